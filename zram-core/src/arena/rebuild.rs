//! Heaps and holes from the objects' places alone: for an arena whose process is gone.
//!
//! The slot table says where every object lies and how long it is. Two walks: the first counts the objects of each
//! segment, the second puts them there, grouped (a counting sort: the table may be larger than the caches, a segment's
//! objects are not). Sorted within its segment each object must begin where the one before it ended, or later, and what
//! lies between are the holes. Segments without an object have their memory given back, so what a process stored and
//! did not publish before it died costs nothing.

use std::io;

use super::heap::Hole;
use super::{Arena, SEGMENT_GRANULES, SEGMENT_SIZE, segment_of};
use crate::slot::Handle;

/// Bits of a place in its segment, and of a length, in the word of an object.
const LEN_BITS: u32 = 10;

/// Why the objects' places make no arena.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum LayoutError {
    /// An object ends past its segment, or its segment is past the arena's end.
    Outside(Handle),
    /// Two objects have granules in common; this is the later one.
    Overlap(Handle),
}

/// Objects by their segments: first all are counted, then all are placed.
#[derive(Debug, Default)]
pub(crate) struct Layout {
    /// Counted: how many objects a segment has. Placed: where in `objects` its next one goes.
    cursors: Vec<u32>,
    /// Start and length of each object, grouped by segment.
    objects: Vec<u32>,
}

impl Layout {
    pub(crate) fn count(&mut self, handle: Handle) {
        let segment = segment_of(handle) as usize;
        if segment >= self.cursors.len() {
            self.cursors.resize(segment + 1, 0);
        }
        self.cursors[segment] += 1;
    }

    /// Ends the counting.
    pub(crate) fn counted(&mut self) {
        let mut next = 0;
        for cursor in &mut self.cursors {
            next += std::mem::replace(cursor, next);
        }
        self.objects = vec![0; next as usize];
    }

    /// Places an object that was counted.
    pub(crate) fn place(&mut self, handle: Handle, granules: usize) {
        let cursor = &mut self.cursors[segment_of(handle) as usize];
        let start = handle.granule() as u32 % SEGMENT_GRANULES as u32;
        self.objects[*cursor as usize] = start << LEN_BITS | granules as u32;
        *cursor += 1;
    }

    /// Each segment with its objects; after all were placed.
    fn segments(&mut self) -> impl Iterator<Item = (u32, &mut [u32])> {
        // Every cursor now stands where the next segment's objects begin.
        let mut rest = &mut self.objects[..];
        let mut start = 0;
        self.cursors.iter().enumerate().map(move |(number, &end)| {
            let (objects, tail) = std::mem::take(&mut rest).split_at_mut((end - start) as usize);
            (rest, start) = (tail, end);
            (number as u32, objects)
        })
    }
}

/// The holes between objects, which get sorted.
fn holes_between(segment: u32, objects: &mut [u32]) -> Result<Vec<Hole>, LayoutError> {
    objects.sort_unstable();
    let mut holes = vec![];
    let mut end = 0;
    for object in objects {
        let (start, len) = (*object >> LEN_BITS, *object & ((1 << LEN_BITS) - 1));
        let handle = super::handle_at((segment, start as usize));
        if start < end {
            return Err(LayoutError::Overlap(handle));
        }
        if start > end {
            holes.push(hole(end, start));
        }
        end = start + len;
        if end as usize > SEGMENT_GRANULES {
            return Err(LayoutError::Outside(handle));
        }
    }
    if (end as usize) < SEGMENT_GRANULES {
        holes.push(hole(end, SEGMENT_GRANULES as u32));
    }
    Ok(holes)
}

fn hole(start: u32, end: u32) -> Hole {
    Hole {
        start: start as u16,
        len: (end - start) as u16,
    }
}

impl Arena {
    /// Whether a segment of this number exists: asked before [`Layout::count`].
    pub(crate) fn has_segment_of(&self, handle: Handle) -> bool {
        (segment_of(handle) as usize) < self.bytes.len() / SEGMENT_SIZE
    }

    /// Makes heaps of an adopted arena's objects, spread over `heaps` of them, and gives back what holds none.
    pub(crate) fn rebuild(&self, mut layout: Layout, heaps: usize) -> io::Result<Result<(), LayoutError>> {
        let mut in_use = vec![false; layout.cursors.len()];
        // A process that died at its limit had its spare segment in use; what lies in it has to be moved before another
        // write can go there. It was the sparsest one: at most a page or two are there at a time.
        let live = |objects: &[u32]| objects.iter().map(|object| object & ((1 << LEN_BITS) - 1)).sum::<u32>();
        let lives = layout.segments().map(|(number, objects)| (live(objects), number));
        let used: Vec<_> = lives.filter(|&(live, _)| live != 0).collect();
        let is_spare_used = used.len() as u64 > self.segments.replace_bound();
        let spare = used
            .into_iter()
            .min()
            .filter(|_| is_spare_used)
            .map(|(_, number)| number);
        for (number, objects) in layout.segments() {
            if objects.is_empty() {
                continue;
            }
            let holes = match holes_between(number, objects) {
                Ok(holes) => holes,
                Err(error) => return Ok(Err(error)),
            };
            in_use[number as usize] = true;
            let owner = if Some(number) == spare {
                self.spare_heap()
            } else {
                number as usize % heaps
            };
            let mut heap = self.try_heap(owner).expect("nobody else has the arena yet");
            self.own_segment(owner, &mut heap, number, |heap| heap.add_segment_with(number, holes));
        }
        self.segments
            .adopt(in_use.len() as u32, |number| in_use[number as usize]);
        self.give_back_unused(&in_use)?;
        Ok(Ok(()))
    }

    /// Punches holes wherever the arena has memory and no segment in use.
    fn give_back_unused(&self, in_use: &[bool]) -> io::Result<()> {
        let is_in_use = |number: usize| in_use.get(number).is_some_and(|&in_use| in_use);
        for range in self.bytes.populated_ranges()? {
            let numbers: Vec<_> = (range.start / SEGMENT_SIZE..range.end.div_ceil(SEGMENT_SIZE)).collect();
            for run in numbers.chunk_by(|&one, &next| is_in_use(one) == is_in_use(next)) {
                if !is_in_use(run[0]) {
                    // SAFETY: these segments hold no object, and nobody else has the arena yet.
                    unsafe { self.bytes.punch_hole(run[0] * SEGMENT_SIZE, run.len() * SEGMENT_SIZE) }?;
                }
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::arena::handle_at;

    fn layout(objects: &[(u32, usize, usize)]) -> Layout {
        let mut layout = Layout::default();
        let handles = objects
            .iter()
            .map(|&(segment, start, granules)| (handle_at((segment, start)), granules));
        handles.clone().for_each(|(handle, _)| layout.count(handle));
        layout.counted();
        handles.for_each(|(handle, granules)| layout.place(handle, granules));
        layout
    }

    fn holes(objects: &[(u32, usize, usize)]) -> Vec<Result<Vec<(u16, u16)>, LayoutError>> {
        let mut layout = layout(objects);
        let of_each = layout.segments().map(|(number, objects)| {
            let holes = holes_between(number, objects)?;
            Ok(holes.iter().map(|hole| (hole.start, hole.len)).collect())
        });
        of_each.collect()
    }

    #[test]
    fn what_lies_between_objects_is_holes() {
        let found = holes(&[(2, 500, 12), (0, 8191, 1), (2, 0, 500), (0, 10, 5), (2, 600, 512)]);
        assert_eq!(found[0], Ok(vec![(0, 10), (15, 8176)]));
        assert_eq!(found[1], Ok(vec![(0, 8192)]), "a segment without objects");
        assert_eq!(found[2], Ok(vec![(512, 88), (1112, 7080)]));
        assert_eq!(found.len(), 3);
    }

    #[test]
    fn objects_that_overlap_or_leave_their_segment_are_named() {
        let handle = |start| handle_at((1, start));
        assert_eq!(holes(&[(1, 5, 3), (1, 7, 1)])[1], Err(LayoutError::Overlap(handle(7))));
        assert_eq!(holes(&[(1, 5, 3), (1, 5, 3)])[1], Err(LayoutError::Overlap(handle(5))));
        assert_eq!(holes(&[(1, 8190, 3)])[1], Err(LayoutError::Outside(handle(8190))));
        assert_eq!(holes(&[(1, 8190, 2)])[1], Ok(vec![(0, 8190)]));
    }
}
