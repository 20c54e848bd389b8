//! Guest memory as a worker sees it, and copies between it and private memory.
//!
//! A [`Guest`] finds mapped bytes by guest address: a sorted array, and the region found last, which is nearly always the
//! one asked for next. A [`Place`] is an area found once and kept: a ring's. A [`Cursor`] only moves forward, so a guest
//! byte that passed it is never read again. No reference into guest memory leaves this file: vm-memory's copies are
//! volatile, and what they give is ours.

use std::cell::Cell;
use std::sync::Arc;
use std::sync::atomic::{AtomicU16, Ordering};

use vm_memory::{Address, GuestAddress, VolatileMemory, VolatileSlice};

use crate::fault::{self, Mapping};
use crate::ring::Segment;

/// A buffer is not, or no longer, in guest memory, or the chain is shorter than was counted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct GuestFault;

/// The regions of one guest, for one worker. It keeps them mapped.
pub(crate) struct Guest {
    /// By `start`, not overlapping, none empty.
    regions: Vec<Region>,
    /// Index of the region found last.
    last: Cell<usize>,
    /// The losses of regions, anybody's, that this guest is known to have survived.
    losses_seen: Cell<usize>,
}

#[derive(Clone)]
pub(crate) struct Region {
    pub start: u64,
    pub bytes: u64,
    pub mapping: Arc<Mapping>,
}

impl Guest {
    /// Of regions sorted by their start.
    pub fn new(regions: Vec<Region>) -> Guest {
        Guest {
            regions,
            last: Cell::new(0),
            // Not the present number: one of these may have been lost already.
            losses_seen: Cell::new(0),
        }
    }

    /// Whether some of it is gone. Cheap as long as nobody loses memory.
    #[inline]
    pub fn is_lost(&self) -> bool {
        let losses = fault::losses();
        losses != self.losses_seen.get() && self.look_for_losses(losses)
    }

    #[cold]
    fn look_for_losses(&self, losses: usize) -> bool {
        let lost = self.regions.iter().any(|region| region.mapping.is_lost());
        if !lost {
            self.losses_seen.set(losses);
        }
        lost
    }

    /// Of memory made by vm-memory.
    #[cfg(any(test, fuzzing))]
    pub fn of(mem: &vm_memory::GuestMemoryMmap) -> Guest {
        use vm_memory::{GuestMemoryBackend, GuestMemoryRegion};
        let region = |region: &vm_memory::GuestRegionMmap| Region {
            start: region.start_addr().raw_value(),
            bytes: region.len(),
            mapping: Arc::new(Mapping::new(region.get_mmap()).expect("few regions")),
        };
        Guest::new(mem.iter().map(region).collect())
    }

    /// The region that has `addr`, and where in it that is.
    #[inline]
    fn find(&self, addr: u64) -> Option<(&Region, u64)> {
        if let Some(region) = self.regions.get(self.last.get()) {
            let offset = addr.wrapping_sub(region.start);
            if offset < region.bytes {
                return Some((region, offset));
            }
        }
        self.search(addr)
    }

    #[inline(never)]
    fn search(&self, addr: u64) -> Option<(&Region, u64)> {
        let after = self.regions.partition_point(|region| region.start <= addr);
        let index = after.checked_sub(1)?;
        let region = self.regions.get(index)?;
        let offset = addr - region.start;
        self.last.set(index);
        (offset < region.bytes).then_some((region, offset))
    }

    /// Whether `bytes` bytes from `addr` on are guest memory, in one region or in adjacent ones.
    #[inline]
    pub fn contains(&self, addr: GuestAddress, bytes: u64) -> bool {
        let (mut at, mut left) = (addr.0, bytes);
        while let Some((region, offset)) = self.find(at) {
            let here = region.bytes - offset;
            if left <= here {
                return true;
            }
            left -= here;
            match at.checked_add(here) {
                Some(next) => at = next,
                None => return false,
            }
        }
        false
    }

    /// An area to keep, if it lies in one region.
    pub fn place(&self, addr: GuestAddress, bytes: u64) -> Option<Place> {
        let (region, offset) = self.find(addr.0)?;
        (bytes <= region.bytes - offset).then(|| Place {
            mapping: region.mapping.clone(),
            // A region is mapped, so its size is a usize.
            start: offset as usize,
            bytes: bytes as usize,
        })
    }

    /// Copies out of the guest.
    #[inline]
    pub fn read(&self, addr: GuestAddress, to: &mut [u8]) -> Result<(), GuestFault> {
        let mut done = 0;
        self.pieces(addr, to.len(), |slice| {
            done += slice.copy_to(to.get_mut(done..).unwrap_or_default());
        })
    }

    /// Copies into the guest.
    #[inline]
    pub fn write(&self, addr: GuestAddress, from: &[u8]) -> Result<(), GuestFault> {
        let mut done = 0;
        self.pieces(addr, from.len(), |slice| {
            let piece = from.get(done..done + slice.len()).unwrap_or_default();
            slice.copy_from(piece);
            done += piece.len();
        })
    }

    /// Gives `each` the mapped pieces of a range: one, unless it crosses from one region into the next.
    #[inline]
    fn pieces(
        &self,
        addr: GuestAddress,
        bytes: usize,
        mut each: impl FnMut(VolatileSlice<'_>),
    ) -> Result<(), GuestFault> {
        let (mut at, mut left) = (addr.0, bytes as u64);
        while left > 0 {
            let (region, offset) = self.find(at).ok_or(GuestFault)?;
            let here = left.min(region.bytes - offset);
            let memory = region.mapping.memory();
            each(
                memory
                    .get_slice(offset as usize, here as usize)
                    .map_err(|_| GuestFault)?,
            );
            if region.mapping.is_lost() {
                return Err(GuestFault);
            }
            left -= here;
            at = at.wrapping_add(here);
        }
        Ok(())
    }
}

/// An area within one region, found once and kept mapped. Accesses past its end give nothing.
#[derive(Debug)]
pub(crate) struct Place {
    mapping: Arc<Mapping>,
    start: usize,
    bytes: usize,
}

impl Place {
    /// `bytes` bytes from `start` on. Where the mapping ends before, accesses give nothing.
    pub fn new(mapping: Arc<Mapping>, start: usize, bytes: usize) -> Place {
        Place { mapping, start, bytes }
    }

    #[inline]
    fn at(&self, offset: usize, bytes: usize) -> Option<usize> {
        (offset.checked_add(bytes)? <= self.bytes).then_some(self.start + offset)
    }

    #[inline]
    fn u16(&self, offset: usize) -> Option<&AtomicU16> {
        self.mapping
            .memory()
            .get_atomic_ref(self.at(offset, size_of::<u16>())?)
            .ok()
    }

    /// Reads a little-endian field. `None` past the end, or if it is not aligned.
    #[inline]
    pub fn load(&self, offset: usize, order: Ordering) -> Option<u16> {
        Some(u16::from_le(self.u16(offset)?.load(order)))
    }

    /// Writes a little-endian field.
    #[inline]
    pub fn store(&self, offset: usize, value: u16, order: Ordering) -> Option<()> {
        self.u16(offset)?.store(value.to_le(), order);
        Some(())
    }

    /// Copies bytes out.
    #[inline]
    pub fn read<const N: usize>(&self, offset: usize) -> Option<[u8; N]> {
        let mut bytes = [0; N];
        let slice = self.mapping.memory().get_slice(self.at(offset, N)?, N).ok()?;
        slice.copy_to(&mut bytes);
        Some(bytes)
    }

    /// Copies bytes in.
    #[inline]
    pub fn write(&self, offset: usize, bytes: &[u8]) -> Option<()> {
        let slice = self
            .mapping
            .memory()
            .get_slice(self.at(offset, bytes.len())?, bytes.len())
            .ok()?;
        slice.copy_from(bytes);
        Some(())
    }
}

/// A place in a row of buffers.
pub(crate) struct Cursor<'a> {
    guest: &'a Guest,
    segments: std::slice::Iter<'a, Segment>,
    /// What is left of the buffer under the cursor.
    current: Option<Segment>,
}

impl<'a> Cursor<'a> {
    /// Starts `skip` bytes into `segments`.
    pub fn new(guest: &'a Guest, segments: &'a [Segment], skip: u64) -> Result<Cursor<'a>, GuestFault> {
        let mut cursor = Cursor {
            guest,
            segments: segments.iter(),
            current: None,
        };
        let mut left = skip;
        while left > 0 {
            let piece = cursor.take(left)?;
            left -= u64::from(piece.len);
        }
        Ok(cursor)
    }

    /// Copies the next bytes out of the guest.
    pub fn read(&mut self, mut to: &mut [u8]) -> Result<(), GuestFault> {
        while !to.is_empty() {
            let piece = self.take(to.len() as u64)?;
            let (now, later) = to.split_at_mut_checked(piece.len as usize).ok_or(GuestFault)?;
            self.guest.read(piece.addr, now)?;
            to = later;
        }
        Ok(())
    }

    /// Copies `from` into the guest.
    pub fn write(&mut self, mut from: &[u8]) -> Result<(), GuestFault> {
        while !from.is_empty() {
            let piece = self.take(from.len() as u64)?;
            let (now, later) = from.split_at_checked(piece.len as usize).ok_or(GuestFault)?;
            self.guest.write(piece.addr, now)?;
            from = later;
        }
        Ok(())
    }

    /// Moves over the next piece: `most` bytes, or what is left of the buffer.
    fn take(&mut self, most: u64) -> Result<Segment, GuestFault> {
        let whole = match self.current.take() {
            Some(rest) => rest,
            None => *self.segments.next().ok_or(GuestFault)?,
        };
        let len = u32::try_from(most).unwrap_or(u32::MAX).min(whole.len);
        if len < whole.len {
            let addr = whole.addr.checked_add(u64::from(len)).ok_or(GuestFault)?;
            self.current = Some(Segment {
                addr,
                len: whole.len - len,
            });
        }
        Ok(Segment { addr: whole.addr, len })
    }
}

#[cfg(test)]
mod tests {
    use vm_memory::GuestMemoryMmap;

    use super::*;
    use crate::ring::tests::guest;

    fn segments(list: &[(u64, u32)]) -> Vec<Segment> {
        list.iter()
            .map(|(addr, len)| Segment {
                addr: GuestAddress(*addr),
                len: *len,
            })
            .collect()
    }

    #[test]
    fn bytes_are_gathered_and_scattered_across_buffers() {
        let mem = Guest::of(&guest(0x4000));
        let list = segments(&[(0x100, 3), (0x3000, 1), (0x200, 8)]);
        Cursor::new(&mem, &list, 0).unwrap().write(b"0123456789ab").unwrap();
        let mut buffer = [0; 5];
        let mut cursor = Cursor::new(&mem, &list, 2).unwrap();
        cursor.read(&mut buffer).unwrap();
        assert_eq!(&buffer, b"23456");
        cursor.read(&mut buffer).unwrap();
        assert_eq!(&buffer, b"789ab");
        assert_eq!(cursor.read(&mut buffer), Err(GuestFault));
    }

    #[test]
    fn a_skip_past_the_end_or_a_buffer_outside_memory_is_a_fault() {
        let mem = Guest::of(&guest(0x4000));
        assert!(Cursor::new(&mem, &segments(&[(0, 8)]), 9).is_err());
        let outside = segments(&[(0x3ffc, 8)]);
        assert_eq!(Cursor::new(&mem, &outside, 0).unwrap().write(&[0; 8]), Err(GuestFault));
        assert_eq!(
            Cursor::new(&mem, &outside, 0).unwrap().read(&mut [0; 8]),
            Err(GuestFault)
        );
    }

    #[test]
    fn a_buffer_across_adjacent_regions_is_one_buffer() {
        let ranges = [(GuestAddress(0), 0x1000), (GuestAddress(0x1000), 0x1000)];
        let mem = Guest::of(&GuestMemoryMmap::from_ranges(&ranges).unwrap());
        let list = segments(&[(0xffc, 8)]);
        Cursor::new(&mem, &list, 0).unwrap().write(b"abcdefgh").unwrap();
        let mut buffer = [0; 8];
        Cursor::new(&mem, &list, 0).unwrap().read(&mut buffer).unwrap();
        assert_eq!(&buffer, b"abcdefgh");
    }
}
