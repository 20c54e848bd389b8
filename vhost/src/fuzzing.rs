//! Bodies of the fuzz targets, as plain functions, so that saved inputs run as ordinary tests too.
//!
//! An input is guest memory as a hostile guest would leave it: the ring areas at fixed places, descriptors and buffers
//! wherever the input says. Whatever it is, the queue must come to rest without a panic, and what it then says of itself
//! must add up.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};
use zram_core::{Algorithm, Codecs, Options, Zram};

use crate::config::{DeviceConfig, Disk};
use crate::counters::{Burst, LogLimit, QueueCounters, RequestCounts};
use crate::guest::Guest;
use crate::ring::{Areas, Ring};
use crate::worker::{Kick, Parts, QueueWorker, Shared, Signals};

/// Guest memory of one input: small, so that addresses drawn at random often lie in it.
const GUEST_BYTES: usize = 0x1_0000;
const RING_SIZE: u16 = 16;
const DESCRIPTORS: u64 = 0;
const AVAIL: u64 = 0x100;
const USED: u64 = 0x200;
const DISK_BYTES: u64 = 64 << 10;

/// Serves one ring over guest memory that begins with `input`. The first byte chooses options.
pub fn ring(input: &[u8]) {
    let Some((options, memory)) = input.split_first() else {
        return;
    };
    let mem: GuestMemoryMmap =
        GuestMemoryMmap::from_ranges(&[(GuestAddress(0), GUEST_BYTES)]).expect("anonymous memory");
    let memory = memory.get(..GUEST_BYTES).unwrap_or(memory);
    mem.write_slice(memory, GuestAddress(0)).expect("it fits");
    let shared = Arc::new(shared(*options));
    let mut ring = Ring::new(RING_SIZE);
    let areas = Areas {
        descriptors: GuestAddress(DESCRIPTORS),
        avail: GuestAddress(AVAIL),
        used: GuestAddress(USED),
    };
    ring.set_up(&Guest::of(&mem), RING_SIZE, areas, options & 1 != 0, options & 2 != 0)
        .expect("areas in memory");
    let parts = Parts {
        index: 0,
        ring,
        guest: Guest::of(&mem),
        kick: Kick::Polled,
        signals: Arc::<Signals>::default(),
        shared: shared.clone(),
    };
    let core = shared.disk.zram.worker().expect("the first worker");
    let mut worker = QueueWorker::new(parts, core);
    worker.turn(&AtomicBool::new(false));
    check(&shared);
}

fn shared(options: u8) -> Shared {
    let zram = Zram::create(&Options {
        name: "fuzz".to_string(),
        size_bytes: DISK_BYTES,
        mem_limit_bytes: None,
        codecs: Codecs::alone(&Algorithm::default()).expect("memory for lz4"),
    });
    let config = DeviceConfig {
        name: "fuzz".to_string(),
        num_queues: 1,
        queue_size_max: RING_SIZE,
        read_only: options & 4 != 0,
        serial: "fuzz".parse().expect("a serial"),
        logical_block_size: 4096,
        flush: options & 8 != 0,
        thread_start: Default::default(),
        poll_max: std::time::Duration::ZERO,
        require_sealed_memory: false,
        rate_limit: Default::default(),
    };
    Shared {
        disk: Disk::new(zram.expect("a small disk"), config).expect("a right config"),
        counters: vec![QueueCounters::default()],
        log_limit: LogLimit::new("test"),
        failures: Burst::default(),
        channel: Default::default(),
    }
}

fn check(shared: &Shared) {
    let counts = RequestCounts::sum(shared.counters.iter());
    assert_eq!(counts.panics, 0);
    assert!(counts.broken_rings <= 1, "a ring breaks once");
    if shared.disk.config.read_only {
        assert_eq!(
            shared.disk.zram.stats().orig_data_size,
            0,
            "a read-only disk was written"
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn saved_inputs_do_no_harm() {
        let corpus = concat!(env!("CARGO_MANIFEST_DIR"), "/fuzz/corpus/ring");
        let mut count = 0;
        for entry in std::fs::read_dir(corpus).unwrap() {
            ring(&std::fs::read(entry.unwrap().path()).unwrap());
            count += 1;
        }
        assert!(count > 0, "no saved inputs");
    }

    /// Rings that are mostly sensible, with fields struck at random: a poor man's fuzzer for every run of the tests.
    #[test]
    fn damaged_rings_do_no_harm() {
        let mut state = 0x9e37_79b9_7f4a_7c15u64;
        let mut random = move |below: u64| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            state % below
        };
        for _ in 0..3000 {
            let mut input = vec![0; 0x4001];
            input[0] = random(16) as u8;
            let mut put = |at: u64, bytes: &[u8]| input[1 + at as usize..][..bytes.len()].copy_from_slice(bytes);
            for index in 0..u64::from(RING_SIZE) {
                let addr = match random(8) {
                    0 => random(u64::MAX),
                    1 => GUEST_BYTES as u64 - random(64),
                    _ => 0x400 + random(0x3000),
                };
                let len = [1, 15, 16, 17, 32, 512, 4096, 4097, 0, u32::MAX][random(10) as usize];
                let flags = [0, 1, 2, 3, 1, 3, 4, 5][random(8) as usize] as u16;
                let next = if random(16) == 0 {
                    random(0x10000) as u16
                } else {
                    (index as u16 + 1) % RING_SIZE
                };
                put(DESCRIPTORS + 16 * index, &addr.to_le_bytes());
                put(DESCRIPTORS + 16 * index + 8, &len.to_le_bytes());
                put(DESCRIPTORS + 16 * index + 12, &flags.to_le_bytes());
                put(DESCRIPTORS + 16 * index + 14, &next.to_le_bytes());
                put(AVAIL + 4 + 2 * index, &(random(17) as u16).to_le_bytes());
            }
            put(AVAIL + 2, &(random(18) as u16).to_le_bytes());
            for at in (0x400..0x3f00).step_by(16) {
                let kind = [0u64, 1, 4, 8, 11, 13, 99, 1 << 31][random(8) as usize];
                put(at, &kind.to_le_bytes());
                put(at + 8, &random(140).to_le_bytes());
            }
            ring(&input);
        }
    }
}
