//! A disk beside a plain map from slot to page: equal after each step, every gauge recomputed from the slot table.
//!
//! Seeds are fixed, and printed when a step fails. `ZRAM_MODEL_SEED` adds one, `ZRAM_MODEL_STEPS` changes the length.

#![allow(clippy::unwrap_used)] // a test: an error is a failure

use std::collections::HashMap;
use std::io::Write;
use std::sync::{Arc, Barrier};

use zram_core::{
    AdoptOptions, Codecs, DecompressionContexts, IdleMark, MEM_LIMIT_MIN, Options, PAGE_SIZE, Page, SECTOR_SIZE,
    SECTORS_PER_PAGE, SlotIndex, Upkeep, Worker, WriteError, Zram,
};

/// xorshift64*: small, and the same everywhere.
struct Random(u64);

impl Random {
    fn new(seed: u64) -> Random {
        Random(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    fn below(&mut self, bound: u64) -> u64 {
        self.next() % bound
    }

    fn fill(&mut self, bytes: &mut [u8]) {
        bytes.fill_with(|| self.next() as u8);
    }
}

/// The kinds of content that take different paths.
fn fill_page(random: &mut Random, page: &mut Page) {
    match random.below(9) {
        0 => page.fill(0),
        1 => page.fill_with_word(random.next()), // same-filled, mostly in the word
        2 => page.fill_with_word(0xb << 60 | random.next() >> 4), // same-filled, an object
        3 => random.fill(&mut page[..]),         // huge
        4 => {
            // Compressible to any length: so many random bytes, then zeroes. Both sides of every edge come up.
            let random_bytes = random.below(PAGE_SIZE as u64 + 1) as usize;
            page.fill(0);
            random.fill(&mut page[..random_bytes]);
        }
        5 => {
            // Around where a page is no longer worth compressing.
            let random_bytes = PAGE_SIZE - random.below(40) as usize;
            page.fill(0);
            random.fill(&mut page[..random_bytes]);
        }
        6 => {
            let word = random.next();
            page.fill_with_word(word);
            page[random.below(PAGE_SIZE as u64) as usize] ^= 1; // all but same-filled
        }
        _ => {
            let words = ["swap ", "page ", "zram ", "guest ", "slot "];
            let mut at = 0;
            while at < PAGE_SIZE {
                let word = words[random.below(5) as usize].as_bytes();
                let len = word.len().min(PAGE_SIZE - at);
                page[at..at + len].copy_from_slice(&word[..len]);
                at += len;
            }
        }
    }
}

fn create(pages: u64, mem_limit_bytes: Option<u64>, algorithm: &str) -> Arc<Zram> {
    let size_bytes = pages * PAGE_SIZE as u64;
    let codecs = Codecs::alone(&algorithm.parse().unwrap()).unwrap();
    Zram::create(&Options {
        name: "model".into(),
        size_bytes,
        size_bytes_max: None,
        mem_limit_bytes,
        codecs,
    })
    .unwrap()
}

fn environment(name: &str) -> Option<u64> {
    std::env::var(name).ok().map(|value| value.parse().expect("a number"))
}

/// One thread, two workers in turn, every kind of operation.
fn run_model(seed: u64, pages: u64, mem_limit_bytes: Option<u64>, algorithm: &str) {
    let mut random = Random::new(seed);
    let zram = create(pages, mem_limit_bytes, algorithm);
    let mut workers = [zram.worker().unwrap(), zram.worker().unwrap()];
    let mut model: HashMap<u64, Box<Page>> = HashMap::new();
    let (mut page, mut back) = (Page::zeroed(), Page::zeroed());
    let (mut refused, mut notify_free) = (0, 0);
    for step in 0..environment("ZRAM_MODEL_STEPS").unwrap_or(3000) {
        let context = || format!("seed {seed}, step {step}, {algorithm}, limit {mem_limit_bytes:?}");
        let slot = random.below(pages);
        let worker = &mut workers[random.below(2) as usize];
        match random.below(20) {
            0..10 => {
                fill_page(&mut random, &mut page);
                match worker.write_page(SlotIndex(slot as u32), &page) {
                    Ok(()) => drop(model.insert(slot, page.clone())),
                    Err(error) => {
                        assert_eq!(error, WriteError::LimitReached, "{}", context());
                        refused += 1;
                    }
                }
            }
            10..15 => {
                let first = random.below(SECTORS_PER_PAGE as u64) as usize;
                let sectors = 1 + random.below((SECTORS_PER_PAGE - first) as u64) as usize;
                fill_page(&mut random, &mut page);
                let data = &page[..sectors * SECTOR_SIZE];
                match worker.write_sectors(SlotIndex(slot as u32), first, data) {
                    Ok(()) => {
                        let content = model.entry(slot).or_insert_with(Page::zeroed);
                        content[first * SECTOR_SIZE..][..data.len()].copy_from_slice(data);
                    }
                    Err(error) => {
                        assert_eq!(error, WriteError::LimitReached, "{}", context());
                        refused += 1;
                    }
                }
            }
            15..18 => {
                let end = (slot + 1 + random.below(8)).min(pages);
                worker.discard(slot..end);
                (slot..end).for_each(|slot| drop(model.remove(&slot)));
                notify_free += end - slot;
            }
            18 => while zram.upkeep() == Upkeep::Soon {},
            _ => worker.end_batch(),
        }
        let reader = &mut workers[random.below(2) as usize];
        for slot in [slot, random.below(pages)] {
            back.fill(0xee);
            reader.read_page(SlotIndex(slot as u32), &mut back).unwrap();
            let expected = model.get(&slot).map_or(&[0; PAGE_SIZE], |page| page);
            assert!(back[..] == expected[..], "slot {slot}: {}", context());
        }
        workers.iter_mut().for_each(Worker::end_batch);
        zram.check_consistency();
        let stats = zram.stats();
        assert_eq!(
            stats.orig_data_size,
            model.len() as u64 * PAGE_SIZE as u64,
            "{}",
            context()
        );
        let same = model.values().filter(|page| page.same_filled().is_some()).count();
        assert_eq!(stats.same_pages, same as u64, "{}", context());
        assert_eq!(
            (stats.refused_writes, stats.notify_free),
            (refused, notify_free),
            "{}",
            context()
        );
        assert!(stats.mem_used_total <= stats.mem_used_max);
    }
    if mem_limit_bytes.is_some() {
        assert!(refused > 0, "seed {seed} never reached the limit");
    }
    workers[0].discard(0..pages);
    workers.iter_mut().for_each(Worker::end_batch);
    while zram.upkeep() == Upkeep::Soon {}
    let stats = zram.stats();
    let gauges = [
        stats.orig_data_size,
        stats.compr_data_size,
        stats.mem_used_total,
        stats.same_pages,
        stats.huge_pages,
    ];
    assert_eq!(gauges, [0; 5], "seed {seed}: gauges of an emptied disk");
}

#[test]
fn a_disk_is_a_map_from_slot_to_page() {
    for seed in 1..=4 {
        for algorithm in ["lz4", "zstd"] {
            run_model(seed, 700, None, algorithm);
        }
    }
    if let Some(seed) = environment("ZRAM_MODEL_SEED") {
        run_model(seed, 700, None, "lz4");
    }
}

#[test]
fn a_disk_at_its_limit_is_still_a_map() {
    for seed in 11..=14 {
        run_model(seed, 700, Some(MEM_LIMIT_MIN + seed % 3 * 65_536), "lz4");
    }
}

const THREADS: usize = 4;

/// Ends the test when a thread fails: the others wait for it at a barrier.
struct FailTogether;

impl Drop for FailTogether {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let _ = writeln!(
                std::io::stderr(),
                "a thread of the test failed: run it with --nocapture to see why"
            );
            std::process::abort();
        }
    }
}

/// A sector that says for which place it was written, by whom and as which write.
fn stamp(slot: u64, sector: usize, writer: usize, write: u64) -> [u8; SECTOR_SIZE] {
    let mut bytes = [0; SECTOR_SIZE];
    let words = [slot, sector as u64, writer as u64, write];
    // Odd writers' sectors do not compress, so that pages of all lengths come up.
    let mut random = Random::new(slot ^ write << 20 ^ (writer as u64) << 8 ^ sector as u64);
    if writer % 2 == 1 {
        random.fill(&mut bytes);
    }
    for (chunk, word) in bytes.chunks_exact_mut(8).zip(words) {
        chunk.copy_from_slice(&word.to_le_bytes());
    }
    bytes
}

fn check_stamp(slot: u64, sector: usize, bytes: &[u8]) {
    if bytes.iter().all(|&byte| byte == 0) {
        return;
    }
    let word = |n: usize| u64::from_le_bytes(bytes[n * 8..][..8].try_into().unwrap());
    let expected = stamp(slot, sector, word(2) as usize % THREADS, word(3));
    assert!(
        bytes == expected,
        "slot {slot} sector {sector} holds {:?}",
        (word(0), word(1), word(2), word(3))
    );
}

/// Each thread owns two sectors of every page and knows exactly what they must hold, while all write into the same pages.
#[test]
fn sectors_of_one_page_written_by_many_queues_are_never_lost() {
    const SLOTS: u64 = 5;
    let zram = create(SLOTS, None, "lz4");
    let barrier = Barrier::new(THREADS);
    std::thread::scope(|scope| {
        for me in 0..THREADS {
            let (zram, barrier) = (&zram, &barrier);
            scope.spawn(move || {
                let _together = FailTogether;
                let mut worker = zram.worker().unwrap();
                let mut random = Random::new(me as u64 + 100);
                let mut mine = HashMap::new();
                let mut page = Page::zeroed();
                for round in 0..20 {
                    for write in 0..200 {
                        let (slot, sector) = (random.below(SLOTS), me * 2 + random.below(2) as usize);
                        let bytes = stamp(slot, sector, me, round * 200 + write);
                        worker.write_sectors(SlotIndex(slot as u32), sector, &bytes).unwrap();
                        mine.insert((slot, sector), bytes);
                        worker.read_page(SlotIndex(slot as u32), &mut page).unwrap();
                        for (sector, bytes) in page.chunks_exact(SECTOR_SIZE).enumerate() {
                            match mine.get(&(slot, sector)) {
                                Some(expected) => assert!(bytes == expected, "lost: slot {slot} sector {sector}"),
                                None => check_stamp(slot, sector, bytes),
                            }
                        }
                    }
                    worker.end_batch();
                    if barrier.wait().is_leader() {
                        zram.upkeep();
                    }
                    barrier.wait();
                    worker.end_batch();
                    if barrier.wait().is_leader() {
                        zram.check_consistency();
                    }
                    barrier.wait();
                }
            });
        }
    });
}

/// All operations on the same few slots: whatever is read is, sector by sector, something that was written there.
#[test]
fn racing_writes_discards_and_reads_give_only_what_was_written() {
    const SLOTS: u64 = 7;
    for (algorithm, limit) in [("lz4", None), ("zstd", None), ("lz4", Some(2 * MEM_LIMIT_MIN))] {
        let zram = create(SLOTS, limit, algorithm);
        let barrier = Barrier::new(THREADS);
        std::thread::scope(|scope| {
            for me in 0..THREADS {
                let (zram, barrier) = (&zram, &barrier);
                scope.spawn(move || {
                    let _together = FailTogether;
                    let mut worker = zram.worker().unwrap();
                    let mut random = Random::new(me as u64 + 200);
                    let mut page = Page::zeroed();
                    for round in 0..20 {
                        for write in 0..200 {
                            let slot = random.below(SLOTS);
                            let index = SlotIndex(slot as u32);
                            match random.below(8) {
                                0..3 => {
                                    for (sector, bytes) in page.chunks_exact_mut(SECTOR_SIZE).enumerate() {
                                        bytes.copy_from_slice(&stamp(slot, sector, me, round * 200 + write));
                                    }
                                    worker.write_page(index, &page).unwrap();
                                }
                                3 => {
                                    let sector = random.below(8) as usize;
                                    let bytes = stamp(slot, sector, me, round * 200 + write);
                                    worker.write_sectors(index, sector, &bytes).unwrap();
                                }
                                4 => worker.discard(slot..slot + 1),
                                _ => {
                                    worker.read_page(index, &mut page).unwrap();
                                    for (sector, bytes) in page.chunks_exact(SECTOR_SIZE).enumerate() {
                                        check_stamp(slot, sector, bytes);
                                    }
                                }
                            }
                            if write % 10 == 0 {
                                worker.end_batch();
                            }
                        }
                        // Twice: what one thread retired may have been held by another's last read.
                        for _ in 0..2 {
                            worker.end_batch();
                            barrier.wait();
                        }
                        if barrier.wait().is_leader() {
                            zram.check_consistency();
                        }
                        barrier.wait();
                    }
                });
            }
        });
    }
}

/// Eight workers fill a small limit with what does not compress, then go on overwriting and discarding there.
#[test]
fn at_the_limit_nothing_is_exceeded_and_overwriting_goes_on() {
    const WORKERS: usize = 8;
    const SLOTS_EACH: u64 = 200;
    let limit = 3 << 20;
    let zram = create(SLOTS_EACH * WORKERS as u64, Some(limit), "lz4");
    std::thread::scope(|scope| {
        for me in 0..WORKERS as u64 {
            let zram = &zram;
            scope.spawn(move || {
                let mut worker = zram.worker().unwrap();
                let mut random = Random::new(me + 300);
                let (mut page, mut back) = (Page::zeroed(), Page::zeroed());
                let mut held: HashMap<u64, Box<Page>> = HashMap::new();
                for slot in me * SLOTS_EACH..(me + 1) * SLOTS_EACH {
                    random.fill(&mut page[..]);
                    match worker.write_page(SlotIndex(slot as u32), &page) {
                        Ok(()) => drop(held.insert(slot, page.clone())),
                        Err(error) => assert_eq!(error, WriteError::LimitReached),
                    }
                    assert!(zram.stats().mem_used_total <= limit);
                }
                let slots: Vec<u64> = held.keys().copied().collect();
                for round in 0..5 {
                    for &slot in &slots {
                        random.fill(&mut page[..]);
                        worker
                            .write_page(SlotIndex(slot as u32), &page)
                            .unwrap_or_else(|error| {
                                panic!("worker {me}, round {round}: overwriting slot {slot} at the limit: {error}")
                            });
                        held.insert(slot, page.clone());
                        worker.end_batch();
                        assert!(zram.stats().mem_used_total <= limit);
                    }
                }
                for (&slot, expected) in &held {
                    worker.read_page(SlotIndex(slot as u32), &mut back).unwrap();
                    assert!(back[..] == expected[..], "slot {slot}");
                }
                let Some((first, rest)) = slots.split_first() else {
                    return; // the others were faster
                };
                rest.iter().for_each(|&slot| worker.discard(slot..slot + 1));
                worker.end_batch();
                worker.write_page(SlotIndex(*first as u32), &page).unwrap();
            });
        }
    });
    assert!(zram.stats().refused_writes > 0, "nobody saw the limit");
    assert!(zram.stats().mem_used_max <= limit);
}

/// Pages of every length up to whole ones fill small limits; each is overwritten again and again with as much.
#[test]
fn as_much_in_the_place_of_as_much_is_never_refused() {
    for (workers, limit) in [(1, MEM_LIMIT_MIN), (1, 1 << 20), (8, 1 << 20), (8, 4 << 20)] {
        let slots_each = 4 * limit / PAGE_SIZE as u64 / workers;
        let zram = create(slots_each * workers, Some(limit), "lz4");
        // The noise of a slot is turned by another byte each time: other content of the same length for lz4.
        let fill = |page: &mut Page, slot: u64, length: usize, turn: u8| {
            page.fill(0);
            Random::new(slot).fill(&mut page[..length]);
            page[..length].iter_mut().for_each(|byte| *byte ^= turn);
            page[length..].fill(turn);
        };
        let stored: Vec<(u64, usize)> = std::thread::scope(|scope| {
            let workers: Vec<_> = (0..workers)
                .map(|me| {
                    let zram = &zram;
                    scope.spawn(move || {
                        let mut worker = zram.worker().unwrap();
                        let mut random = Random::new(me + 500);
                        let (mut page, mut back) = (Page::zeroed(), Page::zeroed());
                        let mut lengths = vec![];
                        for slot in me * slots_each..(me + 1) * slots_each {
                            let length = (1 + random.below(2 * PAGE_SIZE as u64)).min(PAGE_SIZE as u64) as usize;
                            fill(&mut page, slot, length, 0);
                            if worker.write_page(SlotIndex(slot as u32), &page).is_ok() {
                                lengths.push((slot, length));
                            }
                        }
                        for n in 0..20 * lengths.len() {
                            let (slot, length) = lengths[random.below(lengths.len() as u64) as usize];
                            fill(&mut page, slot, length, n as u8);
                            let written = match n % 3 {
                                0 => worker.write_sectors(SlotIndex(slot as u32), 0, &page[..]),
                                _ => worker.write_page(SlotIndex(slot as u32), &page),
                            };
                            assert_eq!(
                                written,
                                Ok(()),
                                "overwrite {n} of {length} bytes, worker {me} of {workers}, limit {limit}"
                            );
                            worker.read_page(SlotIndex(slot as u32), &mut back).unwrap();
                            assert!(back[..] == page[..]);
                            if n % 8 == 0 {
                                worker.end_batch();
                            }
                            if n % 32 == 0 {
                                zram.mark_idle(IdleMark::All); // words change under those who move objects
                            }
                        }
                        lengths
                    })
                })
                .collect();
            workers.into_iter().flat_map(|worker| worker.join().unwrap()).collect()
        });
        assert!(zram.stats().refused_writes > 0, "nobody saw the limit");
        assert!(zram.stats().mem_used_max <= limit);
        while zram.upkeep() == Upkeep::Soon {}
        zram.check_consistency();
        // The same in the process after this one.
        let memory = zram.memory().unwrap();
        drop(zram);
        let options = AdoptOptions {
            mem_limit_bytes: Some(limit),
            contexts: DecompressionContexts::new(DecompressionContexts::count_for(1)),
        };
        let zram = Zram::adopt(memory, &options).unwrap();
        let (mut worker, mut page) = (zram.worker().unwrap(), Page::zeroed());
        for (n, &(slot, length)) in stored.iter().cycle().take(4 * stored.len()).enumerate() {
            fill(&mut page, slot, length, n as u8);
            let written = worker.write_page(SlotIndex(slot as u32), &page);
            assert_eq!(written, Ok(()), "overwrite {n} after adoption, limit {limit}");
        }
        worker.end_batch();
        while zram.upkeep() == Upkeep::Soon {}
        zram.check_consistency();
    }
}

/// What a leaving worker could not free yet is freed by those who stay, and its heap is used by all.
#[test]
fn workers_come_and_go_and_leave_nothing() {
    let zram = create(4096, None, "lz4");
    let mut random = Random::new(9);
    let mut page = Page::zeroed();
    for _ in 0..300 {
        let mut worker = zram.worker().unwrap();
        for _ in 0..20 {
            fill_page(&mut random, &mut page);
            worker.write_page(SlotIndex(random.below(4096) as u32), &page).unwrap();
        }
    }
    let mut worker = zram.worker().unwrap();
    worker.discard(0..4096);
    worker.end_batch();
    while zram.upkeep() == Upkeep::Soon {}
    zram.check_consistency();
    assert_eq!(zram.stats().mem_used_total, 0);
}

/// What one queue wrote is overwritten by others in turn: none builds a store of its own beside the holes of the rest.
#[test]
fn queues_that_overwrite_in_turn_hold_little_more_than_they_store() {
    const SLOTS: u64 = 8192;
    let zram = create(SLOTS, None, "lz4");
    let mut workers: Vec<_> = (0..4).map(|_| zram.worker().unwrap()).collect();
    let mut random = Random::new(400);
    let mut page = Page::zeroed();
    for round in 0..8 {
        let worker = &mut workers[round % 4];
        for slot in 0..SLOTS {
            if round > 0 && random.below(100) < 3 {
                continue; // a few stay, in every segment
            }
            page.fill(0);
            let len = 1000 + random.below(700) as usize;
            random.fill(&mut page[..len]);
            worker.write_page(SlotIndex(slot as u32), &page).unwrap();
            if slot % 32 == 0 {
                worker.end_batch();
            }
        }
        while zram.upkeep() == Upkeep::Soon {}
        let stats = zram.stats();
        let held = stats.mem_used_total as f64 / stats.compr_data_size as f64;
        assert!(
            held < 1.12,
            "round {round}: the arena holds {held:.3} times what it stores"
        );
    }
}
