//! The store of one disk: what joins table, arena, epochs, codec and stats.
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

use std::io;
use std::num::NonZero;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::arena::{Arena, Full, Purpose, Room, SEGMENT_SIZE, object_granules};
use crate::codec::{Algorithm, Decompressors, Stream};
use crate::epoch::{Epochs, Guard, ParticipantId, Retired};
use crate::page::{PAGE_SIZE, Page, SECTOR_SIZE, SECTORS_PER_PAGE};
use crate::slot::{Slot, SlotIndex};
use crate::stats::{self, Cells, IoCounters, Stats};
use crate::sync::CachePadded;
use crate::table::Table;

/// Workers that a disk can have at a time: virtio's queues, and as many again for their successors and passes.
pub const WORKERS_MAX: usize = 128;
/// The largest disk: 2^32 slots.
pub const DISK_BYTES_MAX: u64 = 1 << 44;
/// The least memory limit: four segments, of which one is for overwriting only.
pub const MEM_LIMIT_MIN: u64 = 4 * SEGMENT_SIZE as u64;

/// Objects a worker retires before it seals, even inside a batch.
const RETIRED_OPEN_MAX: usize = 256;
/// How long a write at the limit waits for others to leave what it could use: an object that a reader still holds, a
/// heap in use. Long enough for a preempted holder to run again on a busy host; an error would cost the guest more.
const GRACE_WAIT_MAX: Duration = Duration::from_millis(100);
/// The part of it that is spent trying: a grace period lasts microseconds unless its reader was preempted.
const GRACE_SPIN_MAX: Duration = Duration::from_millis(1);
/// Segments that a leaving worker gives back: 16 MiB, a few milliseconds.
const GIVEN_BACK_ON_LEAVE: usize = 256;

/// How to make a disk.
#[derive(Clone, Debug)]
pub struct Options {
    /// Shown in `/proc/PID/maps`; no meaning.
    pub name: String,
    /// Bytes: a multiple of 4,096, up to [`DISK_BYTES_MAX`], not 0.
    pub size_bytes: u64,
    /// The most host memory that pages may hold, in bytes: at least [`MEM_LIMIT_MIN`], used in whole segments.
    pub mem_limit_bytes: Option<u64>,
    /// How pages are compressed.
    pub algorithm: Algorithm,
}

/// Why a disk cannot be made.
#[derive(Debug, thiserror::Error)]
pub enum CreateError {
    /// The size is 0, too large, or no multiple of a page.
    #[error("a disk of {0} bytes: the size is a multiple of 4096 between 4096 and {DISK_BYTES_MAX}")]
    Size(u64),
    /// The limit is too low to store anything.
    #[error("a memory limit of {0} bytes: it is at least {MEM_LIMIT_MIN}")]
    MemLimit(u64),
    /// The host does not give the address space or the memory files.
    #[error("cannot map the disk")]
    Map(#[source] io::Error),
    /// The host does not give the memory for decompression contexts.
    #[error("no memory for decompression contexts")]
    Contexts,
}

/// Why a worker cannot be had.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum WorkerError {
    /// There are [`WORKERS_MAX`] already.
    #[error("the disk has its {WORKERS_MAX} workers")]
    TooMany,
    /// The host does not give the memory for a compression context.
    #[error("no memory for a compression context")]
    Context,
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

/// One disk's content. Shared by its workers, which do all reading and writing.
pub struct Zram {
    options: Options,
    table: Table,
    arena: Arena,
    epochs: Epochs,
    decompressors: Decompressors,
    /// One for each worker, and one for what is done while there is none.
    cells: Box<[CachePadded<Cells>]>,
    io: IoCounters,
    /// What workers left behind whose grace period was not over.
    orphans: Mutex<Retired>,
    has_orphans: AtomicBool,
}

impl std::fmt::Debug for Zram {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Zram")
            .field("options", &self.options)
            .finish_non_exhaustive()
    }
}

impl Zram {
    /// An empty disk. Costs address space and a few KiB, whatever its size.
    pub fn create(options: &Options) -> Result<Arc<Zram>, CreateError> {
        let size = options.size_bytes;
        if size == 0 || size > DISK_BYTES_MAX || !size.is_multiple_of(PAGE_SIZE as u64) {
            return Err(CreateError::Size(size));
        }
        if let Some(limit) = options.mem_limit_bytes.filter(|&limit| limit < MEM_LIMIT_MIN) {
            return Err(CreateError::MemLimit(limit));
        }
        let pages = size / PAGE_SIZE as u64;
        let cores = std::thread::available_parallelism().map_or(1, NonZero::get);
        Ok(Arc::new(Zram {
            table: Table::new(&options.name, pages).map_err(CreateError::Map)?,
            arena: Arena::new(&options.name, pages, options.mem_limit_bytes, WORKERS_MAX).map_err(CreateError::Map)?,
            epochs: Epochs::new(WORKERS_MAX),
            // One for each page that can be decoded at a time, and one for a worker that was preempted while decoding.
            decompressors: Decompressors::new(options.algorithm, cores + 1).ok_or(CreateError::Contexts)?,
            cells: (0..=WORKERS_MAX).map(|_| CachePadded::default()).collect(),
            io: IoCounters::default(),
            orphans: Mutex::default(),
            has_orphans: AtomicBool::new(false),
            options: options.clone(),
        }))
    }

    /// Bytes of the disk.
    pub fn size_bytes(&self) -> u64 {
        self.options.size_bytes
    }

    /// How pages are compressed.
    pub fn algorithm(&self) -> Algorithm {
        self.options.algorithm
    }

    /// The most host memory that pages may hold.
    pub fn mem_limit_bytes(&self) -> Option<u64> {
        self.options.mem_limit_bytes
    }

    /// A worker: who reads and writes. Takes the memory of a compression context.
    pub fn worker(self: &Arc<Self>) -> Result<Worker, WorkerError> {
        let stream = Stream::new(self.options.algorithm).ok_or(WorkerError::Context)?;
        let id = self.epochs.join().ok_or(WorkerError::TooMany)?;
        Ok(Worker {
            zram: Arc::clone(self),
            id,
            stream,
            scratch: Page::zeroed(),
            retired: Retired::default(),
        })
    }

    /// What the disk holds and has done. Waits for nobody; not one instant's picture while workers write.
    pub fn stats(&self) -> Stats {
        let mut stats = Stats {
            mem_used_total: self.arena.held_bytes(),
            mem_used_max: self.arena.held_bytes_max(),
            mem_limit: self.options.mem_limit_bytes.unwrap_or(0),
            table_bytes: self.table.touched_bytes(),
            contexts: self.decompressors.uses(),
            ..Stats::default()
        };
        stats::add_up(&self.cells, &mut stats);
        self.io.add_to(&mut stats);
        stats
    }

    /// Where failures of requests are counted.
    pub fn io_counters(&self) -> &IoCounters {
        &self.io
    }

    /// A step of giving back, as [`Worker::upkeep`], for a disk that has no workers at the moment.
    pub fn upkeep(&self) -> bool {
        if let Some(mut orphans) = self.take_orphans() {
            orphans.seal(&self.epochs);
            orphans.reclaim(&self.epochs, |word| {
                // SAFETY: as in `Worker::end_batch`. Any heap will do: none is anybody's own now.
                unsafe { self.free(0, word) };
                self.cells[WORKERS_MAX].0.retired.add_shared(-1);
            });
            self.leave_orphans(orphans);
        }
        self.arena.take_queues_in();
        self.arena.give_back() && self.arena.has_upkeep()
    }

    fn take_orphans(&self) -> Option<Retired> {
        // Relaxed: the lock orders what it guards, and a flag seen late is seen the next time.
        let there = self.has_orphans.swap(false, Ordering::Relaxed);
        there.then(|| std::mem::take(&mut *self.orphans.lock().unwrap_or_else(PoisonError::into_inner)))
    }

    fn leave_orphans(&self, retired: Retired) {
        if !retired.is_empty() {
            self.orphans
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .append(retired);
            self.has_orphans.store(true, Ordering::Relaxed);
        }
    }

    /// Panics unless every gauge is what the slot table says, and the arena holds that and nothing else. Only for a disk
    /// at rest: no worker inside a call, all batches ended.
    #[doc(hidden)]
    pub fn check_consistency(&self) {
        let mut found = Stats::default();
        let mut granules = 0;
        for index in self.table.touched_slots(0..self.table.slots()) {
            let slot = Slot::unpack(self.table.load(index));
            found.orig_data_size += PAGE_SIZE as u64 * u64::from(slot != Slot::Empty);
            match slot {
                Slot::Empty => {}
                Slot::SameFilled(_) => found.same_pages += 1,
                Slot::SameFilledObject(_) => found.same_pages += 1,
                Slot::Stored { len, .. } => {
                    found.compr_data_size += len as u64;
                    found.huge_pages += u64::from(len == PAGE_SIZE);
                }
            }
            granules += slot_granules(slot).map_or(0, |(_, granules)| granules);
        }
        let stats = self.stats();
        let gauges = |s: &Stats| (s.orig_data_size, s.compr_data_size, s.same_pages, s.huge_pages);
        assert_eq!(
            gauges(&stats),
            gauges(&found),
            "gauges (orig, compr, same, huge) and the table's"
        );
        assert_eq!(
            stats::gauge(&self.cells, |cells| &cells.granules),
            granules as u64,
            "granules and the table's"
        );
        assert!(stats.mem_limit == 0 || stats.mem_used_total <= stats.mem_limit);
        self.arena.check_consistency(granules);
    }

    /// Fills `page` with what `word` says, which was loaded under `guard`.
    fn decode(&self, reader: ParticipantId, word: u64, page: &mut Page, guard: &Guard<'_>) -> Result<(), ReadError> {
        match Slot::unpack(word) {
            Slot::Empty => page.fill(0),
            Slot::SameFilled(value) => page.fill_with_word(value),
            // SAFETY: the word was loaded under the guard.
            Slot::SameFilledObject(handle) => page.fill_with_word(unsafe { self.arena.value(handle, guard) }),
            Slot::Stored { handle, len } => {
                // SAFETY: the word was loaded under the guard.
                let content = unsafe { self.arena.content(handle, len, guard) };
                if len == PAGE_SIZE {
                    page.copy_from_slice(content);
                } else {
                    self.decompressors
                        .decompress(reader, content, page)
                        .map_err(|_| ReadError::Corrupt)?;
                }
            }
        }
        Ok(())
    }

    /// Stores a page's content, or only its word; the result is not in the table yet. `replaces` is what its slot holds.
    fn prepare(&self, worker: ParticipantId, stream: &mut Stream, page: &Page, replaces: u64) -> Result<Slot, Full> {
        let replaced = slot_granules(Slot::unpack(replaces)).map_or(0, |(_, granules)| granules);
        let live_granules = &|| stats::gauge(&self.cells, |cells| &cells.granules);
        let room = |granules: usize| {
            let purpose = if replaced >= granules {
                Purpose::Replace
            } else {
                Purpose::Grow
            };
            Room {
                heap: worker,
                purpose,
                live_granules,
            }
        };
        if let Some(value) = page.same_filled() {
            return match Slot::same_filled(value) {
                Some(slot) => Ok(slot),
                None => Ok(Slot::SameFilledObject(self.arena.store_value(&room(1), value)?)),
            };
        }
        let compressed = stream.compress(page);
        let gains = object_granules(compressed.len()) < object_granules(PAGE_SIZE);
        let content = if gains { compressed } else { &page[..] };
        let handle = self.arena.store(&room(object_granules(content.len())), content)?;
        Ok(Slot::Stored {
            handle,
            len: content.len(),
        })
    }

    /// Frees what a word points to. The caller keeps the promise of [`Arena::free`].
    ///
    /// # Safety
    /// The word is in no slot any more, no guard is left that may have seen it there, and it is freed once.
    unsafe fn free(&self, worker: ParticipantId, word: u64) {
        if let Some((handle, granules)) = slot_granules(Slot::unpack(word)) {
            // SAFETY: the caller's promise.
            unsafe { self.arena.free(worker, handle, granules) };
        }
    }
}

/// The object behind a slot, and its granules.
fn slot_granules(slot: Slot) -> Option<(crate::slot::Handle, usize)> {
    match slot {
        Slot::Empty | Slot::SameFilled(_) => None,
        Slot::SameFilledObject(handle) => Some((handle, 1)),
        Slot::Stored { handle, len } => Some((handle, object_granules(len))),
    }
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
        self.zram.decode(self.id, self.zram.table.load(index), page, &guard)
    }

    /// Replaces the content of a slot.
    pub fn write_page(&mut self, index: SlotIndex, page: &Page) -> Result<(), WriteError> {
        let mut waiting_since = None;
        loop {
            let replaces = self.zram.table.load(index);
            match self.zram.prepare(self.id, &mut self.stream, page, replaces) {
                Ok(new) => {
                    let old = self.zram.table.swap(index, new.pack());
                    self.account_and_retire(old, new);
                    return Ok(());
                }
                Err(full) => self.make_room(&mut waiting_since, full)?,
            }
        }
    }

    /// Replaces whole sectors of a page: `data` goes to sector `first` of the page and those after it. Atomic against all
    /// other workers, for each sector.
    ///
    /// # Panics
    /// If `data` is no whole number of sectors or passes the end of the page.
    pub fn write_sectors(&mut self, index: SlotIndex, first: usize, data: &[u8]) -> Result<(), WriteError> {
        assert!(data.len().is_multiple_of(SECTOR_SIZE) && first <= SECTORS_PER_PAGE);
        let range = first * SECTOR_SIZE..first * SECTOR_SIZE + data.len();
        let mut waiting_since = None;
        loop {
            let guard = self.zram.epochs.pin(self.id);
            let found = self.zram.table.load(index);
            self.zram
                .decode(self.id, found, &mut self.scratch, &guard)
                .map_err(|_| WriteError::Corrupt)?;
            self.scratch[range.clone()].copy_from_slice(data);
            let prepared = self.zram.prepare(self.id, &mut self.stream, &self.scratch, found);
            let exchanged = prepared.map(|new| (new, self.zram.table.compare_exchange(index, found, new.pack())));
            drop(guard);
            match exchanged {
                Ok((new, Ok(()))) => {
                    self.account_and_retire(found, new);
                    return Ok(());
                }
                // SAFETY: the new object was never in the table.
                Ok((new, Err(_))) => unsafe { self.zram.free(self.id, new.pack()) },
                Err(full) => self.make_room(&mut waiting_since, full)?,
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
                self.account_and_retire(old, Slot::Empty);
            }
        }
    }

    /// Ends a batch: what it replaced is freed as soon as no reader is left who may have found it, now if possible.
    pub fn end_batch(&mut self) {
        let Worker { zram, id, retired, .. } = self;
        retired.seal(&zram.epochs);
        let mut freed = 0;
        retired.reclaim(&zram.epochs, |word| {
            // SAFETY: we took retired words out of their slots, and reclaim gives each once, after its grace period.
            unsafe { zram.free(*id, word) };
            freed += 1;
        });
        if freed != 0 {
            zram.cells[*id].0.retired.add(-freed);
        }
    }

    /// Whether something waits to be given back: then sleep with a timeout and call [`Worker::upkeep`].
    pub fn has_upkeep(&self) -> bool {
        !self.retired.is_empty() || self.zram.arena.has_upkeep() || self.zram.has_orphans.load(Ordering::Relaxed)
    }

    /// Whether objects wait for their grace period, which is over in microseconds as a rule: then call
    /// [`Worker::end_batch`] again soon, since at the memory limit others may need their room.
    pub fn has_retired(&self) -> bool {
        !self.retired.is_empty()
    }

    /// A step of giving back, some 20 us: frees what can be freed now, and returns one empty segment to the host. True
    /// when there is more to do at once. For the time when no request waits.
    pub fn upkeep(&mut self) -> bool {
        if let Some(orphans) = self.zram.take_orphans() {
            self.retired.append(orphans);
        }
        self.end_batch();
        self.zram.arena.take_queues_in();
        self.zram.arena.give_back() && self.zram.arena.has_upkeep()
    }

    fn cells(&self) -> &Cells {
        &self.zram.cells[self.id].0
    }

    /// After `new` took the place of `old` in a slot.
    fn account_and_retire(&mut self, old: u64, new: Slot) {
        let replaced = Slot::unpack(old);
        let cells = self.cells();
        let change = |gauge: &stats::Gauge, measure: fn(Slot) -> i64| {
            let by = measure(new) - measure(replaced);
            if by != 0 {
                gauge.add(by);
            }
        };
        change(&cells.pages_stored, |slot| i64::from(slot != Slot::Empty));
        change(&cells.same_pages, |slot| {
            i64::from(matches!(slot, Slot::SameFilled(_) | Slot::SameFilledObject(_)))
        });
        change(&cells.huge_pages, |slot| i64::from(is_huge(slot)));
        change(&cells.granules, |slot| {
            slot_granules(slot).map_or(0, |(_, granules)| granules as i64)
        });
        change(&cells.compr_data_size, |slot| {
            if let Slot::Stored { len, .. } = slot {
                len as i64
            } else {
                0
            }
        });
        if is_huge(new) {
            cells.huge_pages_since.add(1);
        }
        if slot_granules(replaced).is_some() {
            cells.retired.add(1);
            self.retired.push(old);
            if self.retired.open() >= RETIRED_OPEN_MAX {
                self.end_batch();
            }
        }
    }

    /// After the arena was found full: frees what can be freed. An error when another try is of no use: the first is
    /// always of use, further ones while others use heaps or hold objects that may make room, for `GRACE_WAIT_MAX`.
    fn make_room(&mut self, waiting_since: &mut Option<Instant>, full: Full) -> Result<(), WriteError> {
        let others_may = full.busy || stats::gauge(&self.zram.cells, |cells| &cells.retired) != 0;
        match *waiting_since {
            None => *waiting_since = Some(Instant::now()),
            Some(since) if others_may && since.elapsed() < GRACE_SPIN_MAX => std::thread::yield_now(),
            Some(since) if others_may && since.elapsed() < GRACE_WAIT_MAX => std::thread::sleep(GRACE_SPIN_MAX),
            Some(_) => {
                self.cells().refused_writes.add(1);
                return Err(WriteError::LimitReached);
            }
        }
        self.end_batch();
        Ok(())
    }
}

fn is_huge(slot: Slot) -> bool {
    matches!(slot, Slot::Stored { len: PAGE_SIZE, .. })
}

impl Drop for Worker {
    fn drop(&mut self) {
        self.end_batch();
        for _ in 0..GIVEN_BACK_ON_LEAVE {
            if !self.zram.arena.give_back() {
                break;
            }
        }
        self.zram.leave_orphans(std::mem::take(&mut self.retired));
        self.zram.epochs.leave(self.id);
    }
}
