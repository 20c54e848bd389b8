//! What a store costs beside its pages. Alone in its process, whose memory it measures.

#![allow(clippy::unwrap_used)] // a test: an error is a failure

use std::sync::Arc;

use zram_core::{Codecs, Options, PAGE_SIZE, Page, SlotIndex, Upkeep, Zram};

const MIB: u64 = 1 << 20;

fn create(size_bytes: u64) -> Arc<Zram> {
    let options = Options {
        name: "footprint".into(),
        size_bytes,
        size_bytes_max: None,
        mem_limit_bytes: None,
        codecs: Codecs::alone(&"lz4".parse().unwrap()).unwrap(),
    };
    Zram::create(&options).unwrap()
}

/// Bytes of this process that are in memory, shared or not.
fn resident() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    line.trim().strip_suffix(" kB").unwrap().parse::<u64>().unwrap() * 1024
}

#[test]
fn a_store_costs_little_beside_its_pages() {
    let before = resident();
    let zram = create(1 << 40);
    let upkeep = zram.spawn_upkeep("zram-upkeep").unwrap();
    let (mut worker, mut page) = (zram.worker().unwrap(), Page::zeroed());
    for slot in (0..1 << 28).step_by(10_000_019) {
        worker.read_page(SlotIndex(slot), &mut page).unwrap();
    }
    worker.discard(0..1 << 28);
    let empty = resident() - before;
    assert!(empty < 8 * MIB, "an empty disk of 1 TiB takes {empty} bytes");
    drop((worker, upkeep, zram));

    let before = resident();
    let zram = create(16 * MIB);
    let upkeep = zram.spawn_upkeep("zram-upkeep").unwrap();
    let mut worker = zram.worker().unwrap();
    let mut random = 1_u64;
    for round in 0..10 {
        for slot in 0..(16 * MIB) as usize / PAGE_SIZE {
            page.fill(0);
            page[..600 + (slot * 37 + round * 101) % 900].fill_with(|| {
                random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                (random >> 56) as u8
            });
            worker.write_page(SlotIndex(slot as u32), &page).unwrap();
            if slot.is_multiple_of(16) {
                worker.end_batch();
            }
        }
    }
    worker.end_batch();
    drop(upkeep);
    while zram.upkeep() == Upkeep::Soon {}
    let beside = (resident() - before).saturating_sub(zram.stats().compr_data_size);
    assert!(beside < MIB, "a disk of 16 MiB takes {beside} bytes beside its pages");
}
