//! A picture of the arena for the operator: how full segments are, which holes there are, and whose they are.

use super::{Arena, SEGMENT_GRANULES, SEGMENT_SIZE};
use crate::slot::GRANULE_SIZE;

/// Classes of the live share: up to 10 %, up to 20 %, and so on; a full segment is in the last.
pub const LIVE_SHARES: usize = 10;

/// Segments, holes and owners at about one moment. A heap in use all the time is counted in `busy_heaps` and left out.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ArenaReport {
    /// Bytes of a segment.
    pub segment_bytes: u64,
    /// Segments that hold objects.
    pub segments_in_use: u64,
    /// Empty segments whose memory has not gone back to the host yet.
    pub segments_empty: u64,
    /// Segments by the share of them that objects take: `[n]` has those above n tenths, up to and with n + 1.
    pub live_shares: [u64; LIVE_SHARES],
    /// Holes by their length, shortest first; classes without one are left out.
    pub holes: Vec<HoleClass>,
    /// Heaps that own segments.
    pub heaps: Vec<HeapReport>,
    /// Heaps that were in use whenever they were looked at.
    pub busy_heaps: u64,
}

/// Holes of similar length.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HoleClass {
    /// The shortest that is in the class, in bytes: 8 times a power of two. The longest is one byte short of twice this.
    pub bytes_min: u64,
    /// Holes.
    pub count: u64,
    /// All their bytes.
    pub bytes: u64,
}

/// What one heap owns. A heap is used by the worker of the same number first, and by all.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HeapReport {
    /// Number of the heap.
    pub heap: usize,
    /// Its segments.
    pub segments: u64,
    /// Bytes of objects in them, those that wait for their grace period included.
    pub live_bytes: u64,
    /// Bytes of holes in them.
    pub hole_bytes: u64,
}

impl Arena {
    /// Looks at every heap, step by step; holds nobody up.
    pub(crate) fn report(&self) -> ArenaReport {
        let mut report = ArenaReport {
            segment_bytes: SEGMENT_SIZE as u64,
            segments_in_use: self.segments.in_use(),
            segments_empty: self.segments.held().saturating_sub(self.segments.in_use()),
            ..ArenaReport::default()
        };
        let mut classes = [HoleClass::default(); SEGMENT_GRANULES.ilog2() as usize + 1];
        for number in 0..self.heaps.len() {
            let mut heap = HeapReport {
                heap: number,
                ..HeapReport::default()
            };
            let seen = self.survey_heap(number, |segment| {
                let live = SEGMENT_GRANULES - usize::from(segment.free);
                report.live_shares[(live.saturating_sub(1)) * LIVE_SHARES / SEGMENT_GRANULES] += 1;
                heap.segments += 1;
                heap.live_bytes += (live * GRANULE_SIZE) as u64;
                for hole in segment.holes {
                    let bytes = u64::from(hole.len) * GRANULE_SIZE as u64;
                    heap.hole_bytes += bytes;
                    let class = &mut classes[hole.len.ilog2() as usize];
                    class.count += 1;
                    class.bytes += bytes;
                }
            });
            report.busy_heaps += u64::from(!seen);
            if heap.segments != 0 {
                report.heaps.push(heap);
            }
        }
        let with_bounds = classes.iter().enumerate().map(|(power, class)| HoleClass {
            bytes_min: (GRANULE_SIZE as u64) << power,
            ..*class
        });
        report.holes = with_bounds.filter(|class| class.count != 0).collect();
        report
    }
}
