//! Memory over content: what the cleaner brings back by itself and on command, and what a limit that moves does.

#![allow(clippy::unwrap_used)] // a test: an error is a failure

use std::sync::Arc;
use std::time::{Duration, Instant};

use zram_core::{
    ArenaReport, Codecs, MEM_LIMIT_MIN, MemLimitError, Options, PAGE_SIZE, Page, SEGMENT_SIZE, SlotIndex, Upkeep,
    Worker, WriteError, Zram,
};

const SLOTS: u32 = 16_384;

fn create(mem_limit_bytes: Option<u64>) -> Arc<Zram> {
    create_named("density", mem_limit_bytes)
}

fn create_named(name: &str, mem_limit_bytes: Option<u64>) -> Arc<Zram> {
    let options = Options {
        name: name.into(),
        size_bytes: u64::from(SLOTS) * PAGE_SIZE as u64,
        size_bytes_max: None,
        mem_limit_bytes,
        codecs: Codecs::alone(&"lz4".parse().unwrap()).unwrap(),
    };
    Zram::create(&options).unwrap()
}

struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        self.0 >> 33
    }
}

/// Content of lengths as programs' pages have them: mostly around a quarter of a page, some of any length.
fn fill(page: &mut Page, random: &mut Random) {
    let noise = match random.next() % 8 {
        0 => random.next() % 4096,
        1 => 60 + random.next() % 60,
        _ => 700 + random.next() % 900,
    };
    page.fill(0);
    page[..noise as usize].fill_with(|| random.next() as u8);
    page[PAGE_SIZE - 1] = 1;
}

fn write(worker: &mut Worker, slot: u32, random: &mut Random) {
    let mut page = Page::zeroed();
    fill(&mut page, random);
    worker.write_page(SlotIndex(slot), &page).unwrap();
    if slot.is_multiple_of(16) {
        worker.end_batch();
    }
}

fn held_over_stored(zram: &Zram) -> f64 {
    let stats = zram.stats();
    (stats.mem_used_total + stats.table_bytes) as f64 / stats.compr_data_size as f64
}

fn discard_at_random(worker: &mut Worker, percent: u64, random: &mut Random) {
    for slot in 0..u64::from(SLOTS) {
        if random.next() % 100 < percent {
            worker.discard(slot..slot + 1);
        }
    }
    worker.end_batch();
}

fn settle(zram: &Zram) {
    while zram.upkeep() == Upkeep::Soon {}
}

#[test]
fn a_filled_and_an_overwritten_disk_hold_little_more_than_they_store() {
    let (zram, mut random) = (create(None), Random(1));
    let mut worker = zram.worker().unwrap();
    (0..SLOTS).for_each(|slot| write(&mut worker, slot, &mut random));
    worker.end_batch();
    settle(&zram);
    assert!(held_over_stored(&zram) <= 1.03, "{} filled", held_over_stored(&zram));
    for _ in 0..5 * SLOTS {
        let slot = random.next() as u32 % SLOTS;
        write(&mut worker, slot, &mut random);
    }
    worker.end_batch();
    settle(&zram);
    assert!(
        held_over_stored(&zram) <= 1.05,
        "{} overwritten",
        held_over_stored(&zram)
    );
    zram.check_consistency();
}

/// By the store's own thread, which also goes to sleep and is woken by the discard.
#[test]
fn what_discards_leave_sparse_is_brought_together_without_a_command() {
    let (zram, mut random) = (create(None), Random(2));
    let upkeep = zram.spawn_upkeep("zram-upkeep").unwrap();
    let mut worker = zram.worker().unwrap();
    (0..SLOTS).for_each(|slot| write(&mut worker, slot, &mut random));
    let asleep_after = Duration::from_millis(2500);
    std::thread::sleep(asleep_after);
    discard_at_random(&mut worker, 70, &mut random);
    let deadline = Instant::now() + Duration::from_secs(30); // two seconds are the promise; the machine may be busy
    while held_over_stored(&zram) > 1.15 {
        assert!(Instant::now() < deadline, "{} for good", held_over_stored(&zram));
        std::thread::sleep(Duration::from_millis(10));
    }
    drop(upkeep);
    settle(&zram);
    zram.check_consistency();
    let freed = zram.stats().pages_compacted * PAGE_SIZE as u64;
    assert!(freed > zram.stats().mem_used_total, "{freed} bytes compacted");
}

#[test]
fn compaction_gains_what_it_says_and_a_second_one_nothing() {
    let (zram, mut random) = (create(None), Random(3));
    let mut worker = zram.worker().unwrap();
    (0..SLOTS).for_each(|slot| write(&mut worker, slot, &mut random));
    discard_at_random(&mut worker, 30, &mut random);
    let before = zram.stats();
    let compacted = zram.compact();
    let after = zram.stats();
    zram.check_consistency();
    assert_eq!(before.compr_data_size, after.compr_data_size);
    let gained = (before.mem_used_total - after.mem_used_total) / PAGE_SIZE as u64;
    assert!(compacted.objects_moved > 0);
    assert_eq!(compacted.pages_compacted, after.pages_compacted);
    assert!(
        gained >= compacted.pages_compacted,
        "{gained} pages gained, {compacted:?}"
    );
    assert!(held_over_stored(&zram) <= 1.03, "{} compacted", held_over_stored(&zram));
    let second = zram.compact();
    assert!(
        second.pages_compacted <= compacted.pages_compacted / 20,
        "{second:?} after {compacted:?}"
    );
}

#[test]
fn compacting_an_empty_or_a_full_disk_does_nothing() {
    let (zram, mut random) = (create(None), Random(4));
    assert_eq!(zram.compact(), Default::default());
    let mut worker = zram.worker().unwrap();
    (0..256).for_each(|slot| {
        let mut page = Page::zeroed();
        page.fill_with(|| random.next() as u8);
        worker.write_page(SlotIndex(slot), &page).unwrap();
    });
    assert_eq!(zram.compact(), Default::default());
    zram.check_consistency();
}

#[test]
fn a_limit_that_moves_refuses_and_gives_room_at_once() {
    let (zram, mut random) = (create(None), Random(5));
    let mut worker = zram.worker().unwrap();
    (0..SLOTS / 2).for_each(|slot| write(&mut worker, slot, &mut random));
    let held = zram.stats().mem_used_total;
    assert_eq!(
        zram.set_mem_limit(Some(MEM_LIMIT_MIN - 1)),
        Err(MemLimitError(MEM_LIMIT_MIN - 1))
    );
    assert_eq!((zram.mem_limit_bytes(), zram.stats().mem_limit), (None, 0));

    let limit = held / 2;
    zram.set_mem_limit(Some(limit)).unwrap();
    assert_eq!((zram.mem_limit_bytes(), zram.stats().mem_limit), (Some(limit), limit));
    let mut page = Page::zeroed();
    fill(&mut page, &mut random);
    let new = SlotIndex(SLOTS - 1);
    assert_eq!(worker.write_page(new, &page), Err(WriteError::LimitReached));
    assert_eq!(zram.stats().refused_writes, 1);
    assert!(zram.stats().mem_used_total <= held, "nothing was taken above the limit");

    // Discards make room below a lower limit, once what is left was brought together.
    discard_at_random(&mut worker, 70, &mut random);
    settle(&zram);
    assert!(
        zram.stats().mem_used_total <= limit,
        "{} of {limit}",
        zram.stats().mem_used_total
    );
    worker.write_page(new, &page).unwrap();

    zram.set_mem_limit(None).unwrap();
    (0..SLOTS).for_each(|slot| write(&mut worker, slot, &mut random));
    assert!(zram.stats().mem_used_total > held);
}

#[test]
fn the_maximum_begins_anew_where_the_disk_is() {
    let (zram, mut random) = (create(None), Random(6));
    let mut worker = zram.worker().unwrap();
    (0..SLOTS / 4).for_each(|slot| write(&mut worker, slot, &mut random));
    let filled = zram.stats().mem_used_max;
    assert_eq!(filled, zram.stats().mem_used_total);
    worker.discard(0..u64::from(SLOTS) / 8);
    worker.end_batch();
    settle(&zram);
    assert_eq!(zram.stats().mem_used_max, filled);
    zram.reset_mem_used_max();
    assert_eq!(zram.stats().mem_used_max, zram.stats().mem_used_total);
    assert!(zram.stats().mem_used_max < filled);
}

/// Without room for a copy beside the original nothing is moved, and nothing passes the limit meanwhile.
#[test]
fn the_cleaner_keeps_the_limit_too() {
    let limit = 64 * SEGMENT_SIZE as u64;
    let (zram, mut random) = (create(Some(limit)), Random(7));
    let mut worker = zram.worker().unwrap();
    let mut page = Page::zeroed();
    let mut last = 0;
    for slot in 0..SLOTS {
        fill(&mut page, &mut random);
        if worker.write_page(SlotIndex(slot), &page).is_err() {
            last = slot;
            break;
        }
    }
    assert!(last > 0, "the limit was not reached");
    discard_at_random(&mut worker, 20, &mut random);
    zram.compact();
    zram.check_consistency();
    assert!(zram.stats().mem_used_max <= limit);
    assert!(zram.stats().pages_compacted > 0, "there was something to gain");
}

#[test]
fn the_report_adds_up() {
    let (zram, mut random) = (create(None), Random(8));
    let mut workers = [zram.worker().unwrap(), zram.worker().unwrap()];
    assert_eq!(zram.arena_report().segments_in_use, 0);
    (0..SLOTS).for_each(|slot| write(&mut workers[slot as usize % 2], slot, &mut random));
    discard_at_random(&mut workers[0], 40, &mut random);
    workers[1].end_batch();
    let (report, stats) = (zram.arena_report(), zram.stats());
    let ArenaReport {
        segment_bytes,
        segments_in_use,
        segments_empty,
        live_shares,
        holes,
        heaps,
        busy_heaps,
    } = report;
    assert_eq!(segment_bytes, SEGMENT_SIZE as u64);
    assert_eq!((segments_in_use + segments_empty) * segment_bytes, stats.mem_used_total);
    assert_eq!(live_shares.iter().sum::<u64>(), segments_in_use);
    assert_eq!(live_shares[9], 0, "40 % were discarded everywhere");
    assert_eq!(heaps.iter().map(|heap| heap.segments).sum::<u64>(), segments_in_use);
    assert_eq!((heaps.len(), busy_heaps), (2, 0));
    let live: u64 = heaps.iter().map(|heap| heap.live_bytes).sum();
    assert!(live >= stats.compr_data_size && live < stats.compr_data_size + 8 * u64::from(SLOTS));
    let in_holes: u64 = holes.iter().map(|class| class.bytes).sum();
    assert_eq!(in_holes, heaps.iter().map(|heap| heap.hole_bytes).sum::<u64>());
    assert_eq!(live + in_holes, segments_in_use * segment_bytes);
    for class in &holes {
        assert!(class.count > 0 && class.bytes >= class.count * class.bytes_min);
        assert!(class.bytes < class.count * class.bytes_min * 2);
    }
}

#[test]
fn memory_is_locked_as_it_is_taken_where_the_host_allows_it() {
    let (zram, mut random) = (create_named("locked", None), Random(9));
    let locked = || {
        let status = std::fs::read_to_string("/proc/self/smaps").unwrap();
        let mut lines = status.lines().skip_while(|line| !line.contains("zram-arena-locked"));
        let line = lines.find_map(|line| line.strip_prefix("Locked:")).unwrap();
        line.trim().strip_suffix(" kB").unwrap().parse::<u64>().unwrap() * 1024
    };
    let limit = rustix::process::getrlimit(rustix::process::Resource::Memlock);
    match zram.lock_memory() {
        Ok(()) => {
            let mut worker = zram.worker().unwrap();
            (0..SLOTS / 8).for_each(|slot| write(&mut worker, slot, &mut random));
            assert_eq!(locked(), zram.stats().mem_used_total);
        }
        Err(error) => {
            assert!(
                limit.current.is_some_and(|limit| limit < zram.address_space_bytes()),
                "the limit is high enough: {error}"
            );
        }
    }
}
