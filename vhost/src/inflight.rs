//! The in-flight region: memory that outlives us at the frontend, and says which requests were taken and not completed
//! (vhost-user.rst, "Inflight I/O tracking", split virtqueue).
//!
//! One part for each queue, one after the other, each rounded up to 64 bytes:
//!
//! ```text
//! 0  features u64 (0)   8  version u16 (1)   10  desc_num u16   12  last_batch_head u16   14  used_idx u16
//! then for each descriptor:
//! 0  inflight u8   1..6  unused   6  next u16   8  counter u64
//! ```
//!
//! Requests are completed in the order of the avail ring, so what is in flight is what lies in that ring from the used
//! index on. The region is kept to the letter all the same, for whoever takes over. Of what we find in it we believe one
//! thing: that it is in use. Then the ring goes on from its used index, whatever base the frontend names, since a frontend
//! without IN_ORDER may name one behind requests that were never answered.

use std::collections::VecDeque;
use std::fs::File;
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};

use rustix::fs::{MemfdFlags, SealFlags};

use crate::guest::Place;
use crate::memory::{self, MemoryError, RegionInfo};

const HEADER_BYTES: usize = 16;
const ENTRY_BYTES: usize = 16;
const PART_ALIGN: usize = 64;

const VERSION: u16 = 1;
const VERSION_AT: usize = 8;
const DESC_NUM_AT: usize = 10;
const LAST_BATCH_HEAD_AT: usize = 12;
const USED_IDX_AT: usize = 14;

/// How the region is divided.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Shape {
    pub num_queues: u16,
    pub queue_size: u16,
}

impl Shape {
    /// Bytes of one queue's part; at most half a MiB.
    fn part_bytes(self) -> usize {
        (HEADER_BYTES + ENTRY_BYTES * usize::from(self.queue_size)).next_multiple_of(PART_ALIGN)
    }

    pub fn bytes(self) -> u64 {
        self.part_bytes() as u64 * u64::from(self.num_queues)
    }
}

/// An empty region for a frontend to keep. Sealed, so that nobody can cut it.
pub(crate) fn create(shape: Shape) -> rustix::io::Result<File> {
    let fd = rustix::fs::memfd_create("zram-inflight", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
    rustix::fs::ftruncate(&fd, shape.bytes())?;
    rustix::fs::fcntl_add_seals(&fd, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
    Ok(File::from(fd))
}

/// A region that a frontend has given back.
pub(crate) struct Region {
    mapping: Arc<crate::fault::Mapping>,
    shape: Shape,
}

impl Region {
    /// Maps `shape` at `offset` of `file`, which is checked as guest memory is: it may have come from anywhere.
    pub fn map(file: File, offset: u64, shape: Shape) -> Result<Region, MemoryError> {
        let info = RegionInfo {
            guest_addr: 0,
            user_addr: 0,
            bytes: shape.bytes(),
            file_offset: offset,
        };
        let mapping = Arc::new(memory::map_checked(&info, file)?);
        Ok(Region { mapping, shape })
    }

    /// The part of a queue whose ring has `size` entries. `None` if there is none, or none of that size.
    pub fn part(&self, queue: u16, size: u16) -> Option<Place> {
        let fits = queue < self.shape.num_queues && size <= self.shape.queue_size;
        let bytes = self.shape.part_bytes();
        fits.then(|| Place::new(self.mapping.clone(), usize::from(queue) * bytes, bytes))
    }
}

/// One queue's part while its ring runs.
#[derive(Debug)]
pub(crate) struct Inflight {
    part: Place,
    /// Popped and not completed, oldest first.
    in_hand: VecDeque<u16>,
    /// Completed and not published.
    batch: Vec<u16>,
    last_batch_head: u16,
    counter: u64,
}

impl Inflight {
    /// Begins to track a ring of `size` entries whose used index is `used`. Also tells whether the part was in use, for a
    /// ring of this size.
    pub fn begin(part: Place, size: u16, used: u16) -> Option<(Inflight, bool)> {
        let field = |at: usize| part.load(at, Ordering::Relaxed);
        let was_in_use =
            field(VERSION_AT)? == VERSION && field(DESC_NUM_AT)? == size && field(LAST_BATCH_HEAD_AT)? < size;
        // What was in flight will be popped again, and noted again.
        for head in 0..size {
            part.write(entry(head), &[0; ENTRY_BYTES])?;
        }
        part.write(0, &0u64.to_le_bytes())?;
        for (at, value) in [(DESC_NUM_AT, size), (LAST_BATCH_HEAD_AT, 0), (USED_IDX_AT, used)] {
            part.store(at, value, Ordering::Relaxed)?;
        }
        // Last: the mark that the rest is there.
        part.store(VERSION_AT, VERSION, Ordering::Release)?;
        let inflight = Inflight {
            part,
            in_hand: VecDeque::new(),
            batch: Vec::new(),
            last_batch_head: 0,
            counter: 0,
        };
        Some((inflight, was_in_use))
    }

    /// A chain was popped.
    pub fn take(&mut self, head: u16) -> Option<()> {
        let note = 1u128 | u128::from(self.counter) << 64;
        self.counter = self.counter.wrapping_add(1);
        self.in_hand.push_back(head);
        self.part.write(entry(head), &note.to_le_bytes())
    }

    /// What was popped and not completed is put back.
    pub fn put_back(&mut self) {
        for head in std::mem::take(&mut self.in_hand) {
            // Past the end only if memory is, and then nobody reads it.
            let _ = self.part.write(entry(head), &[0]);
        }
    }

    /// The oldest chain in hand was completed.
    pub fn complete(&mut self) {
        self.batch.extend(self.in_hand.pop_front());
    }

    /// To be called before the used index is published.
    pub fn before_publishing(&mut self) -> Option<()> {
        for &head in &self.batch {
            self.part
                .store(entry(head) + 6, self.last_batch_head, Ordering::Relaxed)?;
            self.part.store(LAST_BATCH_HEAD_AT, head, Ordering::Relaxed)?;
            self.last_batch_head = head;
        }
        // We may end between any two of these; the order is what a successor goes by.
        fence(Ordering::Release);
        Some(())
    }

    /// To be called after the used index was published as `used`.
    pub fn after_publishing(&mut self, used: u16) -> Option<()> {
        fence(Ordering::Release);
        for head in self.batch.drain(..) {
            self.part.write(entry(head), &[0])?;
        }
        self.part.store(USED_IDX_AT, used, Ordering::Release)
    }
}

fn entry(head: u16) -> usize {
    HEADER_BYTES + ENTRY_BYTES * usize::from(head)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt;

    use super::*;

    const SHAPE: Shape = Shape {
        num_queues: 2,
        queue_size: 4,
    };

    fn region() -> (Region, File) {
        let file = create(SHAPE).unwrap();
        (Region::map(file.try_clone().unwrap(), 0, SHAPE).unwrap(), file)
    }

    fn bytes(file: &File, queue: usize) -> Vec<u8> {
        let mut bytes = vec![0; 80];
        file.read_exact_at(&mut bytes, queue as u64 * 128).unwrap();
        bytes
    }

    /// Byte for byte as the specification draws it.
    #[test]
    fn the_layout_is_the_specification_s() {
        let (region, file) = region();
        assert_eq!((SHAPE.bytes(), file.metadata().unwrap().len()), (256, 256));
        let (mut inflight, was_in_use) = Inflight::begin(region.part(1, 4).unwrap(), 4, 7).unwrap();
        assert!(!was_in_use);
        let mut golden = [0; 80];
        golden[8..16].copy_from_slice(&[1, 0, 4, 0, 0, 0, 7, 0]);
        assert_eq!(bytes(&file, 1), golden);
        inflight.take(2).unwrap();
        inflight.take(0).unwrap();
        golden[48] = 1;
        golden[16] = 1;
        golden[24] = 1; // the second
        assert_eq!(bytes(&file, 1), golden);
        inflight.complete();
        inflight.complete();
        inflight.before_publishing().unwrap();
        golden[16 + 6] = 2;
        assert_eq!(bytes(&file, 1), golden, "head 0 is last, head 2 before it");
        inflight.after_publishing(9).unwrap();
        golden[48] = 0;
        golden[16] = 0;
        golden[14] = 9;
        assert_eq!(bytes(&file, 1), golden);
        inflight.take(3).unwrap();
        inflight.put_back();
        golden[64 + 8] = 2;
        assert_eq!(bytes(&file, 1), golden);
        assert_eq!(bytes(&file, 0), [0; 80], "the other queue's part");
    }

    #[test]
    fn a_part_that_makes_no_sense_is_a_fresh_one() {
        let (region, file) = region();
        let begin = || Inflight::begin(region.part(0, 4).unwrap(), 4, 0).unwrap().1;
        assert!(!begin());
        assert!(begin());
        for (at, value) in [(8, 2), (8, 0), (10, 8), (12, 4), (13, 0xff)] {
            assert!(begin());
            file.write_all_at(&[value], at).unwrap();
            assert!(!begin(), "byte {at} is {value}");
        }
        let noise: Vec<u8> = (0..64).map(|at| (at * 37) as u8).collect();
        file.write_all_at(&noise, 16).unwrap();
        assert!(begin(), "the entries are not believed, nor do they matter");
    }

    #[test]
    fn there_are_parts_for_the_queues_that_were_asked_for() {
        let (region, _file) = region();
        assert!(region.part(1, 2).is_some());
        assert!(region.part(2, 4).is_none());
        assert!(region.part(0, 8).is_none());
    }

    #[test]
    fn a_region_is_where_its_file_has_it() {
        let file = || create(SHAPE).unwrap();
        for (offset, what) in [(1, "unaligned"), (4096, "past the end"), (u64::MAX - 100, "wraps")] {
            assert!(Region::map(file(), offset, SHAPE).is_err(), "{what}");
        }
        let larger = Shape {
            num_queues: 64,
            ..SHAPE
        };
        assert!(Region::map(file(), 0, larger).is_err());
        assert!(Region::map(File::open("/dev/null").unwrap(), 0, SHAPE).is_err());
        assert!(file().set_len(0).is_err(), "sealed");
    }
}
