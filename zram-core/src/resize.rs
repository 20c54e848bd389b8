//! Another size for a disk in use.
//!
//! The address space for the largest size is reserved at the start, so nothing moves: a disk has a new size when the head
//! of its slot table and the number of slots say so. The head is one page, written in one call, so another process that
//! takes the memory over after a kill finds the old size or the new one (`adopt.rs`).
//!
//! Who holds the disk sees to it that nobody reads or writes behind a new, smaller end: before [`Zram::shrink`], and until
//! it has returned.

use std::io;
use std::ops::Range;
use std::sync::PoisonError;

use crate::head::{Head, Part};
use crate::page::PAGE_SIZE;
use crate::region::Mapping;
use crate::slot::Slot;
use crate::worker::Worker;
use crate::zram::{WorkerError, Zram};

/// Why a disk keeps its size. Its content is as it was.
#[derive(Debug, thiserror::Error)]
pub enum ResizeError {
    /// The size is 0, no multiple of a page, or more than the address space is for.
    #[error("a size of {0} bytes: it is a multiple of 4096, from 4096 to {1}, for which address space was reserved")]
    Size(u64, u64),
    /// It is not smaller, or not larger.
    #[error("the disk has {0} bytes already")]
    Direction(u64),
    /// Pages behind the new end hold data.
    #[error("{pages} pages behind that hold data, the last of them ends at byte {end}: discard them first")]
    TailInUse {
        /// How many.
        pages: u64,
        /// Bytes from the beginning of the disk to the end of the last one.
        end: u64,
    },
    /// All of the disk's workers are in use.
    #[error(transparent)]
    Workers(#[from] WorkerError),
    /// The head could not be written.
    #[error("the new size cannot be noted: {0}")]
    Head(#[from] io::Error),
}

impl Zram {
    /// The largest size in bytes that the disk can be given.
    pub fn size_bytes_max(&self) -> u64 {
        self.table.slots_max() * PAGE_SIZE as u64
    }

    /// Makes the disk larger: `bytes` are a multiple of 4096, up to [`Zram::size_bytes_max`]. What is new is empty.
    pub fn grow(&self, bytes: u64) -> Result<(), ResizeError> {
        let _one_at_a_time = self.resizing.lock().unwrap_or_else(PoisonError::into_inner);
        let slots = self.check_size(bytes)?;
        if slots <= self.table.slots() {
            return Err(ResizeError::Direction(self.size_bytes()));
        }
        self.note_size(bytes)?;
        self.table.set_slots(slots);
        Ok(())
    }

    /// What keeps the disk from being shrunk to `bytes` now. Pages of zeroes do not.
    pub fn check_shrink(&self, bytes: u64) -> Result<(), ResizeError> {
        let slots = self.check_size(bytes)?;
        if slots >= self.table.slots() {
            return Err(ResizeError::Direction(self.size_bytes()));
        }
        let (mut pages, mut last) = (0, 0);
        for (index, word) in self.table.walk(slots..self.table.slots()) {
            if Slot::unpack(word) != Slot::SameFilled(0) {
                pages += 1;
                last = u64::from(index.0);
            }
        }
        match pages {
            0 => Ok(()),
            pages => Err(ResizeError::TailInUse {
                pages,
                end: (last + 1) * PAGE_SIZE as u64,
            }),
        }
    }

    /// Makes the disk smaller, if nothing but zeroes lies behind the new end, and gives the host the slots' memory. Nobody
    /// may read or write there any more.
    pub fn shrink(self: &std::sync::Arc<Zram>, bytes: u64) -> Result<(), ResizeError> {
        let _one_at_a_time = self.resizing.lock().unwrap_or_else(PoisonError::into_inner);
        self.check_shrink(bytes)?;
        let tail: Range<u64> = bytes / PAGE_SIZE as u64..self.table.slots();
        let mut worker: Worker = self.worker()?;
        // First the zeroes, whose slots somebody else would find, and not have counted, when the disk grows again.
        worker.discard(tail.clone());
        self.note_size(bytes)?;
        self.table.set_slots(tail.start);
        self.table.forget(tail);
        Ok(())
    }

    fn check_size(&self, bytes: u64) -> Result<u64, ResizeError> {
        let is_size = bytes != 0 && bytes.is_multiple_of(PAGE_SIZE as u64) && bytes <= self.size_bytes_max();
        is_size
            .then_some(bytes / PAGE_SIZE as u64)
            .ok_or_else(|| ResizeError::Size(bytes, self.size_bytes_max()))
    }

    fn note_size(&self, bytes: u64) -> io::Result<()> {
        let mapping = self.table.mapping();
        let head = Mapping::read_head(mapping.file()?)?;
        let head = Head::decode(Part::Table, &head).map_err(io::Error::other)?;
        let head = Head {
            disk_bytes: bytes,
            ..head
        };
        mapping.write_head(&head.encode(Part::Table))
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, Ordering};

    use super::*;
    use crate::codec::{Algorithm, Codecs};
    use crate::page::Page;
    use crate::slot::SlotIndex;
    use crate::zram::Options;
    use crate::{AdoptOptions, RecompressOptions};

    const MIB: u64 = 1 << 20;

    fn disk() -> Arc<Zram> {
        Zram::create(&Options {
            name: "test".into(),
            size_bytes: 4 * MIB,
            size_bytes_max: Some(64 * MIB),
            mem_limit_bytes: None,
            codecs: Codecs::alone(&Algorithm::default()).unwrap(),
        })
        .unwrap()
    }

    fn page(number: u64) -> Box<Page> {
        let mut page = Page::zeroed();
        let bytes = number.wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes();
        page.iter_mut()
            .enumerate()
            .for_each(|(at, byte)| *byte = bytes[at % 8] ^ (at / 100) as u8);
        page
    }

    fn read(zram: &Arc<Zram>, slot: u32) -> Box<Page> {
        let mut page = Page::zeroed();
        zram.worker().unwrap().read_page(SlotIndex(slot), &mut page).unwrap();
        page
    }

    #[test]
    fn a_disk_grows_and_keeps_what_it_holds() {
        let zram = disk();
        let mut worker = zram.worker().unwrap();
        worker.write_page(SlotIndex(1023), &page(1)).unwrap();
        zram.grow(64 * MIB).unwrap();
        assert_eq!((zram.size_bytes(), zram.size_bytes_max()), (64 * MIB, 64 * MIB));
        worker.write_page(SlotIndex(16383), &page(2)).unwrap();
        assert!(read(&zram, 1023)[..] == page(1)[..] && read(&zram, 16383)[..] == page(2)[..]);
        assert!(read(&zram, 1024).iter().all(|&byte| byte == 0));
        drop(worker);
        zram.check_consistency();
    }

    #[test]
    fn a_disk_shrinks_when_nothing_but_zeroes_is_lost_and_its_table_comes_back() {
        let zram = disk();
        zram.grow(64 * MIB).unwrap();
        let mut worker = zram.worker().unwrap();
        for slot in (2000..16384).step_by(100) {
            worker.write_page(SlotIndex(slot), &page(slot.into())).unwrap();
        }
        worker.write_page(SlotIndex(900), &page(900)).unwrap();
        worker.write_page(SlotIndex(1500), &Page::zeroed()).unwrap();
        let error = zram.shrink(4 * MIB).unwrap_err();
        assert!(
            matches!(error, ResizeError::TailInUse { pages: 144, end } if end == 16301 * 4096),
            "{error}"
        );
        assert_eq!(zram.size_bytes(), 64 * MIB);
        worker.discard(2000..16384);
        worker.end_batch();
        let held = zram.stats().table_bytes;
        zram.shrink(4 * MIB).unwrap();
        assert_eq!(zram.size_bytes(), 4 * MIB);
        assert!(
            zram.stats().table_bytes <= 2 * 4096,
            "of {held}: {}",
            zram.stats().table_bytes
        );
        assert_eq!(zram.stats().orig_data_size, 4096, "the page of zeroes is no more");
        assert!(read(&zram, 900)[..] == page(900)[..]);
        zram.grow(64 * MIB).unwrap();
        assert!(read(&zram, 1500).iter().all(|&byte| byte == 0));
        worker.write_page(SlotIndex(16383), &page(3)).unwrap();
        assert!(read(&zram, 16383)[..] == page(3)[..]);
        drop(worker);
        zram.check_consistency();
    }

    #[test]
    fn a_size_that_cannot_be_is_refused_with_what_can() {
        let zram = disk();
        for bytes in [0, 4095, 4097, 64 * MIB + 4096, u64::MAX] {
            let error = zram.grow(bytes).unwrap_err();
            assert!(
                matches!(error, ResizeError::Size(of, max) if of == bytes && max == 64 * MIB),
                "{error}"
            );
            assert!(matches!(zram.shrink(bytes), Err(ResizeError::Size(..))));
        }
        assert!(matches!(zram.grow(4 * MIB), Err(ResizeError::Direction(_))));
        assert!(matches!(zram.grow(MIB), Err(ResizeError::Direction(_))));
        assert!(matches!(zram.shrink(4 * MIB), Err(ResizeError::Direction(_))));
        assert_eq!(zram.size_bytes(), 4 * MIB);
    }

    #[test]
    fn another_process_finds_the_size_that_was_given_last() {
        let zram = disk();
        zram.grow(32 * MIB).unwrap();
        zram.worker().unwrap().write_page(SlotIndex(8191), &page(7)).unwrap();
        let adopted = Zram::adopt(zram.memory().unwrap(), &AdoptOptions::default()).unwrap();
        drop(zram);
        assert_eq!((adopted.size_bytes(), adopted.size_bytes_max()), (32 * MIB, 64 * MIB));
        assert!(read(&adopted, 8191)[..] == page(7)[..]);
        adopted.worker().unwrap().discard(8191..8192);
        adopted.shrink(MIB).unwrap();
        let again = Zram::adopt(adopted.memory().unwrap(), &AdoptOptions::default()).unwrap();
        assert_eq!(again.size_bytes(), MIB);
    }

    #[test]
    fn all_goes_on_while_the_size_changes() {
        let zram = disk();
        let stop = AtomicBool::new(false);
        std::thread::scope(|scope| {
            for worker in 0..2u32 {
                let (zram, stop) = (&zram, &stop);
                scope.spawn(move || {
                    let mut core = zram.worker().unwrap();
                    let mut found = Page::zeroed();
                    for round in 0.. {
                        if stop.load(Ordering::Relaxed) {
                            break;
                        }
                        let slot = SlotIndex(worker * 400 + round % 400);
                        core.write_page(slot, &page(round.into())).unwrap();
                        core.read_page(slot, &mut found).unwrap();
                        assert!(found[..] == page(round.into())[..]);
                        core.end_batch();
                    }
                });
            }
            scope.spawn(|| {
                while !stop.load(Ordering::Relaxed) {
                    zram.compact();
                    let _ = zram.recompress(&RecompressOptions::default());
                    zram.mark_idle(crate::IdleMark::All);
                }
            });
            for round in 0..200 {
                zram.grow((5 + round % 60) * MIB).unwrap();
                zram.shrink(4 * MIB).unwrap();
            }
            stop.store(true, Ordering::Relaxed);
        });
        zram.check_consistency();
    }
}
