//! Pin, retire, reclaim: why a reader may use what it found in a slot.
//!
//! A reader pins itself, loads a slot's word and reads the object behind it. A writer takes the word out of the slot
//! first and frees the object later, after the grace period: when no reader is left who can have found it.
//!
//! 1. A clock counts grace periods. A pinned participant shows the clock's value as it was when it pinned itself.
//! 2. A writer retires what it took out of a slot. Once in a batch it seals: the batch gets the clock's value, and the
//!    clock goes on by one.
//! 3. A batch sealed at `t` is free when every pinned participant shows more than `t`. Who shows more has read the clock
//!    after the seal, so it finds what the writer put into the slots; who is not seen to be pinned will find it too,
//!    because of the two fences: either the reclaimer sees the pin, or the reader sees the writer's swap.
//! 4. Nobody waits. A participant that stops while pinned only keeps what is retired from being freed.
//!
//! A pin never spans an access to guest memory, which can take for ever: it covers the decoding of one page.
//!
//! Not crossbeam-epoch: its deferred functions run on any thread, so every object would come back through a queue, while
//! here a batch comes back to the worker that retired it, which frees most of it into its own heap; and its garbage
//! cannot be asked for at the memory limit.

use std::collections::VecDeque;

use crate::sync::{AtomicBool, AtomicU64, CachePadded, Ordering, fence};

const NOT_PINNED: u64 = 0;
/// The clock begins above `NOT_PINNED`. At one seal a nanosecond it would wrap after 584 years.
const CLOCK_START: u64 = 1;

/// Index of a participant, below the `participants` that [`Epochs`] was made with.
pub(crate) type ParticipantId = usize;

#[derive(Debug)]
pub(crate) struct Epochs {
    clock: CachePadded<AtomicU64>,
    /// What each participant shows: `NOT_PINNED`, or the clock when it pinned itself.
    pins: Box<[CachePadded<AtomicU64>]>,
    taken: Box<[AtomicBool]>,
    /// No participant from this place on ever was: so many pins have to be looked at.
    places_used: AtomicU64,
}

impl Epochs {
    pub(crate) fn new(participants: usize) -> Epochs {
        Epochs {
            clock: CachePadded(AtomicU64::new(CLOCK_START)),
            pins: (0..participants)
                .map(|_| CachePadded(AtomicU64::new(NOT_PINNED)))
                .collect(),
            taken: (0..participants).map(|_| AtomicBool::new(false)).collect(),
            places_used: AtomicU64::new(0),
        }
    }

    /// The lowest free place among the participants, so that the next worker inherits what the last one left warm.
    pub(crate) fn join(&self) -> Option<ParticipantId> {
        // Acquire pairs with the release of `leave`: counters and heap of the place pass from the last holder to us.
        let place = self
            .taken
            .iter()
            .position(|taken| !taken.swap(true, Ordering::Acquire))?;
        // Relaxed: it comes before the fence of the first pin, and is read behind the fence of `horizon` (rule 3).
        self.places_used.fetch_max(place as u64 + 1, Ordering::Relaxed);
        Some(place)
    }

    pub(crate) fn leave(&self, participant: ParticipantId) {
        debug_assert!(
            self.pins[participant].0.load(Ordering::Relaxed) == NOT_PINNED,
            "left while pinned"
        );
        self.taken[participant].store(false, Ordering::Release);
    }

    /// Keeps everything that a slot holds from now on readable until the guard is dropped. Not nested.
    pub(crate) fn pin(&self, participant: ParticipantId) -> Guard<'_> {
        let pin = &self.pins[participant].0;
        debug_assert!(pin.load(Ordering::Relaxed) == NOT_PINNED, "pinned twice");
        // The load is relaxed: an old clock only shows an older pin, which frees less. The store releases what was read
        // under the pin before this one, for a reclaimer that sees only the new pin. The fence orders both before the
        // loads of slots that follow (rule 3), and pairs with the one in `horizon`.
        pin.store(self.clock.0.load(Ordering::Relaxed), Ordering::Release);
        fence(Ordering::SeqCst);
        Guard { pin }
    }

    /// Ends a batch: what was retired before is free once [`Epochs::horizon`] has passed the result.
    fn seal(&self) -> u64 {
        // Release: who reads the clock after this (in `pin`, followed by its fence) sees the swaps of the batch.
        self.clock.0.fetch_add(1, Ordering::Release)
    }

    /// Batches sealed below this are free.
    fn horizon(&self) -> u64 {
        fence(Ordering::SeqCst); // pairs with the one in `pin`, rule 3
        // Acquire pairs with the release of a guard's drop, and of a later pin: the reads of that guard are over before we
        // reuse what it read.
        let pins = &self.pins[..self.places_used.load(Ordering::Relaxed) as usize];
        let shown = pins.iter().map(|pin| pin.0.load(Ordering::Acquire));
        shown.filter(|&shown| shown != NOT_PINNED).min().unwrap_or(u64::MAX)
    }
}

/// While it lives, what its holder finds in a slot stays readable.
#[derive(Debug)]
#[must_use = "the pin ends with it"]
pub(crate) struct Guard<'a> {
    pin: &'a AtomicU64,
}

impl Drop for Guard<'_> {
    fn drop(&mut self) {
        self.pin.store(NOT_PINNED, Ordering::Release); // pairs with the loads in `horizon`
    }
}

/// What one worker has taken out of slots and may not free yet, oldest first: 8 bytes an object.
#[derive(Debug, Default)]
pub(crate) struct Retired {
    words: VecDeque<u64>,
    /// Sealed batches: the clock at the seal, and how many of `words` belong to it.
    sealed: VecDeque<(u64, usize)>,
    open: usize,
}

impl Retired {
    /// Takes a slot's former word. The caller no longer uses what is behind it, except under a guard.
    pub(crate) fn push(&mut self, word: u64) {
        self.words.push_back(word);
        self.open += 1;
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.words.is_empty()
    }

    /// Objects retired since the last seal.
    pub(crate) fn open(&self) -> usize {
        self.open
    }

    /// Ends the batch, if there is one.
    pub(crate) fn seal(&mut self, epochs: &Epochs) {
        if self.open != 0 {
            self.sealed.push_back((epochs.seal(), self.open));
            self.open = 0;
        }
    }

    /// Gives `free` every word whose grace period is over.
    pub(crate) fn reclaim(&mut self, epochs: &Epochs, mut free: impl FnMut(u64)) {
        if self.sealed.is_empty() {
            return;
        }
        let horizon = epochs.horizon();
        while let Some(&(sealed_at, count)) = self.sealed.front()
            && sealed_at < horizon
        {
            self.words.drain(..count).for_each(&mut free);
            self.sealed.pop_front();
        }
    }

    /// Takes over what another worker left. It counts as retired now, which is later than true and so safe.
    pub(crate) fn append(&mut self, other: Retired) {
        self.open += other.words.len();
        self.words.extend(other.words);
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    fn reclaimed(retired: &mut Retired, epochs: &Epochs) -> Vec<u64> {
        let mut words = Vec::new();
        retired.reclaim(epochs, |word| words.push(word));
        words
    }

    #[test]
    fn what_nobody_reads_is_free_at_once_after_the_seal() {
        let (epochs, mut retired) = (Epochs::new(2), Retired::default());
        retired.push(1);
        assert_eq!(reclaimed(&mut retired, &epochs), [], "not sealed");
        retired.seal(&epochs);
        assert_eq!(reclaimed(&mut retired, &epochs), [1]);
        assert!(retired.is_empty());
    }

    #[test]
    fn a_reader_holds_what_was_retired_after_its_pin_and_nothing_older() {
        let (epochs, mut retired) = (Epochs::new(2), Retired::default());
        retired.push(1);
        retired.seal(&epochs);
        let reader = epochs.join().unwrap();
        let guard = epochs.pin(reader);
        retired.push(2);
        retired.seal(&epochs);
        assert_eq!(reclaimed(&mut retired, &epochs), [1]);
        assert_eq!(reclaimed(&mut retired, &epochs), []);
        drop(guard);
        assert_eq!(reclaimed(&mut retired, &epochs), [2]);
    }

    #[test]
    fn a_later_reader_does_not_hold_an_earlier_batch() {
        let (epochs, mut retired) = (Epochs::new(2), Retired::default());
        retired.push(1);
        retired.seal(&epochs);
        let _guard = epochs.pin(epochs.join().unwrap());
        assert_eq!(reclaimed(&mut retired, &epochs), [1]);
    }

    #[test]
    fn places_are_lowest_first_and_come_back() {
        let epochs = Epochs::new(2);
        assert_eq!((epochs.join(), epochs.join(), epochs.join()), (Some(0), Some(1), None));
        epochs.leave(0);
        assert_eq!(epochs.join(), Some(0));
    }
}

/// The protocol of publish, read and retire as `zram.rs` uses it, walked through every interleaving: the slot is one
/// atomic word, the objects are loom cells, which fail on any access that is not ordered after a conflicting one.
#[cfg(all(test, loom))]
mod loom_tests {
    use super::*;
    use loom::cell::UnsafeCell;
    use loom::sync::Arc;
    use loom::thread;

    struct Store {
        epochs: Epochs,
        slot: AtomicU64,
        objects: [UnsafeCell<u64>; 3],
    }

    impl Store {
        /// Object 0 holds 10 and is published.
        fn new() -> Arc<Store> {
            Arc::new(Store {
                epochs: Epochs::new(3),
                slot: AtomicU64::new(0),
                objects: [UnsafeCell::new(10), UnsafeCell::new(0), UnsafeCell::new(0)],
            })
        }

        fn read(&self, participant: ParticipantId) -> u64 {
            let _guard = self.epochs.pin(participant);
            let object = self.slot.load(Ordering::Acquire);
            // SAFETY: what the guard promises, and loom checks.
            self.objects[object as usize].with(|content| unsafe { *content })
        }

        fn fill(&self, object: u64, value: u64) {
            // SAFETY: the object is not published, or its grace period is over; loom checks.
            self.objects[object as usize].with_mut(|content| unsafe { *content = value });
        }
    }

    #[test]
    fn a_reader_never_sees_an_object_reused() {
        loom::model(|| {
            let store = Store::new();
            let reader = {
                let store = Arc::clone(&store);
                thread::spawn(move || {
                    let reader = store.epochs.join().unwrap();
                    let first = store.read(reader);
                    let second = store.read(reader);
                    assert!([10, 11].contains(&first) && [10, 11].contains(&second));
                    assert!(second >= first, "a page went back in time");
                })
            };
            store.fill(1, 11);
            let mut retired = Retired::default();
            retired.push(store.slot.swap(1, Ordering::AcqRel));
            retired.seal(&store.epochs);
            retired.reclaim(&store.epochs, |object| store.fill(object, 99));
            reader.join().unwrap();
            retired.reclaim(&store.epochs, |object| store.fill(object, 99));
            assert!(retired.is_empty());
        });
    }

    #[test]
    fn a_merge_that_wins_its_exchange_saw_the_newest_content() {
        // Two queues: one overwrites a page twice, reusing the first object for the second write; the other adds 100 to
        // what it read, as a sub-page write does. The pin held from load to exchange keeps the word from coming back.
        loom::model(|| {
            let store = Store::new();
            let merger = {
                let store = Arc::clone(&store);
                thread::spawn(move || {
                    let _guard = store.epochs.pin(store.epochs.join().unwrap());
                    let found = store.slot.load(Ordering::Acquire);
                    // SAFETY: what the guard promises, and loom checks.
                    let value = store.objects[found as usize].with(|content| unsafe { *content });
                    let exchanged = store
                        .slot
                        .compare_exchange(found, 7, Ordering::AcqRel, Ordering::Acquire);
                    exchanged.is_ok().then_some(value)
                })
            };
            store.fill(1, 11);
            let mut retired = Retired::default();
            let first = store.slot.swap(1, Ordering::AcqRel);
            let mut last = 11;
            if first != 7 {
                retired.push(first);
                retired.seal(&store.epochs);
                let mut reused = None;
                retired.reclaim(&store.epochs, |object| reused = Some(object));
                if let Some(object) = reused {
                    store.fill(object, 12);
                    let _ = store.slot.swap(object, Ordering::AcqRel);
                    last = 12;
                }
            }
            if let Some(merged) = merger.join().unwrap()
                && store.slot.load(Ordering::Acquire) == 7
            {
                // The merge is the last write: it must have merged into what was the newest before it.
                assert_eq!(merged, if first == 7 { 10 } else { last });
            }
        });
    }

    #[test]
    fn a_moved_page_is_always_the_newest() {
        // The cleaner copies what it found into object 2 and exchanges the word; the writer overwrites twice, the second
        // time into the object that it got back. Whoever comes last, the slot holds what was written last.
        loom::model(|| {
            let store = Store::new();
            let cleaner = {
                let store = Arc::clone(&store);
                thread::spawn(move || {
                    let mut retired = Retired::default();
                    let guard = store.epochs.pin(store.epochs.join().unwrap());
                    let found = store.slot.load(Ordering::Acquire);
                    // SAFETY: what the guard promises, and loom checks.
                    let value = store.objects[found as usize].with(|content| unsafe { *content });
                    store.fill(2, value);
                    let exchanged = store
                        .slot
                        .compare_exchange(found, 2, Ordering::AcqRel, Ordering::Acquire);
                    drop(guard);
                    if exchanged.is_ok() {
                        retired.push(found);
                        retired.seal(&store.epochs);
                        retired.reclaim(&store.epochs, |object| store.fill(object, 99));
                    }
                })
            };
            store.fill(1, 11);
            let mut retired = Retired::default();
            retired.push(store.slot.swap(1, Ordering::AcqRel));
            retired.seal(&store.epochs);
            let (mut reused, mut last) = (None, 11);
            retired.reclaim(&store.epochs, |object| reused = Some(object));
            if let Some(object) = reused {
                last = 12;
                store.fill(object, last);
                let _ = store.slot.swap(object, Ordering::AcqRel);
            }
            cleaner.join().unwrap();
            let reader = store.epochs.join().unwrap();
            assert_eq!(store.read(reader), last);
        });
    }
}
