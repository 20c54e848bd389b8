//! What the device counts, and how often it may log.
//!
//! Each queue has counters of its own, on cache lines of its own, that only its worker writes: workers of one queue follow
//! each other through a join, so there is never a second writer. Whoever reads adds up.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// A count with one writer at a time.
#[derive(Default)]
pub(crate) struct Counter(AtomicU64);

impl Counter {
    /// Adds one. A plain load and store, since there is one writer; no order is needed, a reader only wants the number.
    pub fn count(&self) {
        self.add(1);
    }

    pub fn add(&self, more: u64) {
        self.0
            .store(self.0.load(Ordering::Relaxed).wrapping_add(more), Ordering::Relaxed);
    }

    pub fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// Where a worker stands: odd while it serves a batch. So whoever has changed what batches go by can wait until no batch
/// is left that began before.
#[derive(Default)]
pub(crate) struct Turns(AtomicU64);

impl Turns {
    /// A batch begins. SeqCst, before what it goes by is read, as [`Turns::seen`] is after that was changed: one of both
    /// sides sees the other.
    pub fn begin(&self) {
        self.0.store(self.0.load(Ordering::Relaxed) | 1, Ordering::SeqCst);
    }

    /// It ends, or the worker that was in it does. Release: what the batch did is over for who sees it.
    pub fn end(&self) {
        let turn = self.0.load(Ordering::Relaxed);
        self.0.store(turn + (turn & 1), Ordering::Release);
    }

    /// The batch that goes on now, if any.
    pub fn seen(&self) -> Option<u64> {
        let turn = self.0.load(Ordering::SeqCst);
        (turn & 1 == 1).then_some(turn)
    }

    /// Whether that batch still goes on.
    pub fn is_in(&self, turn: u64) -> bool {
        self.0.load(Ordering::Acquire) == turn
    }
}

/// The counts of one virtqueue. Aligned to two cache lines, which x86 fetches as a pair.
#[derive(Default)]
#[repr(align(128))]
pub(crate) struct QueueCounters {
    pub reads: Counter,
    pub writes: Counter,
    pub flushes: Counter,
    pub get_ids: Counter,
    pub discards: Counter,
    pub write_zeroes: Counter,
    pub unsupported: Counter,
    pub io_errors: Counter,
    pub sectors_read: Counter,
    pub sectors_written: Counter,
    pub bad_chains: Counter,
    pub broken_rings: Counter,
    pub panics: Counter,
    pub calls: Counter,
    pub calls_lost: Counter,
    pub turns: Turns,
}

/// Requests and mishaps of all queues since the device started.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct RequestCounts {
    /// IN requests answered, whatever their status.
    pub reads: u64,
    /// OUT requests answered, whatever their status.
    pub writes: u64,
    /// FLUSH requests.
    pub flushes: u64,
    /// GET_ID requests.
    pub get_ids: u64,
    /// DISCARD requests.
    pub discards: u64,
    /// WRITE_ZEROES requests.
    pub write_zeroes: u64,
    /// Requests answered UNSUPP.
    pub unsupported: u64,
    /// Requests answered IOERR.
    pub io_errors: u64,
    /// Sectors of 512 bytes that IN requests asked for and got.
    pub sectors_read: u64,
    /// Sectors of 512 bytes that OUT requests stored.
    pub sectors_written: u64,
    /// Chains that could not be answered: returned with used length 0.
    pub bad_chains: u64,
    /// Rings stopped because of what the guest wrote into them, or because of a panic.
    pub broken_rings: u64,
    /// Panics caught in workers: each is a defect of ours.
    pub panics: u64,
    /// Call notifications sent.
    pub calls: u64,
    /// Call notifications that the frontend's descriptor did not take.
    pub calls_lost: u64,
}

impl RequestCounts {
    pub(crate) fn sum<'a>(queues: impl Iterator<Item = &'a QueueCounters>) -> RequestCounts {
        let mut sum = RequestCounts::default();
        for queue in queues {
            sum.reads += queue.reads.get();
            sum.writes += queue.writes.get();
            sum.flushes += queue.flushes.get();
            sum.get_ids += queue.get_ids.get();
            sum.discards += queue.discards.get();
            sum.write_zeroes += queue.write_zeroes.get();
            sum.unsupported += queue.unsupported.get();
            sum.io_errors += queue.io_errors.get();
            sum.sectors_read += queue.sectors_read.get();
            sum.sectors_written += queue.sectors_written.get();
            sum.bad_chains += queue.bad_chains.get();
            sum.broken_rings += queue.broken_rings.get();
            sum.panics += queue.panics.get();
            sum.calls += queue.calls.get();
            sum.calls_lost += queue.calls_lost.get();
        }
        sum
    }
}

/// The process at the other end of the socket, as the kernel names it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Frontend {
    /// Process id at the time it connected.
    pub pid: i32,
    /// The process's command name, empty if it could not be read.
    pub command: String,
}

/// A device as it is now.
#[derive(Debug, Clone, Default)]
pub struct DeviceStatus {
    /// Virtqueues with a running worker.
    pub queues_running: usize,
    /// Who is connected.
    pub frontend: Option<Frontend>,
    /// Connections served since start, the present one included.
    pub connections_total: u64,
    /// Connections closed at once because another was alive.
    pub refused_connections: u64,
    /// Connections closed because of what the frontend sent or failed to send.
    pub failed_connections: u64,
    /// What the queues did.
    pub requests: RequestCounts,
}

/// Lets a few lines through in each period: a guest or frontend must not fill the host's disk.
pub(crate) struct LogLimit {
    disk: String,
    period: Mutex<Period>,
}

struct Period {
    since: Instant,
    /// Lines asked for since then.
    lines: u32,
}

impl LogLimit {
    const LINES_MAX: u32 = 20;
    const PERIOD: Duration = Duration::from_secs(60);

    pub fn new(disk: &str) -> LogLimit {
        LogLimit {
            disk: disk.to_string(),
            period: Mutex::new(Period {
                since: Instant::now(),
                lines: 0,
            }),
        }
    }

    /// Whether one more line may be logged now. The first line of a period tells how many the last one left out. Cold paths
    /// only: it takes a lock.
    pub fn allows(&self) -> bool {
        let mut period = self.period.lock().unwrap_or_else(PoisonError::into_inner);
        if period.since.elapsed() >= Self::PERIOD {
            let left_out = period.lines.saturating_sub(Self::LINES_MAX);
            *period = Period {
                since: Instant::now(),
                lines: 0,
            };
            if left_out > 0 {
                tracing::warn!(
                    disk = self.disk,
                    "{left_out} lines about frontends and queues were left out"
                );
            }
        }
        period.lines = period.lines.saturating_add(1);
        period.lines <= Self::LINES_MAX
    }
}

/// Tells the first of many failures that follow each other: one line for all of them.
#[derive(Debug, Default)]
pub(crate) struct Burst(Mutex<Option<Instant>>);

impl Burst {
    /// A burst is over after so long without a failure.
    const QUIET: Duration = Duration::from_secs(10);

    /// Whether a failure begins a new burst. Cold paths only: it takes a lock.
    pub fn begins(&self) -> bool {
        let mut last = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let now = Instant::now();
        let begins = last.is_none_or(|last| now - last >= Self::QUIET);
        *last = Some(now);
        begins
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    /// Keeps the last line.
    #[derive(Clone, Default)]
    struct LeftOut(Arc<Mutex<String>>);

    impl tracing::field::Visit for LeftOut {
        fn record_debug(&mut self, field: &tracing::field::Field, value: &dyn std::fmt::Debug) {
            if field.name() == "message" {
                *self.0.lock().unwrap() = format!("{value:?}");
            }
        }
    }

    impl tracing::Subscriber for LeftOut {
        fn enabled(&self, _: &tracing::Metadata<'_>) -> bool {
            true
        }
        fn new_span(&self, _: &tracing::span::Attributes<'_>) -> tracing::span::Id {
            tracing::span::Id::from_u64(1)
        }
        fn record(&self, _: &tracing::span::Id, _: &tracing::span::Record<'_>) {}
        fn record_follows_from(&self, _: &tracing::span::Id, _: &tracing::span::Id) {}
        fn event(&self, event: &tracing::Event<'_>) {
            event.record(&mut self.clone());
        }
        fn enter(&self, _: &tracing::span::Id) {}
        fn exit(&self, _: &tracing::span::Id) {}
    }

    #[test]
    fn failures_that_follow_each_other_are_one_burst() {
        let burst = Burst::default();
        assert!(burst.begins());
        assert!((0..1000).all(|_| !burst.begins()));
        *burst.0.lock().unwrap() = Instant::now().checked_sub(Burst::QUIET);
        assert!(burst.begins());
        assert!(!burst.begins());
    }

    #[test]
    fn a_flood_of_lines_is_cut() {
        let limit = LogLimit::new("disk");
        let allowed = (0..1000).filter(|_| limit.allows()).count();
        assert_eq!(allowed, LogLimit::LINES_MAX as usize);
        limit.period.lock().unwrap().since = Instant::now().checked_sub(LogLimit::PERIOD).unwrap();
        let told = LeftOut::default();
        tracing::subscriber::with_default(told.clone(), || assert!(limit.allows()));
        assert_eq!(
            *told.0.lock().unwrap(),
            "980 lines about frontends and queues were left out"
        );
    }

    #[test]
    fn sums_run_over_all_queues() {
        let queues: [QueueCounters; 3] = Default::default();
        queues[0].reads.count();
        queues[2].reads.add(4);
        queues[1].bad_chains.count();
        let sum = RequestCounts::sum(queues.iter());
        assert_eq!(
            sum,
            RequestCounts {
                reads: 5,
                bad_chains: 1,
                ..Default::default()
            }
        );
    }
}
