//! Whether a worker looks at its ring for a while before it sleeps, and for how long.
//!
//! Looking saves the driver the kick and the worker the waking, which is most of a lone request's time. It costs CPU, so
//! it goes on only while it gains:
//!
//! 1. The window grows when work came soon after it, up to the owner's limit, and shrinks to nothing when work comes
//!    later than the limit: then no looking would have been enough.
//! 2. Looks in vain, one after the other, end the looking even though work comes soon: whoever makes the work may be
//!    waiting for this very core. It is tried again after some sleeps, each time after twice as many.
//!
//! So an idle queue costs one window and then nothing, and a slow trickle of requests costs nothing at all.

use std::time::{Duration, Instant};

/// The least window worth a clock reading.
const WINDOW_MIN: Duration = Duration::from_micros(4);

/// Looks in vain before a rest.
const MISSES_MAX: u32 = 8;

/// Sleeps before the first new try, and at most.
const REST_MIN: u32 = 16;
const REST_MAX: u32 = 4096;

/// Looks at the ring between two looks at the clock: some 0.5 us.
const LOOKS_PER_TIME: u32 = 16;

pub(crate) struct Polling {
    /// 0: never looks.
    window_max: Duration,
    window: Duration,
    /// When the ring was found empty.
    empty_since: Instant,
    /// Looks in vain since the last that found work.
    misses: u32,
    /// Sleeps until looking is tried again.
    rest: u32,
    next_rest: u32,
}

impl Polling {
    pub fn new(window_max: Duration) -> Polling {
        Polling {
            window_max,
            window: Duration::ZERO,
            empty_since: Instant::now(),
            misses: 0,
            rest: 0,
            next_rest: REST_MIN,
        }
    }

    /// To be called when the ring is empty: looks until `has_work`, for the present window, or until `must_end`.
    pub fn look(&mut self, has_work: impl Fn() -> bool, must_end: impl Fn() -> bool) -> bool {
        if self.window_max.is_zero() {
            return false;
        }
        self.empty_since = Instant::now();
        if self.window.is_zero() {
            return false;
        }
        loop {
            for _ in 0..LOOKS_PER_TIME {
                if has_work() {
                    self.gained();
                    return true;
                }
                std::hint::spin_loop();
            }
            if must_end() || self.empty_since.elapsed() >= self.window {
                self.misses += 1;
                return false;
            }
        }
    }

    fn gained(&mut self) {
        self.misses = 0;
        self.next_rest = REST_MIN;
    }

    /// To be called when a sleep has ended with work.
    pub fn woken(&mut self) {
        if self.window_max.is_zero() {
            return;
        }
        if self.misses >= MISSES_MAX {
            self.misses = 0;
            self.window = Duration::ZERO;
            self.rest = self.next_rest;
            self.next_rest = (self.next_rest * 2).min(REST_MAX);
        } else if self.rest > 0 {
            self.rest -= 1;
        } else {
            self.adapt(self.empty_since.elapsed());
        }
    }

    /// After `idle` time without work.
    fn adapt(&mut self, idle: Duration) {
        if idle <= self.window_max {
            self.window = (self.window * 2)
                .clamp(WINDOW_MIN.min(self.window_max), self.window_max)
                .max(idle);
        } else {
            self.window /= 2;
            self.misses = 0;
            if self.window < WINDOW_MIN {
                self.window = Duration::ZERO;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MAX: Duration = Duration::from_micros(100);

    fn us(us: u64) -> Duration {
        Duration::from_micros(us)
    }

    /// A sleep that ended with work, `idle` after the ring was found empty.
    fn sleep(polling: &mut Polling, idle: Duration) {
        polling.empty_since = Instant::now().checked_sub(idle).unwrap();
        polling.woken();
    }

    fn in_vain(polling: &mut Polling) {
        assert!(!polling.look(|| false, || false));
    }

    #[test]
    fn the_window_follows_the_work() {
        let mut polling = Polling::new(MAX);
        in_vain(&mut polling);
        sleep(&mut polling, us(30));
        assert!((us(30)..us(60)).contains(&polling.window), "{:?}", polling.window);
        for _ in 0..4 {
            sleep(&mut polling, us(30));
        }
        assert_eq!(polling.window, MAX);
        assert!(polling.look(|| true, || false));
        for _ in 0..5 {
            sleep(&mut polling, us(5000));
        }
        assert_eq!(polling.window, Duration::ZERO, "work that comes late is not waited for");
        sleep(&mut polling, us(30));
        assert!(!polling.window.is_zero());
    }

    #[test]
    fn looking_in_vain_ends_and_is_tried_again_ever_more_seldom() {
        let mut polling = Polling::new(MAX);
        let mut looks = Vec::new();
        let mut in_a_row = 0;
        for turn in 0..2000 {
            if polling.window.is_zero() {
                in_a_row = 0;
            } else {
                in_a_row += 1;
                if in_a_row == 1 {
                    looks.push(turn);
                }
            }
            assert!(in_a_row <= MISSES_MAX);
            // Nothing while it is looked, and something at once when the worker sleeps.
            assert!(!polling.look(|| false, || true));
            sleep(&mut polling, us(20));
        }
        let pauses: Vec<_> = looks.windows(2).map(|pair| pair[1] - pair[0]).collect();
        assert!(pauses.len() >= 3, "{pauses:?}");
        assert!(pauses.windows(2).all(|pair| pair[1] > pair[0]), "{pauses:?}");
    }

    #[test]
    fn without_a_window_nothing_is_looked_at() {
        let mut polling = Polling::new(Duration::ZERO);
        sleep(&mut polling, us(1));
        assert!(!polling.look(|| panic!("looked"), || false));
    }

    #[test]
    fn a_look_ends_when_it_must() {
        let mut polling = Polling::new(us(10_000_000));
        polling.window = us(10_000_000);
        let started = Instant::now();
        assert!(!polling.look(|| false, || true));
        assert!(started.elapsed() < Duration::from_secs(5));
    }
}
