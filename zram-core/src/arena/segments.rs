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
//! held = in use + dirty, and held never exceeds the limit: a clean segment is reserved in `held` before it is used, and
//! leaves `held` after its memory went back. The last `reserve` segments of the limit are for overwriting only.

use std::io;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use super::SEGMENT_SIZE;
use super::stack::{Links, Stack};
use crate::region::Mapping;

/// A segment for every 32 in use may stay dirty, for the next writer to find warm.
const DIRTY_SHARE: u64 = 32;

/// What an object is stored for, which decides how near to the limit it may go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Purpose {
    /// The disk grows by it.
    Grow,
    /// It replaces an object at least as large, which is freed soon.
    Replace,
}

#[derive(Debug)]
pub(super) struct Segments {
    /// Segments of address space.
    count: u32,
    limit: u64,
    reserve: u64,
    in_use: AtomicU64,
    held: AtomicU64,
    held_max: AtomicU64,
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
        let limit_or_all = limit.unwrap_or(u64::from(count)).min(u64::from(count));
        Ok(Segments {
            count,
            limit: limit_or_all,
            // 1/32 of the limit, so that a batch of overwrites fits while its old objects wait for their grace period.
            reserve: if limit.is_some() {
                (limit_or_all / 32).clamp(1, 32)
            } else {
                0
            },
            in_use: AtomicU64::new(0),
            held: AtomicU64::new(0),
            held_max: AtomicU64::new(0),
            dirty: Stack::new(),
            clean: Stack::new(),
            fresh: AtomicU32::new(0),
            links: LinkArray(Mapping::anonymous(count as usize * size_of::<u32>())?),
        })
    }

    /// An empty segment, now in use, within the limit.
    pub(super) fn take(&self, purpose: Purpose) -> Option<u32> {
        let bound = match purpose {
            Purpose::Grow => self.grow_bound(),
            Purpose::Replace => self.limit,
        };
        reserve(&self.in_use, bound)?;
        let number = self.dirty.pop(&self.links).or_else(|| self.take_clean());
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

    /// Whether more empty segments hold memory than should.
    pub(super) fn has_surplus(&self) -> bool {
        let (held, in_use) = (self.held.load(Ordering::Relaxed), self.in_use.load(Ordering::Relaxed));
        held > in_use + in_use / DIRTY_SHARE
    }

    /// Gives one empty segment's memory back with `punch`, when there are too many.
    pub(super) fn give_back(&self, punch: impl FnOnce(u32) -> io::Result<()>) -> bool {
        if !self.has_surplus() {
            return false;
        }
        let Some(number) = self.dirty.pop(&self.links) else {
            return false;
        };
        if punch(number).is_err() {
            // The host keeps the memory, so the segment stays held; it is as good as before for the next writer.
            self.dirty.push(&self.links, number);
            return false;
        }
        self.clean.push(&self.links, number);
        self.held.fetch_sub(1, Ordering::Relaxed);
        true
    }

    pub(super) fn held_bytes(&self) -> u64 {
        self.held.load(Ordering::Relaxed) * SEGMENT_SIZE as u64
    }

    pub(super) fn held_bytes_max(&self) -> u64 {
        self.held_max.load(Ordering::Relaxed) * SEGMENT_SIZE as u64
    }

    /// Segments that may be in use for a disk to grow.
    pub(super) fn grow_bound(&self) -> u64 {
        self.limit - self.reserve
    }

    pub(super) fn in_use(&self) -> u64 {
        self.in_use.load(Ordering::Relaxed)
    }

    fn take_clean(&self) -> Option<u32> {
        let held = reserve(&self.held, self.limit)?;
        self.held_max.fetch_max(held, Ordering::Relaxed);
        let number = self.clean.pop(&self.links).or_else(|| self.take_fresh());
        if number.is_none() {
            self.held.fetch_sub(1, Ordering::Relaxed);
        }
        number
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

    #[test]
    fn the_limit_holds_and_its_reserve_is_for_overwriting() {
        let segments = Segments::new(100, Some(4)).unwrap();
        let grown: Vec<_> = std::iter::from_fn(|| segments.take(Purpose::Grow)).collect();
        assert_eq!(grown, [0, 1, 2]);
        assert_eq!(segments.take(Purpose::Replace), Some(3));
        assert_eq!(segments.take(Purpose::Replace), None);
        assert_eq!(segments.held_bytes(), 4 * SEGMENT_SIZE as u64);
        segments.release(1);
        assert_eq!(segments.take(Purpose::Grow), None, "the reserve is in use");
        assert_eq!(segments.take(Purpose::Replace), Some(1));
    }

    #[test]
    fn an_emptied_segment_is_used_again_before_a_clean_one() {
        let segments = Segments::new(100, None).unwrap();
        let first = segments.take(Purpose::Grow).unwrap();
        segments.release(first);
        assert_eq!(segments.take(Purpose::Grow), Some(first));
        assert_eq!(segments.held_bytes(), SEGMENT_SIZE as u64);
    }

    #[test]
    fn surplus_goes_back_and_comes_again() {
        let segments = Segments::new(100, Some(10)).unwrap();
        let taken: Vec<_> = (0..9).map(|_| segments.take(Purpose::Grow).unwrap()).collect();
        taken.iter().for_each(|&number| segments.release(number));
        let mut punched = vec![];
        while segments.give_back(|number| {
            punched.push(number);
            Ok(())
        }) {}
        punched.sort_unstable();
        assert_eq!(punched, taken);
        assert_eq!(
            (segments.held_bytes(), segments.held_bytes_max()),
            (0, 9 * SEGMENT_SIZE as u64)
        );
        assert!(segments.take(Purpose::Grow).is_some());
    }

    #[test]
    fn a_segment_that_cannot_be_given_back_stays_held() {
        let segments = Segments::new(100, None).unwrap();
        let number = segments.take(Purpose::Grow).unwrap();
        segments.release(number);
        assert!(!segments.give_back(|_| Err(io::ErrorKind::Unsupported.into())));
        assert_eq!(segments.held_bytes(), SEGMENT_SIZE as u64);
        assert_eq!(segments.take(Purpose::Grow), Some(number));
    }
}
