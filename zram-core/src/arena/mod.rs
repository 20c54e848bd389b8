//! The arena: objects of exact length in segments of host memory.
//!
//! It knows no slots' meaning and no codec. An object is a page's content, or a same-filled page's word, and nothing
//! else: no header says whose it is, since only the slot table has to know (the cleaner finds who points at an object by
//! a walk through the table, see `clean.rs`). Objects never span segments, so each is contiguous and is decoded where
//! it lies. They do not change from publication to the end of their grace period.
//!
//! 1. Every segment in use belongs to one heap, every heap to whoever holds its lock, and the lock is only ever *tried*:
//!    a worker uses its own heap, whose lock others rarely want; when it is taken all the same, the next heap does. So a
//!    heap whose worker stopped is everybody's, and nobody waits.
//! 2. An object whose heap is not to be had at the moment is pushed to that heap's queue, through its own first 8 bytes;
//!    whoever next holds the heap takes the queue in.
//! 3. Nothing is taken beyond the limit, see `segments.rs`. And no heap grows while the segments in use are sparse and
//!    another heap has room: else what one queue filled would stay half empty while others fill segments of their own.
//! 4. One heap more is for what has no room anywhere, until the object that it replaces has left its place: an overwrite
//!    with as much as before never fails for want of a hole that is large enough.
//! 5. What is lost with a process can be had again from the objects' places alone, see `rebuild.rs`.

mod heap;
mod rebuild;
mod report;
mod segments;
mod stack;

use std::io;
use std::os::fd::OwnedFd;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard};

use crate::epoch::Guard;
use crate::page::PAGE_SIZE;
use crate::pause::{Step, allocation_fails, reach};
use crate::region::{Mapping, OS_PAGE_SIZE, prefetch};
use crate::slot::{GRANULE_SIZE, GRANULES_MAX, Handle};
use crate::sync::CachePadded;
use heap::{Heap, Local};
pub(crate) use rebuild::{Layout, LayoutError};
pub use report::{ArenaReport, HeapReport, HoleClass, LIVE_SHARES};
pub(crate) use segments::Purpose;
use segments::Segments;

/// Bytes in a segment: the unit in which the arena takes memory from the host and gives it back.
pub const SEGMENT_SIZE: usize = 64 << 10;
pub(crate) const SEGMENT_GRANULES: usize = SEGMENT_SIZE / GRANULE_SIZE;
/// Granules of the largest object, a page kept whole: sixteen fill a segment.
const OBJECT_GRANULES_MAX: usize = PAGE_SIZE / GRANULE_SIZE;
/// Objects whose heap is busy wait in its queue as one word: place and length.
const QUEUE_LENGTH_BITS: u32 = 10;
const _: () = assert!(OBJECT_GRANULES_MAX < 1 << QUEUE_LENGTH_BITS);
/// A segment's home is its heap and its index there, as one 32-bit word.
const HOME_LOCAL_BITS: u32 = 24;
const _: () = assert!(GRANULES_MAX / SEGMENT_GRANULES as u64 <= 1 << HOME_LOCAL_BITS);
/// Segments in use are sparse when more than this share of them is free.
const SPARSE_SHARE: u64 = 32;
/// How often a heap that is in use for a moment is tried.
const TRIES: usize = 3;
/// Segments of a heap that are looked at under its lock at a time: some microseconds.
const SURVEY_STEP: usize = 256;

/// How much of an object is fetched ahead. The processor goes on by itself; asking for the rest keeps other fetches
/// waiting and costs 3 to 5 % of all reads.
const PREFETCH_BYTES_MAX: usize = 1024;

/// Granules of an object with `len` bytes of content.
pub(crate) fn object_granules(len: usize) -> usize {
    len.div_ceil(GRANULE_SIZE)
}

/// For whom and for what an object is stored.
pub(crate) struct Room<'a> {
    /// The heap of the worker.
    pub(crate) heap: usize,
    pub(crate) purpose: Purpose,
    /// What all objects in slots take. Asked for only when the worker's heap has no hole that fits.
    pub(crate) live_granules: &'a dyn Fn() -> u64,
}

/// Nothing fits below the limit now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Full {
    /// A heap that may have room was in use: another try may succeed.
    pub(crate) busy: bool,
    /// A segment's worth is free, in holes that are too small.
    pub(crate) is_fragmented: bool,
}

impl Full {
    const FOR_GOOD: Full = Full {
        busy: false,
        is_fragmented: false,
    };
}

/// A segment that the cleaner has closed, or may close.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sparse {
    pub(crate) free_granules: u16,
    pub(crate) number: u32,
    heap: u16,
    local: Local,
}

#[derive(Debug)]
pub(crate) struct Arena {
    bytes: Mapping,
    segments: Segments,
    /// For each segment in use: its heap and its index there.
    homes: Mapping,
    /// The workers', and one for [`Purpose::Spare`] behind them.
    heaps: Box<[CachePadded<HeapPlace>]>,
    /// Some queue could not be taken in by who filled it, and perhaps nobody else will come by.
    queue_left: AtomicBool,
    /// Segments that were taken to move objects into, ever.
    fresh_for_moves: AtomicU64,
}

#[derive(Debug, Default)]
struct HeapPlace {
    heap: Mutex<Heap>,
    /// Segments of the heap, so that an empty one is passed over without its lock.
    segments: AtomicUsize,
    /// Freed objects that wait for the heap, newest first: 0 or the word of `queue_word`.
    queue: AtomicU64,
}

impl Arena {
    /// Bytes of address space for `pages` pages. It costs nothing and is no limit: four times what it takes to keep every
    /// page whole, and 256 MiB for what waits for its grace period.
    pub(crate) fn address_space(pages: u64) -> u64 {
        let ample =
            pages.div_ceil((SEGMENT_GRANULES / OBJECT_GRANULES_MAX) as u64) * 4 + (256 << 20) / SEGMENT_SIZE as u64;
        ample.min(GRANULES_MAX / SEGMENT_GRANULES as u64) * SEGMENT_SIZE as u64
    }

    /// An arena in `space` bytes of address space, of which `limit_bytes` may be in memory, with `heaps` heaps.
    pub(crate) fn new(
        name: &str,
        space: u64,
        head: &[u8; OS_PAGE_SIZE],
        limit_bytes: Option<u64>,
        heaps: usize,
    ) -> io::Result<Arena> {
        let bytes = Mapping::memfd(&format!("zram-arena-{name}"), space as usize, head)?;
        Arena::on(bytes, limit_bytes, heaps)
    }

    /// The arena of `space` bytes that another process left in `memfd`, with nothing known of what is in it: see
    /// [`Arena::rebuild`].
    pub(crate) fn adopt(memfd: OwnedFd, space: u64, limit_bytes: Option<u64>, heaps: usize) -> io::Result<Arena> {
        Arena::on(Mapping::adopt(memfd, space as usize)?, limit_bytes, heaps)
    }

    fn on(bytes: Mapping, limit_bytes: Option<u64>, heaps: usize) -> io::Result<Arena> {
        assert!(heaps < 1 << (u32::BITS - HOME_LOCAL_BITS));
        let count = (bytes.len() / SEGMENT_SIZE) as u32;
        Ok(Arena {
            bytes,
            segments: Segments::new(count, limit_bytes.map(whole_segments))?,
            homes: Mapping::anonymous(count as usize * size_of::<u32>())?,
            heaps: (0..=heaps).map(|_| CachePadded(HeapPlace::default())).collect(),
            queue_left: AtomicBool::new(false),
            fresh_for_moves: AtomicU64::new(0),
        })
    }

    pub(crate) fn mapping(&self) -> &Mapping {
        &self.bytes
    }

    /// Stores `content`, 1 to 4,096 bytes. Nobody can see the object until the handle is published.
    pub(crate) fn store(&self, room: &Room<'_>, content: &[u8]) -> Result<Handle, Full> {
        let granules = object_granules(content.len());
        let handle = self.allocate(room, granules)?;
        reach(Step::Allocated);
        self.fill(handle, content);
        reach(Step::Stored);
        Ok(handle)
    }

    /// Writes an object that nobody can see.
    fn fill(&self, handle: Handle, content: &[u8]) {
        let object = self.address(handle, object_granules(content.len()) * GRANULE_SIZE);
        // SAFETY: the granules were free and are ours alone until the handle is published; the write stays inside them,
        // and `content` is a reference, so it does not lie in them.
        unsafe { object.copy_from_nonoverlapping(NonNull::from(content).cast(), content.len()) };
    }

    /// The content of an object.
    ///
    /// # Safety
    /// `handle` and `len` come from one slot's word of this arena's disk that was loaded while `guard`, of the same disk,
    /// lived.
    pub(crate) unsafe fn content<'g>(&'g self, handle: Handle, len: usize, _guard: &'g Guard<'_>) -> &'g [u8] {
        let object = self.address(handle, object_granules(len) * GRANULE_SIZE);
        // SAFETY: an object is written before its handle is published and not again until its grace period is over,
        // which is after the guard; the mapping outlives the guard, since both are the store's.
        unsafe { std::slice::from_raw_parts(object.as_ptr(), len) }
    }

    /// Has the caches fetch an object. A hint: the object may be freed meanwhile, and nothing is read.
    pub(crate) fn prefetch(&self, handle: Handle, len: usize) {
        prefetch(self.address(handle, len).as_ptr(), len.min(PREFETCH_BYTES_MAX));
    }

    /// The word of a same-filled page.
    ///
    /// # Safety
    /// As for `content`.
    pub(crate) unsafe fn value(&self, handle: Handle, _guard: &Guard<'_>) -> u64 {
        // SAFETY: as in `content`; a granule is 8 bytes, aligned to 8.
        unsafe { self.address(handle, GRANULE_SIZE).cast::<u64>().read() }
    }

    /// Frees an object of `granules`, for a worker whose own heap is `heap`.
    ///
    /// # Safety
    /// The object is not in any slot any more and no guard is left that may have seen it there. It is freed once.
    pub(crate) unsafe fn free(&self, heap: usize, handle: Handle, granules: usize) {
        reach(Step::Freeing);
        let (home, _) = self.home(segment_of(handle));
        if home == heap
            && let Some(mut heap) = self.try_heap(heap)
        {
            self.free_into(&mut heap, handle, granules);
            return;
        }
        self.enqueue(home, handle, granules);
        // If the heap is to be had, take the queue in at once: its worker may have stopped and would never do it.
        if self.try_heap(home).is_none() {
            self.queue_left.store(true, Ordering::Relaxed);
        }
    }

    /// Gives the memory of some empty segments back to the host, if too many have some; how many went.
    pub(crate) fn give_back(&self) -> u64 {
        self.segments.give_back(|run| {
            reach(Step::GivingBack);
            let (offset, len) = (run.start as usize * SEGMENT_SIZE, run.len() * SEGMENT_SIZE);
            // SAFETY: a segment to be given back holds no object, and what it held was freed after its grace period.
            unsafe { self.bytes.punch_hole(offset, len) }
        })
    }

    /// Takes in the queues that who filled them could not. For idle time.
    pub(crate) fn take_queues_in(&self) {
        if self.queue_left.swap(false, Ordering::Relaxed) {
            for (number, place) in self.heaps.iter().enumerate() {
                if place.0.queue.load(Ordering::Relaxed) != 0 && self.try_heap(number).is_none() {
                    self.queue_left.store(true, Ordering::Relaxed);
                }
            }
        }
    }

    /// Whether queues were left, or empty segments can be given back.
    pub(crate) fn has_upkeep(&self) -> bool {
        self.queue_left.load(Ordering::Relaxed) || self.segments.surplus() != 0
    }

    /// Host memory that segments hold.
    pub(crate) fn held_bytes(&self) -> u64 {
        self.segments.held() * SEGMENT_SIZE as u64
    }

    /// The most that `held_bytes` was since the start or the last reset.
    pub(crate) fn held_bytes_max(&self) -> u64 {
        self.segments.held_max() * SEGMENT_SIZE as u64
    }

    pub(crate) fn reset_held_bytes_max(&self) {
        self.segments.reset_held_max();
    }

    /// The limit from now on; it counts in whole segments.
    pub(crate) fn set_limit(&self, bytes: Option<u64>) {
        self.segments.set_limit(bytes.map(whole_segments));
    }

    /// Granules of the segments in use, live or not.
    pub(crate) fn granules_in_use(&self) -> u64 {
        self.segments.in_use() * SEGMENT_GRANULES as u64
    }

    /// All segments' numbers lie below this one.
    pub(crate) fn segments_used(&self) -> u32 {
        self.segments.used()
    }

    /// Granules of the segments that may still be taken.
    pub(crate) fn fresh_granules(&self) -> u64 {
        self.segments.limit().saturating_sub(self.segments.in_use()) * SEGMENT_GRANULES as u64
    }

    /// Segments that were taken to move objects into, ever.
    pub(crate) fn fresh_for_moves(&self) -> u64 {
        self.fresh_for_moves.load(Ordering::Relaxed)
    }

    /// The segments that are not closed, with what is free in each, but for the spare one. A heap is looked at step by
    /// step, and left out where it is in use: a picture for choosing, not an account.
    pub(crate) fn survey(&self) -> Vec<Sparse> {
        (0..self.spare_heap()).flat_map(|heap| self.survey_of(heap)).collect()
    }

    /// Whether anything lies in the spare segment.
    pub(crate) fn has_spare(&self) -> bool {
        self.heaps[self.spare_heap()].0.segments.load(Ordering::Relaxed) != 0
    }

    /// Closes the spare segment, unless it is in use at the moment.
    pub(crate) fn close_spare(&self) -> Vec<Sparse> {
        let mut segments = self.survey_of(self.spare_heap());
        segments.retain(|segment| self.close(segment));
        segments
    }

    fn survey_of(&self, number: usize) -> Vec<Sparse> {
        let mut found = vec![];
        self.survey_heap(number, |segment| {
            if !segment.is_closed {
                found.push(Sparse {
                    free_granules: segment.free,
                    number: segment.number,
                    heap: number as u16,
                    local: segment.local,
                });
            }
        });
        found
    }

    /// Allocates nothing more in the segment. False when it is not what it was, or its heap is in use.
    pub(crate) fn close(&self, segment: &Sparse) -> bool {
        let heap = self.try_heap(segment.heap.into());
        heap.is_some_and(|mut heap| heap.close(segment.local, segment.number))
    }

    /// Allocates in the segment again: `Some(false)` when it became empty and is gone, `None` when its heap is in use. In a
    /// heap whose user panicked nothing is allocated any more, so there it is as good as open.
    pub(crate) fn reopen(&self, segment: &Sparse) -> Option<bool> {
        let number = usize::from(segment.heap);
        if self.heaps[number].0.heap.is_poisoned() {
            return Some(true);
        }
        let mut heap = self.try_heap(number)?;
        Some(heap.reopen(segment.local, segment.number))
    }

    /// The heap that an object belongs to, or any other when it is the spare one.
    pub(crate) fn heap_of(&self, handle: Handle) -> usize {
        let (heap, _) = self.home(segment_of(handle));
        if heap == self.spare_heap() { 0 } else { heap }
    }

    /// Puts `content` where an object of `granules` was, which is not longer there. What is left over is freed.
    ///
    /// # Safety
    /// As for `free`, which this replaces.
    pub(crate) unsafe fn reuse(&self, heap: usize, handle: Handle, granules: usize, content: &[u8]) {
        let needed = object_granules(content.len());
        assert!(needed <= granules, "{needed} granules in the place of {granules}");
        self.fill(handle, content);
        if needed < granules {
            let rest = Handle::from_granule(handle.granule() + needed as u64);
            // SAFETY: the caller's promise; these granules are not the new object's.
            unsafe { self.free(heap, rest, granules - needed) };
        }
    }

    /// Whether an object lies in the spare segment.
    pub(crate) fn is_spare(&self, handle: Handle) -> bool {
        self.home(segment_of(handle)).0 == self.spare_heap()
    }

    fn spare_heap(&self) -> usize {
        self.heaps.len() - 1
    }

    fn survey_heap(&self, number: usize, mut each: impl FnMut(heap::Survey<'_>)) -> bool {
        if self.heaps[number].0.segments.load(Ordering::Relaxed) == 0 {
            return true;
        }
        let mut from = 0;
        loop {
            let Some(heap) = self.try_heap_again(number) else {
                return false;
            };
            heap.survey(from, SURVEY_STEP).for_each(&mut each);
            from += SURVEY_STEP as Local;
            if from >= heap.end() {
                return true;
            }
        }
    }

    fn allocate(&self, room: &Room<'_>, granules: usize) -> Result<Handle, Full> {
        if allocation_fails() {
            return Err(Full::FOR_GOOD);
        }
        let in_use = self.segments.in_use();
        let bound = self.segments.grow_bound();
        // Once overwriting took a segment of the reserve, what is free, in holes anywhere, is what it goes on with. A disk
        // grows only where much is free, after discards: an eighth. What gets a little larger may take half of the
        // reserve and no more, or many such steps would leave nothing for what only changes.
        let live_max = match room.purpose {
            Purpose::Grow => bound * SEGMENT_GRANULES as u64 / 8 * 7,
            Purpose::Resize => self.segments.resize_bound_halves() * SEGMENT_GRANULES as u64 / 2,
            Purpose::Replace | Purpose::Move | Purpose::Spare => u64::MAX,
        };
        if live_max != u64::MAX && in_use > bound && (room.live_granules)() > live_max {
            return Err(Full::FOR_GOOD);
        }
        let own = self.try_heap(room.heap).and_then(|mut heap| {
            reach(Step::HeapLocked);
            heap.allocate(granules)
        });
        if let Some(place) = own {
            return Ok(handle_at(place));
        }
        let used = in_use * SEGMENT_GRANULES as u64;
        let mut busy = false;
        let is_sparse = || used.saturating_sub((room.live_granules)()) > used / SPARSE_SHARE;
        if (room.purpose == Purpose::Move || is_sparse())
            && let Some(handle) = self.allocate_elsewhere(room.heap, granules, &mut busy)
        {
            return Ok(handle);
        }
        if room.purpose != Purpose::Spare
            && let Some(handle) = self.allocate_fresh(room, granules)
        {
            return Ok(handle);
        }
        if let Some(handle) = self.allocate_elsewhere(room.heap, granules, &mut busy) {
            return Ok(handle);
        }
        // When the spare segment is full or in use it will not be for long; nor are segments on their way back.
        busy |= room.purpose == Purpose::Spare || self.segments.is_giving_back();
        let spare = (room.purpose == Purpose::Spare).then(|| self.allocate_spare(room, granules));
        spare.flatten().ok_or_else(|| {
            let free = self.granules_in_use().saturating_sub((room.live_granules)());
            Full {
                busy,
                is_fragmented: room.purpose != Purpose::Move && free > SEGMENT_GRANULES as u64,
            }
        })
    }

    /// A place in any heap, `own` last.
    fn allocate_elsewhere(&self, own: usize, granules: usize, busy: &mut bool) -> Option<Handle> {
        let others = (own + 1..self.spare_heap()).chain(0..=own);
        others
            .filter(|&number| self.heaps[number].0.segments.load(Ordering::Relaxed) != 0)
            .find_map(|number| {
                let heap = self.try_heap_again(number);
                *busy |= heap.is_none();
                heap?.allocate(granules).map(handle_at)
            })
    }

    fn allocate_spare(&self, room: &Room<'_>, granules: usize) -> Option<Handle> {
        let place = self.try_heap_again(self.spare_heap())?.allocate(granules);
        place.map(handle_at).or_else(|| self.allocate_fresh(room, granules))
    }

    /// A place in a segment that was empty, for the first heap to be had.
    fn allocate_fresh(&self, room: &Room<'_>, granules: usize) -> Option<Handle> {
        // The host's memory first, in which the kernel may take its time, and then the heap.
        let populate = |number: u32| {
            let offset = number as usize * SEGMENT_SIZE;
            self.bytes.populate(offset, SEGMENT_SIZE).inspect_err(|_| {
                // What was populated of it is in no account.
                // SAFETY: the segment was just taken from the clean ones, so it holds no object.
                let _ = unsafe { self.bytes.punch_hole(offset, SEGMENT_SIZE) };
            })
        };
        let segment = self.segments.take(room.purpose, populate)?;
        let numbers = match room.purpose {
            Purpose::Spare => (self.spare_heap()..self.spare_heap() + 1).chain(0..0),
            _ => (room.heap..self.spare_heap()).chain(0..room.heap),
        };
        let found = numbers.map(|number| (number, self.try_heap(number)));
        let Some((number, Some(mut heap))) = found.into_iter().find(|(_, heap)| heap.is_some()) else {
            self.segments.release(segment);
            return None;
        };
        // The heap may have got a hole with its queue. A segment that nothing is put into would never get empty.
        if let Some(place) = heap.allocate(granules) {
            self.segments.release(segment);
            return Some(handle_at(place));
        }
        self.own_segment(number, &mut heap, segment, |heap| heap.add_segment(segment));
        if room.purpose == Purpose::Move {
            self.fresh_for_moves.fetch_add(1, Ordering::Relaxed);
        }
        let place = heap
            .allocate(granules)
            .expect("a fresh segment has room for any object");
        Some(handle_at(place))
    }

    fn own_segment(&self, number: usize, heap: &mut Heap, segment: u32, add: impl FnOnce(&mut Heap) -> Local) {
        let local = add(heap);
        self.heaps[number].0.segments.fetch_add(1, Ordering::Relaxed);
        self.set_home(segment, number, local);
    }

    /// The heap, with its queue taken in, if nobody else uses it now. A heap whose user panicked stays locked for good.
    fn try_heap(&self, number: usize) -> Option<MutexGuard<'_, Heap>> {
        let place = &self.heaps[number].0;
        let mut heap = place.heap.try_lock().ok()?;
        if place.queue.load(Ordering::Relaxed) != 0 {
            self.take_queue_in(&place.queue, &mut heap);
        }
        Some(heap)
    }

    /// As `try_heap`, a few times: most users have it for less than a microsecond.
    fn try_heap_again(&self, number: usize) -> Option<MutexGuard<'_, Heap>> {
        (0..TRIES).find_map(|_| {
            std::hint::spin_loop();
            self.try_heap(number)
        })
    }

    fn enqueue(&self, home: usize, handle: Handle, granules: usize) {
        let queue = &self.heaps[home].0.queue;
        let link = self.address(handle, GRANULE_SIZE).cast::<u64>();
        let word = queue_word(handle, granules);
        let mut newest = queue.load(Ordering::Relaxed);
        reach(Step::Queueing);
        loop {
            // SAFETY: the object is free and not reachable, so its first granule is ours until the exchange succeeds.
            unsafe { link.write(newest) };
            // Release: the link comes before the object can be taken from the queue.
            match queue.compare_exchange_weak(newest, word, Ordering::Release, Ordering::Relaxed) {
                Ok(_) => return,
                Err(found) => newest = found,
            }
        }
    }

    #[cold]
    fn take_queue_in(&self, queue: &AtomicU64, heap: &mut Heap) {
        // The whole queue at once, so no head can come back: no ABA. Acquire pairs with the release of `enqueue`.
        let mut word = queue.swap(0, Ordering::Acquire);
        reach(Step::QueueTaken);
        while word != 0 {
            let (handle, granules) = of_queue_word(word);
            // SAFETY: a queued object is free, its first granule holds what `enqueue` wrote, and the queue is ours now.
            word = unsafe { self.address(handle, GRANULE_SIZE).cast::<u64>().read() };
            self.free_into(heap, handle, granules);
        }
    }

    fn free_into(&self, heap: &mut Heap, handle: Handle, granules: usize) {
        let segment = segment_of(handle);
        let (home, local) = self.home(segment);
        if let Some(emptied) = heap.free(local, handle.granule() as usize % SEGMENT_GRANULES, granules) {
            debug_assert_eq!(emptied, segment);
            self.heaps[home].0.segments.fetch_sub(1, Ordering::Relaxed);
            self.segments.release(segment);
        }
    }

    fn address(&self, handle: Handle, len: usize) -> NonNull<u8> {
        self.bytes.address(handle.granule() as usize * GRANULE_SIZE, len)
    }

    /// Relaxed, as in `set_home`: a segment's home changes only while it holds no object, and who has an object's handle
    /// got it after the home was set.
    fn home(&self, segment: u32) -> (usize, Local) {
        let home = self.homes.half_words()[segment as usize].load(Ordering::Relaxed);
        ((home >> HOME_LOCAL_BITS) as usize, home & ((1 << HOME_LOCAL_BITS) - 1))
    }

    fn set_home(&self, segment: u32, heap: usize, local: Local) {
        let home = (heap as u32) << HOME_LOCAL_BITS | local;
        self.homes.half_words()[segment as usize].store(home, Ordering::Relaxed);
    }

    /// As if a thread had panicked while it had the heap.
    #[cfg(test)]
    pub(crate) fn poison_heap(&self, number: usize) {
        let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            let _heap = self.heaps[number].0.heap.lock();
            panic!("as if an invariant did not hold");
        }));
        assert!(panicked.is_err() && self.heaps[number].0.heap.is_poisoned());
    }

    /// Panics unless holes and live objects together are all segments in use. Only for a store at rest: every object
    /// freed, no worker at work. `live_granules` is what the slot table says.
    pub(crate) fn check_consistency(&self, live_granules: usize) {
        let heaps: Vec<_> = (0..self.heaps.len())
            .map(|number| self.try_heap(number).expect("at rest"))
            .collect();
        let segments: usize = heaps.iter().map(|heap| heap.segments()).sum();
        let free: usize = heaps.iter().map(|heap| heap.free_granules()).sum();
        let mut all = heaps.iter().flat_map(|heap| heap.survey(0, usize::MAX));
        assert!(
            all.all(|segment| usize::from(segment.free) < SEGMENT_GRANULES && !segment.is_closed),
            "a segment without objects, or one that is closed for good"
        );
        assert_eq!(segments as u64, self.segments.in_use(), "segments in heaps and in use");
        assert_eq!(
            free + live_granules,
            segments * SEGMENT_GRANULES,
            "granules in holes and objects"
        );
        assert!(self.segments.in_use() <= self.segments.held());
    }
}

fn whole_segments(bytes: u64) -> u64 {
    bytes / SEGMENT_SIZE as u64
}

pub(crate) fn segment_of(handle: Handle) -> u32 {
    (handle.granule() / SEGMENT_GRANULES as u64) as u32
}

fn handle_at((segment, start): (u32, usize)) -> Handle {
    Handle::from_granule(u64::from(segment) * SEGMENT_GRANULES as u64 + start as u64)
}

fn queue_word(handle: Handle, granules: usize) -> u64 {
    handle.granule() << QUEUE_LENGTH_BITS | granules as u64
}

fn of_queue_word(word: u64) -> (Handle, usize) {
    (
        Handle::from_granule(word >> QUEUE_LENGTH_BITS),
        (word & ((1 << QUEUE_LENGTH_BITS) - 1)) as usize,
    )
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::epoch::Epochs;

    fn arena(pages: u64, limit_bytes: Option<u64>, heaps: usize) -> Arena {
        let space = Arena::address_space(pages);
        Arena::new("test", space, &[0; OS_PAGE_SIZE], limit_bytes, heaps).expect("address space")
    }

    fn room(heap: usize, purpose: Purpose) -> Room<'static> {
        Room {
            heap,
            purpose,
            live_granules: &|| 0,
        }
    }

    fn content(arena: &Arena, handle: Handle, len: usize) -> Vec<u8> {
        let epochs = Epochs::new(1);
        let guard = epochs.pin(0);
        // SAFETY: no test here frees what it still reads.
        unsafe { arena.content(handle, len, &guard) }.to_vec()
    }

    #[test]
    fn objects_keep_their_bytes_and_never_touch_their_neighbours() {
        let arena = arena(4096, None, 1);
        let lens = [1, 2, 3, 4, 5, 11, 12, 13, 100, 1000, 3625, 4095, 4096];
        let stored: Vec<_> = (0..2000usize)
            .map(|n| {
                let mark = vec![n as u8; lens[n % lens.len()]];
                (arena.store(&room(0, Purpose::Grow), &mark).unwrap(), mark)
            })
            .collect();
        for (handle, mark) in &stored {
            assert_eq!(&content(&arena, *handle, mark.len()), mark);
        }
        arena.check_consistency(stored.iter().map(|(_, mark)| object_granules(mark.len())).sum());
    }

    #[test]
    fn everything_freed_goes_back_to_the_host() {
        let arena = arena(4096, None, 2);
        let handles: Vec<_> = (0..500)
            .map(|n| arena.store(&room(n % 2, Purpose::Grow), &[7; 4096]).unwrap())
            .collect();
        let blocks = || {
            arena
                .bytes
                .populated_ranges()
                .unwrap()
                .iter()
                .map(|range| range.len() / 512)
                .sum::<usize>()
        };
        assert_eq!(blocks() as u64 * 512, arena.held_bytes());
        assert_eq!(
            arena.held_bytes(),
            32 * SEGMENT_SIZE as u64,
            "sixteen pages kept whole fill a segment"
        );
        for (n, handle) in handles.into_iter().enumerate() {
            // SAFETY: the handle is published nowhere. Each is freed by the worker that did not store it.
            unsafe { arena.free(1 - n % 2, handle, object_granules(4096)) };
        }
        arena.check_consistency(0);
        while arena.give_back() != 0 {}
        assert_eq!((arena.held_bytes(), blocks()), (0, 0));
    }

    #[test]
    fn a_heap_in_use_elsewhere_delays_nobody() {
        let arena = arena(4096, None, 2);
        let handle = arena.store(&room(0, Purpose::Grow), &[1; 100]).unwrap();
        let held = arena.heaps[0].0.heap.lock().unwrap();
        let other = arena.store(&room(0, Purpose::Grow), &[2; 100]).unwrap();
        assert_eq!(arena.home(segment_of(other)).0, 1, "the next heap took it");
        // SAFETY: published nowhere.
        unsafe { arena.free(0, handle, object_granules(100)) };
        assert_ne!(
            arena.heaps[0].0.queue.load(Ordering::Relaxed),
            0,
            "it waits in the queue"
        );
        // Who has the heap saw no queue when it took it, and perhaps nobody comes by after it.
        drop(held);
        assert!(arena.has_upkeep());
        arena.take_queues_in();
        assert_eq!(arena.heaps[0].0.queue.load(Ordering::Relaxed), 0);
        // SAFETY: as above.
        unsafe { arena.free(0, other, object_granules(100)) };
        arena.check_consistency(0);
    }

    #[test]
    fn at_the_limit_any_heap_with_room_will_do() {
        let arena = arena(4096, Some(4 * SEGMENT_SIZE as u64), 4);
        let mut handles = vec![];
        while let Ok(handle) = arena.store(&room(0, Purpose::Replace), &[1; 4096]) {
            handles.push(handle);
        }
        assert_eq!(arena.held_bytes(), 3 * SEGMENT_SIZE as u64);
        assert!(arena.store(&room(3, Purpose::Replace), &[1; 4096]).is_err());
        let spare = arena.store(&room(3, Purpose::Spare), &[1; 4096]).unwrap();
        assert!(arena.is_spare(spare) && !arena.is_spare(handles[0]));
        assert_eq!(arena.held_bytes(), 4 * SEGMENT_SIZE as u64);
        // SAFETY: published nowhere.
        unsafe { arena.free(3, spare, object_granules(4096)) };
        // SAFETY: published nowhere.
        unsafe { arena.free(2, handles[5], object_granules(4096)) };
        assert_eq!(arena.store(&room(3, Purpose::Grow), &[1; 4096]), Ok(handles[5]));
    }

    #[test]
    fn a_place_is_used_again_for_less_and_the_rest_is_free() {
        let arena = arena(4096, None, 1);
        let handle = arena.store(&room(0, Purpose::Grow), &[1; 4096]).unwrap();
        let next = arena.store(&room(0, Purpose::Grow), &[3; 100]).unwrap();
        // SAFETY: published nowhere.
        unsafe { arena.reuse(0, handle, object_granules(4096), &[2; 1000]) };
        assert_eq!(content(&arena, handle, 1000), [2; 1000]);
        assert_eq!(content(&arena, next, 100), [3; 100]);
        arena.check_consistency(object_granules(1000) + object_granules(100));
        let rest = arena.store(&room(0, Purpose::Grow), &[4; 3096]).unwrap();
        assert_eq!(rest.granule(), handle.granule() + 125);
    }

    #[test]
    fn the_last_place_of_the_arena_is_as_good_as_the_first() {
        // 4 TiB of disk: the arena is as large as slots can name, and its end has every bit of a handle set.
        let arena = arena(1 << 30, None, 1);
        let last = Handle::from_granule(GRANULES_MAX - 1);
        // SAFETY: nothing else is stored there.
        unsafe { arena.address(last, GRANULE_SIZE).cast::<u64>().write(42) };
        let epochs = Epochs::new(1);
        // SAFETY: as above.
        assert_eq!(unsafe { arena.value(last, &epochs.pin(0)) }, 42);
        assert_eq!(
            of_queue_word(queue_word(last, OBJECT_GRANULES_MAX)),
            (last, OBJECT_GRANULES_MAX)
        );
    }
}
