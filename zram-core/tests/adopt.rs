//! A store that another process left: taken over in peace, after kill -9 at any moment, and refused when damaged.

#![allow(clippy::unwrap_used)] // a test: an error is a failure

use std::fs::File;
use std::io::{BufRead, BufReader};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use zram_core::{
    AdoptError, AdoptOptions, Codecs, Memory, Options, PAGE_SIZE, Page, SEGMENT_SIZE, SlotIndex, Stats, Upkeep, Worker,
    Zram,
};

const SLOTS: u32 = 3000;
const SIZE_BYTES: u64 = SLOTS as u64 * PAGE_SIZE as u64;
const WRITERS: u32 = 3;
const KILLS: u32 = 200;
/// Bytes in front of the content of each memory file.
const HEAD: u64 = 4096;

fn create() -> Arc<Zram> {
    let options = Options {
        name: "adopt".into(),
        size_bytes: SIZE_BYTES,
        size_bytes_max: Some(2 * SIZE_BYTES),
        mem_limit_bytes: None,
        codecs: Codecs::alone(&"lz4".parse().unwrap()).unwrap(),
    };
    Zram::create(&options).unwrap()
}

fn adopt(memory: Memory) -> Result<Arc<Zram>, AdoptError> {
    Zram::adopt(memory, &AdoptOptions::default())
}

fn random_from(seed: u64) -> impl FnMut() -> u64 {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    move || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        state >> 33
    }
}

/// What version `version` of a slot is; every kind of slot comes up, 0 and some others are empty.
fn content(page: &mut Page, slot: u32, version: u64) {
    let mut random = random_from(u64::from(slot) << 32 | version);
    page.fill(0);
    match (version + u64::from(slot)) % 8 {
        _ if version == 0 => {}
        0 => {} // discarded
        1 => page.fill_with_word(u64::from(slot) << 32 | version),
        2 => page.fill_with_word(0xb << 60 | u64::from(slot) << 28 | version),
        3 => page.fill_with(|| random() as u8),
        _ => {
            let noise = 100 + random() as usize % 2000;
            page[..noise].fill_with(|| random() as u8);
        }
    }
}

fn write(worker: &mut Worker, page: &mut Page, slot: u32, version: u64) {
    content(page, slot, version);
    if (version + u64::from(slot)).is_multiple_of(8) {
        worker.discard(u64::from(slot)..u64::from(slot) + 1);
    } else if version.is_multiple_of(5) {
        let sectors = page[..].to_vec();
        worker.write_sectors(SlotIndex(slot), 0, &sectors).unwrap();
    } else {
        worker.write_page(SlotIndex(slot), page).unwrap();
    }
}

fn fill(zram: &Arc<Zram>) {
    let (mut worker, mut page) = (zram.worker().unwrap(), Page::zeroed());
    (0..SLOTS).for_each(|slot| write(&mut worker, &mut page, slot, 1));
    (0..SLOTS)
        .step_by(2)
        .for_each(|slot| write(&mut worker, &mut page, slot, 2));
}

fn file_bytes(file: &OwnedFd) -> u64 {
    File::from(file.try_clone().unwrap()).metadata().unwrap().blocks() * 512
}

fn assert_nothing_leaks(zram: &Zram) {
    zram.check_consistency();
    let (memory, stats) = (zram.memory().unwrap(), zram.stats());
    assert_eq!(file_bytes(&memory.arena), HEAD + stats.mem_used_total);
    assert_eq!(file_bytes(&memory.table), HEAD + stats.table_bytes);
}

#[test]
fn what_a_store_holds_another_finds() {
    let zram = create();
    fill(&zram);
    while zram.upkeep() == Upkeep::Soon {}
    let (memory, before) = (zram.memory().unwrap(), zram.stats());
    drop(zram);
    let zram = adopt(memory).unwrap();
    let after = zram.stats();
    let kept = |stats: &Stats| {
        let Stats {
            orig_data_size,
            compr_data_size,
            same_pages,
            huge_pages,
            table_bytes,
            ..
        } = *stats;
        [orig_data_size, compr_data_size, same_pages, huge_pages, table_bytes]
    };
    assert_eq!(kept(&after), kept(&before));
    assert!(after.mem_used_total <= before.mem_used_total && after.mem_used_max == after.mem_used_total);
    assert_nothing_leaks(&zram);
    let (mut worker, mut page, mut expected) = (zram.worker().unwrap(), Page::zeroed(), Page::zeroed());
    for slot in 0..SLOTS {
        worker.read_page(SlotIndex(slot), &mut page).unwrap();
        content(&mut expected, slot, if slot % 2 == 0 { 2 } else { 1 });
        assert!(page[..] == expected[..], "slot {slot}");
    }
    // And it goes on as any store does.
    (0..SLOTS).for_each(|slot| write(&mut worker, &mut page, slot, 9));
    worker.end_batch();
    zram.compact();
    assert_nothing_leaks(&zram);
    worker.discard(0..u64::from(SLOTS));
    worker.end_batch();
    while zram.upkeep() == Upkeep::Soon {}
    assert_nothing_leaks(&zram);
    assert_eq!(zram.stats().mem_used_total, 0);
}

#[test]
fn an_empty_store_is_found_empty() {
    let memory = create().memory().unwrap();
    let zram = adopt(memory).unwrap();
    assert_eq!(zram.stats().orig_data_size, 0);
    assert_nothing_leaks(&zram);
}

/// Memory that no slot knows: as if a process had died between storing and publishing.
#[test]
fn what_was_never_published_goes_back_to_the_host() {
    let zram = create();
    fill(&zram);
    let memory = zram.memory().unwrap();
    drop(zram);
    let arena = File::from(memory.arena.try_clone().unwrap());
    let lost = 200 * SEGMENT_SIZE as u64;
    arena.write_all_at(&[7; 3 * SEGMENT_SIZE], HEAD + lost).unwrap();
    let with_lost = file_bytes(&memory.arena);
    let zram = adopt(memory).unwrap();
    assert_nothing_leaks(&zram);
    assert!(file_bytes(&zram.memory().unwrap().arena) <= with_lost - 3 * SEGMENT_SIZE as u64);
}

fn damaged(damage: impl FnOnce(&File, &File)) -> AdoptError {
    let zram = create();
    fill(&zram);
    let memory = zram.memory().unwrap();
    drop(zram);
    let [table, arena] = [&memory.table, &memory.arena].map(|file| File::from(file.try_clone().unwrap()));
    damage(&table, &arena);
    adopt(memory).unwrap_err()
}

fn word_at(table: &File, slot: u64) -> u64 {
    let mut word = [0; 8];
    table.read_exact_at(&mut word, HEAD + slot * 8).unwrap();
    u64::from_ne_bytes(word)
}

fn set_word(table: &File, slot: u64, word: u64) {
    table.write_all_at(&word.to_ne_bytes(), HEAD + slot * 8).unwrap();
}

/// Two slots whose objects are stored.
const STORED: [u64; 2] = [4, 5];

#[test]
fn damage_is_refused_and_named() {
    let told = |damage: fn(&File, &File)| damaged(damage).to_string();
    assert_eq!(
        told(|table, _| set_word(table, 77, 3 << 58)),
        "slot 77 holds 0xc00000000000000, which is damaged"
    );
    // Beyond the arena.
    let error = damaged(|table, _| set_word(table, 78, word_at(table, STORED[0]) | 0xf_ffff_ffff << 22));
    assert!(matches!(error, AdoptError::Slot(78, _)), "{error}");
    // One object in two slots.
    let error = damaged(|table, _| set_word(table, STORED[1], word_at(table, STORED[0])));
    assert!(matches!(error, AdoptError::Overlap(_)), "{error}");
    assert_eq!(
        told(|table, _| table.write_all_at(b"x", 40).unwrap()),
        "this is no slot table: its head is damaged"
    );
    assert_eq!(
        told(|_, arena| arena.write_all_at(b"x", 0).unwrap()),
        "this is no arena: it does not begin as one"
    );
    assert_eq!(
        told(|table, _| table.set_len(1 << 30).unwrap()),
        "cannot map the memory files"
    );
}

#[test]
fn files_that_do_not_belong_together_are_refused() {
    let (one, other) = (create().memory().unwrap(), create().memory().unwrap());
    let error = adopt(Memory {
        table: one.table.try_clone().unwrap(),
        arena: other.arena,
    });
    assert!(matches!(error, Err(AdoptError::NotAPair)));
    let swapped = Memory {
        table: one.arena,
        arena: one.table,
    };
    assert!(matches!(adopt(swapped), Err(AdoptError::Table(_))));
    let file = || OwnedFd::from(tempfile());
    let plain = Memory {
        table: file(),
        arena: file(),
    };
    assert!(
        matches!(adopt(plain), Err(AdoptError::Map(_))),
        "an empty file has no head"
    );
}

fn tempfile() -> File {
    let path = std::env::temp_dir().join(format!(
        "zram-adopt-{}-{:?}",
        std::process::id(),
        std::thread::current().id()
    ));
    let file = File::options()
        .read(true)
        .write(true)
        .create_new(true)
        .open(&path)
        .unwrap();
    std::fs::remove_file(path).unwrap();
    file
}

/// The version that each slot's owner began to write last, and the last one it knows to be done.
struct Journal(File);

impl Journal {
    fn get(&self, slot: u32) -> (u64, u64) {
        let mut bytes = [0; 16];
        self.0.read_exact_at(&mut bytes, u64::from(slot) * 16).unwrap();
        let (begun, done) = bytes.split_at(8);
        let version = |bytes: &[u8]| u64::from_ne_bytes(bytes.try_into().unwrap());
        (version(begun), version(done))
    }

    fn begin(&self, slot: u32, version: u64) {
        self.0
            .write_all_at(&version.to_ne_bytes(), u64::from(slot) * 16)
            .unwrap();
    }

    fn done(&self, slot: u32, version: u64) {
        self.0
            .write_all_at(&version.to_ne_bytes(), u64::from(slot) * 16 + 8)
            .unwrap();
    }
}

const VICTIM: &str = "ZRAM_ADOPT_VICTIM";

/// Not a test by itself: the process that is killed. It takes over the store of its parent and writes until it dies.
#[test]
fn victim() {
    let Ok(files) = std::env::var(VICTIM) else { return };
    let open = |path: &str| File::options().read(true).write(true).open(path).unwrap();
    let [table, arena, journal] = files.split(',').map(open).collect::<Vec<_>>().try_into().unwrap();
    let zram = adopt(Memory {
        table: table.into(),
        arena: arena.into(),
    });
    let (zram, journal) = (zram.unwrap(), Journal(journal));
    let upkeep = zram.spawn_upkeep("zram-upkeep").unwrap();
    println!("ready");
    std::thread::scope(|scope| {
        for me in 0..WRITERS {
            let (zram, journal) = (&zram, &journal);
            scope.spawn(move || {
                let (mut worker, mut page) = (zram.worker().unwrap(), Page::zeroed());
                let mut random = random_from(u64::from(std::process::id()) << 8 | u64::from(me));
                for n in 0_u64.. {
                    let slot = random() as u32 % (SLOTS / WRITERS) * WRITERS + me;
                    let version = journal.get(slot).0 + 1;
                    journal.begin(slot, version);
                    write(&mut worker, &mut page, slot, version);
                    journal.done(slot, version);
                    if n.is_multiple_of(16) {
                        worker.end_batch();
                    }
                }
            });
        }
        scope.spawn(|| {
            loop {
                zram.compact();
            }
        });
        scope.spawn(|| {
            let (mut worker, zeroes) = (zram.worker().unwrap(), Page::zeroed());
            loop {
                // It may have been left as large as it gets.
                let _ = zram.grow(2 * SIZE_BYTES);
                for slot in (SLOTS..2 * SLOTS).step_by(700) {
                    worker.write_page(SlotIndex(slot), &zeroes).unwrap();
                }
                worker.end_batch();
                zram.shrink(SIZE_BYTES).unwrap();
            }
        });
    });
    drop(upkeep);
}

fn spawn_victim(memory: &Memory, journal: &Journal) -> Child {
    let path = |fd: i32| format!("/proc/{}/fd/{fd}", std::process::id());
    let files = [
        memory.table.as_raw_fd(),
        memory.arena.as_raw_fd(),
        journal.0.as_raw_fd(),
    ]
    .map(path);
    Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "victim", "--nocapture"])
        .env(VICTIM, files.join(","))
        .stdout(Stdio::piped())
        .spawn()
        .unwrap()
}

#[test]
fn nothing_published_is_lost_when_a_process_is_killed() {
    let memory = create().memory().unwrap();
    let journal = Journal(tempfile());
    journal.0.set_len(u64::from(SLOTS) * 16).unwrap();
    let mut random = random_from(5);
    let (mut page, mut expected) = (Page::zeroed(), Page::zeroed());
    let mut writes_cut_off = 0;
    let mut sizes = [0; 2];
    for kill in 0..KILLS {
        let mut victim = spawn_victim(&memory, &journal);
        let mut lines = BufReader::new(victim.stdout.take().unwrap()).lines();
        let is_ready = lines.any(|line| line.unwrap().contains("ready"));
        assert!(is_ready, "kill {kill}: the process did not take the store over");
        std::thread::sleep(Duration::from_micros(random() % 30_000));
        victim.kill().unwrap();
        victim.wait().unwrap();

        let files = (memory.table.try_clone().unwrap(), memory.arena.try_clone().unwrap());
        let zram = adopt(Memory {
            table: files.0,
            arena: files.1,
        })
        .unwrap();
        assert_nothing_leaks(&zram);
        match zram.size_bytes() {
            SIZE_BYTES => sizes[0] += 1,
            size => {
                assert_eq!(size, 2 * SIZE_BYTES);
                sizes[1] += 1;
            }
        }
        let mut worker = zram.worker().unwrap();
        for slot in 0..SLOTS {
            worker.read_page(SlotIndex(slot), &mut page).unwrap();
            let (begun, done) = journal.get(slot);
            let is_version = [begun, done].into_iter().any(|version| {
                content(&mut expected, slot, version);
                page[..] == expected[..]
            });
            assert!(
                is_version,
                "kill {kill}: slot {slot} holds neither version {begun} nor {done}"
            );
            writes_cut_off += u32::from(begun != done);
            // A write that was cut off is done again, as a driver would: afterwards the slot is what was begun.
            if begun != done {
                write(&mut worker, &mut page, slot, begun);
                journal.done(slot, begun);
            }
        }
    }
    assert!(writes_cut_off > 0, "no process died in the middle of a write");
    assert!(sizes.iter().all(|&count| count > 0), "sizes found: {sizes:?}");
}
