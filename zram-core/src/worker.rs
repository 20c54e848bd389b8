//! Who reads and writes a disk: one worker for each virtqueue.
//!
//! The path of a write: same-filled? then only the word is kept; else compress into the stream's buffer; no gain? then
//! the page is kept whole, huge; the arena gives room and takes the bytes; one swap of the slot's word publishes them;
//! what the slot held is retired and freed after its grace period. All slow work comes before the swap and a step that
//! fails leaves the slot as it was.
//!
//! The path of a read: pin, load the word, decode where the object lies, unpin. Nothing on it waits for anybody.
//!
//! A sub-page write reads, merges, compresses, and exchanges the word it read for the new one; when another queue was
//! faster it starts again, so each of its sectors is either before or after each of the other's. Its pin lasts from load
//! to exchange: the object it read cannot be freed and another stored in its place, so an equal word means equal content.

use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::arena::Full;
use crate::codec::Stream;
use crate::epoch::{ParticipantId, Retired};
use crate::page::{Page, SECTOR_SIZE, SECTORS_PER_PAGE};
use crate::pause::{Step, reach};
use crate::slot::{self, Slot, SlotIndex};
use crate::stats::{self, Cells};
use crate::zram::{Contents, RETIRED_OPEN_MAX, Zram, is_huge, slot_granules};

/// How long a write at the limit waits for others to leave what it could use: an object that a reader still holds, a
/// heap in use. Long enough for a preempted holder to run again on a busy host; an error would cost the guest more.
const GRACE_WAIT_MAX: Duration = Duration::from_millis(100);
/// The part of it that is spent trying: a grace period lasts microseconds unless its reader was preempted.
const GRACE_SPIN_MAX: Duration = Duration::from_millis(1);
/// Tries before a write is refused: as it is, after a batch's end, and with the spare segment.
const TRIES_MIN: u32 = 2;

/// How often and how long a write has tried to get room.
#[derive(Debug, Default)]
struct Patience {
    tries: u32,
    since: Option<Instant>,
}

impl Patience {
    /// The batch was ended, and that did not help.
    fn is_short(&self) -> bool {
        self.tries >= TRIES_MIN
    }
}

/// Why a page was not written. The slot holds what it held.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum WriteError {
    /// The memory limit leaves no room.
    #[error("the memory limit is reached")]
    LimitReached,
    /// Part of a page was to be written and the rest of it does not decode.
    #[error("the page does not decode")]
    Corrupt,
}

/// Why a page was not read. The buffer is all zeroes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ReadError {
    /// The stored object is not what was stored.
    #[error("the page does not decode")]
    Corrupt,
}

/// Reads and writes a disk: one for each virtqueue, on the thread that serves it. Owns its compression stream, its heap
/// of the arena, its counters, and what it has retired; leaves them to the next worker when dropped.
pub struct Worker {
    zram: Arc<Zram>,
    id: ParticipantId,
    stream: Stream,
    /// Where sub-page writes are merged.
    scratch: Box<Page>,
    retired: Retired,
}

impl Worker {
    pub(crate) fn new(zram: Arc<Zram>, id: ParticipantId, stream: Stream) -> Worker {
        Worker {
            zram,
            id,
            stream,
            scratch: Page::zeroed(),
            retired: Retired::default(),
        }
    }

    /// The disk.
    pub fn zram(&self) -> &Arc<Zram> {
        &self.zram
    }

    /// Fills `page` with the content of a slot.
    ///
    /// # Panics
    /// If the slot is past the end of the disk, as all methods do.
    pub fn read_page(&mut self, index: SlotIndex, page: &mut Page) -> Result<(), ReadError> {
        let guard = self.zram.epochs.pin(self.id);
        let word = self.zram.table.load(index);
        reach(Step::ReadPinned);
        let read = self.zram.decode(self.id, word, page, &guard);
        drop(guard);
        let used = slot::used(word);
        if used != word && self.zram.table.change_flags(index, word, used) {
            self.zram.note_use();
        }
        read
    }

    /// Has the caches fetch what a slot holds, for a read that is to follow in a microsecond or two.
    ///
    /// # Panics
    /// If the slot is past the end of the disk.
    pub fn prefetch(&self, index: SlotIndex) {
        self.zram.prefetch(index);
    }

    /// Has the caches fetch a slot's word, so that [`Worker::prefetch`] need not wait for it.
    pub fn prefetch_slot(&self, index: SlotIndex) {
        self.zram.prefetch_slot(index);
    }

    /// Replaces the content of a slot.
    pub fn write_page(&mut self, index: SlotIndex, page: &Page) -> Result<(), WriteError> {
        let mut patience = Patience::default();
        loop {
            let replaces = self.zram.table.load(index);
            let with_spare = patience.is_short();
            match self.zram.prepare(self.id, &mut self.stream, page, replaces, with_spare) {
                Ok(new) => {
                    let old = self.zram.table.swap(index, new.pack());
                    self.published(index, old, new);
                    return Ok(());
                }
                Err(full) => self.make_room(&mut patience, full)?,
            }
        }
    }

    /// Replaces the content of a slot with what the codec made of it already: all of a write but the codec, for the bench.
    #[doc(hidden)]
    pub fn write_encoded(&mut self, index: SlotIndex, content: &[u8]) -> bool {
        let replaces = self.zram.table.load(index);
        let Ok(handle) = self.zram.store(self.id, content, replaces, false) else {
            return false;
        };
        let new = Slot::Stored {
            handle,
            len: content.len(),
            priority: 0,
        };
        let old = self.zram.table.swap(index, new.pack());
        self.published(index, old, new);
        true
    }

    /// Replaces whole sectors of a page: `data` goes to sector `first` of the page and those after it. Atomic against all
    /// other workers, for each sector.
    ///
    /// # Panics
    /// If `data` is no whole number of sectors or passes the end of the page.
    pub fn write_sectors(&mut self, index: SlotIndex, first: usize, data: &[u8]) -> Result<(), WriteError> {
        assert!(data.len().is_multiple_of(SECTOR_SIZE) && first <= SECTORS_PER_PAGE);
        let range = first * SECTOR_SIZE..first * SECTOR_SIZE + data.len();
        let mut patience = Patience::default();
        loop {
            let guard = self.zram.epochs.pin(self.id);
            let found = self.zram.table.load(index);
            self.zram
                .decode(self.id, found, &mut self.scratch, &guard)
                .map_err(|_| WriteError::Corrupt)?;
            self.scratch[range.clone()].copy_from_slice(data);
            let with_spare = patience.is_short();
            let prepared = self
                .zram
                .prepare(self.id, &mut self.stream, &self.scratch, found, with_spare);
            let exchanged = prepared.map(|new| (new, self.zram.table.compare_exchange(index, found, new.pack())));
            drop(guard);
            match exchanged {
                Ok((new, Ok(()))) => {
                    self.published(index, found, new);
                    return Ok(());
                }
                // SAFETY: the new object was never in the table.
                Ok((new, Err(_))) => unsafe { self.zram.free(self.id, new.pack()) },
                Err(full) => self.make_room(&mut patience, full)?,
            }
        }
    }

    /// Empties slots: they read as zeroes and cost nothing. Never fails. Areas that were never written cost next to
    /// nothing to skip; where all is written it takes some 0.1 us a slot.
    pub fn discard(&mut self, slots: Range<u64>) {
        let zram = Arc::clone(&self.zram);
        self.cells().notify_free.add(slots.end - slots.start);
        for index in zram.table.touched_slots(slots) {
            if zram.table.load(index) != Slot::EMPTY {
                let old = zram.table.swap(index, Slot::EMPTY);
                self.published(index, old, Slot::Empty);
            }
        }
    }

    /// Ends a batch: what it replaced is freed as soon as no reader is left who may have found it, now if possible.
    pub fn end_batch(&mut self) {
        let Worker { zram, id, retired, .. } = self;
        if retired.is_empty() {
            return;
        }
        zram.reclaim(*id, retired);
    }

    /// Whether objects wait for their grace period, which is over in microseconds as a rule: then call
    /// [`Worker::end_batch`] again soon, since at the memory limit others may need their room.
    pub fn has_retired(&self) -> bool {
        !self.retired.is_empty()
    }

    fn cells(&self) -> &Cells {
        &self.zram.cells[self.id].0
    }

    /// After `new` took the place of `old` in a slot: counts, and retires what is not needed any more.
    fn published(&mut self, index: SlotIndex, old: u64, new: Slot) {
        reach(Step::Published);
        account(self.cells(), Slot::unpack(old), new);
        if is_huge(new) {
            self.cells().huge_pages_since.add(1);
        }
        match slot_granules(new) {
            Some((handle, _)) if self.zram.arena.is_spare(handle) => self.leave_spare(index, old),
            _ => self.retire(old),
        }
    }

    fn retire(&mut self, word: u64) {
        if slot_granules(Slot::unpack(word)).is_some() {
            self.cells().retired.add(1);
            self.retired.push(word);
            if self.retired.open() >= RETIRED_OPEN_MAX {
                self.end_batch();
            }
        }
    }

    /// After a write at the limit went to the spare segment: moves what the slot holds, this or what another worker put
    /// there since, to the place of what was replaced, as soon as nobody can read that any more. Where a reader takes its
    /// time, or the other's place was it, the cleaner does it later.
    fn leave_spare(&mut self, index: SlotIndex, old: u64) {
        let zram = Arc::clone(&self.zram);
        let Some((place, granules)) =
            slot_granules(Slot::unpack(old)).filter(|&(place, _)| !zram.arena.is_spare(place))
        else {
            self.retire(old); // who replaced the object before this one has its place
            return;
        };
        let mut former = Retired::default();
        former.push(old);
        self.cells().retired.add(1);
        former.seal(&zram.epochs);
        let since = Instant::now();
        let mut is_free = false;
        loop {
            former.reclaim(&zram.epochs, |_| is_free = true);
            match since.elapsed() {
                _ if is_free => break,
                waited if waited < GRACE_SPIN_MAX => std::thread::yield_now(),
                waited if waited < GRACE_WAIT_MAX => std::thread::sleep(GRACE_SPIN_MAX),
                _ => {
                    self.retired.append(former);
                    return;
                }
            }
        }
        self.cells().retired.add(-1);
        let guard = zram.epochs.pin(self.id);
        let mut word = zram.table.load(index);
        let slot = Slot::unpack(word);
        let Some((spare, needed)) =
            slot_granules(slot).filter(|&(handle, needed)| needed <= granules && zram.arena.is_spare(handle))
        else {
            drop(guard);
            // SAFETY: it was in a slot, its grace period is over, and nobody else has it.
            unsafe { zram.arena.free(self.id, place, granules) };
            return;
        };
        let len = match slot {
            Slot::Stored { len, .. } => len,
            _ => size_of::<u64>(),
        };
        // SAFETY: the word was loaded under the guard.
        let content = unsafe { zram.arena.content(spare, len, &guard) };
        // SAFETY: as for the place above; the object fits, as was asked.
        unsafe { zram.arena.reuse(self.id, place, granules, content) };
        let moved = loop {
            match zram.table.compare_exchange(index, word, slot::moved(word, place)) {
                Ok(()) => break true,
                // Read or marked meanwhile.
                Err(found) if slot::is_same_object(found, word) => word = found,
                Err(_) => break false,
            }
        };
        drop(guard);
        if moved {
            self.retire(word);
        } else {
            // SAFETY: the copy was never in the table.
            unsafe { zram.arena.free(self.id, place, needed) };
        }
        self.end_batch();
    }

    /// After the arena was found full: frees what can be freed. An error when another try is of no use: the first two are
    /// always of use, further ones while things can be moved together, or others use heaps or hold objects that may make
    /// room, for `GRACE_WAIT_MAX`.
    fn make_room(&mut self, patience: &mut Patience, full: Full) -> Result<(), WriteError> {
        patience.tries += 1;
        let since = *patience.since.get_or_insert_with(Instant::now);
        let others_may = full.busy || stats::gauge(&self.zram.cells, |cells| &cells.retired) != 0;
        let may_move = || full.is_fragmented && since.elapsed() < GRACE_WAIT_MAX && self.zram.clean_for_room();
        match since.elapsed() {
            _ if patience.tries <= TRIES_MIN || may_move() => {}
            waited if others_may && waited < GRACE_SPIN_MAX => std::thread::yield_now(),
            waited if others_may && waited < GRACE_WAIT_MAX => std::thread::sleep(GRACE_SPIN_MAX),
            _ => {
                self.cells().refused_writes.add(1);
                return Err(WriteError::LimitReached);
            }
        }
        self.end_batch();
        Ok(())
    }
}

/// Counts that `new` took the place of `old` in a slot, in the cells of who did it.
pub(crate) fn account(cells: &Cells, old: Slot, new: Slot) {
    cells.changes.add(1);
    let (before, after) = (Contents::of(old), Contents::of(new));
    let change = |gauge: &stats::Gauge, of: fn(&Contents) -> u64| {
        let by = of(&after) as i64 - of(&before) as i64;
        if by != 0 {
            gauge.add(by);
        }
    };
    change(&cells.pages_stored, |contents| contents.pages);
    change(&cells.same_pages, |contents| contents.same_pages);
    change(&cells.huge_pages, |contents| contents.huge_pages);
    change(&cells.granules, |contents| contents.granules);
    change(&cells.compr_data_size, |contents| contents.bytes);
}

impl Drop for Worker {
    fn drop(&mut self) {
        self.end_batch();
        self.zram.leave_orphans(std::mem::take(&mut self.retired));
        self.zram.epochs.leave(self.id);
    }
}
