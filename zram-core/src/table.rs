//! The slot table: one atomic word for each page of the disk, in a lazily touched memfd. No packing here: see `slot.rs`.
//!
//! 1. A slot changes by one swap or one compare-exchange of its word, and in no other way.
//! 2. Both release what the writer did before (the object's bytes) and acquire what the slot's last writer did.
//!    Flags of the same object change relaxed: that is a read-modify-write, so who loads the result still acquires what
//!    the writer before it released.
//! 3. A load acquires, so that a reader who finds a handle also finds the bytes behind it.
//! 4. A table page, 512 slots, that was never written is not even read: reading would make the host allocate it. One
//!    bit for each says that it was touched; it is set before the first slot of the page changes.

use std::io;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::region::{Mapping, OS_PAGE_SIZE};
use crate::slot::{Slot, SlotIndex};

/// Slots in one OS page of the table.
const SLOTS_PER_OS_PAGE: u64 = (OS_PAGE_SIZE / size_of::<u64>()) as u64;
const BITS: u64 = u64::BITS as u64;

#[derive(Debug)]
pub(crate) struct Table {
    /// Those of the disk now. Who looks at others finds them empty: the words are there up to `slots_max`.
    slots: AtomicU64,
    slots_max: u64,
    words: Mapping,
    /// One bit for each OS page of `words`.
    touched: Mapping,
}

impl Table {
    pub(crate) fn new(name: &str, slots: u64, slots_max: u64, head: &[u8; OS_PAGE_SIZE]) -> io::Result<Table> {
        let words = Mapping::memfd(&format!("zram-table-{name}"), table_len(slots_max), head)?;
        Table::on(slots, slots_max, words)
    }

    /// The table that another process left in `memfd`, with what it holds.
    pub(crate) fn adopt(memfd: OwnedFd, slots: u64, slots_max: u64) -> io::Result<Table> {
        let table = Table::on(slots, slots_max, Mapping::adopt(memfd, table_len(slots_max))?)?;
        for range in table.words.populated_ranges()? {
            for os_page in range.start / OS_PAGE_SIZE..range.end.div_ceil(OS_PAGE_SIZE) {
                table.touch(SlotIndex((os_page as u64 * SLOTS_PER_OS_PAGE) as u32));
            }
        }
        Ok(table)
    }

    fn on(slots: u64, slots_max: u64, words: Mapping) -> io::Result<Table> {
        let os_pages = slots_max.div_ceil(SLOTS_PER_OS_PAGE);
        Ok(Table {
            slots: AtomicU64::new(slots),
            slots_max,
            words,
            touched: Mapping::anonymous(os_pages.div_ceil(BITS) as usize * size_of::<u64>())?,
        })
    }

    pub(crate) fn mapping(&self) -> &Mapping {
        &self.words
    }

    pub(crate) fn slots(&self) -> u64 {
        self.slots.load(Ordering::Relaxed)
    }

    pub(crate) fn slots_max(&self) -> u64 {
        self.slots_max
    }

    /// Relaxed: whoever may use new slots hears of them in another way, and finds them empty.
    pub(crate) fn set_slots(&self, slots: u64) {
        assert!(slots <= self.slots_max);
        self.slots.store(slots, Ordering::Relaxed);
    }

    /// Gives the host the memory of empty slots that nobody uses any more, in whole OS pages.
    pub(crate) fn forget(&self, slots: Range<u64>) {
        let os_pages = slots.start.div_ceil(SLOTS_PER_OS_PAGE)..slots.end.div_ceil(SLOTS_PER_OS_PAGE);
        for os_page in os_pages {
            let index = SlotIndex((os_page * SLOTS_PER_OS_PAGE) as u32);
            let (word, bit) = self.touched_bit(index);
            if word.load(Ordering::Relaxed) & bit == 0 {
                continue;
            }
            word.fetch_and(!bit, Ordering::Relaxed);
            // What is not given back costs a page of host memory, and is empty all the same.
            let offset = os_page as usize * OS_PAGE_SIZE;
            // SAFETY: the table hands out atomics only; to them it is a store of the zeroes that they hold already.
            let _ = unsafe { self.words.punch_hole(offset, OS_PAGE_SIZE) };
        }
    }

    /// Bytes of host memory behind the table.
    pub(crate) fn touched_bytes(&self) -> u64 {
        let bits = self
            .touched_words()
            .iter()
            .map(|word| u64::from(word.load(Ordering::Relaxed).count_ones()))
            .sum::<u64>();
        bits * OS_PAGE_SIZE as u64
    }

    pub(crate) fn load(&self, index: SlotIndex) -> u64 {
        if !self.is_touched(index) {
            return Slot::EMPTY;
        }
        self.word(index).load(Ordering::Acquire) // pairs with swap and compare_exchange, rule 3
    }

    /// Has the caches fetch the word of a slot, and waits for nothing.
    pub(crate) fn prefetch(&self, index: SlotIndex) {
        crate::region::prefetch(std::ptr::from_ref(self.word(index)).cast(), size_of::<u64>());
    }

    /// Puts `new` and gives what the slot held, which is now the caller's to retire.
    #[must_use = "what the slot held must be retired"]
    pub(crate) fn swap(&self, index: SlotIndex, new: u64) -> u64 {
        self.touch(index);
        self.word(index).swap(new, Ordering::AcqRel) // rule 2
    }

    /// Puts `new` if the slot still holds `current`. On success `current` is the caller's to retire.
    #[must_use = "on success what the slot held must be retired, on failure the new object freed"]
    pub(crate) fn compare_exchange(&self, index: SlotIndex, current: u64, new: u64) -> Result<(), u64> {
        self.touch(index);
        match self
            .word(index)
            .compare_exchange(current, new, Ordering::AcqRel, Ordering::Acquire)
        {
            Ok(_) => Ok(()),
            Err(found) => Err(found),
        }
    }

    /// Puts `new`, which says the same of the same object and differs in its flags only, if the slot still holds `current`.
    /// So there is nothing to retire, and nothing that it orders.
    pub(crate) fn change_flags(&self, index: SlotIndex, current: u64, new: u64) -> bool {
        let word = self.word(index);
        word.compare_exchange(current, new, Ordering::Relaxed, Ordering::Relaxed)
            .is_ok()
    }

    /// The slots of `range` that may hold something: those on touched table pages.
    pub(crate) fn touched_slots(&self, range: Range<u64>) -> impl Iterator<Item = SlotIndex> + '_ {
        assert!(
            range.start <= range.end && range.end <= self.slots_max,
            "slots {range:?} of {}",
            self.slots_max
        );
        let os_pages = range.start / SLOTS_PER_OS_PAGE..range.end.div_ceil(SLOTS_PER_OS_PAGE);
        let touched = TouchedPages {
            words: self.touched_words(),
            next: os_pages.start,
            end: os_pages.end,
        };
        touched.flat_map(move |os_page| {
            let first = os_page * SLOTS_PER_OS_PAGE;
            (first.max(range.start)..(first + SLOTS_PER_OS_PAGE).min(range.end)).map(|slot| SlotIndex(slot as u32))
        })
    }

    /// What the slots of `range` hold that are not empty, each as it was at some moment of the walk: a hint, which a load
    /// under a guard confirms. At memory's speed.
    pub(crate) fn walk(&self, range: Range<u64>) -> impl Iterator<Item = (SlotIndex, u64)> + '_ {
        let words = self.words.words();
        self.touched_slots(range)
            .map(move |index| (index, words[index.0 as usize].load(Ordering::Relaxed)))
            .filter(|&(_, word)| word != Slot::EMPTY)
    }

    fn word(&self, index: SlotIndex) -> &AtomicU64 {
        assert!(
            u64::from(index.0) < self.slots_max,
            "slot {} of {}",
            index.0,
            self.slots_max
        );
        &self.words.words()[index.0 as usize]
    }

    fn touched_words(&self) -> &[AtomicU64] {
        self.touched.words()
    }

    fn touched_bit(&self, index: SlotIndex) -> (&AtomicU64, u64) {
        let os_page = u64::from(index.0) / SLOTS_PER_OS_PAGE;
        (&self.touched_words()[(os_page / BITS) as usize], 1 << (os_page % BITS))
    }

    /// Relaxed: the bit orders nothing. A reader that misses it was not ordered after the write that set it, and may
    /// read the slot as it was before that write.
    fn is_touched(&self, index: SlotIndex) -> bool {
        let (word, bit) = self.touched_bit(index);
        word.load(Ordering::Relaxed) & bit != 0
    }

    fn touch(&self, index: SlotIndex) {
        let (word, bit) = self.touched_bit(index);
        if word.load(Ordering::Relaxed) & bit == 0 {
            word.fetch_or(bit, Ordering::Relaxed);
        }
    }
}

fn table_len(slots: u64) -> usize {
    slots as usize * size_of::<u64>()
}

/// The set bits of a range, whole empty words at a time.
struct TouchedPages<'a> {
    words: &'a [AtomicU64],
    next: u64,
    end: u64,
}

impl Iterator for TouchedPages<'_> {
    type Item = u64;

    fn next(&mut self) -> Option<u64> {
        while self.next < self.end {
            let rest = self.words[(self.next / BITS) as usize].load(Ordering::Relaxed) >> (self.next % BITS);
            if rest == 0 {
                self.next = (self.next / BITS + 1) * BITS;
                continue;
            }
            let found = self.next + u64::from(rest.trailing_zeros());
            self.next = found + 1;
            return (found < self.end).then_some(found);
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reading_a_table_touches_nothing() {
        let table = Table::new("test", 1 << 28, 1 << 28, &[0; OS_PAGE_SIZE]).unwrap(); // a disk of 1 TiB
        for index in (0..1 << 28).step_by(99_999) {
            assert_eq!(table.load(SlotIndex(index)), Slot::EMPTY);
        }
        assert_eq!(table.touched_slots(0..1 << 28).count(), 0);
        assert_eq!(table.touched_bytes(), 0);
        assert_eq!(table.words.populated_ranges().unwrap(), []);
    }

    #[test]
    fn only_touched_pages_are_walked_and_ends_are_exact() {
        let table = Table::new("test", 1 << 20, 1 << 20, &[0; OS_PAGE_SIZE]).unwrap();
        for index in [3, 70_000, 999_999] {
            assert_eq!(table.swap(SlotIndex(index), 7 << 60), Slot::EMPTY);
        }
        let walked = |range| table.touched_slots(range).map(|slot| slot.0).collect::<Vec<_>>();
        assert_eq!(walked(0..512), (0..512).collect::<Vec<_>>());
        assert_eq!(walked(5..10), vec![5, 6, 7, 8, 9]);
        assert_eq!(walked(70_001..70_003), vec![70_001, 70_002]);
        assert_eq!(walked(512..69_632), Vec::<u32>::new());
        assert_eq!(walked(0..1 << 20).len(), 3 * 512);
        assert_eq!(table.touched_bytes(), 3 * 4096);
    }

    #[test]
    fn a_lost_compare_exchange_says_what_it_found() {
        let table = Table::new("test", 1, 1, &[0; OS_PAGE_SIZE]).unwrap();
        assert_eq!(table.compare_exchange(SlotIndex(0), Slot::EMPTY, 5 << 60), Ok(()));
        assert_eq!(table.compare_exchange(SlotIndex(0), Slot::EMPTY, 6 << 60), Err(5 << 60));
        assert_eq!(table.load(SlotIndex(0)), 5 << 60);
    }
}
