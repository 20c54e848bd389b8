//! Which segments hold host memory, and the limit on them. A segment is in one of three states:
//!
//! ```text
//!          take                       release
//!  clean --------> in use <---------> dirty (empty, memory still there)
//!    ^                       take       |
//!    +----------------------------------+
//!                   punch
//! ```
//!
//! held = in use + dirty. A clean segment is reserved in `held`, within the limit, before its memory is taken from the
//! host, and leaves `held` after its memory went back: so the limit is never passed. The last segments of the limit, the
//! reserve, are for overwriting only, and the very last one is where an overwrite goes when nothing else has room, until
//! the object that it replaces has left its place. A limit that is set lower than what is held takes nothing away: it refuses more.

use std::io;
use std::ops::Range;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use super::stack::{Links, Stack};
use crate::region::Mapping;

/// One segment for so many in use may stay dirty, for the next writer to find warm.
const DIRTY_SHARE: u64 = 256;
/// Segments that are given back at a time, as few ranges as they make.
const GIVE_BACK_BATCH: usize = 64;
/// Segments of the limit for [`Purpose::Spare`] alone.
const SPARE: u64 = 1;
/// No limit.
const UNLIMITED: u64 = u64::MAX;

/// What an object is stored for, which decides how near to the limit it may go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Purpose {
    /// The disk grows by it.
    Grow,
    /// It replaces an object at least as large, which is freed soon.
    Replace,
    /// It replaces an object that is hardly smaller: of the same class of size, in zram's words.
    Resize,
    /// It is moved so that its segment gets empty.
    Move,
    /// It replaces an object at least as large, and will be moved to that one's place.
    Spare,
}

#[derive(Debug)]
pub(super) struct Segments {
    /// Segments of address space.
    count: u32,
    /// Or `UNLIMITED`.
    limit: AtomicU64,
    in_use: AtomicU64,
    held: AtomicU64,
    held_max: AtomicU64,
    /// Empty segments on their way back to the host: in `held`, and on no stack.
    leaving: AtomicU64,
    dirty: Stack,
    clean: Stack,
    /// Segments from this number on were never used.
    fresh: AtomicU32,
    links: LinkArray,
}

#[derive(Debug)]
struct LinkArray(Mapping);

impl Links for LinkArray {
    fn get(&self, of: u32) -> u32 {
        self.0.half_words()[of as usize].load(Ordering::Relaxed) // ordered by the stack's head
    }
    fn set(&self, of: u32, to: u32) {
        self.0.half_words()[of as usize].store(to, Ordering::Relaxed);
    }
}

impl Segments {
    /// `count` segments of address space, of which `limit` may hold memory.
    pub(super) fn new(count: u32, limit: Option<u64>) -> io::Result<Segments> {
        Ok(Segments {
            count,
            limit: AtomicU64::new(limit.unwrap_or(UNLIMITED)),
            in_use: AtomicU64::new(0),
            held: AtomicU64::new(0),
            held_max: AtomicU64::new(0),
            leaving: AtomicU64::new(0),
            dirty: Stack::new(),
            clean: Stack::new(),
            fresh: AtomicU32::new(0),
            links: LinkArray(Mapping::anonymous(count as usize * size_of::<u32>())?),
        })
    }

    /// The segments of an arena that was found: `in_use` says which of those below `used` hold objects. The others have
    /// no memory.
    pub(super) fn adopt(&self, used: u32, in_use: impl Fn(u32) -> bool) {
        self.fresh.store(used, Ordering::Relaxed);
        for number in (0..used).rev() {
            if in_use(number) {
                self.in_use.fetch_add(1, Ordering::Relaxed);
            } else {
                self.clean.push(&self.links, number);
            }
        }
        let held = self.in_use();
        self.held.store(held, Ordering::Relaxed);
        self.held_max.store(held, Ordering::Relaxed);
    }

    /// An empty segment, now in use, within the limit. `populate` takes a clean one's memory from the host.
    pub(super) fn take(&self, purpose: Purpose, populate: impl FnOnce(u32) -> io::Result<()>) -> Option<u32> {
        let bound = match purpose {
            Purpose::Grow => self.grow_bound(),
            Purpose::Replace | Purpose::Resize | Purpose::Move => self.replace_bound(),
            Purpose::Spare => self.limit(),
        };
        reserve(&self.in_use, bound)?;
        let number = self.dirty.pop(&self.links).or_else(|| self.take_clean(populate));
        if number.is_none() {
            self.in_use.fetch_sub(1, Ordering::Relaxed);
        }
        number
    }

    /// A segment without live objects, whose memory may be used again or given back.
    pub(super) fn release(&self, number: u32) {
        self.dirty.push(&self.links, number);
        self.in_use.fetch_sub(1, Ordering::Relaxed);
    }

    /// Empty segments that hold memory and should not.
    pub(super) fn surplus(&self) -> u64 {
        let (held, in_use) = (self.held(), self.in_use());
        let may_stay = if held > self.limit() { 0 } else { in_use / DIRTY_SHARE };
        held.saturating_sub(in_use + may_stay)
    }

    /// Gives the memory of some empty segments back with `punch`, when there are too many; how many went.
    pub(super) fn give_back(&self, mut punch: impl FnMut(Range<u32>) -> io::Result<()>) -> u64 {
        let wanted = self.surplus().min(GIVE_BACK_BATCH as u64) as usize;
        self.leaving.fetch_add(wanted as u64, Ordering::Relaxed);
        let mut numbers: Vec<u32> = std::iter::from_fn(|| self.dirty.pop(&self.links))
            .take(wanted)
            .collect();
        numbers.sort_unstable();
        let mut given = 0;
        for run in numbers.chunk_by(|&one, &next| next == one + 1) {
            let (first, last) = (run[0], run[run.len() - 1]);
            // Where the host keeps the memory the segment stays held; it is as good as before for the next writer.
            let punched = punch(first..last + 1).is_ok();
            let stack = if punched { &self.clean } else { &self.dirty };
            run.iter().for_each(|&number| stack.push(&self.links, number));
            if punched {
                self.held.fetch_sub(run.len() as u64, Ordering::Relaxed);
                given += run.len() as u64;
            }
        }
        self.leaving.fetch_sub(wanted as u64, Ordering::Relaxed);
        given
    }

    /// Whether empty segments are on their way back: for a moment they can be neither used nor taken anew.
    pub(super) fn is_giving_back(&self) -> bool {
        self.leaving.load(Ordering::Relaxed) != 0
    }

    /// Segments that may hold memory: all when there is no limit.
    pub(super) fn limit(&self) -> u64 {
        self.limit.load(Ordering::Relaxed).min(u64::from(self.count))
    }

    pub(super) fn set_limit(&self, limit: Option<u64>) {
        self.limit.store(limit.unwrap_or(UNLIMITED), Ordering::Relaxed);
    }

    /// Segments that may be in use for a disk to grow.
    pub(super) fn grow_bound(&self) -> u64 {
        // A thirty-second of the limit stays, so that a batch of overwrites fits while its old objects wait for their
        // grace period.
        match self.limit.load(Ordering::Relaxed) {
            UNLIMITED => u64::from(self.count),
            limit => self.limit().saturating_sub((limit / 32).clamp(SPARE + 1, 32)),
        }
    }

    /// Segments that may be in use, the spare one not counted.
    pub(super) fn replace_bound(&self) -> u64 {
        match self.limit.load(Ordering::Relaxed) {
            UNLIMITED => u64::from(self.count),
            _ => self.limit().saturating_sub(SPARE),
        }
    }

    /// Half segments of objects up to which objects may get a little larger: half of the reserve stays for the others.
    pub(super) fn resize_bound_halves(&self) -> u64 {
        self.replace_bound() + self.grow_bound()
    }

    pub(super) fn in_use(&self) -> u64 {
        self.in_use.load(Ordering::Relaxed)
    }

    pub(super) fn held(&self) -> u64 {
        self.held.load(Ordering::Relaxed)
    }

    pub(super) fn held_max(&self) -> u64 {
        self.held_max.load(Ordering::Relaxed).max(self.held())
    }

    /// As zram: the maximum begins anew at what is held now.
    pub(super) fn reset_held_max(&self) {
        self.held_max.store(self.held(), Ordering::Relaxed);
    }

    /// All numbers in use lie below this one.
    pub(super) fn used(&self) -> u32 {
        self.fresh.load(Ordering::Relaxed)
    }

    fn take_clean(&self, populate: impl FnOnce(u32) -> io::Result<()>) -> Option<u32> {
        let held = reserve(&self.held, self.limit())?;
        self.held_max.fetch_max(held, Ordering::Relaxed);
        let number = self.clean.pop(&self.links).or_else(|| self.take_fresh());
        match number {
            Some(number) if populate(number).is_ok() => return Some(number),
            Some(number) => self.clean.push(&self.links, number), // what was populated of it is taken again with it
            None => {}
        }
        self.held.fetch_sub(1, Ordering::Relaxed);
        None
    }

    fn take_fresh(&self) -> Option<u32> {
        let next = |fresh: u32| (fresh < self.count).then_some(fresh + 1);
        self.fresh.fetch_update(Ordering::Relaxed, Ordering::Relaxed, next).ok()
    }
}

/// Adds one unless that would pass `bound`; gives the new value. Relaxed: only the number itself is shared.
fn reserve(counter: &AtomicU64, bound: u64) -> Option<u64> {
    let next = |now: u64| (now < bound).then_some(now + 1);
    counter
        .fetch_update(Ordering::Relaxed, Ordering::Relaxed, next)
        .ok()
        .map(|before| before + 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn take(segments: &Segments, purpose: Purpose) -> Option<u32> {
        segments.take(purpose, |_| Ok(()))
    }

    #[test]
    fn the_limit_holds_and_its_reserve_is_for_overwriting() {
        let segments = Segments::new(100, Some(4)).unwrap();
        let grown: Vec<_> = std::iter::from_fn(|| take(&segments, Purpose::Grow)).collect();
        assert_eq!(grown, [0, 1]);
        assert_eq!(take(&segments, Purpose::Replace), Some(2));
        assert_eq!(take(&segments, Purpose::Replace), None);
        assert_eq!(take(&segments, Purpose::Move), None);
        assert_eq!(take(&segments, Purpose::Spare), Some(3));
        assert_eq!(take(&segments, Purpose::Spare), None);
        assert_eq!(segments.held(), 4);
        segments.release(3);
        segments.release(1);
        assert_eq!(take(&segments, Purpose::Grow), None, "the reserve is in use");
        assert_eq!(take(&segments, Purpose::Replace), Some(1));
    }

    #[test]
    fn an_emptied_segment_is_used_again_before_a_clean_one() {
        let segments = Segments::new(100, None).unwrap();
        let first = take(&segments, Purpose::Grow).unwrap();
        segments.release(first);
        assert_eq!(take(&segments, Purpose::Grow), Some(first));
        assert_eq!(segments.held(), 1);
    }

    #[test]
    fn surplus_goes_back_in_runs_and_comes_again() {
        let segments = Segments::new(100, Some(11)).unwrap();
        let taken: Vec<_> = (0..9).map(|_| take(&segments, Purpose::Grow).unwrap()).collect();
        taken
            .iter()
            .filter(|&&number| number != 4)
            .for_each(|&number| segments.release(number));
        let mut punched = vec![];
        assert_eq!(
            segments.give_back(|run| {
                punched.push(run);
                Ok(())
            }),
            8
        );
        assert_eq!(punched, [0..4, 5..9]);
        assert_eq!((segments.held(), segments.held_max()), (1, 9));
        segments.reset_held_max();
        assert_eq!(segments.held_max(), 1);
        assert!(take(&segments, Purpose::Grow).is_some());
    }

    #[test]
    fn a_segment_that_cannot_be_given_back_stays_held() {
        let segments = Segments::new(100, None).unwrap();
        let number = take(&segments, Purpose::Grow).unwrap();
        segments.release(number);
        assert_eq!(segments.give_back(|_| Err(io::ErrorKind::Unsupported.into())), 0);
        assert_eq!(segments.held(), 1);
        assert_eq!(take(&segments, Purpose::Grow), Some(number));
    }

    #[test]
    fn segments_on_their_way_back_are_known_of() {
        let segments = Segments::new(100, None).unwrap();
        let number = take(&segments, Purpose::Grow).unwrap();
        segments.release(number);
        assert!(!segments.is_giving_back());
        segments.give_back(|_| {
            assert!(segments.is_giving_back());
            Ok(())
        });
        assert!(!segments.is_giving_back());
    }

    #[test]
    fn a_host_without_memory_is_the_same_as_a_limit() {
        let segments = Segments::new(100, None).unwrap();
        let refused = segments.take(Purpose::Grow, |_| Err(io::ErrorKind::OutOfMemory.into()));
        assert_eq!((refused, segments.held(), segments.in_use()), (None, 0, 0));
        assert_eq!(take(&segments, Purpose::Grow), Some(0));
    }

    #[test]
    fn a_limit_set_lower_refuses_more_and_set_higher_gives_it() {
        let segments = Segments::new(100, Some(8)).unwrap();
        let taken: Vec<_> = std::iter::from_fn(|| take(&segments, Purpose::Replace)).collect();
        assert_eq!(taken.len(), 7);
        segments.set_limit(Some(4));
        assert_eq!(take(&segments, Purpose::Spare), None);
        taken[..2].iter().for_each(|&number| segments.release(number));
        assert_eq!(take(&segments, Purpose::Spare), None, "5 are in use");
        assert_eq!(segments.surplus(), 2, "nothing stays dirty above the limit");
        segments.set_limit(None);
        assert_eq!(std::iter::from_fn(|| take(&segments, Purpose::Grow)).count(), 95);
    }

    #[test]
    fn an_arena_that_was_found_has_its_segments_in_use_or_clean() {
        let segments = Segments::new(100, None).unwrap();
        segments.adopt(5, |number| number % 2 == 0);
        assert_eq!((segments.in_use(), segments.held(), segments.held_max()), (3, 3, 3));
        let taken: Vec<_> = (0..3).map(|_| take(&segments, Purpose::Grow).unwrap()).collect();
        assert_eq!(taken, [1, 3, 5]);
    }
}
