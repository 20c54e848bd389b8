//! Copies between a chain's buffers and private memory.
//!
//! A [`Cursor`] only moves forward, so a guest byte that passed it is never read again. No reference into guest memory
//! leaves this file: vm-memory's copies are volatile, and what they give is ours.

use vm_memory::{Address, Bytes, GuestMemoryMmap};

use crate::ring::Segment;

/// A buffer is not, or no longer, in guest memory, or the chain is shorter than was counted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct GuestFault;

/// A place in a row of buffers.
pub(crate) struct Cursor<'a> {
    mem: &'a GuestMemoryMmap,
    segments: std::slice::Iter<'a, Segment>,
    /// What is left of the buffer under the cursor.
    current: Option<Segment>,
}

impl<'a> Cursor<'a> {
    /// Starts `skip` bytes into `segments`.
    pub fn new(mem: &'a GuestMemoryMmap, segments: &'a [Segment], skip: u64) -> Result<Cursor<'a>, GuestFault> {
        let mut cursor = Cursor {
            mem,
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
            self.mem.read_slice(now, piece.addr).map_err(|_| GuestFault)?;
            to = later;
        }
        Ok(())
    }

    /// Copies `from` into the guest.
    pub fn write(&mut self, mut from: &[u8]) -> Result<(), GuestFault> {
        while !from.is_empty() {
            let piece = self.take(from.len() as u64)?;
            let (now, later) = from.split_at_checked(piece.len as usize).ok_or(GuestFault)?;
            self.mem.write_slice(now, piece.addr).map_err(|_| GuestFault)?;
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
    use vm_memory::GuestAddress;

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
        let mem = guest(0x4000);
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
        let mem = guest(0x4000);
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
        let mem = GuestMemoryMmap::from_ranges(&ranges).unwrap();
        let list = segments(&[(0xffc, 8)]);
        Cursor::new(&mem, &list, 0).unwrap().write(b"abcdefgh").unwrap();
        let mut buffer = [0; 8];
        Cursor::new(&mem, &list, 0).unwrap().read(&mut buffer).unwrap();
        assert_eq!(&buffer, b"abcdefgh");
    }
}
