//! The holes of the segments that one heap owns: best fit, exact, coalescing.
//!
//! Pure bookkeeping in granules; no byte of the arena is touched here. Two views of the same holes:
//!
//! - each segment has its holes, sorted by place, never touching each other (so a free merges with its neighbours);
//! - bins have (segment, place) of every hole by its length, so that the smallest hole that fits is found at once.
//!
//! A bin's entry is never searched for when its hole changes: it stays, and whoever takes it from the bin sees that no
//! such hole exists and drops it. When stale entries outnumber the holes, the bins are made anew. Bins shrink as they
//! empty: who makes holes of one length after another must not leave a large bin behind for each.
//!
//! A segment can be closed: its holes leave the bins, so that nothing is allocated there any more, while what is freed
//! there still merges. That is how the cleaner empties one.
//!
//! Invariants: sum of holes + sum of live objects = granules of the owned segments; every hole of an open segment has an entry in its bin;
//! no two holes of a segment touch; a segment without objects is not kept.

use crate::arena::SEGMENT_GRANULES;

/// Bins up to this length hold one length each. Objects are at most 512 granules, a huge page.
const EXACT_BINS: usize = 520;
/// Above, a bin holds this many lengths: only ever the rest of a fresh segment, where best fit decides nothing.
const COARSE_STEP: usize = 128;
const BINS: usize = bin_of(SEGMENT_GRANULES) + 1;
const _: () = assert!(EXACT_BINS >= super::OBJECT_GRANULES_MAX);

/// Index of a segment in its heap.
pub(super) type Local = u32;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Hole {
    pub(super) start: u16,
    pub(super) len: u16,
}

#[derive(Clone, Copy, Debug)]
struct Entry {
    local: Local,
    start: u16,
}

#[derive(Debug)]
struct Segment {
    /// The arena's number of the segment.
    number: u32,
    holes: Vec<Hole>,
    /// Granules in the holes.
    free: u16,
    is_closed: bool,
}

/// A segment as the cleaner and the operator see it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Survey<'a> {
    pub(super) local: Local,
    pub(super) number: u32,
    pub(super) free: u16,
    pub(super) is_closed: bool,
    pub(super) holes: &'a [Hole],
}

#[derive(Debug, Default)]
pub(super) struct Heap {
    segments: Vec<Option<Segment>>,
    vacant: Vec<Local>,
    /// Empty until the heap owns its first segment.
    bins: Vec<Vec<Entry>>,
    /// One bit for each bin that has entries.
    occupied: [u64; BINS.div_ceil(64)],
    entries: usize,
    holes: usize,
}

const fn bin_of(len: usize) -> usize {
    if len <= EXACT_BINS {
        len
    } else {
        EXACT_BINS + 1 + (len - EXACT_BINS - 1) / COARSE_STEP
    }
}

/// Room for entries that a bin may keep whatever it holds: half a KiB.
const BIN_ROOM_KEPT: usize = 64;

/// Takes the newest entry. A bin keeps room for at most four times what it holds.
fn pop_and_shrink(bin: &mut Vec<Entry>) -> Option<Entry> {
    let entry = bin.pop();
    if bin.capacity() > BIN_ROOM_KEPT && bin.len() < bin.capacity() / 4 {
        bin.shrink_to(BIN_ROOM_KEPT.max(bin.len() * 2));
    }
    entry
}

impl Heap {
    /// Takes over an empty segment.
    pub(super) fn add_segment(&mut self, number: u32) -> Local {
        let all = Hole {
            start: 0,
            len: SEGMENT_GRANULES as u16,
        };
        self.add_segment_with(number, vec![all])
    }

    /// Takes over a segment that has objects everywhere but in `holes`, which are sorted and do not touch.
    pub(super) fn add_segment_with(&mut self, number: u32, holes: Vec<Hole>) -> Local {
        if self.bins.is_empty() {
            self.bins = vec![Vec::new(); BINS];
        }
        let local = match self.vacant.pop() {
            Some(local) => local,
            None => {
                self.segments.push(None);
                (self.segments.len() - 1) as Local
            }
        };
        self.holes += holes.len();
        self.segments[local as usize] = Some(Segment {
            number,
            free: holes.iter().map(|hole| hole.len).sum(),
            holes: holes.clone(),
            is_closed: false,
        });
        holes.into_iter().for_each(|hole| self.file(local, hole));
        local
    }

    /// Allocates nothing in a segment any more. False when the heap has no such segment now, or it is closed already.
    pub(super) fn close(&mut self, local: Local, number: u32) -> bool {
        match self.segments.get_mut(local as usize) {
            Some(Some(segment)) if segment.number == number && !segment.is_closed => {
                segment.is_closed = true;
                true
            }
            _ => false,
        }
    }

    /// Allocates in a closed segment again. False when it is gone: it became empty.
    pub(super) fn reopen(&mut self, local: Local, number: u32) -> bool {
        let Some(Some(segment)) = self.segments.get_mut(local as usize) else {
            return false;
        };
        if segment.number != number {
            return false;
        }
        segment.is_closed = false;
        for hole in segment.holes.clone() {
            self.file(local, hole);
        }
        true
    }

    /// The segments from `from` on, in the order of their indices: at most `count` places are looked at.
    pub(super) fn survey(&self, from: Local, count: usize) -> impl Iterator<Item = Survey<'_>> {
        let places = self.segments.iter().enumerate().skip(from as usize).take(count);
        places.filter_map(|(local, segment)| {
            let segment = segment.as_ref()?;
            Some(Survey {
                local: local as Local,
                number: segment.number,
                free: segment.free,
                is_closed: segment.is_closed,
                holes: &segment.holes,
            })
        })
    }

    /// No segment has this index or a higher one.
    pub(super) fn end(&self) -> Local {
        self.segments.len() as Local
    }

    /// A place for `granules` in the smallest hole that has room: the segment's number and the place in it.
    pub(super) fn allocate(&mut self, granules: usize) -> Option<(u32, usize)> {
        debug_assert!((1..=super::OBJECT_GRANULES_MAX).contains(&granules));
        let mut bin = self.occupied_bin(granules)?;
        loop {
            let Some(entry) = pop_and_shrink(&mut self.bins[bin]) else {
                self.occupied[bin / 64] &= !(1 << (bin % 64));
                bin = self.occupied_bin(bin + 1)?;
                continue;
            };
            self.entries -= 1;
            if let Some(place) = self.take(entry, bin, granules) {
                return Some(place);
            }
        }
    }

    /// Gives granules back. When that empties the segment, it leaves the heap and its number is returned.
    pub(super) fn free(&mut self, local: Local, start: usize, granules: usize) -> Option<u32> {
        let segment = self.segments[local as usize]
            .as_mut()
            .expect("an object's segment is owned");
        segment.free += granules as u16;
        let holes = &mut segment.holes;
        let end = start + granules;
        let after = holes.partition_point(|hole| usize::from(hole.start) < start);
        let mut freed = Hole {
            start: start as u16,
            len: granules as u16,
        };
        if let Some(next) = holes.get(after) {
            assert!(
                usize::from(next.start) >= end,
                "granules {start}+{granules} are free already"
            );
        }
        let mut merged = after..after;
        if let Some(next) = holes.get(after)
            && usize::from(next.start) == end
        {
            freed.len += next.len;
            merged.end += 1;
        }
        if let Some(before) = after.checked_sub(1).map(|at| holes[at]) {
            let before_end = usize::from(before.start + before.len);
            assert!(before_end <= start, "granules {start}+{granules} are free already");
            if before_end == start {
                freed = Hole {
                    start: before.start,
                    len: before.len + freed.len,
                };
                merged.start -= 1;
            }
        }
        self.holes = self.holes + 1 - merged.len();
        holes.splice(merged, [freed]);
        if usize::from(freed.len) == SEGMENT_GRANULES {
            let number = segment.number;
            self.segments[local as usize] = None;
            self.vacant.push(local);
            self.holes -= 1;
            if self.holes == 0 && self.segments() == 0 {
                *self = Heap::default();
            }
            return Some(number);
        }
        if !segment.is_closed {
            self.file(local, freed);
        }
        None
    }

    /// Takes the first granules of the hole that an entry of `bin` names, if there is one and it belongs to that bin.
    fn take(&mut self, entry: Entry, bin: usize, granules: usize) -> Option<(u32, usize)> {
        let segment = self.segments[entry.local as usize].as_mut()?;
        if segment.is_closed {
            return None;
        }
        let at = segment
            .holes
            .binary_search_by_key(&entry.start, |hole| hole.start)
            .ok()?;
        let hole = segment.holes[at];
        if bin_of(usize::from(hole.len)) != bin {
            return None;
        }
        let place = (segment.number, usize::from(hole.start));
        let rest = Hole {
            start: hole.start + granules as u16,
            len: hole.len - granules as u16,
        };
        segment.free -= granules as u16;
        if rest.len == 0 {
            segment.holes.remove(at);
            self.holes -= 1;
        } else {
            segment.holes[at] = rest;
            self.file(entry.local, rest);
        }
        Some(place)
    }

    /// Puts a hole into its bin.
    fn file(&mut self, local: Local, hole: Hole) {
        if self.entries > 2 * self.holes + 1024 {
            self.file_all_anew();
            return;
        }
        let bin = bin_of(usize::from(hole.len));
        self.bins[bin].push(Entry {
            local,
            start: hole.start,
        });
        self.occupied[bin / 64] |= 1 << (bin % 64);
        self.entries += 1;
    }

    #[cold]
    fn file_all_anew(&mut self) {
        self.bins.iter_mut().for_each(|bin| *bin = Vec::new());
        self.entries = 0;
        self.occupied = Default::default();
        for (local, segment) in self.segments.iter().enumerate() {
            let open = segment.iter().filter(|segment| !segment.is_closed);
            for hole in open.flat_map(|segment| &segment.holes) {
                let bin = bin_of(usize::from(hole.len));
                self.bins[bin].push(Entry {
                    local: local as Local,
                    start: hole.start,
                });
                self.occupied[bin / 64] |= 1 << (bin % 64);
                self.entries += 1;
            }
        }
    }

    /// The first bin from `from` on that has entries, stale or not.
    fn occupied_bin(&self, from: usize) -> Option<usize> {
        let mut word = from / 64;
        let mut bits = self.occupied.get(word)? & (u64::MAX << (from % 64));
        while bits == 0 {
            word += 1;
            bits = *self.occupied.get(word)?;
        }
        Some(word * 64 + bits.trailing_zeros() as usize)
    }

    /// Granules in holes, for the self-check.
    pub(super) fn free_granules(&self) -> usize {
        self.owned().map(|segment| usize::from(segment.free)).sum()
    }

    /// Segments owned.
    pub(super) fn segments(&self) -> usize {
        self.owned().count()
    }

    fn owned(&self) -> impl Iterator<Item = &Segment> {
        self.segments.iter().flatten()
    }

    /// Panics unless the invariants at the head of this file hold.
    #[cfg(test)]
    fn check_consistency(&self) {
        assert_eq!(
            self.holes,
            self.owned().map(|segment| segment.holes.len()).sum::<usize>()
        );
        assert_eq!(self.entries, self.bins.iter().map(Vec::len).sum::<usize>());
        for (local, segment) in self.segments.iter().enumerate() {
            let Some(segment) = segment else { continue };
            let free: u16 = segment.holes.iter().map(|hole| hole.len).sum();
            assert_eq!(segment.free, free);
            for pair in segment.holes.windows(2) {
                assert!(pair[0].start + pair[0].len < pair[1].start, "{:?} touch", pair);
            }
            for hole in &segment.holes {
                assert!(
                    hole.len > 0 && usize::from(hole.len) < SEGMENT_GRANULES + usize::from(segment.holes.len() == 1)
                );
                let bin = &self.bins[bin_of(usize::from(hole.len))];
                assert!(
                    segment.is_closed
                        || bin
                            .iter()
                            .any(|entry| entry.local as usize == local && entry.start == hole.start)
                );
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn the_smallest_hole_that_fits_is_taken() {
        let mut heap = Heap::default();
        let local = heap.add_segment(7);
        let places: Vec<_> = [10, 1, 5, 1, 6, 1]
            .map(|granules| heap.allocate(granules).unwrap().1)
            .into();
        for (at, granules) in [(0, 10), (2, 5), (4, 6)] {
            assert_eq!(heap.free(local, places[at], granules), None);
        }
        assert_eq!(heap.allocate(5), Some((7, places[2])));
        assert_eq!(heap.allocate(5), Some((7, places[4])));
        assert_eq!(heap.allocate(5), Some((7, places[0])));
        heap.check_consistency();
    }

    #[test]
    fn neighbours_coalesce_and_an_empty_segment_leaves() {
        let mut heap = Heap::default();
        let local = heap.add_segment(3);
        let places: Vec<_> = (0..3).map(|_| heap.allocate(100).unwrap().1).collect();
        assert_eq!(heap.free(local, places[0], 100), None);
        assert_eq!(heap.free(local, places[2], 100), None);
        assert_eq!(heap.free(local, places[1], 100), Some(3));
        assert_eq!((heap.segments(), heap.allocate(1)), (0, None));
    }

    #[test]
    fn a_closed_segment_gives_nothing_takes_back_and_leaves_when_empty() {
        let mut heap = Heap::default();
        let local = heap.add_segment(5);
        let places: Vec<_> = (0..3).map(|_| heap.allocate(100).unwrap().1).collect();
        assert!(!heap.close(local, 6), "another segment");
        assert!(heap.close(local, 5));
        assert!(!heap.close(local, 5), "closed already");
        assert_eq!(heap.allocate(1), None);
        assert_eq!(heap.free(local, places[1], 100), None);
        heap.check_consistency();
        assert_eq!(heap.allocate(100), None);
        assert!(heap.reopen(local, 5));
        heap.check_consistency();
        assert_eq!(heap.allocate(100), Some((5, places[1])));
        assert!(heap.close(local, 5));
        let emptied: Vec<_> = places.iter().map(|&place| heap.free(local, place, 100)).collect();
        assert_eq!(emptied, [None, None, Some(5)]);
        assert!(!heap.reopen(local, 5));
    }

    #[test]
    #[should_panic(expected = "free already")]
    fn a_double_free_is_our_own_fault() {
        let mut heap = Heap::default();
        let local = heap.add_segment(0);
        let place = heap.allocate(4).unwrap().1;
        heap.allocate(4).unwrap();
        heap.free(local, place, 4);
        heap.free(local, place, 4);
    }

    #[test]
    fn stale_entries_do_not_pile_up() {
        let mut heap = Heap::default();
        let local = heap.add_segment(0);
        heap.allocate(1).unwrap();
        for _ in 0..100_000 {
            let place = heap.allocate(9).unwrap().1;
            heap.free(local, place, 9);
        }
        assert!(
            heap.entries <= 2 * heap.holes + 1025,
            "{} entries for {} holes",
            heap.entries,
            heap.holes
        );
        heap.check_consistency();
    }

    #[test]
    fn bins_of_lengths_that_went_out_of_use_keep_no_room() {
        let mut heap = Heap::default();
        let locals: Vec<_> = (0..10).map(|number| heap.add_segment(number)).collect();
        // One object stays in each, so that none leaves the heap.
        let large = SEGMENT_GRANULES - super::super::OBJECT_GRANULES_MAX;
        let ends: Vec<_> = std::iter::from_fn(|| heap.allocate(300)).collect();
        for &(number, start) in ends.iter().filter(|end| end.1 < large) {
            assert_eq!(heap.free(locals[number as usize], start, 300), None);
        }
        for length in 2..=200 {
            // Objects of this length, kept apart by others, go first and leave as many holes of one length.
            let (mut long, mut short) = (vec![], vec![]);
            for _ in 0..10 * SEGMENT_GRANULES / 300 {
                long.push(heap.allocate(length).unwrap());
                short.push(heap.allocate(1).unwrap());
            }
            for (objects, granules) in [(long, length), (short, 1)] {
                for (number, start) in objects {
                    assert_eq!(heap.free(locals[number as usize], start, granules), None);
                }
            }
            let room: usize = heap.bins.iter().map(Vec::capacity).sum();
            let bound = BIN_ROOM_KEPT * length + 4 * heap.entries + 4096;
            assert!(
                room <= bound,
                "room for {room} entries, {bound} at most, after length {length}"
            );
        }
        heap.check_consistency();
    }

    #[test]
    fn a_bin_shrinks_as_it_empties() {
        let mut heap = Heap::default();
        let local = heap.add_segment(0);
        let places: Vec<_> = (0..SEGMENT_GRANULES / 2).map(|_| heap.allocate(1).unwrap().1).collect();
        let rest = heap.allocate(400).unwrap().1;
        places
            .iter()
            .step_by(2)
            .for_each(|&place| assert_eq!(heap.free(local, place, 1), None));
        assert!(heap.bins[1].capacity() >= 2048);
        while heap.allocate(1).is_some_and(|(_, place)| place < rest) {}
        assert!(heap.bins[1].capacity() <= BIN_ROOM_KEPT, "{}", heap.bins[1].capacity());
    }

    proptest! {
        /// Beside a plain map: no granule is given twice, none is lost.
        #[test]
        fn places_never_overlap(steps in prop::collection::vec((any::<bool>(), 1usize..=512, any::<prop::sample::Index>()), 1..600)) {
            let mut heap = Heap::default();
            let mut segments: Vec<Option<Local>> = vec![];
            let mut live: Vec<(u32, usize, usize)> = vec![];
            for (allocates, granules, which) in steps {
                if allocates || live.is_empty() {
                    let (number, start) = heap.allocate(granules).unwrap_or_else(|| {
                        segments.push(Some(heap.add_segment(segments.len() as u32)));
                        heap.allocate(granules).unwrap()
                    });
                    for &(other, at, len) in &live {
                        prop_assert!(other != number || start + granules <= at || at + len <= start);
                    }
                    live.push((number, start, granules));
                } else {
                    let (number, start, granules) = live.swap_remove(which.index(live.len()));
                    let local = segments[number as usize].unwrap();
                    if let Some(emptied) = heap.free(local, start, granules) {
                        prop_assert_eq!(emptied, number);
                        segments[number as usize] = None;
                    }
                }
                heap.check_consistency();
                let used: usize = live.iter().map(|object| object.2).sum();
                prop_assert_eq!(heap.free_granules() + used, heap.segments() * SEGMENT_GRANULES);
            }
        }
    }
}
