//! What a frontend asks, and what it gets.

use virtio_bindings::virtio_blk::*;

/// A request and the way it is cut into descriptors. The readable bytes are header and data, the writable bytes data and
/// status; each list of cuts gives the lengths of the first descriptors, and what is left over makes one more.
#[derive(Clone, Debug)]
pub struct Request {
    pub kind: u32,
    pub sector: u64,
    pub data: Vec<u8>,
    pub in_len: usize,
    pub readable: Vec<usize>,
    pub writable: Vec<usize>,
    pub indirect: bool,
}

/// One range of a discard or write zeroes request.
#[derive(Clone, Copy, Debug)]
pub struct Range {
    pub sector: u64,
    pub sectors: u32,
    pub flags: u32,
}

pub fn range(sector: u64, sectors: u32) -> Range {
    Range {
        sector,
        sectors,
        flags: 0,
    }
}

impl Request {
    pub fn new(kind: u32, sector: u64, data: &[u8], in_len: usize) -> Request {
        let data = data.to_vec();
        Request {
            kind,
            sector,
            data,
            in_len,
            readable: vec![16],
            writable: vec![in_len],
            indirect: false,
        }
    }

    pub fn read(sector: u64, len: usize) -> Request {
        Request::new(VIRTIO_BLK_T_IN, sector, &[], len)
    }

    pub fn write(sector: u64, data: &[u8]) -> Request {
        Request::new(VIRTIO_BLK_T_OUT, sector, data, 0)
    }

    pub fn get_id(len: usize) -> Request {
        Request::new(VIRTIO_BLK_T_GET_ID, 0, &[], len)
    }

    pub fn discard(ranges: &[Range]) -> Request {
        Request::new(VIRTIO_BLK_T_DISCARD, 0, &range_bytes(ranges), 0)
    }

    pub fn write_zeroes(ranges: &[Range]) -> Request {
        Request::new(VIRTIO_BLK_T_WRITE_ZEROES, 0, &range_bytes(ranges), 0)
    }

    pub fn cut(mut self, readable: &[usize], writable: &[usize]) -> Request {
        self.readable = readable.to_vec();
        self.writable = writable.to_vec();
        self
    }

    pub fn indirect(mut self) -> Request {
        self.indirect = true;
        self
    }
}

fn range_bytes(ranges: &[Range]) -> Vec<u8> {
    let mut bytes = Vec::new();
    for range in ranges {
        bytes.extend_from_slice(&range.sector.to_le_bytes());
        bytes.extend_from_slice(&range.sectors.to_le_bytes());
        bytes.extend_from_slice(&range.flags.to_le_bytes());
    }
    bytes
}

#[derive(Clone, Copy, Debug)]
pub struct Descriptor {
    pub addr: u64,
    pub len: u32,
    pub flags: u16,
    pub next: u16,
}

pub fn descriptor(addr: u64, len: u32, flags: u16, next: u16) -> Descriptor {
    Descriptor { addr, len, flags, next }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Used {
    pub id: u16,
    pub len: u32,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reply {
    pub status: u8,
    pub used_len: u32,
    /// The writable bytes without the status.
    pub data: Vec<u8>,
}
