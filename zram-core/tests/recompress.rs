//! Recompression of a disk: what is gained, which pages are looked at, and that nothing else changes.

#![allow(clippy::unwrap_used)] // a test: an error is a failure

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use zram_core::{
    Algorithm, Codecs, DecompressionContexts, IdleMark, Options, PAGE_SIZE, Page, RecompressError, RecompressOptions,
    RecompressType, Recompressed, SlotIndex, Upkeep, Worker, Zram,
};

const SLOTS: u32 = 600;

fn create(primary: &str, secondary: [Option<&str>; 3]) -> Arc<Zram> {
    let load = |text: &str| text.parse::<Algorithm>().unwrap().load().unwrap();
    let contexts = DecompressionContexts::new(DecompressionContexts::count_for(4));
    let codecs = Codecs::new(load(primary), secondary.map(|text| text.map(load)), contexts).unwrap();
    Zram::create(&Options {
        name: "recompress".into(),
        size_bytes: u64::from(SLOTS) * PAGE_SIZE as u64,
        size_bytes_max: None,
        mem_limit_bytes: None,
        codecs: Arc::new(codecs),
    })
    .unwrap()
}

fn lz4_then_zstd() -> Arc<Zram> {
    create("lz4", [Some("zstd"), None, None])
}

fn random_from(seed: u64) -> impl FnMut() -> u64 {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    move || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        state >> 33
    }
}

/// Every tenth page noise, every tenth of one word, every tenth nothing at all; else text that entropy coding makes
/// much smaller than matches alone do, of different lengths.
fn content(slot: u32, version: u32) -> Box<Page> {
    let (mut page, mut random) = (Page::zeroed(), random_from(u64::from(slot) << 32 | u64::from(version)));
    match slot % 10 {
        0 => page.fill_with(|| random() as u8),
        1 => page.fill_with_word(u64::from(slot + version)),
        2 => {}
        _ => page[..400 + slot as usize % 8 * 400].fill_with(|| b"0123456789abcdef"[random() as usize % 16]),
    }
    page
}

fn fill(zram: &Arc<Zram>, version: u32) -> Worker {
    let mut worker = zram.worker().unwrap();
    for slot in (0..SLOTS).filter(|slot| slot % 10 != 2) {
        worker.write_page(SlotIndex(slot), &content(slot, version)).unwrap();
    }
    worker.end_batch();
    worker
}

fn check(worker: &mut Worker, version: u32) {
    let mut page = Page::zeroed();
    for slot in 0..SLOTS {
        worker.read_page(SlotIndex(slot), &mut page).unwrap();
        assert!(page[..] == content(slot, version)[..], "slot {slot}");
    }
}

fn run(zram: &Zram, options: RecompressOptions) -> Recompressed {
    let done = zram.recompress(&options).unwrap();
    while zram.upkeep() == Upkeep::Soon {}
    zram.check_consistency();
    done
}

const ALL: RecompressOptions = RecompressOptions {
    kind: RecompressType::All,
    threshold: None,
    max_pages: None,
    priority: None,
};

/// Pages that are stored as objects, and those of them that are noise.
const STORED: u64 = SLOTS as u64 / 10 * 8;
const NOISE: u64 = SLOTS as u64 / 10;

#[test]
fn a_denser_algorithm_gains_and_every_page_is_the_same() {
    let zram = lz4_then_zstd();
    let mut worker = fill(&zram, 1);
    let before = zram.stats();
    let done = run(&zram, ALL);
    let after = zram.stats();
    check(&mut worker, 1);
    assert_eq!(done.pages_tried, STORED);
    assert_eq!(done.pages_incompressible, NOISE);
    assert_eq!(done.pages_recompressed, STORED - NOISE);
    assert_eq!(before.compr_data_size - after.compr_data_size, done.bytes_gained);
    assert!(
        after.compr_data_size * 10 < before.compr_data_size * 8,
        "{before:?} {after:?}"
    );
    assert!(after.mem_used_total < before.mem_used_total);
    assert_eq!(before.orig_data_size, after.orig_data_size);
    assert_eq!(before.huge_pages_since, after.huge_pages_since);
    // There is nothing left to try.
    assert_eq!(run(&zram, ALL), Recompressed::default());
    drop(fill(&zram, 2));
    assert_eq!(run(&zram, ALL).pages_tried, STORED, "written anew");
    check(&mut worker, 2);
}

#[test]
fn what_gains_less_than_a_granule_is_not_taken() {
    let zram = create("zstd(level=3)", [Some("zstd(level=3)"), None, None]);
    let mut worker = fill(&zram, 1);
    let before = zram.stats().compr_data_size;
    let done = run(&zram, ALL);
    assert_eq!((done.pages_recompressed, done.bytes_gained), (0, 0));
    assert_eq!(done.pages_incompressible, STORED);
    assert_eq!(zram.stats().compr_data_size, before);
    check(&mut worker, 1);
}

#[test]
fn idle_pages_are_those_that_nobody_used_since_the_mark() {
    let zram = lz4_then_zstd();
    let mut worker = fill(&zram, 1);
    let idle = RecompressOptions {
        kind: RecompressType::Idle,
        ..ALL
    };
    assert_eq!(run(&zram, idle).pages_tried, 0, "nothing is marked");
    assert_eq!(zram.mark_idle(IdleMark::All), STORED);
    let mut page = Page::zeroed();
    worker.read_page(SlotIndex(13), &mut page).unwrap();
    worker.write_page(SlotIndex(14), &content(14, 1)).unwrap();
    worker
        .write_sectors(SlotIndex(15), 3, &content(15, 1)[3 * 512..4 * 512])
        .unwrap();
    worker.discard(16..17);
    worker.write_page(SlotIndex(16), &content(16, 1)).unwrap();
    worker.end_batch();
    assert_eq!(run(&zram, idle).pages_tried, STORED - 4);
    assert_eq!(run(&zram, idle).pages_tried, 0, "the mark went with the try");
    check(&mut worker, 1);
    zram.mark_idle(IdleMark::All);
    assert_eq!(
        zram.mark_idle(IdleMark::Age(Duration::from_secs(3600))),
        0,
        "too young, and unmarked"
    );
    assert_eq!(run(&zram, idle).pages_tried, 0);
}

#[test]
fn a_second_algorithm_has_one_context_whatever_the_number_of_workers() {
    let zram = lz4_then_zstd();
    let alone = zram.context_bytes();
    assert!(alone.worker > 0, "known before there is a worker");
    assert!(alone.shared > 0);
    let mut workers: Vec<_> = (0..32).map(|_| zram.worker().unwrap()).collect();
    let mut page = Page::zeroed();
    for (number, worker) in workers.iter_mut().enumerate() {
        worker
            .write_page(SlotIndex(number as u32), &content(number as u32, 1))
            .unwrap();
        worker.read_page(SlotIndex(number as u32), &mut page).unwrap();
    }
    run(&zram, ALL);
    for (number, worker) in workers.iter_mut().enumerate() {
        worker.read_page(SlotIndex(number as u32), &mut page).unwrap();
    }
    assert_eq!(zram.context_bytes(), alone);
}

#[test]
fn huge_pages_and_thresholds() {
    let zram = lz4_then_zstd();
    let mut worker = fill(&zram, 1);
    let huge_before = zram.stats().huge_pages;
    let huge = RecompressOptions {
        kind: RecompressType::Huge,
        ..ALL
    };
    let huge_idle = RecompressOptions {
        kind: RecompressType::HugeIdle,
        ..ALL
    };
    assert_eq!(run(&zram, huge_idle).pages_tried, 0);
    let threshold = RecompressOptions {
        threshold: Some(2000),
        ..ALL
    };
    let done = run(&zram, threshold);
    assert!(done.pages_tried > huge_before && done.pages_tried < STORED, "{done:?}");
    assert_eq!(done.pages_incompressible, huge_before);
    // A result must be below the threshold, too.
    let done = run(
        &zram,
        RecompressOptions {
            threshold: Some(1),
            ..ALL
        },
    );
    assert_eq!(done.pages_recompressed, 0);
    drop(fill(&zram, 2));
    assert_eq!(run(&zram, huge).pages_tried, zram.stats().huge_pages);
    drop(fill(&zram, 3));
    zram.mark_idle(IdleMark::All);
    assert_eq!(run(&zram, huge_idle).pages_tried, zram.stats().huge_pages);
    check(&mut worker, 3);
}

#[test]
fn the_largest_objects_come_first() {
    let zram = lz4_then_zstd();
    let mut worker = fill(&zram, 1);
    let few = |max_pages| RecompressOptions {
        max_pages: Some(max_pages),
        ..ALL
    };
    assert_eq!(run(&zram, few(NOISE)).pages_incompressible, NOISE, "nothing is larger");
    // The larger the object, the more there is to gain in these pages.
    let gains: Vec<_> = std::iter::repeat_with(|| run(&zram, few(20)))
        .take_while(|done| done.pages_tried == 20)
        .map(|done| done.bytes_gained)
        .collect();
    assert_eq!(gains.len() as u64, (STORED - NOISE) / 20);
    for pair in gains.windows(2) {
        assert!(pair[1] <= pair[0] + 20 * 64, "{gains:?}");
    }
    assert!(gains[0] > 2 * gains[gains.len() - 1], "{gains:?}");
    check(&mut worker, 1);
}

#[test]
fn priorities_are_tried_in_their_order_or_one_alone() {
    let zram = create("lz4", [Some("lz4hc"), Some("zstd(level=1)"), Some("zstd(level=19)")]);
    let mut worker = fill(&zram, 1);
    let only = |priority| RecompressOptions {
        priority: Some(priority),
        ..ALL
    };
    let second = run(&zram, only(2));
    assert!(second.pages_recompressed > 0);
    assert_eq!(second.pages_incompressible, 0, "3 was not tried");
    assert_eq!(run(&zram, only(1)).pages_recompressed, 0, "below what made them");
    let third = run(&zram, only(3));
    assert_eq!(third.pages_incompressible + third.pages_recompressed, STORED);
    check(&mut worker, 1);
}

/// What the first algorithm made smaller is not tried with the next one in the same run.
#[test]
fn a_run_tries_a_page_once() {
    let zram = create("lz4", [Some("lz4hc"), Some("zstd"), None]);
    let mut worker = fill(&zram, 1);
    let first = run(&zram, ALL);
    assert_eq!(first.pages_tried, STORED);
    let second = run(&zram, ALL);
    assert!(
        second.pages_recompressed > 0,
        "with zstd, what lz4hc had gained on: {second:?}"
    );
    check(&mut worker, 1);
}

#[test]
fn what_cannot_be_is_refused() {
    let zram = lz4_then_zstd();
    for (options, error) in [
        (
            RecompressOptions {
                priority: Some(0),
                ..ALL
            },
            "the disk has no algorithm for recompression with priority 0",
        ),
        (
            RecompressOptions {
                priority: Some(2),
                ..ALL
            },
            "the disk has no algorithm for recompression with priority 2",
        ),
        (
            RecompressOptions {
                priority: Some(4),
                ..ALL
            },
            "the disk has no algorithm for recompression with priority 4",
        ),
        (
            RecompressOptions {
                threshold: Some(0),
                ..ALL
            },
            "threshold=0 is not in 1..4096",
        ),
        (
            RecompressOptions {
                threshold: Some(4096),
                ..ALL
            },
            "threshold=4096 is not in 1..4096",
        ),
    ] {
        assert_eq!(zram.recompress(&options).unwrap_err().to_string(), error);
    }
    let alone = create("lz4", [None; 3]);
    assert_eq!(alone.recompress(&ALL), Err(RecompressError::NoAlgorithms));
}

#[test]
fn another_process_reads_what_was_recompressed() {
    let zram = create("lz4", [None, Some("zstd(level=5)"), None]);
    drop(fill(&zram, 1));
    let half = RecompressOptions {
        max_pages: Some(STORED / 2),
        ..ALL
    };
    run(&zram, half);
    let (memory, stats) = (zram.memory().unwrap(), zram.stats());
    drop(zram);
    let options = zram_core::AdoptOptions {
        mem_limit_bytes: None,
        contexts: DecompressionContexts::new(DecompressionContexts::count_for(4)),
    };
    let zram = Zram::adopt(memory, &options).unwrap();
    zram.check_consistency();
    assert_eq!(zram.stats().compr_data_size, stats.compr_data_size);
    let mut worker = zram.worker().unwrap();
    check(&mut worker, 1);
    assert_eq!(run(&zram, ALL).pages_tried, STORED - STORED / 2);
    check(&mut worker, 1);
}

/// Two workers write, discard and read what they know, all pages are marked, recompressed and moved at the same time.
#[test]
fn pages_are_never_wrong_while_they_are_recompressed() {
    let zram = create("lz4", [Some("lz4hc"), Some("zstd"), Some("deflate")]);
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let (zram, is_over) = (&zram, &is_over);
        let writers: Vec<_> = (0..2)
            .map(|me| {
                scope.spawn(move || {
                    let (mut worker, mut random) = (zram.worker().unwrap(), random_from(me));
                    let (mut versions, mut page) = ([0; SLOTS as usize], Page::zeroed());
                    for n in 0..12_000 {
                        let slot = random() as u32 % (SLOTS / 2) * 2 + me as u32;
                        let version = &mut versions[slot as usize];
                        match random() % 8 {
                            0..3 => {
                                *version = n;
                                worker.write_page(SlotIndex(slot), &content(slot, n)).unwrap();
                            }
                            3 => {
                                *version = n;
                                let sectors = content(slot, n)[..].to_vec();
                                worker.write_sectors(SlotIndex(slot), 0, &sectors).unwrap();
                            }
                            _ => {
                                worker.read_page(SlotIndex(slot), &mut page).unwrap();
                                let expected = if *version == 0 {
                                    Page::zeroed()
                                } else {
                                    content(slot, *version)
                                };
                                assert!(page[..] == expected[..], "slot {slot}");
                            }
                        }
                        if n % 16 == 0 {
                            worker.end_batch();
                        }
                    }
                })
            })
            .collect();
        let recompressor = scope.spawn(move || {
            let mut done = 0;
            while !is_over.load(Ordering::Relaxed) {
                zram.mark_idle(IdleMark::All);
                done += zram.recompress(&ALL).unwrap().pages_recompressed;
                zram.compact();
                zram.stats();
            }
            done
        });
        writers.into_iter().for_each(|writer| writer.join().unwrap());
        is_over.store(true, Ordering::Relaxed);
        assert!(recompressor.join().unwrap() > 0);
    });
    while zram.upkeep() == Upkeep::Soon {}
    zram.check_consistency();
}
