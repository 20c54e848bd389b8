//! From a checked request to page operations on the core.
//!
//! The one place that knows how sectors lie in pages. A page passes through the worker's own [`Page`] in both directions:
//! copied out of the guest before the core compresses it, and decoded there before it is copied to the guest.
//!
//! A request may be left in the middle when the queue is being stopped. It is then not completed but done again later,
//! which every request bears: reads and writes of the same bytes, zeroes over zeroes.

use std::ops::ControlFlow;
use std::sync::atomic::{AtomicBool, Ordering};

use zram_core::{PAGE_SIZE, Page, SECTOR_SIZE, SECTORS_PER_PAGE, SlotIndex};

use crate::config::Disk;
use crate::guest::{Cursor, Guest, GuestFault};
use crate::request::{HEADER_BYTES, Outcome, Ranges, Refusal, Request, SectorRange};
use crate::ring::Chain;

/// Slots discarded between two looks at the stop flag: 1 GiB of disk.
const SLOTS_PER_STEP: u64 = 1 << 18;

static ZEROES: [u8; PAGE_SIZE] = [0; PAGE_SIZE];

/// What a worker needs of the core: its handle and the page that all data passes through.
pub(crate) struct Store {
    pub core: zram_core::Worker,
    pub page: Box<Page>,
}

/// One request being executed.
pub(crate) struct Execution<'a> {
    pub disk: &'a Disk,
    pub store: &'a mut Store,
    pub guest: &'a Guest,
    pub chain: &'a Chain,
    pub ranges: &'a Ranges,
    pub stop: &'a AtomicBool,
}

/// Why an execution ends early.
enum Early {
    /// The queue is being stopped.
    Stopped,
    /// The core could not.
    Failed,
    /// A checked buffer could not be copied after all.
    Fault,
}

impl From<GuestFault> for Early {
    fn from(_: GuestFault) -> Early {
        Early::Fault
    }
}

impl Execution<'_> {
    /// Executes `request`. `Break` if the queue is being stopped: the request is to be done again.
    pub fn run(&mut self, request: Request) -> ControlFlow<(), Outcome> {
        let done = match request {
            Request::In(range) => self.read(range),
            Request::Out(range) => self.write(range),
            Request::Flush => Ok(0),
            Request::GetId(room) => self.get_id(room),
            Request::Discard => self.discard(),
            Request::WriteZeroes => self.write_zeroes(),
        };
        match done {
            Ok(data_bytes) => ControlFlow::Continue(Outcome::Done(data_bytes)),
            Err(Early::Stopped) => ControlFlow::Break(()),
            Err(Early::Failed) => {
                self.count_failure(request);
                ControlFlow::Continue(Outcome::Failed)
            }
            Err(Early::Fault) => ControlFlow::Continue(Outcome::Refused(Refusal::OutsideMemory)),
        }
    }

    fn count_failure(&self, request: Request) {
        let counters = self.disk.zram.io_counters();
        match request {
            Request::In(_) => counters.count_failed_read(),
            Request::Out(_) | Request::WriteZeroes => counters.count_failed_write(),
            Request::Flush | Request::GetId(_) | Request::Discard => {}
        }
    }

    fn read(&mut self, range: SectorRange) -> Result<u32, Early> {
        let mut cursor = Cursor::new(self.guest, &self.chain.writable, 0)?;
        let mut pieces = pieces(range).peekable();
        while let Some(piece) = pieces.next() {
            self.check_stop()?;
            if let Some(next) = pieces.peek() {
                self.store.core.prefetch(next.slot);
            }
            self.store
                .core
                .read_page(piece.slot, &mut self.store.page)
                .map_err(|_| Early::Failed)?;
            cursor.write(self.store.page.get(piece.bytes()).ok_or(Early::Failed)?)?;
        }
        // A used length is a u32 and the parser has bounded the data by it.
        Ok(u32::try_from(range.count * SECTOR_SIZE as u64).unwrap_or(u32::MAX))
    }

    fn write(&mut self, range: SectorRange) -> Result<u32, Early> {
        let mut cursor = Cursor::new(self.guest, &self.chain.readable, HEADER_BYTES)?;
        for piece in pieces(range) {
            self.check_stop()?;
            let data = self.store.page.get_mut(piece.bytes()).ok_or(Early::Failed)?;
            cursor.read(data)?;
            let stored = if piece.is_whole_page() {
                self.store.core.write_page(piece.slot, &self.store.page)
            } else {
                self.store.core.write_sectors(piece.slot, piece.first, data)
            };
            stored.map_err(|_| Early::Failed)?;
        }
        Ok(0)
    }

    fn get_id(&mut self, room: u64) -> Result<u32, Early> {
        let serial = self.disk.config.serial;
        let count = serial.as_bytes().len().min(usize::try_from(room).unwrap_or(usize::MAX));
        let id = serial.as_bytes().get(..count).ok_or(Early::Fault)?;
        Cursor::new(self.guest, &self.chain.writable, 0)?.write(id)?;
        Ok(count as u32)
    }

    /// Frees what can be freed: whole pages. The guest may not rely on the rest.
    fn discard(&mut self) -> Result<u32, Early> {
        for range in self.ranges {
            self.drop_pages(Split::of(*range).pages)?;
        }
        Ok(0)
    }

    /// Zeroes every sector: whole pages by freeing them, the ends by writing.
    fn write_zeroes(&mut self) -> Result<u32, Early> {
        for range in self.ranges {
            let split = Split::of(*range);
            self.zero_sectors(split.head)?;
            self.drop_pages(split.pages)?;
            self.zero_sectors(split.tail)?;
        }
        Ok(0)
    }

    fn drop_pages(&mut self, pages: std::ops::Range<u64>) -> Result<(), Early> {
        let mut from = pages.start;
        while from < pages.end {
            self.check_stop()?;
            let to = pages.end.min(from.saturating_add(SLOTS_PER_STEP));
            self.store.core.discard(from..to);
            from = to;
        }
        Ok(())
    }

    /// Zeroes part of one page.
    fn zero_sectors(&mut self, range: SectorRange) -> Result<(), Early> {
        for piece in pieces(range) {
            let zeroes = ZEROES.get(piece.bytes()).ok_or(Early::Failed)?;
            self.store
                .core
                .write_sectors(piece.slot, piece.first, zeroes)
                .map_err(|_| Early::Failed)?;
        }
        Ok(())
    }

    /// No order is needed: the flag only has to be seen soon, and the join orders everything else.
    fn check_stop(&self) -> Result<(), Early> {
        if self.stop.load(Ordering::Relaxed) {
            Err(Early::Stopped)
        } else {
            Ok(())
        }
    }
}

/// The part of a range that lies in one page.
struct Piece {
    slot: SlotIndex,
    /// First sector within the page, 0 to 7.
    first: usize,
    /// Sectors, 1 to 8 - `first`.
    count: usize,
}

impl Piece {
    fn bytes(&self) -> std::ops::Range<usize> {
        self.first * SECTOR_SIZE..(self.first + self.count) * SECTOR_SIZE
    }

    fn is_whole_page(&self) -> bool {
        self.count == SECTORS_PER_PAGE
    }
}

/// Cuts a range on the disk at the pages' bounds.
fn pieces(range: SectorRange) -> impl Iterator<Item = Piece> {
    let per_page = SECTORS_PER_PAGE as u64;
    let end = range.first.0 + range.count;
    let mut at = range.first.0;
    std::iter::from_fn(move || {
        if at >= end {
            return None;
        }
        let first = at % per_page;
        let count = (per_page - first).min(end - at);
        // The disk has at most 2^32 pages and the range is on the disk.
        let piece = Piece {
            slot: SlotIndex((at / per_page) as u32),
            first: first as usize,
            count: count as usize,
        };
        at += count;
        Some(piece)
    })
}

/// A range as whole pages and the ends that are not whole: `head` and `tail` each lie in one page.
struct Split {
    head: SectorRange,
    pages: std::ops::Range<u64>,
    tail: SectorRange,
}

impl Split {
    fn of(range: SectorRange) -> Split {
        let per_page = SECTORS_PER_PAGE as u64;
        let (start, end) = (range.first.0, range.first.0 + range.count);
        let sectors = |from: u64, to: u64| SectorRange {
            first: crate::request::Sector(from),
            count: to - from,
        };
        let first_page = start.div_ceil(per_page);
        let last_page = end / per_page;
        if first_page > last_page {
            // All within one page, touching neither of its ends.
            return Split {
                head: sectors(start, end),
                pages: 0..0,
                tail: sectors(end, end),
            };
        }
        Split {
            head: sectors(start, first_page * per_page),
            pages: first_page..last_page,
            tail: sectors(last_page * per_page, end),
        }
    }
}

#[cfg(test)]
mod tests {
    use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};

    use super::*;
    use crate::config::tests::{config, zram};
    use crate::request::Sector;
    use crate::ring::Segment;
    use crate::ring::tests::guest;

    const PAGES: u64 = 8;

    struct Bench {
        disk: Disk,
        store: Store,
        mem: GuestMemoryMmap,
        stop: AtomicBool,
    }

    impl Bench {
        fn new() -> Bench {
            Bench::of(PAGES, None)
        }

        fn of(pages: u64, mem_limit_bytes: Option<u64>) -> Bench {
            let zram = zram(pages * 4096, mem_limit_bytes);
            let store = Store {
                core: zram.worker().unwrap(),
                page: Page::zeroed(),
            };
            let disk = Disk::new(zram, config()).unwrap();
            Bench {
                disk,
                store,
                mem: guest(0x10_0000),
                stop: AtomicBool::new(false),
            }
        }

        fn run(&mut self, request: Request, chain: &Chain, ranges: &[SectorRange]) -> ControlFlow<(), Outcome> {
            let ranges = ranges.to_vec();
            let Bench { disk, store, mem, stop } = self;
            Execution {
                disk,
                store,
                guest: &Guest::of(mem),
                chain,
                ranges: &ranges,
                stop,
            }
            .run(request)
        }

        fn write(&mut self, first: u64, data: &[u8]) -> ControlFlow<(), Outcome> {
            self.mem.write_slice(data, GuestAddress(0x1010)).unwrap();
            let mut chain = Chain::default();
            chain.push(
                Segment {
                    addr: GuestAddress(0x1000),
                    len: 16 + data.len() as u32,
                },
                false,
            );
            self.run(Request::Out(range(first, data.len() as u64 / 512)), &chain, &[])
        }

        fn read(&mut self, first: u64, count: u64) -> Vec<u8> {
            let mut chain = Chain::default();
            chain.push(
                Segment {
                    addr: GuestAddress(0x8_0000),
                    len: count as u32 * 512 + 1,
                },
                true,
            );
            let outcome = self.run(Request::In(range(first, count)), &chain, &[]);
            assert_eq!(outcome, ControlFlow::Continue(Outcome::Done(count as u32 * 512)));
            let mut data = vec![0; count as usize * 512];
            self.mem.read_slice(&mut data, GuestAddress(0x8_0000)).unwrap();
            data
        }
    }

    const OK: ControlFlow<(), Outcome> = ControlFlow::Continue(Outcome::Done(0));

    fn range(first: u64, count: u64) -> SectorRange {
        SectorRange {
            first: Sector(first),
            count,
        }
    }

    /// Bytes that differ from sector to sector and do not compress to nothing.
    fn pattern(seed: u8, sectors: u64) -> Vec<u8> {
        (0..sectors * 512)
            .map(|index| (index / 512) as u8 ^ seed ^ ((index * 7) as u8))
            .collect()
    }

    #[test]
    fn what_is_written_is_read_across_page_bounds() {
        let mut bench = Bench::new();
        let mut model = vec![0; PAGES as usize * 4096];
        for (seed, (first, count)) in [(0, 8), (3, 1), (5, 20), (63, 1), (16, 16), (0, 64), (7, 2)]
            .iter()
            .enumerate()
        {
            let data = pattern(seed as u8 + 1, *count);
            assert_eq!(bench.write(*first, &data), OK);
            model[*first as usize * 512..][..data.len()].copy_from_slice(&data);
            assert_eq!(bench.read(0, 64), model, "write {first}+{count}");
        }
        assert_eq!(bench.read(5, 3), model[5 * 512..8 * 512]);
    }

    #[test]
    fn write_zeroes_zeroes_exactly_its_sectors() {
        for (first, count) in [
            (0, 8),
            (1, 1),
            (1, 6),
            (1, 7),
            (0, 7),
            (7, 1),
            (7, 2),
            (3, 30),
            (8, 16),
            (0, 64),
            (63, 1),
        ] {
            let mut bench = Bench::new();
            let mut model = pattern(9, 64);
            assert_eq!(bench.write(0, &model), OK);
            assert_eq!(
                bench.run(Request::WriteZeroes, &Chain::default(), &[range(first, count)]),
                OK
            );
            model[first as usize * 512..][..count as usize * 512].fill(0);
            assert_eq!(bench.read(0, 64), model, "{first}+{count}");
        }
    }

    #[test]
    fn discard_frees_whole_pages_only() {
        let mut bench = Bench::new();
        let mut model = pattern(9, 64);
        assert_eq!(bench.write(0, &model), OK);
        assert_eq!(
            bench.run(Request::Discard, &Chain::default(), &[range(4, 17), range(41, 6)]),
            OK
        );
        model[8 * 512..16 * 512].fill(0);
        assert_eq!(bench.read(0, 64), model);
    }

    #[test]
    fn the_serial_is_cut_to_the_room() {
        let mut bench = Bench::new();
        let mut chain = Chain::default();
        chain.push(
            Segment {
                addr: GuestAddress(0x8_0000),
                len: 64,
            },
            true,
        );
        let done = |bytes| ControlFlow::Continue(Outcome::Done(bytes));
        assert_eq!(bench.run(Request::GetId(0), &chain, &[]), done(0));
        assert_eq!(bench.run(Request::GetId(3), &chain, &[]), done(3));
        assert_eq!(bench.run(Request::GetId(50), &chain, &[]), done(20));
        let mut id = [0xff; 21];
        bench.mem.read_slice(&mut id, GuestAddress(0x8_0000)).unwrap();
        assert_eq!(&id, b"serial-0\0\0\0\0\0\0\0\0\0\0\0\0\0");
    }

    #[test]
    fn a_write_beyond_the_limit_fails_once_and_stops_there() {
        const TOO_MANY_PAGES: usize = 120;
        let mut bench = Bench::of(TOO_MANY_PAGES as u64, Some(zram_core::MEM_LIMIT_MIN));
        let mut state = 1u64;
        let mut noise = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (state >> 56) as u8
        };
        let data: Vec<u8> = (0..TOO_MANY_PAGES * 4096).map(|_| noise()).collect();
        assert_eq!(bench.write(0, &data), ControlFlow::Continue(Outcome::Failed));
        assert_eq!(bench.disk.zram.stats().failed_writes, 1);
        assert_eq!(bench.read(0, 8), data[..4096]);
        assert_eq!(bench.read(8 * (TOO_MANY_PAGES as u64 - 1), 8), [0; 4096]);
    }

    #[test]
    fn a_stop_leaves_the_request_to_be_done_again() {
        let mut bench = Bench::new();
        let data = pattern(1, 8);
        bench.stop.store(true, Ordering::Relaxed);
        assert_eq!(bench.write(0, &data), ControlFlow::Break(()));
        assert_eq!(
            bench.run(Request::Discard, &Chain::default(), &[range(0, 64)]),
            ControlFlow::Break(())
        );
        bench.stop.store(false, Ordering::Relaxed);
        assert_eq!(bench.write(0, &data), OK);
        assert_eq!(bench.read(0, 8), data);
    }
}
