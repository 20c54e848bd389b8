//! Another size for a disk that is being served.
//!
//! A larger one is a matter of order: first the disk, then what requests are checked against, then the word to the
//! frontend. A smaller one takes more care, since a request that was checked before may still be on its way to what is
//! about to go: requests are checked against the new end first, then those that began before are waited for, and only
//! then the tail is looked at and given up. Where it turns out to hold data after all, the old end counts again.

use std::sync::{Arc, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use zram_core::SECTOR_SIZE;

use crate::channel::Notice;
use crate::device::Device;
use crate::worker::Shared;

/// How long requests that began before may take. They take microseconds, discards of a whole disk seconds; without end
/// they are only where a frontend serves the guest's memory itself, and does not.
const DRAIN_TIME_MAX: Duration = Duration::from_secs(5);

/// What a change of the size did.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Resized {
    /// Bytes before.
    pub bytes_before: u64,
    /// Whether the frontend knows; `None` if the disk had that size already.
    pub notice: Option<Notice>,
}

/// Why a disk keeps its size.
#[derive(Debug, thiserror::Error)]
pub enum ResizeError {
    /// The size is none, or the tail holds data.
    #[error(transparent)]
    Disk(#[from] zram_core::ResizeError),
    /// Requests that may write behind the new end do not come to theirs.
    #[error("a request of the guest goes on that began before: try again later")]
    Busy,
}

/// Changes a device's size without holding on to the device.
#[derive(Clone)]
pub struct Resizer(Arc<Shared>);

impl Device {
    /// What changes its size, from any thread.
    pub fn resizer(&self) -> Resizer {
        Resizer(self.shared.clone())
    }
}

impl Resizer {
    /// Changes the size of the disk, in bytes, a multiple of 4096, and tells the frontend. It is made smaller only if
    /// nothing but zeroes lies behind the new end; requests for what is there fail from the moment at which that is
    /// looked at.
    pub fn resize(&self, bytes: u64) -> Result<Resized, ResizeError> {
        let shared = &*self.0;
        let _one_at_a_time = shared.resizing.lock().unwrap_or_else(PoisonError::into_inner);
        let zram = &shared.disk.zram;
        let bytes_before = zram.size_bytes();
        let notice = if bytes == bytes_before {
            None
        } else {
            if bytes > bytes_before {
                zram.grow(bytes)?;
                set_end(shared, bytes);
            } else {
                shrink(shared, bytes)?;
            }
            Some(shared.channel.tell_config_change())
        };
        Ok(Resized { bytes_before, notice })
    }
}

fn set_end(shared: &Shared, bytes: u64) {
    shared.disk.set_capacity_sectors(bytes / SECTOR_SIZE as u64);
}

fn shrink(shared: &Shared, bytes: u64) -> Result<(), ResizeError> {
    let zram = &shared.disk.zram;
    // As a rule it ends here if it does, and no request has noticed anything.
    zram.check_shrink(bytes)?;
    let bytes_before = zram.size_bytes();
    set_end(shared, bytes);
    let shrunk = if drained(shared, DRAIN_TIME_MAX) {
        zram.shrink(bytes).map_err(ResizeError::from)
    } else {
        Err(ResizeError::Busy)
    };
    if shrunk.is_err() {
        set_end(shared, bytes_before);
    }
    shrunk
}

/// Waits until no batch goes on that began before.
fn drained(shared: &Shared, time: Duration) -> bool {
    let deadline = Instant::now() + time;
    shared.counters.iter().all(|counters| {
        let Some(turn) = counters.turns.seen() else { return true };
        while counters.turns.is_in(turn) {
            if Instant::now() >= deadline {
                return false;
            }
            thread::sleep(Duration::from_micros(100));
        }
        true
    })
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};

    use zram_core::{Algorithm, Codecs, Options, Page, SlotIndex, Zram};

    use super::*;
    use crate::config::Disk;
    use crate::config::tests::config;
    use crate::counters::{Burst, LogLimit, QueueCounters};

    const MIB: u64 = 1 << 20;

    fn shared(queues: usize) -> Shared {
        let zram = Zram::create(&Options {
            name: "test".to_string(),
            size_bytes: 4 * MIB,
            size_bytes_max: Some(16 * MIB),
            mem_limit_bytes: None,
            codecs: Codecs::alone(&Algorithm::default()).unwrap(),
        });
        Shared {
            disk: Disk::new(zram.unwrap(), config()).unwrap(),
            counters: (0..queues).map(|_| QueueCounters::default()).collect(),
            log_limit: LogLimit::new("test"),
            failures: Burst::default(),
            channel: Default::default(),
            resizing: Default::default(),
        }
    }

    #[test]
    fn a_batch_that_began_before_is_waited_for_and_one_that_begins_later_is_not() {
        let shared = shared(2);
        assert!(drained(&shared, Duration::ZERO));
        shared.counters[1].turns.begin();
        assert!(!drained(&shared, Duration::from_millis(5)));
        let turn = shared.counters[1].turns.seen().unwrap();
        shared.counters[1].turns.end();
        shared.counters[1].turns.begin();
        assert!(!shared.counters[1].turns.is_in(turn));
        shared.counters[1].turns.end();
        shared.counters[1].turns.end(); // as after a panic in none
        assert!(drained(&shared, Duration::ZERO));
    }

    #[test]
    fn what_cannot_shrink_serves_all_of_it_as_before() {
        let shared = shared(1);
        let sectors = shared.disk.capacity_sectors();
        shared.counters[0].turns.begin();
        assert!(matches!(shrink(&shared, MIB), Err(ResizeError::Busy)));
        assert_eq!(shared.disk.capacity_sectors(), sectors);
        shared.counters[0].turns.end();
        let mut page = Page::zeroed();
        page[7] = 1;
        let mut worker = shared.disk.zram.worker().unwrap();
        worker.write_page(SlotIndex(1000), &page).unwrap();
        assert!(matches!(shrink(&shared, MIB), Err(ResizeError::Disk(_))));
        assert_eq!(shared.disk.capacity_sectors(), sectors);
        worker.discard(1000..1001);
        shrink(&shared, MIB).unwrap();
        assert_eq!(shared.disk.capacity_sectors(), MIB / 512);
    }

    /// A worker that takes the end, writes what lies before it, and is done, against one who shrinks: what was written
    /// within the end as it was taken is never lost.
    #[test]
    fn no_write_is_lost_to_a_shrink() {
        let shared = Arc::new(shared(1));
        let stop = AtomicBool::new(false);
        let mut page = Page::zeroed();
        page[7] = 1;
        std::thread::scope(|scope| {
            let stop = &stop;
            let other = shared.clone();
            let page = &page;
            scope.spawn(move || {
                let mut worker = other.disk.zram.worker().unwrap();
                let mut found = Page::zeroed();
                let last = SlotIndex(1023);
                while !stop.load(Ordering::Relaxed) {
                    let turns = &other.counters[0].turns;
                    turns.begin();
                    let written = other.disk.capacity_sectors() == 4 * MIB / 512;
                    if written {
                        worker.write_page(last, page).unwrap();
                    }
                    turns.end();
                    // Whoever may still see the page sees it whole, until it is taken away here.
                    turns.begin();
                    if written {
                        assert_eq!(other.disk.zram.size_bytes(), 4 * MIB, "it shrank over data");
                        worker.read_page(last, &mut found).unwrap();
                        assert_eq!(found[7], 1, "a write is lost");
                        worker.discard(1023..1024);
                    }
                    turns.end();
                    worker.end_batch();
                }
            });
            let mut shrunk = 0;
            while shrunk < 300 {
                if shrink(&shared, MIB).is_ok() {
                    shrunk += 1;
                    shared.disk.zram.grow(4 * MIB).unwrap();
                    set_end(&shared, 4 * MIB);
                }
            }
            stop.store(true, Ordering::Relaxed);
        });
    }
}
