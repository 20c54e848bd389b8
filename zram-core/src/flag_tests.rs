//! What each operation makes of a page's flags, for every combination of them that there is.

#![allow(clippy::unwrap_used)] // a test: an error is a failure

use std::sync::Arc;
use std::time::Duration;

use crate::slot::{self, Slot};
use crate::{
    Algorithm, Codecs, DecompressionContexts, IdleMark, Options, PAGE_SIZE, Page, RecompressOptions, RecompressType,
    SlotIndex, Worker, Zram,
};

/// An age that only a walk gives, and one of a page just used.
const OLD: u8 = 40;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Flags {
    is_huge: bool,
    is_idle: bool,
    is_incompressible: bool,
    priority: u8,
    age: u8,
}

#[derive(Clone, Copy, Debug)]
enum Operation {
    Read,
    Write,
    WriteSector,
    MarkAll,
    MarkOld,
    MarkNothing,
    Recompress(RecompressType),
    Move,
}

const OPERATIONS: [Operation; 11] = [
    Operation::Read,
    Operation::Write,
    Operation::WriteSector,
    Operation::MarkAll,
    Operation::MarkOld,
    Operation::MarkNothing,
    Operation::Recompress(RecompressType::All),
    Operation::Recompress(RecompressType::Idle),
    Operation::Recompress(RecompressType::Huge),
    Operation::Recompress(RecompressType::HugeIdle),
    Operation::Move,
];

/// zram's rules, written down once more.
fn expected(before: Flags, operation: Operation) -> Flags {
    let fresh = Flags {
        is_idle: false,
        is_incompressible: false,
        priority: 0,
        age: 0,
        ..before
    };
    // A mark walks through the ages first: a page just used goes from class 0 to class 1.
    let walked = Flags {
        age: before.age.max(1),
        ..before
    };
    match operation {
        Operation::Read => Flags {
            is_idle: false,
            age: 0,
            ..before
        },
        Operation::Write | Operation::WriteSector => fresh,
        Operation::MarkAll => Flags {
            is_idle: true,
            ..walked
        },
        Operation::MarkOld => Flags {
            is_idle: before.age == OLD,
            ..walked
        },
        Operation::MarkNothing => Flags {
            is_idle: false,
            ..walked
        },
        Operation::Move => before,
        Operation::Recompress(kind) => {
            let is_kind = match kind {
                RecompressType::All => true,
                RecompressType::Idle => before.is_idle,
                RecompressType::Huge => before.is_huge,
                RecompressType::HugeIdle => before.is_huge && before.is_idle,
            };
            // Of two algorithms the second is the last.
            if !is_kind || before.is_incompressible || before.priority == 1 {
                return before;
            }
            if before.is_huge {
                // Noise: no algorithm gains.
                Flags {
                    is_idle: false,
                    is_incompressible: true,
                    ..before
                }
            } else {
                Flags {
                    is_idle: false,
                    priority: 1,
                    ..before
                }
            }
        }
    }
}

/// Compressible by zstd far better than by lz4, or not at all.
fn content(is_huge: bool) -> Box<Page> {
    let (mut page, mut random) = (Page::zeroed(), 7_u64);
    page.fill_with(|| {
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        let noise = (random >> 56) as u8;
        if is_huge { noise } else { noise % 16 }
    });
    if !is_huge {
        page[PAGE_SIZE / 2..].fill(0);
    }
    page
}

fn flags(zram: &Zram) -> Flags {
    let word = zram.table.load(SlotIndex(0));
    let Slot::Stored { len, priority, .. } = Slot::unpack(word) else {
        panic!("{word:#x} is not stored");
    };
    Flags {
        is_huge: len == PAGE_SIZE,
        is_idle: slot::is_idle(word),
        is_incompressible: slot::is_incompressible(word),
        priority,
        age: slot::age(word).unwrap(),
    }
}

/// A disk whose first page has these flags.
fn prepare(wanted: Flags) -> (Arc<Zram>, Worker) {
    let load = |text: &str| text.parse::<Algorithm>().unwrap().load().unwrap();
    let contexts = DecompressionContexts::new(DecompressionContexts::count_for(1));
    let codecs = Codecs::new(load("lz4"), [Some(load("zstd")), None, None], contexts).unwrap();
    let zram = Zram::create(&Options {
        name: "flags".into(),
        size_bytes: 256 * PAGE_SIZE as u64,
        size_bytes_max: None,
        mem_limit_bytes: None,
        codecs: Arc::new(codecs),
    })
    .unwrap();
    let mut worker = zram.worker().unwrap();
    worker.write_page(SlotIndex(0), &content(wanted.is_huge)).unwrap();
    if wanted.priority == 1 {
        zram.recompress(&RecompressOptions::default()).unwrap();
    }
    let found = zram.table.load(SlotIndex(0));
    let mut word = slot::with_idle(slot::with_age(found, wanted.age), wanted.is_idle);
    if wanted.is_incompressible {
        word = slot::incompressible(word);
    }
    assert!(zram.table.change_flags(SlotIndex(0), found, word));
    assert_eq!(flags(&zram), wanted);
    (zram, worker)
}

fn apply(operation: Operation, zram: &Arc<Zram>, worker: &mut Worker, is_huge: bool) {
    let old = Duration::from_secs(3600);
    match operation {
        Operation::Read => worker.read_page(SlotIndex(0), &mut Page::zeroed()).unwrap(),
        Operation::Write => worker.write_page(SlotIndex(0), &content(is_huge)).unwrap(),
        Operation::WriteSector => {
            let sector = content(is_huge)[1024..1536].to_vec();
            worker.write_sectors(SlotIndex(0), 2, &sector).unwrap();
        }
        Operation::MarkAll => drop(zram.mark_idle(IdleMark::All)),
        Operation::MarkOld => drop(zram.mark_idle(IdleMark::Age(old))),
        Operation::MarkNothing => drop(zram.mark_idle(IdleMark::Age(Duration::MAX))),
        Operation::Recompress(kind) => {
            let options = RecompressOptions {
                kind,
                ..Default::default()
            };
            zram.recompress(&options).unwrap();
        }
        Operation::Move => {
            // Many more, of which few stay: the segments are sparse.
            (1..256).for_each(|slot| worker.write_page(SlotIndex(slot), &content(true)).unwrap());
            worker.discard(1..256);
            (1..256)
                .step_by(5)
                .for_each(|slot| worker.write_page(SlotIndex(slot), &content(true)).unwrap());
            worker.discard(1..256);
            worker.end_batch();
            zram.compact();
        }
    }
    worker.end_batch();
}

#[test]
fn every_operation_makes_of_every_combination_what_zram_makes() {
    let mut combinations = 0;
    for bits in 0..32 {
        let bit = |n: u32| bits >> n & 1 != 0;
        let before = Flags {
            is_huge: bit(0),
            is_idle: bit(1),
            is_incompressible: bit(2),
            priority: u8::from(bit(3)),
            age: if bit(4) { OLD } else { 0 },
        };
        if before.priority == 1 && before.is_huge {
            continue; // what was recompressed is not kept whole
        }
        combinations += 1;
        for operation in OPERATIONS {
            let (zram, mut worker) = prepare(before);
            apply(operation, &zram, &mut worker, before.is_huge);
            assert_eq!(flags(&zram), expected(before, operation), "{operation:?} of {before:?}");
            let mut page = Page::zeroed();
            worker.read_page(SlotIndex(0), &mut page).unwrap();
            assert!(page[..] == content(before.is_huge)[..], "{operation:?} of {before:?}");
            zram.check_consistency();
        }
    }
    assert_eq!(combinations, 24);
}

#[test]
fn slots_without_an_object_never_have_flags() {
    let (zram, mut worker) = prepare(Flags {
        is_huge: false,
        is_idle: true,
        is_incompressible: false,
        priority: 0,
        age: OLD,
    });
    worker.discard(0..1);
    assert_eq!(zram.table.load(SlotIndex(0)), Slot::EMPTY);
    let mut page = Page::zeroed();
    page.fill_with_word(0xb0b0_b0b0_b0b0_b0b0);
    worker.write_page(SlotIndex(0), &page).unwrap();
    let word = zram.table.load(SlotIndex(0));
    assert_eq!(zram.mark_idle(IdleMark::All), 0);
    assert_eq!(zram.recompress(&RecompressOptions::default()).unwrap().pages_tried, 0);
    assert_eq!(zram.table.load(SlotIndex(0)), word);
}
