//! One block request (virtio 1.3 section 5.2.6): from a chain to a [`Request`], from an [`Outcome`] to status and length.
//!
//! Nothing here has an effect. Everything that can be refused is refused here, before any effect, so that later rooms may
//! trust a `Request`: its sectors are on the disk, its buffers in guest memory, its ranges in private memory.
//!
//! Any framing is accepted, as VERSION_1 has it: the header is the first 16 readable bytes, the status the last writable
//! byte, and the data what is between them.

use virtio_bindings::virtio_blk::{
    VIRTIO_BLK_S_IOERR, VIRTIO_BLK_S_OK, VIRTIO_BLK_S_UNSUPP, VIRTIO_BLK_T_DISCARD, VIRTIO_BLK_T_FLUSH,
    VIRTIO_BLK_T_GET_ID, VIRTIO_BLK_T_IN, VIRTIO_BLK_T_OUT, VIRTIO_BLK_T_WRITE_ZEROES,
};
use vm_memory::{Address, GuestAddress};
use zram_core::{SECTOR_SIZE, SECTORS_PER_PAGE, SlotIndex};

use crate::config::Disk;
use crate::config_space::{RANGE_SECTORS_MAX, RANGES_MAX};
use crate::guest::{Cursor, Guest};
use crate::ring::{Chain, Segment};

/// Bytes of the header: type, reserved (a priority that is ignored), sector.
pub(crate) const HEADER_BYTES: u64 = 16;

/// Bytes of one range of DISCARD and WRITE_ZEROES.
const RANGE_BYTES: u64 = 16;

/// VIRTIO_BLK_WRITE_ZEROES_FLAG_UNMAP.
const FLAG_UNMAP: u32 = 1;

/// A sector of the disk: always 512 bytes, whatever the block size.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Sector(pub u64);

/// Sectors on the disk, checked: `first + count` is at most the capacity.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct SectorRange {
    pub first: Sector,
    pub count: u64,
}

impl SectorRange {
    /// The page in which the range begins. The disk has at most 2^32.
    pub fn first_slot(&self) -> SlotIndex {
        SlotIndex((self.first.0 / SECTORS_PER_PAGE as u64) as u32)
    }
}

/// What the guest wants, checked. The data of `In` and `Out` is in the chain, the ranges in the worker's [`Ranges`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Request {
    In(SectorRange),
    Out(SectorRange),
    Flush,
    /// Room for this many bytes of the serial.
    GetId(u64),
    Discard,
    WriteZeroes,
}

/// The checked ranges of one DISCARD or WRITE_ZEROES. Owned by the worker and used again.
pub(crate) type Ranges = Vec<SectorRange>;

/// Why a request is refused: the guest's fault.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Refusal {
    ShortHeader,
    UnknownType,
    /// Flags that the type does not have.
    Flags,
    /// A readable buffer behind a writable one.
    Misordered,
    /// Data to read where the device has to write, or the other way round.
    Direction,
    /// Not whole sectors, not whole ranges, too many ranges, or more bytes than a used length holds.
    Length,
    /// Not on the disk.
    OutOfRange,
    ReadOnly,
    /// A buffer is not in guest memory.
    OutsideMemory,
}

/// How a request ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Outcome {
    /// Done; this many bytes of data were written to the guest.
    Done(u32),
    Refused(Refusal),
    /// The disk could not: its limit is reached, or a page does not decode.
    Failed,
}

impl Outcome {
    /// The status byte.
    pub fn status(self) -> u8 {
        let status = match self {
            Outcome::Done(_) => VIRTIO_BLK_S_OK,
            Outcome::Refused(Refusal::ShortHeader | Refusal::UnknownType | Refusal::Flags) => VIRTIO_BLK_S_UNSUPP,
            Outcome::Refused(_) | Outcome::Failed => VIRTIO_BLK_S_IOERR,
        };
        status as u8
    }

    /// Bytes written, the status byte included. After a failure no more than the status counts.
    pub fn used_len(self) -> u32 {
        match self {
            Outcome::Done(data_bytes) => data_bytes.saturating_add(1),
            Outcome::Refused(_) | Outcome::Failed => 1,
        }
    }
}

/// Where the status byte goes: the last writable byte. `None` if there is none in guest memory; then nothing can be
/// answered.
pub(crate) fn status_addr(chain: &Chain, guest: &Guest) -> Option<GuestAddress> {
    let last = chain.writable.last()?;
    let addr = last.addr.checked_add(u64::from(last.len.checked_sub(1)?))?;
    guest.contains(addr, 1).then_some(addr)
}

/// Reads and checks a request. The chain has a status byte, by [`status_addr`].
pub(crate) fn parse(chain: &Chain, guest: &Guest, disk: &Disk, ranges: &mut Ranges) -> Result<Request, Refusal> {
    check_buffers(chain, guest)?;
    let header = Header::read(chain, guest)?;
    if chain.misordered {
        return Err(Refusal::Misordered);
    }
    let shape = Shape::of(chain)?;
    match header.kind {
        VIRTIO_BLK_T_IN => parse_in(&header, &shape, disk),
        VIRTIO_BLK_T_OUT => parse_out(&header, &shape, disk),
        VIRTIO_BLK_T_FLUSH if disk.config.flush => Ok(Request::Flush),
        VIRTIO_BLK_T_GET_ID if shape.readable_bytes > 0 => Err(Refusal::Direction),
        VIRTIO_BLK_T_GET_ID => Ok(Request::GetId(shape.writable_bytes)),
        VIRTIO_BLK_T_DISCARD | VIRTIO_BLK_T_WRITE_ZEROES => parse_ranges(&header, &shape, chain, guest, disk, ranges),
        _ => Err(Refusal::UnknownType),
    }
}

/// The copy of a request's header.
struct Header {
    kind: u32,
    sector: Sector,
}

impl Header {
    fn read(chain: &Chain, guest: &Guest) -> Result<Header, Refusal> {
        if chain.readable_bytes() < HEADER_BYTES {
            return Err(Refusal::ShortHeader);
        }
        let mut cursor = Cursor::new(guest, &chain.readable, 0).map_err(|_| Refusal::OutsideMemory)?;
        let header = read_u128(&mut cursor)?;
        Ok(Header {
            kind: header as u32,
            sector: Sector((header >> 64) as u64),
        })
    }
}

/// The data of a chain: without the header and the status byte.
struct Shape {
    readable_bytes: u64,
    writable_bytes: u64,
    /// The status byte's buffer is the only writable one: then bytes before it in it are not data, only room.
    status_alone: bool,
}

impl Shape {
    fn of(chain: &Chain) -> Result<Shape, Refusal> {
        let writable_bytes = chain.writable_bytes();
        // A used length is a u32, so the standard bounds a chain by it.
        if writable_bytes > u64::from(u32::MAX) {
            return Err(Refusal::Length);
        }
        Ok(Shape {
            readable_bytes: chain.readable_bytes().saturating_sub(HEADER_BYTES),
            writable_bytes: writable_bytes.saturating_sub(1),
            status_alone: chain.writable.len() == 1,
        })
    }
}

fn check_buffers(chain: &Chain, guest: &Guest) -> Result<(), Refusal> {
    let inside = |segment: &Segment| guest.contains(segment.addr, u64::from(segment.len));
    if chain.readable.iter().chain(&chain.writable).all(inside) {
        Ok(())
    } else {
        Err(Refusal::OutsideMemory)
    }
}

fn parse_in(header: &Header, shape: &Shape, disk: &Disk) -> Result<Request, Refusal> {
    if shape.readable_bytes > 0 {
        return Err(Refusal::Direction);
    }
    data_range(header.sector, shape.writable_bytes, disk).map(Request::In)
}

fn parse_out(header: &Header, shape: &Shape, disk: &Disk) -> Result<Request, Refusal> {
    check_changing(shape, disk)?;
    data_range(header.sector, shape.readable_bytes, disk).map(Request::Out)
}

/// What holds for all requests that change the disk.
fn check_changing(shape: &Shape, disk: &Disk) -> Result<(), Refusal> {
    if disk.config.read_only {
        return Err(Refusal::ReadOnly);
    }
    if shape.status_alone {
        Ok(())
    } else {
        Err(Refusal::Direction)
    }
}

fn data_range(first: Sector, bytes: u64, disk: &Disk) -> Result<SectorRange, Refusal> {
    let sector_bytes = SECTOR_SIZE as u64;
    if !bytes.is_multiple_of(sector_bytes) {
        return Err(Refusal::Length);
    }
    on_disk(
        SectorRange {
            first,
            count: bytes / sector_bytes,
        },
        disk,
    )
}

fn on_disk(range: SectorRange, disk: &Disk) -> Result<SectorRange, Refusal> {
    match range.first.0.checked_add(range.count) {
        Some(end) if end <= disk.capacity_sectors() => Ok(range),
        _ => Err(Refusal::OutOfRange),
    }
}

/// Copies and checks all ranges before any is applied.
fn parse_ranges(
    header: &Header,
    shape: &Shape,
    chain: &Chain,
    guest: &Guest,
    disk: &Disk,
    ranges: &mut Ranges,
) -> Result<Request, Refusal> {
    check_changing(shape, disk)?;
    let count = shape.readable_bytes / RANGE_BYTES;
    if !shape.readable_bytes.is_multiple_of(RANGE_BYTES) || !(1..=u64::from(RANGES_MAX)).contains(&count) {
        return Err(Refusal::Length);
    }
    let (request, flags_known) = if header.kind == VIRTIO_BLK_T_DISCARD {
        (Request::Discard, 0)
    } else {
        (Request::WriteZeroes, FLAG_UNMAP)
    };
    let mut cursor = Cursor::new(guest, &chain.readable, HEADER_BYTES).map_err(|_| Refusal::OutsideMemory)?;
    ranges.clear();
    for _ in 0..count {
        ranges.push(read_range(&mut cursor, flags_known, disk)?);
    }
    Ok(request)
}

fn read_range(cursor: &mut Cursor<'_>, flags_known: u32, disk: &Disk) -> Result<SectorRange, Refusal> {
    let range = read_u128(cursor)?;
    let (first, count, flags) = (Sector(range as u64), (range >> 64) as u32, (range >> 96) as u32);
    if flags & !flags_known != 0 {
        return Err(Refusal::Flags);
    }
    if count > RANGE_SECTORS_MAX {
        return Err(Refusal::Length);
    }
    on_disk(
        SectorRange {
            first,
            count: u64::from(count),
        },
        disk,
    )
}

/// Header and range alike are 16 bytes, little-endian throughout: one copy, and the fields are shifts.
fn read_u128(cursor: &mut Cursor<'_>) -> Result<u128, Refusal> {
    let mut bytes = [0; 16];
    cursor.read(&mut bytes).map_err(|_| Refusal::OutsideMemory)?;
    Ok(u128::from_le_bytes(bytes))
}

#[cfg(test)]
mod tests {
    use vm_memory::{Bytes, GuestMemoryMmap};

    use super::*;
    use crate::config::tests::disk;
    use crate::ring::tests::guest;

    /// Disk of 16 pages.
    const CAPACITY: u64 = 128;
    const GUEST_BYTES: usize = 0x10_0000;
    const HEADER: u64 = 0x1000;
    const DATA: u64 = 0x2000;
    const STATUS: u64 = 0x8_0000;

    struct Case {
        mem: GuestMemoryMmap,
        chain: Chain,
        disk: Disk,
        ranges: Ranges,
    }

    impl Case {
        fn new(kind: u32, sector: u64) -> Case {
            let mem = guest(GUEST_BYTES);
            let mut case = Case {
                mem,
                chain: Chain::default(),
                disk: disk(CAPACITY * 512, |_| {}),
                ranges: Ranges::new(),
            };
            case.mem.write_obj(kind.to_le(), GuestAddress(HEADER)).unwrap();
            case.mem.write_obj(0xffff_ffff_u32, GuestAddress(HEADER + 4)).unwrap();
            case.mem.write_obj(sector.to_le(), GuestAddress(HEADER + 8)).unwrap();
            case.readable(HEADER, 16);
            case
        }

        fn with_ranges(kind: u32, ranges: &[(u64, u32, u32)]) -> Case {
            let mut case = Case::new(kind, 0);
            for (index, (sector, count, flags)) in ranges.iter().enumerate() {
                let at = DATA + 16 * index as u64;
                case.mem.write_obj(sector.to_le(), GuestAddress(at)).unwrap();
                case.mem.write_obj(count.to_le(), GuestAddress(at + 8)).unwrap();
                case.mem.write_obj(flags.to_le(), GuestAddress(at + 12)).unwrap();
            }
            case.readable(DATA, 16 * ranges.len() as u32).writable(STATUS, 1);
            case
        }

        fn readable(&mut self, addr: u64, len: u32) -> &mut Case {
            self.chain.push(
                Segment {
                    addr: GuestAddress(addr),
                    len,
                },
                false,
            );
            self
        }

        fn writable(&mut self, addr: u64, len: u32) -> &mut Case {
            self.chain.push(
                Segment {
                    addr: GuestAddress(addr),
                    len,
                },
                true,
            );
            self
        }

        fn configured(mut self, change: impl FnOnce(&mut crate::config::DeviceConfig)) -> Case {
            change(&mut self.disk.config);
            self
        }

        fn parse(&mut self) -> Result<Request, Refusal> {
            parse(&self.chain, &Guest::of(&self.mem), &self.disk, &mut self.ranges)
        }
    }

    fn range(first: u64, count: u64) -> SectorRange {
        SectorRange {
            first: Sector(first),
            count,
        }
    }

    #[test]
    fn plain_requests_are_read() {
        let parsed = Case::new(VIRTIO_BLK_T_IN, 3)
            .writable(DATA, 4096)
            .writable(STATUS, 1)
            .parse();
        assert_eq!(parsed, Ok(Request::In(range(3, 8))));
        let parsed = Case::new(VIRTIO_BLK_T_OUT, 120)
            .readable(DATA, 4096)
            .writable(STATUS, 1)
            .parse();
        assert_eq!(parsed, Ok(Request::Out(range(120, 8))));
        let parsed = Case::new(VIRTIO_BLK_T_GET_ID, 0)
            .writable(DATA, 20)
            .writable(STATUS, 1)
            .parse();
        assert_eq!(parsed, Ok(Request::GetId(20)));
        let mut case = Case::with_ranges(VIRTIO_BLK_T_DISCARD, &[(0, 128, 0), (8, 0, 0)]);
        assert_eq!(case.parse(), Ok(Request::Discard));
        assert_eq!(case.ranges, [range(0, 128), range(8, 0)]);
    }

    #[test]
    fn flush_is_known_only_where_it_is_offered() {
        let flush = || {
            let mut case = Case::new(VIRTIO_BLK_T_FLUSH, 0);
            case.writable(STATUS, 1);
            case
        };
        assert_eq!(flush().parse(), Err(Refusal::UnknownType));
        assert_eq!(
            flush().configured(|config| config.flush = true).parse(),
            Ok(Request::Flush)
        );
    }

    #[test]
    fn any_framing_is_accepted() {
        // Header in 16 pieces of one byte, data in odd pieces, status joined to data.
        let mut case = Case::new(VIRTIO_BLK_T_IN, 1);
        case.chain = Chain::default();
        for byte in 0..16 {
            case.readable(HEADER + byte, 1);
        }
        case.writable(DATA, 1)
            .writable(DATA + 0x1000, 510)
            .writable(DATA + 0x2000, 2);
        assert_eq!(case.parse(), Ok(Request::In(range(1, 1))));
        assert_eq!(
            status_addr(&case.chain, &Guest::of(&case.mem)),
            Some(GuestAddress(DATA + 0x2001))
        );
        // Header and data in one buffer, room before the status.
        let mut case = Case::new(VIRTIO_BLK_T_OUT, 1);
        case.chain = Chain::default();
        case.readable(HEADER, 16 + 1024).writable(STATUS, 64);
        assert_eq!(case.parse(), Ok(Request::Out(range(1, 2))));
        assert_eq!(
            status_addr(&case.chain, &Guest::of(&case.mem)),
            Some(GuestAddress(STATUS + 63))
        );
    }

    #[test]
    fn without_a_writable_byte_in_memory_there_is_no_status() {
        let status = |case: &mut Case| status_addr(&case.chain, &Guest::of(&case.mem));
        assert_eq!(status(&mut Case::new(VIRTIO_BLK_T_IN, 0)), None);
        assert_eq!(status(Case::new(VIRTIO_BLK_T_IN, 0).writable(STATUS, 0)), None);
        for outside in [GUEST_BYTES as u64, u64::MAX - 8, u64::MAX] {
            assert_eq!(
                status(Case::new(VIRTIO_BLK_T_IN, 0).writable(outside, 1)),
                None,
                "{outside:x}"
            );
        }
        assert_eq!(status(Case::new(VIRTIO_BLK_T_IN, 0).writable(u64::MAX - 8, 16)), None);
        let last = GUEST_BYTES as u64 - 1;
        assert_eq!(
            status(Case::new(VIRTIO_BLK_T_IN, 0).writable(last, 1)),
            Some(GuestAddress(last))
        );
    }

    #[test]
    fn a_short_header_is_unsupported() {
        for len in [0, 1, 15] {
            let mut case = Case::new(VIRTIO_BLK_T_IN, 0);
            case.chain = Chain::default();
            case.readable(HEADER, len).writable(STATUS, 1);
            assert_eq!(case.parse(), Err(Refusal::ShortHeader), "{len}");
        }
    }

    #[test]
    fn unknown_types_are_unsupported() {
        let known = [
            VIRTIO_BLK_T_IN,
            VIRTIO_BLK_T_OUT,
            VIRTIO_BLK_T_GET_ID,
            VIRTIO_BLK_T_DISCARD,
            VIRTIO_BLK_T_WRITE_ZEROES,
        ];
        for kind in (0..40)
            .chain([1 << 31, 1 << 31 | 1, u32::MAX])
            .filter(|kind| !known.contains(kind))
        {
            let parsed = Case::new(kind, 0).writable(STATUS, 1).parse();
            assert_eq!(parsed, Err(Refusal::UnknownType), "{kind}");
        }
    }

    #[test]
    fn buffers_outside_memory_are_refused_before_anything_else() {
        for outside in [GUEST_BYTES as u64 - 511, GUEST_BYTES as u64, u64::MAX - 8] {
            let parsed = Case::new(VIRTIO_BLK_T_OUT, 0)
                .readable(outside, 512)
                .writable(STATUS, 1)
                .parse();
            assert_eq!(parsed, Err(Refusal::OutsideMemory), "{outside:x}");
            let parsed = Case::new(VIRTIO_BLK_T_IN, 0)
                .writable(outside, 512)
                .writable(STATUS, 1)
                .parse();
            assert_eq!(parsed, Err(Refusal::OutsideMemory), "{outside:x}");
        }
        let parsed = Case::with_ranges(VIRTIO_BLK_T_DISCARD, &[(0, 8, 0)])
            .readable(u64::MAX, 16)
            .parse();
        assert_eq!(parsed, Err(Refusal::OutsideMemory));
    }

    #[test]
    fn order_and_direction_are_checked() {
        let parsed = Case::new(VIRTIO_BLK_T_OUT, 0)
            .writable(STATUS, 1)
            .readable(DATA, 512)
            .parse();
        assert_eq!(parsed, Err(Refusal::Misordered));
        let parsed = Case::new(VIRTIO_BLK_T_IN, 0)
            .readable(DATA, 512)
            .writable(DATA, 512)
            .writable(STATUS, 1)
            .parse();
        assert_eq!(parsed, Err(Refusal::Direction));
        let parsed = Case::new(VIRTIO_BLK_T_OUT, 0)
            .readable(DATA, 512)
            .writable(DATA, 512)
            .writable(STATUS, 1)
            .parse();
        assert_eq!(parsed, Err(Refusal::Direction));
        let parsed = Case::new(VIRTIO_BLK_T_GET_ID, 0)
            .readable(DATA, 1)
            .writable(DATA, 20)
            .writable(STATUS, 1)
            .parse();
        assert_eq!(parsed, Err(Refusal::Direction));
    }

    #[test]
    fn data_is_whole_sectors_on_the_disk() {
        let read = |sector: u64, len: u32| {
            Case::new(VIRTIO_BLK_T_IN, sector)
                .writable(DATA, len)
                .writable(STATUS, 1)
                .parse()
        };
        assert_eq!(read(0, 0), Ok(Request::In(range(0, 0))));
        assert_eq!(read(CAPACITY, 0), Ok(Request::In(range(CAPACITY, 0))));
        assert_eq!(read(CAPACITY - 1, 512), Ok(Request::In(range(CAPACITY - 1, 1))));
        for len in [1, 511, 513, 4095] {
            assert_eq!(read(0, len), Err(Refusal::Length), "{len}");
        }
        for sector in [CAPACITY - 7, CAPACITY, u64::MAX - 7, u64::MAX, 1 << 55] {
            assert_eq!(read(sector, 4096), Err(Refusal::OutOfRange), "{sector}");
        }
    }

    #[test]
    fn a_read_only_disk_refuses_every_change_and_nothing_else() {
        let read_only = |case: Case| case.configured(|config| config.read_only = true);
        let mut out = read_only(Case::new(VIRTIO_BLK_T_OUT, 0));
        assert_eq!(
            out.readable(DATA, 512).writable(STATUS, 1).parse(),
            Err(Refusal::ReadOnly)
        );
        for kind in [VIRTIO_BLK_T_DISCARD, VIRTIO_BLK_T_WRITE_ZEROES] {
            assert_eq!(
                read_only(Case::with_ranges(kind, &[(0, 8, 0)])).parse(),
                Err(Refusal::ReadOnly)
            );
        }
        let mut id = read_only(Case::new(VIRTIO_BLK_T_GET_ID, 0));
        assert_eq!(
            id.writable(DATA, 20).writable(STATUS, 1).parse(),
            Ok(Request::GetId(20))
        );
        let mut read = read_only(Case::new(VIRTIO_BLK_T_IN, 0));
        assert_eq!(
            read.writable(DATA, 512).writable(STATUS, 1).parse(),
            Ok(Request::In(range(0, 1)))
        );
    }

    #[test]
    fn ranges_are_all_checked() {
        let discard = |ranges: &[(u64, u32, u32)]| Case::with_ranges(VIRTIO_BLK_T_DISCARD, ranges).parse();
        let zeroes = |ranges: &[(u64, u32, u32)]| Case::with_ranges(VIRTIO_BLK_T_WRITE_ZEROES, ranges).parse();
        assert_eq!(discard(&vec![(0, 1, 0); 256]), Ok(Request::Discard));
        assert_eq!(discard(&vec![(0, 1, 0); 257]), Err(Refusal::Length));
        assert_eq!(discard(&[]), Err(Refusal::Length));
        assert_eq!(discard(&[(0, 8, 0), (CAPACITY - 1, 2, 0)]), Err(Refusal::OutOfRange));
        assert_eq!(discard(&[(u64::MAX, 2, 0)]), Err(Refusal::OutOfRange));
        assert_eq!(discard(&[(0, u32::MAX, 0)]), Err(Refusal::Length));
        assert_eq!(
            Case::with_ranges(VIRTIO_BLK_T_DISCARD, &[(0, 8, 0)])
                .readable(DATA, 15)
                .parse(),
            Err(Refusal::Misordered)
        );
        let mut ragged = Case::new(VIRTIO_BLK_T_DISCARD, 0);
        assert_eq!(
            ragged.readable(DATA, 31).writable(STATUS, 1).parse(),
            Err(Refusal::Length)
        );
        for (flags, on_discard, on_zeroes) in [
            (0, Ok(Request::Discard), Ok(Request::WriteZeroes)),
            (1, Err(Refusal::Flags), Ok(Request::WriteZeroes)),
            (2, Err(Refusal::Flags), Err(Refusal::Flags)),
            (3, Err(Refusal::Flags), Err(Refusal::Flags)),
            (1 << 31, Err(Refusal::Flags), Err(Refusal::Flags)),
        ] {
            assert_eq!(discard(&[(0, 8, 0), (0, 8, flags)]), on_discard, "{flags}");
            assert_eq!(zeroes(&[(0, 8, 0), (0, 8, flags)]), on_zeroes, "{flags}");
        }
    }

    #[test]
    fn outcomes_become_status_and_length() {
        let answer = |outcome: Outcome| (outcome.status(), outcome.used_len());
        assert_eq!(answer(Outcome::Done(4096)), (0, 4097));
        assert_eq!(answer(Outcome::Done(0)), (0, 1));
        assert_eq!(answer(Outcome::Failed), (1, 1));
        for unsupported in [Refusal::ShortHeader, Refusal::UnknownType, Refusal::Flags] {
            assert_eq!(answer(Outcome::Refused(unsupported)), (2, 1));
        }
        for refusal in [
            Refusal::Misordered,
            Refusal::Direction,
            Refusal::Length,
            Refusal::OutOfRange,
            Refusal::ReadOnly,
            Refusal::OutsideMemory,
        ] {
            assert_eq!(answer(Outcome::Refused(refusal)), (1, 1));
        }
    }
}
