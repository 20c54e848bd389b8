//! A pool of contexts that many workers share: each tries its own place first, then any other, and waits when all are in
//! use.
//!
//! 1. A place is locked for one use and nothing else: its holder waits for nothing, in no order with anything.
//! 2. Who waits takes whichever place comes back first, so one holder that is preempted holds up nobody as long as
//!    another returns. It says that it waits before it looks once more; who returns a place unlocks it before it looks
//!    whether somebody waits. The two fences pair: one of them sees the other.
//! 3. A place is never removed, so nothing is freed while it is lent.

use crate::sync::{AtomicU64, CachePadded, Condvar, Mutex, MutexGuard, Ordering, PoisonError, TryLockError, fence};

/// How often a context was taken from where.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ContextUses {
    /// The worker's own place was idle.
    pub own: u64,
    /// It was not, but another was.
    pub borrowed: u64,
    /// All were in use, so the worker waited. Should stay 0.
    pub waited: u64,
}

pub(super) struct Pool<T> {
    places: Box<[CachePadded<Place<T>>]>,
    /// Workers that wait.
    waiting: AtomicU64,
    waited: AtomicU64,
    /// Held by who waits, but not while it sleeps, and for a moment by who returns a place to one that waits.
    turn: Mutex<()>,
    returned: Condvar,
}

struct Place<T> {
    context: Mutex<T>,
    /// Uses by workers whose own it is. Only written under the lock.
    own: AtomicU64,
    /// Uses by others. Only written under the lock.
    borrowed: AtomicU64,
}

impl<T> Pool<T> {
    /// # Panics
    /// If there is no context.
    pub(super) fn new(contexts: impl IntoIterator<Item = T>) -> Pool<T> {
        let place = |context| {
            CachePadded(Place {
                context: Mutex::new(context),
                own: AtomicU64::new(0),
                borrowed: AtomicU64::new(0),
            })
        };
        let places: Box<[_]> = contexts.into_iter().map(place).collect();
        assert!(!places.is_empty(), "a pool of no contexts serves nobody");
        Pool {
            places,
            waiting: AtomicU64::new(0),
            waited: AtomicU64::new(0),
            turn: Mutex::new(()),
            returned: Condvar::new(),
        }
    }

    pub(super) fn len(&self) -> usize {
        self.places.len()
    }

    /// Lends a context for one use. What a panic in `use_it` leaves in it the next one gets.
    pub(super) fn with<R>(&self, worker: usize, use_it: impl FnOnce(&mut T) -> R) -> R {
        // Dropped after the place, also when this panics.
        let _returned = Returned(self);
        let mut place = self.take_idle(worker).unwrap_or_else(|| self.wait(worker));
        use_it(&mut place)
    }

    /// Visits every context, one after the other, waiting for each one's holder.
    pub(super) fn for_each(&self, mut visit: impl FnMut(&mut T)) {
        for place in &self.places {
            let _returned = Returned(self);
            visit(&mut place.0.context.lock().unwrap_or_else(PoisonError::into_inner));
        }
    }

    pub(super) fn uses(&self) -> ContextUses {
        // Relaxed: counters, which order nothing.
        let sum = |counter: fn(&Place<T>) -> &AtomicU64| {
            let loads = self
                .places
                .iter()
                .map(|place| counter(&place.0).load(Ordering::Relaxed));
            loads.sum()
        };
        ContextUses {
            own: sum(|place| &place.own),
            borrowed: sum(|place| &place.borrowed),
            waited: self.waited.load(Ordering::Relaxed),
        }
    }

    fn take_idle(&self, worker: usize) -> Option<MutexGuard<'_, T>> {
        let count = self.places.len();
        (0..count).find_map(|nth| {
            let place = &self.places[(worker + nth) % count].0;
            let context = match place.context.try_lock() {
                Ok(context) => context,
                Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
                Err(TryLockError::WouldBlock) => return None,
            };
            let counter = if nth == 0 { &place.own } else { &place.borrowed };
            // Relaxed, and no read-modify-write: only written under the lock.
            counter.store(counter.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
            Some(context)
        })
    }

    #[cold]
    fn wait(&self, worker: usize) -> MutexGuard<'_, T> {
        self.waited.fetch_add(1, Ordering::Relaxed);
        let mut turn = self.turn.lock().unwrap_or_else(PoisonError::into_inner);
        // Relaxed: the fence orders it before the look at the places.
        self.waiting.fetch_add(1, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        let place = loop {
            if let Some(place) = self.take_idle(worker) {
                break place;
            }
            turn = self.returned.wait(turn).unwrap_or_else(PoisonError::into_inner);
        };
        self.waiting.fetch_sub(1, Ordering::Relaxed);
        place
    }
}

/// Dropped after a place was unlocked: calls one that waits.
struct Returned<'a, T>(&'a Pool<T>);

impl<T> Drop for Returned<'_, T> {
    fn drop(&mut self) {
        // Pairs with the fence in `wait`: we see that it waits, or it sees the place that we unlocked.
        fence(Ordering::SeqCst);
        if self.0.waiting.load(Ordering::Relaxed) != 0 {
            // Through its turn: it sleeps by now, or has not looked at the places yet.
            drop(self.0.turn.lock().unwrap_or_else(PoisonError::into_inner));
            self.0.returned.notify_one();
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::sync::atomic::AtomicBool;
    use std::sync::mpsc::channel;
    use std::time::{Duration, Instant};

    use super::*;

    fn wait_until(what: &str, done: impl Fn() -> bool) {
        let since = Instant::now();
        while !done() {
            assert!(since.elapsed() < Duration::from_secs(20), "{what}");
            std::thread::yield_now();
        }
    }

    #[test]
    fn who_waits_takes_whichever_comes_back_first() {
        let pool = Pool::new([0, 1, 2]);
        let served = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let (holders, holding): (Vec<_>, Vec<_>) = (0..3)
                .map(|place| {
                    let (release, released) = channel::<()>();
                    let (taken, holding) = channel();
                    let pool = &pool;
                    scope.spawn(move || {
                        pool.with(place, |_| {
                            taken.send(()).unwrap();
                            released.recv().unwrap();
                        })
                    });
                    (release, holding)
                })
                .unzip();
            holding.iter().for_each(|holding| holding.recv().unwrap());
            scope.spawn(|| {
                assert_eq!(pool.with(0, |context| *context), 2, "not its own, which is held still");
                served.store(true, Ordering::SeqCst);
            });
            wait_until("it waits", || pool.uses().waited == 1);
            assert!(!served.load(Ordering::SeqCst));
            holders[2].send(()).unwrap();
            wait_until("it is served", || served.load(Ordering::SeqCst));
            holders[..2].iter().for_each(|holder| holder.send(()).unwrap());
        });
        assert_eq!(pool.uses().own + pool.uses().borrowed, 4);
        assert_eq!(pool.waiting.load(Ordering::SeqCst), 0);
    }

    #[test]
    fn a_panic_returns_its_context_to_who_waits() {
        let pool = Pool::new([7]);
        let holding = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let panics = scope.spawn(|| {
                pool.with(0, |_| {
                    holding.store(true, Ordering::SeqCst);
                    wait_until("somebody waits", || pool.uses().waited == 1);
                    // Not a panic!, which would print.
                    std::panic::resume_unwind(Box::new(()));
                })
            });
            wait_until("it holds", || holding.load(Ordering::SeqCst));
            assert_eq!(pool.with(0, |context| *context), 7);
            assert!(panics.join().is_err());
        });
        assert_eq!(pool.with(0, |context| *context), 7);
    }
}

#[cfg(all(test, loom))]
mod loom_tests {
    use loom::sync::Arc;
    use loom::thread;

    use super::*;

    /// Three workers and one context, so that there is one to call and another that barges in: nobody sleeps for ever
    /// (loom would see it), and nobody meets another in a context.
    #[test]
    fn nobody_who_waits_is_forgotten() {
        loom::model(|| {
            let pool = Arc::new(Pool::new([0_u32]));
            let workers: Vec<_> = (0..2)
                .map(|worker| {
                    let pool = pool.clone();
                    thread::spawn(move || pool.with(worker, |count| *count += 1))
                })
                .collect();
            pool.with(0, |count| *count += 1);
            for worker in workers {
                worker.join().unwrap();
            }
            assert_eq!(pool.with(0, |count| *count), 3);
        });
    }

    /// Two places: who waits is served by either.
    #[test]
    fn either_place_serves_who_waits() {
        loom::model(|| {
            let pool = Arc::new(Pool::new([0_u32, 0]));
            let workers: Vec<_> = (0..2)
                .map(|worker| {
                    let pool = pool.clone();
                    thread::spawn(move || pool.with(worker, |count| *count += 1))
                })
                .collect();
            pool.with(0, |count| *count += 1);
            for worker in workers {
                worker.join().unwrap();
            }
            assert_eq!(pool.with(0, |count| *count) + pool.with(1, |count| *count), 3);
        });
    }
}
