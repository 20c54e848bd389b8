//! What is done beside requests: freeing what workers left, giving empty segments back to the host, cleaning.
//!
//! And the pages' ages are moved on.
//!
//! One thread a store does it, in slices, and sleeps most of the time: after each slice of cleaning three times as long,
//! a tenth of a second when there is nothing to do now, and without an end when nothing is used either. A worker whose
//! batch freed something wakes it from that last sleep and from no other, so a busy data path makes no call for it.

use std::io;
use std::sync::atomic::{AtomicBool, Ordering, fence};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};
use std::thread::{JoinHandle, Thread};
use std::time::{Duration, Instant};

use crate::clean::{Cleaner, Goal, Progress, SLICE};
use crate::stats;
use crate::zram::Zram;

/// Between two rounds of looking for something to do.
const PERIOD: Duration = Duration::from_millis(100);
/// Between two slices of cleaning: so it takes a quarter of a core at most.
const PAUSE: Duration = Duration::from_micros(1500);
/// Rounds without any change after which the thread sleeps until it is woken.
const QUIET_ROUNDS: u32 = 20;

/// When to come again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Upkeep {
    /// After a pause: there is more to do.
    Soon,
    /// After a while: there is nothing to do now.
    Later,
}

/// The sleep of the thread that a change ends.
#[derive(Debug, Default)]
pub(crate) struct Sleeper {
    is_asleep: AtomicBool,
    thread: Mutex<Option<Thread>>,
}

impl Sleeper {
    /// After a change. A load as a rule.
    pub(crate) fn wake(&self) {
        // Pairs with the one in `sleep`: the sleeper sees the change, or we see that it sleeps.
        fence(Ordering::SeqCst);
        if self.is_asleep.load(Ordering::Relaxed) && self.is_asleep.swap(false, Ordering::Relaxed) {
            let thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner);
            thread.iter().for_each(Thread::unpark);
        }
    }

    /// Sleeps unless `is_over` already; woken, perhaps for nothing.
    fn sleep(&self, is_over: impl Fn() -> bool) {
        self.is_asleep.store(true, Ordering::Relaxed);
        fence(Ordering::SeqCst); // as above
        if !is_over() {
            std::thread::park();
        }
        self.is_asleep.store(false, Ordering::Relaxed);
    }
}

/// The thread that keeps a store up. Dropping it ends the thread, within milliseconds.
#[derive(Debug)]
pub struct UpkeepThread {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Drop for UpkeepThread {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            thread.thread().unpark();
            let _ = thread.join(); // its panic was printed, and the store works without it
        }
    }
}

impl Zram {
    /// Starts the thread that keeps this store up: one is enough. Without it empty segments keep their memory.
    pub fn spawn_upkeep(self: &Arc<Self>, name: &str) -> io::Result<UpkeepThread> {
        self.spawn_upkeep_after(name, || {})
    }

    /// The same with a thread that first calls `first`.
    pub fn spawn_upkeep_after(
        self: &Arc<Self>,
        name: &str,
        first: impl FnOnce() + Send + 'static,
    ) -> io::Result<UpkeepThread> {
        let stop = Arc::new(AtomicBool::new(false));
        let (zram, stopped) = (Arc::clone(self), Arc::clone(&stop));
        let thread = std::thread::Builder::new().name(name.into()).spawn(move || {
            first();
            zram.keep_up(&stopped)
        })?;
        *self.sleeper.thread.lock().unwrap_or_else(PoisonError::into_inner) = Some(thread.thread().clone());
        Ok(UpkeepThread {
            stop,
            thread: Some(thread),
        })
    }

    /// A slice of what the thread does, about a millisecond: for who has none, and for tests.
    pub fn upkeep(&self) -> Upkeep {
        let mut cleaner = match self.cleaner.try_lock() {
            Ok(cleaner) => cleaner,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => return Upkeep::Later,
        };
        if let Some(orphans) = self.take_orphans() {
            cleaner.retired.append(orphans);
        }
        self.reclaim_for(&mut cleaner);
        self.arena.take_queues_in();
        let since = Instant::now();
        while self.arena.give_back() != 0 {
            if since.elapsed() >= SLICE {
                return Upkeep::Soon;
            }
        }
        match self.clean(&mut cleaner, Goal::BACKGROUND) {
            Progress::Working | Progress::Waiting => Upkeep::Soon,
            Progress::Done => Upkeep::Later,
        }
    }

    fn keep_up(&self, stop: &AtomicBool) {
        let (mut changes, mut quiet_rounds) = (0, 0);
        while !stop.load(Ordering::Relaxed) {
            let round = self.upkeep();
            if self.is_tick_due() {
                self.tick();
            }
            match round {
                Upkeep::Soon => std::thread::park_timeout(PAUSE),
                Upkeep::Later if quiet_rounds < QUIET_ROUNDS || self.has_orphans() || self.arena.has_upkeep() => {
                    std::thread::park_timeout(PERIOD);
                }
                Upkeep::Later => {
                    // From here on every page's age is known without a walk, until one is used.
                    self.tick();
                    let has_work = || self.has_orphans() || self.arena.has_upkeep() || self.was_used();
                    let is_over = || self.changes() != changes || has_work() || stop.load(Ordering::Relaxed);
                    self.sleeper.sleep(is_over);
                }
            }
            let now = self.changes();
            quiet_rounds = if now == changes && !self.was_used() {
                quiet_rounds + 1
            } else {
                0
            };
            changes = now;
        }
    }

    /// At the limit, while a writer waits for room: a slice of moving things together. Whether another slice may bring
    /// something: not when nothing is worth moving, nor when somebody else is at it.
    pub(crate) fn clean_for_room(&self) -> bool {
        let Ok(mut cleaner) = self.cleaner.try_lock() else {
            return false;
        };
        let progress = self.clean(&mut cleaner, Goal::COMPACT);
        self.reclaim_for(&mut cleaner);
        progress == Progress::Working
    }

    pub(crate) fn lock_cleaner(&self) -> MutexGuard<'_, Cleaner> {
        self.cleaner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Changes of slots so far.
    pub(crate) fn changes(&self) -> u64 {
        stats::count(&self.cells, |cells| &cells.changes)
    }
}
