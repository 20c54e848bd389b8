//! Nobody waits for anybody: one thread is held at each step that there is, while others read and write the same slots
//! and other ones. They get on, or the deadline passes.

#![allow(clippy::unwrap_used)] // a test: an error is a failure

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::channel;
use std::time::Duration;

use crate::pause::{Step, fail_allocation, stop_at};
use crate::{
    Algorithm, Codecs, DecompressionContexts, IdleMark, MEM_LIMIT_MIN, Options, PAGE_SIZE, Page, RecompressError,
    RecompressOptions, SlotIndex, Upkeep, Zram,
};

/// Long enough for the busiest machine; passes only when somebody waits for the held thread.
const DEADLINE: Duration = Duration::from_secs(60);
const SLOTS: u32 = 2049;

/// lz4, and zstd for recompression.
fn two_algorithms() -> Arc<Codecs> {
    let load = |text: &str| text.parse::<Algorithm>().unwrap().load().unwrap();
    let contexts = DecompressionContexts::new(DecompressionContexts::count_for(8));
    Arc::new(Codecs::new(load("lz4"), [Some(load("zstd")), None, None], contexts).unwrap())
}

fn create(mem_limit_bytes: Option<u64>) -> Arc<Zram> {
    let options = Options {
        name: "pause".into(),
        size_bytes: u64::from(SLOTS) * PAGE_SIZE as u64,
        size_bytes_max: None,
        mem_limit_bytes,
        codecs: two_algorithms(),
    };
    Zram::create(&options).unwrap()
}

/// A page that says who it is for, of a length that depends on `version`.
fn fill(page: &mut Page, slot: u32, version: u32) {
    let mut random = u64::from(slot) << 32 | u64::from(version) | 1;
    let noise = 200 + (slot as usize * 7 + version as usize * 131) % 1500;
    page.fill(0);
    for byte in &mut page[..noise] {
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        *byte = (random >> 56) as u8;
    }
    page[PAGE_SIZE - 8..PAGE_SIZE - 4].copy_from_slice(&slot.to_le_bytes());
    page[PAGE_SIZE - 4..].copy_from_slice(&version.to_le_bytes());
}

/// Panics unless the page is empty or some version of `slot`.
fn check(page: &Page, slot: u32) {
    if page.same_filled() == Some(0) {
        return;
    }
    let version = u32::from_le_bytes(page[PAGE_SIZE - 4..].try_into().unwrap());
    let mut expected = Page::zeroed();
    fill(&mut expected, slot, version);
    assert!(page[..] == expected[..], "slot {slot} holds no version of itself");
}

fn write_all(zram: &Arc<Zram>, slots: Range<u32>, version: u32) {
    let (mut worker, mut page) = (zram.worker().unwrap(), Page::zeroed());
    for slot in slots {
        fill(&mut page, slot, version);
        worker.write_page(SlotIndex(slot), &page).unwrap();
        if slot % 16 == 0 {
            worker.end_batch();
        }
    }
}

/// Everything that a worker does, all over the disk, with every page checked.
fn do_everything(zram: &Arc<Zram>, version: u32) {
    let (mut worker, mut page) = (zram.worker().unwrap(), Page::zeroed());
    for slot in (0..SLOTS).step_by(3) {
        fill(&mut page, slot, version);
        worker.write_page(SlotIndex(slot), &page).unwrap();
        worker.read_page(SlotIndex(slot + 1), &mut page).unwrap();
        check(&page, slot + 1);
        if slot % 5 == 0 {
            worker.discard(u64::from(slot + 2)..u64::from(slot + 3));
        } else {
            fill(&mut page, slot + 2, version);
            let sectors = page[..].to_vec();
            worker.write_sectors(SlotIndex(slot + 2), 0, &sectors).unwrap();
        }
        if slot % 16 == 0 {
            worker.end_batch();
        }
    }
}

/// Holds the thread that runs `held` at `step` while two others do everything twice.
fn nobody_waits_at(step: Step, prepare: impl FnOnce(&Arc<Zram>), held: impl FnOnce(Arc<Zram>) + Send + 'static) {
    let zram = create(None);
    prepare(&zram);
    let (arm, stop) = stop_at(step);
    let holder = {
        let zram = Arc::clone(&zram);
        std::thread::spawn(move || {
            arm.set();
            held(zram);
        })
    };
    stop.reached
        .recv_timeout(DEADLINE)
        .unwrap_or_else(|_| panic!("{step:?} was not reached"));
    let (done, all_done) = channel();
    let others: Vec<_> = (0..2)
        .map(|other| {
            let (zram, done) = (Arc::clone(&zram), done.clone());
            std::thread::spawn(move || {
                do_everything(&zram, 100 + other);
                do_everything(&zram, 200 + other);
                zram.stats();
                zram.arena_report();
                zram.mark_idle(IdleMark::All);
                zram.upkeep();
                done.send(()).unwrap();
            })
        })
        .collect();
    drop(done);
    for _ in &others {
        all_done
            .recv_timeout(DEADLINE)
            .unwrap_or_else(|_| panic!("somebody waits for a thread at {step:?}"));
    }
    drop(stop.go_on);
    holder.join().unwrap();
    others.into_iter().for_each(|other| other.join().unwrap());
    while zram.upkeep() == Upkeep::Soon {}
    while zram.upkeep() == Upkeep::Soon {}
    zram.check_consistency();
    let (mut worker, mut page) = (zram.worker().unwrap(), Page::zeroed());
    for slot in 0..SLOTS {
        worker.read_page(SlotIndex(slot), &mut page).unwrap();
        check(&page, slot);
    }
    worker.discard(0..u64::from(SLOTS));
    worker.end_batch();
    while zram.upkeep() == Upkeep::Soon {}
    zram.check_consistency();
    assert_eq!(zram.stats().mem_used_total, 0, "{step:?} leaked");
}

/// A disk with sparse segments everywhere.
fn make_sparse(zram: &Arc<Zram>) {
    write_all(zram, 0..SLOTS, 1);
    let mut worker = zram.worker().unwrap();
    for slot in (0..u64::from(SLOTS)).filter(|slot| slot % 4 != 0) {
        worker.discard(slot..slot + 1);
    }
}

#[test]
fn nobody_waits_for_a_writer() {
    for step in [
        Step::HeapLocked,
        Step::Allocated,
        Step::Stored,
        Step::Published,
        Step::Sealed,
        Step::Freeing,
    ] {
        let prepare = |zram: &Arc<Zram>| write_all(zram, 0..SLOTS, 1);
        nobody_waits_at(step, prepare, |zram| write_all(&zram, 0..SLOTS, 2));
    }
}

#[test]
fn nobody_waits_for_a_reader() {
    nobody_waits_at(
        Step::ReadPinned,
        |zram| write_all(zram, 0..SLOTS, 1),
        |zram| {
            let (mut worker, mut page) = (zram.worker().unwrap(), Page::zeroed());
            worker.read_page(SlotIndex(4), &mut page).unwrap();
            check(&page, 4);
        },
    );
}

#[test]
fn nobody_waits_for_a_discard() {
    for step in [Step::Published, Step::Sealed, Step::Freeing] {
        let prepare = |zram: &Arc<Zram>| write_all(zram, 0..SLOTS, 1);
        nobody_waits_at(step, prepare, |zram| {
            zram.worker().unwrap().discard(0..u64::from(SLOTS));
        });
    }
}

/// What the holder frees lies in the heap of a worker that is at work.
#[test]
fn nobody_waits_for_a_free_into_a_foreign_heap() {
    for step in [Step::Queueing, Step::QueueTaken] {
        let prepare = |zram: &Arc<Zram>| {
            // Two workers at once, so that their objects lie in two heaps.
            let mut workers = [zram.worker().unwrap(), zram.worker().unwrap()];
            let mut page = Page::zeroed();
            for slot in 0..SLOTS {
                fill(&mut page, slot, 1);
                workers[slot as usize % 2].write_page(SlotIndex(slot), &page).unwrap();
            }
        };
        nobody_waits_at(step, prepare, |zram| write_all(&zram, 0..SLOTS, 2));
    }
}

#[test]
fn nobody_waits_for_memory_on_its_way_back() {
    let prepare = |zram: &Arc<Zram>| {
        make_sparse(zram);
        let mut worker = zram.worker().unwrap();
        worker.discard(0..u64::from(SLOTS) / 2);
    };
    nobody_waits_at(Step::GivingBack, prepare, |zram| while zram.upkeep() == Upkeep::Soon {});
}

#[test]
fn nobody_waits_for_the_cleaner() {
    for step in [
        Step::Chosen,
        Step::MoveLoaded,
        Step::HeapLocked,
        Step::Allocated,
        Step::Stored,
        Step::Copied,
        Step::Moved,
        Step::Freeing,
    ] {
        nobody_waits_at(step, make_sparse, |zram| {
            zram.compact();
        });
    }
}

#[test]
fn nobody_waits_for_recompression() {
    for step in [
        Step::RecompressLoaded,
        Step::HeapLocked,
        Step::Allocated,
        Step::Stored,
        Step::Recompressed,
        Step::Sealed,
        Step::Freeing,
    ] {
        let prepare = |zram: &Arc<Zram>| write_all(zram, 0..SLOTS, 1);
        nobody_waits_at(step, prepare, |zram| {
            zram.recompress(&RecompressOptions::default()).unwrap();
        });
    }
}

#[test]
fn a_second_run_of_recompression_is_refused_and_writes_win_over_the_first() {
    let zram = create(None);
    write_all(&zram, 0..SLOTS, 1);
    let (arm, stop) = stop_at(Step::Recompressed);
    let first = {
        let zram = Arc::clone(&zram);
        std::thread::spawn(move || {
            arm.set();
            zram.recompress(&RecompressOptions::default())
        })
    };
    stop.reached.recv_timeout(DEADLINE).unwrap();
    assert_eq!(
        zram.recompress(&RecompressOptions::default()),
        Err(RecompressError::Busy)
    );
    write_all(&zram, 0..SLOTS, 7);
    drop(stop.go_on);
    first.join().unwrap().unwrap();
    let (mut worker, mut page, mut expected) = (zram.worker().unwrap(), Page::zeroed(), Page::zeroed());
    for slot in 0..SLOTS {
        worker.read_page(SlotIndex(slot), &mut page).unwrap();
        fill(&mut expected, slot, 7);
        assert!(page[..] == expected[..], "slot {slot}");
    }
    while zram.upkeep() == Upkeep::Soon {}
    zram.check_consistency();
    assert!(zram.recompress(&RecompressOptions::default()).is_ok());
}

/// A thread that panics with a heap takes it out of use, and nothing else: others go on, and the cleaner ends its pass.
#[test]
fn a_heap_whose_user_panicked_is_left_alone() {
    let zram = create(None);
    make_sparse(&zram);
    let (arm, stop) = stop_at(Step::Chosen);
    let (done, is_done) = channel();
    let cleaner = {
        let zram = Arc::clone(&zram);
        std::thread::spawn(move || {
            arm.set();
            zram.compact();
            done.send(()).unwrap();
        })
    };
    stop.reached.recv_timeout(DEADLINE).unwrap();
    (0..3).for_each(|heap| zram.arena.poison_heap(heap));
    drop(stop.go_on);
    is_done
        .recv_timeout(DEADLINE)
        .expect("the cleaner waits for a heap that is lost");
    cleaner.join().unwrap();
    do_everything(&zram, 5);
    let deadline = std::time::Instant::now() + DEADLINE;
    while zram.upkeep() == Upkeep::Soon {
        assert!(std::time::Instant::now() < deadline, "upkeep never ends");
    }
}

/// A writer that comes between the cleaner's copy and its exchange wins.
#[test]
fn the_cleaner_that_loses_to_a_writer_moves_nothing() {
    let zram = create(None);
    make_sparse(&zram);
    let (arm, stop) = stop_at(Step::Copied);
    let cleaner = {
        let zram = Arc::clone(&zram);
        std::thread::spawn(move || {
            arm.set();
            zram.compact()
        })
    };
    stop.reached.recv_timeout(DEADLINE).unwrap();
    write_all(&zram, 0..SLOTS, 7);
    drop(stop.go_on);
    cleaner.join().unwrap();
    let (mut worker, mut page, mut expected) = (zram.worker().unwrap(), Page::zeroed(), Page::zeroed());
    for slot in 0..SLOTS {
        worker.read_page(SlotIndex(slot), &mut page).unwrap();
        fill(&mut expected, slot, 7);
        assert!(page[..] == expected[..], "slot {slot}");
    }
    while zram.upkeep() == Upkeep::Soon {}
    zram.check_consistency();
}

/// Readers and writers at full speed while the cleaner runs without a rest.
#[test]
fn pages_are_never_wrong_while_they_are_moved() {
    let zram = create(None);
    make_sparse(&zram);
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for other in 0..2 {
            let zram = &zram;
            scope.spawn(move || (0..6).for_each(|round| do_everything(zram, round * 2 + other)));
        }
        let (zram, is_over) = (&zram, &is_over);
        let cleaner = scope.spawn(move || {
            let mut moved = 0;
            while !is_over.load(Ordering::Relaxed) {
                moved += zram.compact().objects_moved;
            }
            moved
        });
        scope.spawn(move || {
            let (mut worker, mut page) = (zram.worker().unwrap(), Page::zeroed());
            for _ in 0..20 {
                for slot in 0..SLOTS {
                    worker.read_page(SlotIndex(slot), &mut page).unwrap();
                    check(&page, slot);
                }
            }
            is_over.store(true, Ordering::Relaxed);
        });
        assert!(cleaner.join().unwrap() > 0, "nothing was moved");
    });
    while zram.upkeep() == Upkeep::Soon {}
    zram.check_consistency();
}

/// A reader holds what a write at the limit replaces, for longer than the write waits: what went to the spare segment stays
/// there until the reader is done and the cleaner comes by, and then the segment is free for others again.
#[test]
fn a_slow_reader_leaves_nothing_in_the_spare_segment() {
    let zram = create(Some(MEM_LIMIT_MIN));
    let (mut worker, mut page, mut random) = (zram.worker().unwrap(), Page::zeroed(), 3_u64);
    let mut noise = || {
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (random >> 56) as u8
    };
    let mut last = 0;
    for slot in 0..SLOTS {
        page.fill_with(&mut noise);
        if worker.write_page(SlotIndex(slot), &page).is_err() {
            break;
        }
        last = slot;
    }
    // The overwriting part of the limit, too: then nothing is free but the spare segment.
    let (arm, stop) = stop_at(Step::ReadPinned);
    let reader = {
        let zram = Arc::clone(&zram);
        std::thread::spawn(move || {
            arm.set();
            let mut page = Page::zeroed();
            zram.worker().unwrap().read_page(SlotIndex(0), &mut page).unwrap();
        })
    };
    stop.reached.recv_timeout(DEADLINE).unwrap();
    let mut written = 0;
    for slot in 0..=last {
        page.fill_with(&mut noise);
        written += u32::from(worker.write_page(SlotIndex(slot), &page).is_ok());
    }
    assert!(zram.arena.has_spare(), "{written} of {last} were written without it");
    drop(stop.go_on);
    reader.join().unwrap();
    worker.end_batch();
    let deadline = std::time::Instant::now() + DEADLINE;
    while zram.arena.has_spare() {
        assert!(std::time::Instant::now() < deadline, "it stays there");
        zram.upkeep();
        std::thread::sleep(Duration::from_millis(20));
    }
    while zram.upkeep() == Upkeep::Soon {}
    zram.check_consistency();
    for slot in 0..=last {
        page.fill_with(&mut noise);
        worker.write_page(SlotIndex(slot), &page).unwrap();
    }
}

/// Segments on their way back to the host are held and cannot be used: a writer waits for them for a while.
#[test]
fn a_write_is_not_refused_for_memory_on_its_way_back() {
    let zram = create(Some(4 * MEM_LIMIT_MIN));
    let (mut worker, mut page) = (zram.worker().unwrap(), Page::zeroed());
    let mut stored = 0;
    for slot in 0..SLOTS {
        fill(&mut page, slot, 1);
        if worker.write_page(SlotIndex(slot), &page).is_err() {
            break;
        }
        stored = slot;
    }
    worker.discard(0..u64::from(SLOTS));
    worker.end_batch();
    let (arm, stop) = stop_at(Step::GivingBack);
    let upkeep = {
        let zram = Arc::clone(&zram);
        std::thread::spawn(move || {
            arm.set();
            zram.upkeep();
        })
    };
    stop.reached.recv_timeout(DEADLINE).unwrap();
    let (written, is_written) = channel();
    let writer = std::thread::spawn(move || {
        let mut refused = 0;
        for slot in 0..stored / 4 * 3 {
            fill(&mut page, slot, 2);
            refused += u32::from(worker.write_page(SlotIndex(slot), &page).is_err());
        }
        written.send(refused).unwrap();
    });
    // There is room for some, and then nothing for a moment.
    let early = is_written.recv_timeout(Duration::from_millis(40));
    assert!(early.is_err(), "{early:?} were refused");
    drop(stop.go_on);
    assert_eq!(is_written.recv_timeout(DEADLINE), Ok(0));
    writer.join().unwrap();
    upkeep.join().unwrap();
}

/// Room is refused at every place in turn where it is asked for: the write fails, nothing else changes.
#[test]
fn an_allocation_that_fails_leaves_everything_as_it_was() {
    for n in 0..200 {
        let zram = create(Some(16 * MEM_LIMIT_MIN));
        make_sparse(&zram);
        let (mut worker, mut page, mut back) = (zram.worker().unwrap(), Page::zeroed(), Page::zeroed());
        let mut versions = [1; SLOTS as usize];
        fail_allocation(Some(n));
        for slot in (0..64).map(|slot| slot * 4) {
            fill(&mut page, slot, 9);
            let written = match slot % 3 {
                0 => worker.write_sectors(SlotIndex(slot), 0, &page[..]),
                _ => worker.write_page(SlotIndex(slot), &page),
            };
            // A write tries again once; so a single failure is made up for.
            assert_eq!(written, Ok(()));
            versions[slot as usize] = 9;
        }
        zram.compact();
        fail_allocation(None);
        worker.end_batch();
        while zram.upkeep() == Upkeep::Soon {}
        zram.check_consistency();
        for slot in (0..SLOTS).step_by(4) {
            worker.read_page(SlotIndex(slot), &mut back).unwrap();
            fill(&mut page, slot, versions[slot as usize]);
            assert!(back[..] == page[..], "allocation {n}, slot {slot}");
        }
    }
}
