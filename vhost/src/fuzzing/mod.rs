//! Bodies of the fuzz targets, as plain functions, so that saved inputs run as ordinary tests too.
//!
//! `ring`: guest memory as a hostile guest would leave it. `request`: requests that are nearly right, against a second
//! statement of the rules. `session`: what a frontend sends, right and wrong.

mod request;
mod ring;
mod session;

use std::sync::Arc;
use std::time::Duration;

use arbitrary::Unstructured;
use zram_core::{Algorithm, Codecs, Options, Zram};

pub use self::request::request;
pub use self::ring::ring;
pub use self::session::session;
use crate::config::{DeviceConfig, Disk};
use crate::counters::{Burst, LogLimit, QueueCounters};
use crate::worker::Shared;

const DISK_BYTES: u64 = 64 << 10;
const SERIAL: &str = "fuzz";

fn zram() -> Arc<Zram> {
    Zram::create(&Options {
        name: "fuzz".to_string(),
        size_bytes: DISK_BYTES,
        size_bytes_max: None,
        mem_limit_bytes: None,
        codecs: Codecs::alone(&Algorithm::default()).expect("memory for lz4"),
    })
    .expect("a small disk")
}

fn config(num_queues: u16, queue_size_max: u16) -> DeviceConfig {
    DeviceConfig {
        name: "fuzz".to_string(),
        num_queues,
        queue_size_max,
        read_only: false,
        serial: SERIAL.parse().expect("a serial"),
        logical_block_size: 4096,
        flush: false,
        thread_start: Default::default(),
        poll_max: Duration::ZERO,
        require_sealed_memory: false,
        rate_limit: Default::default(),
    }
}

/// What the one queue of a disk shares with nobody.
fn shared(config: DeviceConfig) -> Arc<Shared> {
    Arc::new(Shared {
        disk: Disk::new(zram(), config).expect("a right config"),
        counters: vec![QueueCounters::default()],
        log_limit: LogLimit::new("test"),
        failures: Burst::default(),
        channel: Default::default(),
        resizing: Default::default(),
    })
}

/// An input as a row of choices; all zeroes behind its end.
struct Choices<'a>(Unstructured<'a>);

impl<'a> Choices<'a> {
    fn new(input: &'a [u8]) -> Choices<'a> {
        Choices(Unstructured::new(input))
    }

    fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    fn any<T: arbitrary::Arbitrary<'a> + Default>(&mut self) -> T {
        self.0.arbitrary().unwrap_or_default()
    }

    fn below(&mut self, end: u64) -> u64 {
        self.0.int_in_range(0..=end - 1).unwrap_or(0)
    }

    fn pick<T: Copy>(&mut self, of: &[T]) -> T {
        self.0.choose(of).copied().unwrap_or(of[0])
    }

    fn one_in(&mut self, count: u64) -> bool {
        self.below(count) == count - 1
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn saved_inputs_of(target: &str, body: fn(&[u8])) {
        let corpus = format!("{}/fuzz/corpus/{target}", env!("CARGO_MANIFEST_DIR"));
        let mut count = 0;
        for entry in std::fs::read_dir(corpus).unwrap() {
            body(&std::fs::read(entry.unwrap().path()).unwrap());
            count += 1;
        }
        assert!(count > 0, "no saved inputs");
    }

    #[test]
    fn saved_rings_do_no_harm() {
        saved_inputs_of("ring", ring);
    }

    #[test]
    fn saved_requests_do_what_they_should() {
        saved_inputs_of("request", request);
    }

    #[test]
    fn saved_sessions_do_no_harm() {
        saved_inputs_of("session", session);
    }

    /// A poor man's fuzzer for every run of the tests.
    fn drawn(rounds: usize, bytes: usize, body: fn(&[u8])) {
        let mut state = 0x9e37_79b9_7f4a_7c15u64;
        for _ in 0..rounds {
            let input: Vec<u8> = (0..bytes)
                .map(|_| {
                    state ^= state << 13;
                    state ^= state >> 7;
                    state ^= state << 17;
                    state as u8
                })
                .collect();
            body(&input);
        }
    }

    #[test]
    fn requests_drawn_at_random_do_what_they_should() {
        drawn(1000, 400, request);
    }

    #[test]
    fn sessions_drawn_at_random_do_no_harm() {
        drawn(100, 300, session);
    }
}
