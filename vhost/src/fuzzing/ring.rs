//! Guest memory as a hostile guest would leave it: the ring areas at fixed places, descriptors and buffers wherever the
//! input says. Whatever it is, the queue must come to rest without a panic, what it then says of itself must add up, and
//! no byte may have changed but those of the used ring and those that some descriptor called writable.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};

use super::{config, shared};
use crate::counters::RequestCounts;
use crate::guest::Guest;
use crate::ring::{Areas, Ring};
use crate::worker::{Kick, Parts, QueueWorker, Shared, Signals};

/// Guest memory of one input: small, so that addresses drawn at random often lie in it.
const GUEST_BYTES: usize = 0x1_0000;
const RING_SIZE: u16 = 16;
const DESCRIPTORS: u64 = 0;
const AVAIL: u64 = 0x100;
const USED: u64 = 0x200;

/// Serves one ring over guest memory that begins with `input`. The first byte chooses options.
pub fn ring(input: &[u8]) {
    let Some((options, memory)) = input.split_first() else {
        return;
    };
    let mem: GuestMemoryMmap =
        GuestMemoryMmap::from_ranges(&[(GuestAddress(0), GUEST_BYTES)]).expect("anonymous memory");
    let memory = memory.get(..GUEST_BYTES).unwrap_or(memory);
    mem.write_slice(memory, GuestAddress(0)).expect("it fits");
    let mut before = vec![0; GUEST_BYTES];
    mem.read_slice(&mut before, GuestAddress(0)).expect("it fits");
    let mut config = config(1, RING_SIZE);
    (config.read_only, config.flush) = (options & 4 != 0, options & 8 != 0);
    let shared = shared(config);
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
    check_memory(&before, &mem);
}

/// Any 16 bytes may serve as a descriptor of some table, and data that was read may make new ones. So what is looked at
/// is memory in which nothing says "writable" as a descriptor would: then nothing but the used ring may change.
fn check_memory(before: &[u8], mem: &GuestMemoryMmap) {
    const FLAGS_AT: usize = 12;
    const WRITE: u8 = 2;
    let is_writable_anywhere = before
        .windows(16)
        .any(|descriptor| descriptor[FLAGS_AT] & WRITE != 0 && descriptor[8..12] != [0; 4]);
    if is_writable_anywhere {
        return;
    }
    let mut after = vec![0; GUEST_BYTES];
    mem.read_slice(&mut after, GuestAddress(0)).expect("it fits");
    let used = USED as usize..USED as usize + 6 + 8 * usize::from(RING_SIZE);
    after[used.clone()].copy_from_slice(&before[used]);
    assert!(after == before, "memory changed that nobody called writable");
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
