//! How many requests and bytes a second a disk may move: two token buckets for all its queues together.
//!
//! A bucket is one number: the time at which all that was taken from it will have been refilled. A request may pass while
//! that time is no further away than the burst, and then moves it on by what it costs; so the largest request passes too,
//! in debt, and the long-term rate is exact. Queues that pass at the same moment may overdraw by one request each, which
//! they pay for later.
//!
//! Reads and writes count. Discards and zeroes move no data, and holding them up would only keep memory.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// The limits of a disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RateLimit {
    /// Reads and writes a second; `None` is no limit. Not 0.
    pub iops: Option<u64>,
    /// Bytes read and written a second; `None` is no limit. Not 0.
    pub bytes_per_second: Option<u64>,
    /// How long a disk may save up what it does not use: at most [`BURST_MAX`].
    pub burst: Duration,
}

/// The longest burst.
pub const BURST_MAX: Duration = Duration::from_secs(60);

/// The burst when none is asked for: a guest's habit of coming in bunches, and no more.
pub const BURST_DEFAULT: Duration = Duration::from_millis(100);

impl Default for RateLimit {
    fn default() -> RateLimit {
        RateLimit {
            iops: None,
            bytes_per_second: None,
            burst: BURST_DEFAULT,
        }
    }
}

impl RateLimit {
    /// Whether it can be kept.
    pub(crate) fn is_valid(&self) -> bool {
        self.iops != Some(0) && self.bytes_per_second != Some(0) && self.burst <= BURST_MAX
    }
}

/// Everything is in nanoseconds since `start`, and relaxed: the numbers order nothing else.
pub(crate) struct Limiter {
    start: Instant,
    burst: AtomicU64,
    requests: Bucket,
    bytes: Bucket,
}

#[derive(Default)]
struct Bucket {
    /// 0 is no limit.
    per_second: AtomicU64,
    refilled_at: AtomicU64,
}

impl Bucket {
    fn is_off(&self) -> bool {
        self.per_second.load(Ordering::Relaxed) == 0
    }

    fn limit(&self) -> Option<u64> {
        Some(self.per_second.load(Ordering::Relaxed)).filter(|&rate| rate != 0)
    }

    fn wait(&self, now: u64, burst: u64) -> u64 {
        if self.is_off() {
            return 0;
        }
        self.refilled_at
            .load(Ordering::Relaxed)
            .saturating_sub(now.saturating_add(burst))
    }

    fn take(&self, now: u64, count: u64) {
        let rate = self.per_second.load(Ordering::Relaxed);
        if rate == 0 {
            return;
        }
        let cost = u64::try_from(u128::from(count) * 1_000_000_000 / u128::from(rate)).unwrap_or(u64::MAX);
        let take = |refilled_at: u64| Some(refilled_at.max(now).saturating_add(cost));
        let _ = self
            .refilled_at
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, take);
    }

    fn set(&self, per_second: Option<u64>) {
        // What was owed under the old limit may be more than the new one would ever ask for.
        self.refilled_at.store(0, Ordering::Relaxed);
        self.per_second.store(per_second.unwrap_or(0), Ordering::Relaxed);
    }
}

impl Limiter {
    pub fn new(limit: &RateLimit) -> Limiter {
        let limiter = Limiter {
            start: Instant::now(),
            burst: AtomicU64::new(0),
            requests: Bucket::default(),
            bytes: Bucket::default(),
        };
        limiter.set(limit);
        limiter
    }

    pub fn set(&self, limit: &RateLimit) {
        let burst = u64::try_from(limit.burst.as_nanos()).unwrap_or(u64::MAX);
        self.burst.store(burst, Ordering::Relaxed);
        self.requests.set(limit.iops);
        self.bytes.set(limit.bytes_per_second);
    }

    /// What was set last.
    pub fn limit(&self) -> RateLimit {
        RateLimit {
            iops: self.requests.limit(),
            bytes_per_second: self.bytes.limit(),
            burst: Duration::from_nanos(self.burst.load(Ordering::Relaxed)),
        }
    }

    /// Lets one request of `bytes` bytes pass, or says how long it has to wait before it asks again.
    #[inline]
    pub fn pass(&self, bytes: u64) -> Result<(), Duration> {
        if self.requests.is_off() && self.bytes.is_off() {
            return Ok(());
        }
        self.pass_at(Instant::now(), bytes)
    }

    fn pass_at(&self, now: Instant, bytes: u64) -> Result<(), Duration> {
        let now = u64::try_from(now.saturating_duration_since(self.start).as_nanos()).unwrap_or(u64::MAX);
        let burst = self.burst.load(Ordering::Relaxed);
        let wait = self.requests.wait(now, burst).max(self.bytes.wait(now, burst));
        if wait > 0 {
            return Err(Duration::from_nanos(wait));
        }
        self.requests.take(now, 1);
        self.bytes.take(now, bytes);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ms(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    /// Requests of `bytes` that pass within `time`, by someone who asks each time he may.
    fn passed(limiter: &Limiter, bytes: u64, time: Duration) -> u64 {
        let (mut now, mut count) = (limiter.start, 0);
        while now <= limiter.start + time {
            match limiter.pass_at(now, bytes) {
                Ok(()) => count += 1,
                Err(wait) => now += wait,
            }
        }
        count
    }

    #[test]
    fn the_rate_is_what_was_asked_for_after_the_burst() {
        let limit = RateLimit {
            iops: Some(1000),
            ..RateLimit::default()
        };
        // One second's, what was saved up before, and the one that goes into debt.
        assert_eq!(passed(&Limiter::new(&limit), 4096, ms(1000)), 1000 + 100 + 1);
        let limit = RateLimit {
            iops: None,
            bytes_per_second: Some(1 << 20),
            burst: ms(500),
        };
        assert_eq!(passed(&Limiter::new(&limit), 65536, ms(1000)), 16 + 8 + 1);
        let large = passed(&Limiter::new(&limit), 4 << 20, ms(20_000));
        assert!(
            (5..=6).contains(&large),
            "a request larger than the bucket passes too: {large}"
        );
        let both = RateLimit {
            iops: Some(10),
            ..limit
        };
        assert!(
            passed(&Limiter::new(&both), 4096, ms(1000)) <= 16,
            "the narrower one counts"
        );
    }

    #[test]
    fn what_is_not_used_is_saved_up_to_the_burst_only() {
        let limiter = Limiter::new(&RateLimit {
            iops: Some(100),
            bytes_per_second: None,
            burst: ms(50),
        });
        let later = limiter.start + ms(10_000);
        assert_eq!((0..100).filter(|_| limiter.pass_at(later, 0).is_ok()).count(), 6);
        assert_eq!(limiter.pass_at(later, 0), Err(ms(10)));
    }

    #[test]
    fn a_change_takes_effect_at_once() {
        let slow = RateLimit {
            iops: Some(1),
            ..RateLimit::default()
        };
        let limiter = Limiter::new(&slow);
        assert!(limiter.pass(0).is_ok());
        assert!(limiter.pass(0).is_err());
        limiter.set(&RateLimit::default());
        assert!((0..1000).all(|_| limiter.pass(1 << 30).is_ok()));
        limiter.set(&slow);
        assert!(limiter.pass(0).is_ok(), "nothing is owed for what was free");
    }
}
