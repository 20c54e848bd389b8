//! The store of one disk: what joins table, arena, epochs, codec and stats.
//!
//! Workers (`worker.rs`) read and write it, the cleaner (`clean.rs`) moves its objects together, upkeep (`upkeep.rs`) does
//! what is done beside requests, and another process can take over what one left (`adopt.rs`).

use std::io;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use rustix::rand::{GetRandomFlags, getrandom};

use crate::arena::{Arena, ArenaReport, Full, Purpose, Room, SEGMENT_SIZE, object_granules};
use crate::clean::Cleaner;
use crate::codec::{Algorithm, Codecs, PRIORITIES, Stream};
use crate::epoch::{Epochs, Guard, ParticipantId, Retired};
use crate::head::{Head, Part};
use crate::idle::{self, IdleMark};
use crate::page::{PAGE_SIZE, Page};
use crate::pause::{Step, reach};
use crate::region::file_len;
use crate::slot::{Handle, Slot, SlotIndex};
use crate::stats::{self, Cells, IoCounters, Stats};
use crate::sync::CachePadded;
use crate::table::Table;
use crate::upkeep::Sleeper;
use crate::worker::{ReadError, Worker};

/// Workers that a disk can have at a time: virtio's queues, and as many again for their successors and passes.
pub const WORKERS_MAX: usize = 128;
/// The largest disk: 2^32 slots.
pub const DISK_BYTES_MAX: u64 = 1 << 44;
/// The least memory limit: four segments, of which one is for overwriting only.
pub const MEM_LIMIT_MIN: u64 = 4 * SEGMENT_SIZE as u64;

/// Objects a worker retires before it seals, even inside a batch.
pub(crate) const RETIRED_OPEN_MAX: usize = 256;
/// Workers and the cleaner: each is a participant of the epochs, with a heap and cells of its own.
pub(crate) const PARTICIPANTS_MAX: usize = WORKERS_MAX + 1;

/// How to make a disk.
#[derive(Clone, Debug)]
pub struct Options {
    /// Shown in `/proc/PID/maps`; no meaning.
    pub name: String,
    /// Bytes: a multiple of 4,096, up to [`DISK_BYTES_MAX`], not 0.
    pub size_bytes: u64,
    /// The largest size that [`Zram::grow`] can give it, in bytes like the size; `None`: it does not grow. Address space
    /// for it is reserved.
    pub size_bytes_max: Option<u64>,
    /// The most host memory that pages may hold, in bytes: at least [`MEM_LIMIT_MIN`], used in whole segments.
    pub mem_limit_bytes: Option<u64>,
    /// How pages are compressed.
    pub codecs: Arc<Codecs>,
}

/// Why a disk cannot be made.
#[derive(Debug, thiserror::Error)]
pub enum CreateError {
    /// The size is 0, too large, or no multiple of a page.
    #[error("a disk of {0} bytes: the size is a multiple of 4096 between 4096 and {DISK_BYTES_MAX}")]
    Size(u64),
    /// The limit is too low to store anything.
    #[error(transparent)]
    MemLimit(#[from] MemLimitError),
    /// The host does not give the address space or the memory files.
    #[error("cannot map the disk")]
    Map(#[source] io::Error),
}

/// A memory limit that leaves no room to store anything.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a memory limit of {0} bytes: it is at least {MEM_LIMIT_MIN}")]
pub struct MemLimitError(pub u64);

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

/// Memory of contexts, in bytes. They are taken at start, and do not grow with what is stored.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ContextBytes {
    /// Each worker's compression context and output buffer.
    pub worker: u64,
    /// Once a disk: compression contexts for recompression, and dictionaries.
    pub shared: u64,
    /// Once a daemon: contexts to decode with.
    pub decompression: u64,
}

/// One disk's content. Shared by its workers, which do all reading and writing.
pub struct Zram {
    pub(crate) codecs: Arc<Codecs>,
    /// Bytes, 0 when there is none.
    mem_limit: AtomicU64,
    pub(crate) table: Table,
    pub(crate) arena: Arena,
    pub(crate) epochs: Epochs,
    /// One for each participant.
    pub(crate) cells: Box<[CachePadded<Cells>]>,
    io: IoCounters,
    /// What workers left behind whose grace period was not over.
    orphans: Mutex<Retired>,
    has_orphans: AtomicBool,
    /// Whoever cleans has it. No request ever waits for it.
    pub(crate) cleaner: Mutex<Cleaner>,
    pub(crate) sleeper: Sleeper,
    /// Held while the size changes.
    pub(crate) resizing: Mutex<()>,
    /// Held by a run of recompression.
    pub(crate) recompressing: Mutex<()>,
    /// What a worker's stream takes; 0 until it is known.
    stream_bytes: AtomicU64,
    created: Instant,
    /// The last walk that moved the pages' ages on, since `created`.
    ticked: Mutex<Duration>,
    /// An aged page was read since that walk.
    was_used: AtomicBool,
}

impl std::fmt::Debug for Zram {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Zram")
            .field("size_bytes", &self.size_bytes())
            .field("codecs", &self.codecs)
            .finish_non_exhaustive()
    }
}

impl Zram {
    /// An empty disk. Costs address space and some KiB, whatever its size.
    pub fn create(options: &Options) -> Result<Arc<Zram>, CreateError> {
        let size = options.size_bytes;
        let size_max = options.size_bytes_max.unwrap_or(size);
        for bytes in [size, size_max] {
            if bytes < size || bytes == 0 || bytes > DISK_BYTES_MAX || !bytes.is_multiple_of(PAGE_SIZE as u64) {
                return Err(CreateError::Size(bytes));
            }
        }
        check_mem_limit(options.mem_limit_bytes)?;
        let [pages, pages_max] = [size, size_max].map(|bytes| bytes / PAGE_SIZE as u64);
        let mut id = [0; size_of::<u128>()];
        getrandom(&mut id, GetRandomFlags::empty()).map_err(|error| CreateError::Map(error.into()))?;
        let space = Arena::address_space(pages_max);
        let head = Head {
            id: u128::from_ne_bytes(id),
            disk_bytes: size,
            content_bytes: pages_max * size_of::<u64>() as u64,
            algorithms: options.codecs.to_string(),
        };
        let arena_head = Head {
            content_bytes: space,
            ..head.clone()
        };
        let table = Table::new(&options.name, pages, pages_max, &head.encode(Part::Table)).map_err(CreateError::Map)?;
        let limit = options.mem_limit_bytes;
        let arena = Arena::new(
            &options.name,
            space,
            &arena_head.encode(Part::Arena),
            limit,
            PARTICIPANTS_MAX,
        )
        .map_err(CreateError::Map)?;
        Ok(Arc::new(Zram::on(table, arena, options.codecs.clone(), limit)))
    }

    pub(crate) fn on(table: Table, arena: Arena, codecs: Arc<Codecs>, mem_limit: Option<u64>) -> Zram {
        let epochs = Epochs::new(PARTICIPANTS_MAX);
        let cleaner = Cleaner::new(epochs.join().expect("nobody else has joined"));
        Zram {
            codecs,
            mem_limit: AtomicU64::new(mem_limit.unwrap_or(0)),
            table,
            arena,
            epochs,
            cells: (0..PARTICIPANTS_MAX).map(|_| CachePadded::default()).collect(),
            io: IoCounters::default(),
            orphans: Mutex::default(),
            has_orphans: AtomicBool::new(false),
            cleaner: Mutex::new(cleaner),
            sleeper: Sleeper::default(),
            resizing: Mutex::new(()),
            recompressing: Mutex::new(()),
            stream_bytes: AtomicU64::new(0),
            created: Instant::now(),
            ticked: Mutex::default(),
            was_used: AtomicBool::new(false),
        }
    }

    /// Bytes of the disk.
    pub fn size_bytes(&self) -> u64 {
        self.table.slots() * PAGE_SIZE as u64
    }

    /// The algorithms by priority, and the decompression contexts.
    pub fn codecs(&self) -> &Arc<Codecs> {
        &self.codecs
    }

    /// How pages are compressed.
    pub fn algorithm(&self) -> &Algorithm {
        let primary = self.codecs.algorithm(0);
        primary.expect("priority 0 is always there").algorithm()
    }

    /// The algorithms for recompression, with their priorities.
    pub fn recompress_algorithms(&self) -> impl Iterator<Item = (usize, &Algorithm)> {
        (1..PRIORITIES).filter_map(|priority| Some((priority, self.codecs.algorithm(priority)?.algorithm())))
    }

    /// What compression and decompression contexts take.
    pub fn context_bytes(&self) -> ContextBytes {
        ContextBytes {
            worker: self.stream_bytes(),
            shared: self.codecs.memory_bytes() as u64,
            decompression: self.codecs.contexts().memory_bytes(),
        }
    }

    /// What a worker's stream takes. Before there was a worker one is made to know it.
    fn stream_bytes(&self) -> u64 {
        let known = self.stream_bytes.load(Ordering::Relaxed);
        if known != 0 {
            return known;
        }
        let bytes = self.codecs.stream().map_or(0, |stream| stream.memory_bytes() as u64);
        self.stream_bytes.store(bytes, Ordering::Relaxed);
        bytes
    }

    /// The most host memory that pages may hold, in bytes.
    pub fn mem_limit_bytes(&self) -> Option<u64> {
        Some(self.mem_limit.load(Ordering::Relaxed)).filter(|&limit| limit != 0)
    }

    /// Changes the limit for what is stored from now on, as zram's `mem_limit` does. A limit below what is held takes
    /// nothing away: new pages are refused until enough was discarded, overwritten with less, or moved together.
    pub fn set_mem_limit(&self, bytes: Option<u64>) -> Result<(), MemLimitError> {
        check_mem_limit(bytes)?;
        self.mem_limit.store(bytes.unwrap_or(0), Ordering::Relaxed);
        self.arena.set_limit(bytes);
        if let Ok(mut cleaner) = self.cleaner.try_lock() {
            cleaner.forget_futility();
        }
        self.sleeper.wake();
        Ok(())
    }

    /// Begins the maximum in `mem_used_max` anew at what is held now, as writing 0 to zram's `mem_used_max` does.
    pub fn reset_mem_used_max(&self) {
        self.arena.reset_held_bytes_max();
    }

    /// Keeps slot table and arena, now and later, out of the host's swap (mlock2 with MLOCK_ONFAULT). RLIMIT_MEMLOCK has
    /// to cover [`Zram::address_space_bytes`], or the process have CAP_IPC_LOCK.
    pub fn lock_memory(&self) -> io::Result<()> {
        self.table.mapping().lock()?;
        self.arena.mapping().lock()
    }

    /// Length of the longer of the two memory files of a disk of `size_bytes`, most of it without memory: what
    /// RLIMIT_FSIZE has to allow.
    pub fn memory_file_bytes(size_bytes: u64) -> u64 {
        let pages = size_bytes.div_ceil(PAGE_SIZE as u64);
        let table = pages * size_of::<u64>() as u64;
        file_len(Arena::address_space(pages).max(table) as usize)
    }

    /// Bytes of address space for slot table and arena, most of it without memory.
    pub fn address_space_bytes(&self) -> u64 {
        (self.table.mapping().len() + self.arena.mapping().len()) as u64
    }

    /// How full the arena's segments are, for the operator. Waits for nobody and holds nobody up; takes some
    /// microseconds a thousand segments.
    pub fn arena_report(&self) -> ArenaReport {
        self.arena.report()
    }

    /// Marks pages as idle, as writing to zram's `idle` does: the next read or write of a page takes the mark away. How many
    /// pages have it now. One walk through the slot table.
    pub fn mark_idle(&self, mark: IdleMark) -> u64 {
        self.tick();
        idle::mark(&self.table, mark)
    }

    /// Moves the pages' ages on to now.
    pub(crate) fn tick(&self) {
        let mut ticked = self.ticked.lock().unwrap_or_else(PoisonError::into_inner);
        // Before the walk: what is used while it goes on counts as used after it.
        self.was_used.store(false, Ordering::Relaxed);
        let now = self.created.elapsed();
        idle::tick(&self.table, *ticked, now);
        *ticked = now;
    }

    pub(crate) fn is_tick_due(&self) -> bool {
        let ticked = self.ticked.lock().unwrap_or_else(PoisonError::into_inner);
        self.created.elapsed() - *ticked >= idle::TICK
    }

    /// An aged page was read: ages have to be moved on again.
    pub(crate) fn note_use(&self) {
        self.was_used.store(true, Ordering::Relaxed);
        self.sleeper.wake();
    }

    pub(crate) fn was_used(&self) -> bool {
        self.was_used.load(Ordering::Relaxed)
    }

    /// A worker: who reads and writes. Takes the memory of a compression context.
    pub fn worker(self: &Arc<Self>) -> Result<Worker, WorkerError> {
        let stream = self.codecs.stream().map_err(|_| WorkerError::Context)?;
        self.stream_bytes.store(stream.memory_bytes() as u64, Ordering::Relaxed);
        let id = self.epochs.join().ok_or(WorkerError::TooMany)?;
        Ok(Worker::new(Arc::clone(self), id, stream))
    }

    /// What the disk holds and has done. Waits for nobody; not one instant's picture while workers write.
    pub fn stats(&self) -> Stats {
        let mut stats = Stats {
            mem_used_total: self.arena.held_bytes(),
            mem_used_max: self.arena.held_bytes_max(),
            mem_limit: self.mem_limit_bytes().unwrap_or(0),
            table_bytes: self.table.touched_bytes(),
            contexts: self.codecs.contexts().uses(),
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

    pub(crate) fn take_orphans(&self) -> Option<Retired> {
        // Relaxed: the lock orders what it guards, and a flag seen late is seen the next time.
        let there = self.has_orphans.swap(false, Ordering::Relaxed);
        there.then(|| std::mem::take(&mut *self.orphans.lock().unwrap_or_else(PoisonError::into_inner)))
    }

    pub(crate) fn leave_orphans(&self, retired: Retired) {
        if !retired.is_empty() {
            self.orphans
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .append(retired);
            self.has_orphans.store(true, Ordering::Relaxed);
            self.sleeper.wake();
        }
    }

    pub(crate) fn has_orphans(&self) -> bool {
        self.has_orphans.load(Ordering::Relaxed)
    }

    /// Granules of all objects in slots.
    pub(crate) fn live_granules(&self) -> u64 {
        stats::gauge(&self.cells, |cells| &cells.granules)
    }

    /// Panics unless every gauge is what the slot table says, and the arena holds that and nothing else. Only for a disk
    /// at rest: no worker inside a call, all batches ended.
    #[doc(hidden)]
    pub fn check_consistency(&self) {
        let mut found = Contents::default();
        for index in self.table.touched_slots(0..self.table.slots()) {
            found.add(Slot::unpack(self.table.load(index)));
        }
        let stats = self.stats();
        let gauges = Contents {
            pages: stats.orig_data_size / PAGE_SIZE as u64,
            same_pages: stats.same_pages,
            huge_pages: stats.huge_pages,
            bytes: stats.compr_data_size,
            granules: self.live_granules(),
        };
        assert_eq!(gauges, found, "the gauges and what the table says");
        assert_eq!(stats::gauge(&self.cells, |cells| &cells.retired), 0, "retired");
        assert!(stats.mem_limit == 0 || stats.mem_used_total <= stats.mem_limit);
        self.arena.check_consistency(found.granules as usize);
    }

    /// Has the caches fetch the object behind a slot, if there is one now.
    pub(crate) fn prefetch(&self, index: SlotIndex) {
        if let Slot::Stored { handle, len, .. } = Slot::unpack(self.table.load(index)) {
            self.arena.prefetch(handle, len);
        }
    }

    /// Has the caches fetch a slot's word.
    pub(crate) fn prefetch_slot(&self, index: SlotIndex) {
        self.table.prefetch(index);
    }

    /// Fills `page` with what `word` says, which was loaded under `guard`.
    pub(crate) fn decode(
        &self,
        reader: ParticipantId,
        word: u64,
        page: &mut Page,
        guard: &Guard<'_>,
    ) -> Result<(), ReadError> {
        match Slot::unpack(word) {
            Slot::Empty => page.fill(0),
            Slot::SameFilled(value) => page.fill_with_word(value),
            // SAFETY: the word was loaded under the guard.
            Slot::SameFilledObject(handle) => page.fill_with_word(unsafe { self.arena.value(handle, guard) }),
            Slot::Stored { handle, len, priority } => {
                // SAFETY: the word was loaded under the guard.
                let content = unsafe { self.arena.content(handle, len, guard) };
                if len == PAGE_SIZE {
                    page.copy_from_slice(content);
                } else {
                    self.codecs
                        .decompress(priority.into(), reader, content, page)
                        .map_err(|_| ReadError::Corrupt)?;
                }
            }
        }
        Ok(())
    }

    /// Stores a page's content, or only its word; the result is not in the table yet. `replaces` is what its slot holds.
    /// `with_spare`: the arena was found full, what replaces as much may go to the spare segment.
    pub(crate) fn prepare(
        &self,
        worker: ParticipantId,
        stream: &mut Stream,
        page: &Page,
        replaces: u64,
        with_spare: bool,
    ) -> Result<Slot, Full> {
        if let Some(value) = page.same_filled() {
            return match Slot::same_filled(value) {
                Some(slot) => Ok(slot),
                None => {
                    let handle = self.store(worker, &value.to_ne_bytes(), replaces, with_spare)?;
                    Ok(Slot::SameFilledObject(handle))
                }
            };
        }
        let compressed = stream.compress(page);
        let gains = object_granules(compressed.len()) < object_granules(PAGE_SIZE);
        let content = if gains { compressed } else { &page[..] };
        Ok(Slot::Stored {
            handle: self.store(worker, content, replaces, with_spare)?,
            len: content.len(),
            priority: 0,
        })
    }

    /// Stores an object that will take the place of what the word `replaces` points to.
    pub(crate) fn store(
        &self,
        worker: ParticipantId,
        content: &[u8],
        replaces: u64,
        with_spare: bool,
    ) -> Result<Handle, Full> {
        let granules = object_granules(content.len());
        let replaced = slot_granules(Slot::unpack(replaces)).map_or(0, |(_, granules)| granules);
        let room = Room {
            heap: worker,
            purpose: match granules {
                _ if granules <= replaced && with_spare => Purpose::Spare,
                _ if granules <= replaced => Purpose::Replace,
                _ if granules <= replaced + (replaced / 16).max(2) => Purpose::Resize,
                _ => Purpose::Grow,
            },
            live_granules: &|| self.live_granules(),
        };
        self.arena.store(&room, content)
    }

    /// Ends a batch of what a participant retired, and frees what no reader can have found any more.
    pub(crate) fn reclaim(&self, id: ParticipantId, retired: &mut Retired) {
        retired.seal(&self.epochs);
        reach(Step::Sealed);
        let mut freed = 0;
        retired.reclaim(&self.epochs, |word| {
            // SAFETY: retired words were taken out of their slots, and reclaim gives each once, after its grace period.
            unsafe { self.free(id, word) };
            freed += 1;
        });
        if freed != 0 {
            self.cells[id].0.retired.add(-freed);
        }
        self.sleeper.wake();
    }

    /// Frees what a word points to. The caller keeps the promise of [`Arena::free`].
    ///
    /// # Safety
    /// The word is in no slot any more, no guard is left that may have seen it there, and it is freed once.
    pub(crate) unsafe fn free(&self, worker: ParticipantId, word: u64) {
        if let Some((handle, granules)) = slot_granules(Slot::unpack(word)) {
            // SAFETY: the caller's promise.
            unsafe { self.arena.free(worker, handle, granules) };
        }
    }
}

pub(crate) fn check_mem_limit(bytes: Option<u64>) -> Result<(), MemLimitError> {
    match bytes {
        Some(bytes) if bytes < MEM_LIMIT_MIN => Err(MemLimitError(bytes)),
        _ => Ok(()),
    }
}

/// What slots hold, added up: the gauges as the table says them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Contents {
    pub(crate) pages: u64,
    pub(crate) same_pages: u64,
    pub(crate) huge_pages: u64,
    pub(crate) bytes: u64,
    pub(crate) granules: u64,
}

impl Contents {
    pub(crate) fn of(slot: Slot) -> Contents {
        Contents {
            pages: u64::from(slot != Slot::Empty),
            same_pages: u64::from(matches!(slot, Slot::SameFilled(_) | Slot::SameFilledObject(_))),
            huge_pages: u64::from(is_huge(slot)),
            bytes: if let Slot::Stored { len, .. } = slot {
                len as u64
            } else {
                0
            },
            granules: slot_granules(slot).map_or(0, |(_, granules)| granules as u64),
        }
    }

    pub(crate) fn add(&mut self, slot: Slot) {
        let more = Contents::of(slot);
        self.pages += more.pages;
        self.same_pages += more.same_pages;
        self.huge_pages += more.huge_pages;
        self.bytes += more.bytes;
        self.granules += more.granules;
    }
}

/// The object behind a slot, and its granules.
pub(crate) fn slot_granules(slot: Slot) -> Option<(Handle, usize)> {
    match slot {
        Slot::Empty | Slot::SameFilled(_) => None,
        Slot::SameFilledObject(handle) => Some((handle, 1)),
        Slot::Stored { handle, len, .. } => Some((handle, object_granules(len))),
    }
}

pub(crate) fn is_huge(slot: Slot) -> bool {
    matches!(slot, Slot::Stored { len: PAGE_SIZE, .. })
}
