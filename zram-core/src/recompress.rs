//! Recompression: what the guest's writes were stored with quickly is stored again with an algorithm that takes longer and
//! makes less of it. zram's `recompress` (Documentation/admin-guide/blockdev/zram.rst, "Recompression").
//!
//! A run looks at pages with the largest objects first, in steps of 64 bytes of their length. Of each it decodes the
//! page, tries the algorithms above the one that made it, by priority, and takes the first result that needs fewer
//! granules: what gains nothing in the arena gains nothing. When none does and the last algorithm was among them the
//! page is marked, and no run looks at it again until it is written.
//!
//! 1. The pin lasts from loading the word to exchanging it, so the exchange puts the new object in the place of the one
//!    that was compressed and of no other. A write in between wins.
//! 2. One run at a time. There is one compression context for each secondary algorithm, whatever the number of workers.
//! 3. Nobody waits for it: neither reader nor writer nor whoever asks for numbers. It works at most half of the time.

use std::sync::TryLockError;
use std::time::{Duration, Instant};

use crate::arena::object_granules;
use crate::codec::PRIORITIES;
use crate::epoch::{ParticipantId, Retired};
use crate::page::{PAGE_SIZE, Page};
use crate::pause::{Step, reach};
use crate::slot::{self, Slot, SlotIndex};
use crate::worker::account;
use crate::zram::{RETIRED_OPEN_MAX, Zram};

/// Objects whose lengths differ by less count as equally large.
const LENGTH_STEP: usize = 64;
/// How long a run works before it lets others run as long.
const SLICE: Duration = Duration::from_micros(500);

/// Which pages a run looks at.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum RecompressType {
    /// All that are stored.
    #[default]
    All,
    /// Those with the idle mark.
    Idle,
    /// Those kept whole.
    Huge,
    /// Those kept whole and with the idle mark.
    HugeIdle,
}

/// What a run does.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RecompressOptions {
    /// Which pages.
    pub kind: RecompressType,
    /// Only pages whose object has so many bytes or more, and only results below it.
    pub threshold: Option<usize>,
    /// How many pages are tried at most.
    pub max_pages: Option<u64>,
    /// The one algorithm to try, by its priority, 1 to 3; all above the page's own when it is not given.
    pub priority: Option<usize>,
}

/// What a run did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Recompressed {
    /// Pages that were tried.
    pub pages_tried: u64,
    /// Pages that are stored with less now.
    pub pages_recompressed: u64,
    /// Pages of which no algorithm makes less; they have the mark now.
    pub pages_incompressible: u64,
    /// Bytes of content that were gained.
    pub bytes_gained: u64,
    /// It ended early: the memory limit left no room for the new beside the old.
    pub is_limit_reached: bool,
}

/// Why a run did not begin.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RecompressError {
    /// Another run goes on.
    #[error("a recompression is going on already")]
    Busy,
    /// No algorithm of such a priority.
    #[error("the disk has no algorithm for recompression with priority {0}")]
    NoAlgorithm(usize),
    /// None at all.
    #[error("the disk has no algorithm for recompression")]
    NoAlgorithms,
    /// The threshold says nothing.
    #[error("threshold={0} is not in 1..4096")]
    Threshold(usize),
    /// There are as many workers as there can be.
    #[error("the disk has too many workers for another pass")]
    Workers,
}

/// What a run needs for each page.
struct Run<'a> {
    zram: &'a Zram,
    options: RecompressOptions,
    id: ParticipantId,
    retired: Retired,
    page: Box<Page>,
    /// Those that the disk had when the run began.
    slots: u64,
    /// One bit a slot: a page that got smaller comes by again among the smaller ones. Zeroes that nothing touches cost
    /// no memory.
    tried: Vec<u64>,
    done: Recompressed,
    slice: Instant,
}

impl Zram {
    /// Compresses pages again. Takes some tens of microseconds of the caller's thread a page, and as long for others.
    pub fn recompress(&self, options: &RecompressOptions) -> Result<Recompressed, RecompressError> {
        if let Some(threshold) = options.threshold
            && !(1..PAGE_SIZE).contains(&threshold)
        {
            return Err(RecompressError::Threshold(threshold));
        }
        match options.priority {
            Some(priority) if !(1..PRIORITIES).contains(&priority) || self.codecs.algorithm(priority).is_none() => {
                return Err(RecompressError::NoAlgorithm(priority));
            }
            None if self.last_priority() == 0 => return Err(RecompressError::NoAlgorithms),
            _ => {}
        }
        let _one_at_a_time = match self.recompressing.try_lock() {
            Ok(guard) => guard,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => return Err(RecompressError::Busy),
        };
        let slots = self.table.slots();
        let mut run = Run {
            zram: self,
            options: *options,
            id: self.epochs.join().ok_or(RecompressError::Workers)?,
            retired: Retired::default(),
            page: Page::zeroed(),
            slots,
            tried: vec![0; slots.div_ceil(64) as usize],
            done: Recompressed::default(),
            slice: Instant::now(),
        };
        run.all();
        Ok(run.done)
    }

    /// The highest priority that has an algorithm.
    fn last_priority(&self) -> usize {
        let mut priorities = (1..PRIORITIES).rev();
        let last = priorities.find(|&priority| self.codecs.algorithm(priority).is_some());
        last.unwrap_or(0)
    }
}

impl Run<'_> {
    /// Goes through the table once for each step of length of which there is anything.
    fn all(&mut self) {
        let zram = self.zram;
        let mut counts = [0_u64; PAGE_SIZE.div_ceil(LENGTH_STEP)];
        for (_, word) in zram.table.walk(0..self.slots) {
            if let Some(len) = self.length_to_try(word) {
                counts[(len - 1) / LENGTH_STEP] += 1;
            }
        }
        for step in (0..counts.len()).rev().filter(|&step| counts[step] != 0) {
            for (index, hint) in zram.table.walk(0..self.slots) {
                if self
                    .length_to_try(hint)
                    .is_none_or(|len| (len - 1) / LENGTH_STEP != step)
                {
                    continue;
                }
                if self.options.max_pages.is_some_and(|max| self.done.pages_tried >= max) || self.done.is_limit_reached
                {
                    return;
                }
                if !self.was_tried(index) {
                    self.one(index);
                    self.rest();
                }
            }
        }
    }

    /// Whether the page was tried in this run; from now on it was.
    fn was_tried(&mut self, index: SlotIndex) -> bool {
        let (word, bit) = (&mut self.tried[index.0 as usize / 64], 1 << (index.0 % 64));
        let was = *word & bit != 0;
        *word |= bit;
        was
    }

    /// The length of the object, if the page is to be tried.
    fn length_to_try(&self, word: u64) -> Option<usize> {
        let Slot::Stored { len, priority, .. } = Slot::unpack(word) else {
            return None;
        };
        let (is_idle, is_huge) = (slot::is_idle(word), len == PAGE_SIZE);
        let is_kind = match self.options.kind {
            RecompressType::All => true,
            RecompressType::Idle => is_idle,
            RecompressType::Huge => is_huge,
            RecompressType::HugeIdle => is_idle && is_huge,
        };
        let is_wanted = is_kind
            && !slot::is_incompressible(word)
            && self.priorities(priority.into()).next().is_some()
            && self.options.threshold.is_none_or(|threshold| len >= threshold);
        is_wanted.then_some(len)
    }

    /// The algorithms to try on a page that priority `of` made, in their order.
    fn priorities(&self, of: usize) -> impl Iterator<Item = usize> + use<'_> {
        let wanted = self.options.priority;
        (of + 1..PRIORITIES).filter(move |&priority| {
            wanted.is_none_or(|wanted| wanted == priority) && self.zram.codecs.algorithm(priority).is_some()
        })
    }

    fn one(&mut self, index: SlotIndex) {
        let zram = self.zram;
        let guard = zram.epochs.pin(self.id);
        let word = zram.table.load(index);
        let Some(len) = self.length_to_try(word) else {
            return; // used or moved meanwhile
        };
        reach(Step::RecompressLoaded);
        self.done.pages_tried += 1;
        if zram.decode(self.id, word, &mut self.page, &guard).is_err() {
            return; // its reader will be told
        }
        let Slot::Stored { priority: own, .. } = Slot::unpack(word) else {
            return;
        };
        let mut last_tried = 0;
        let mut made = None;
        for priority in self.priorities(own.into()) {
            // One run at a time, so nobody else has the context.
            let Some(mut stream) = zram.codecs.try_secondary_stream(priority) else {
                continue;
            };
            last_tried = priority;
            let content = stream.compress(&self.page);
            let gains = object_granules(content.len()) < object_granules(len);
            if gains && self.options.threshold.is_none_or(|threshold| content.len() < threshold) {
                made = Some(zram.store(self.id, content, word, false).map(|handle| Slot::Stored {
                    handle,
                    len: content.len(),
                    priority: priority as u8,
                }));
                break;
            }
        }
        match made {
            None => {
                let is_last = last_tried == zram.last_priority();
                let tried = slot::with_idle(word, false);
                let new = if is_last { slot::incompressible(tried) } else { tried };
                let is_marked = zram.table.change_flags(index, word, new);
                self.done.pages_incompressible += u64::from(is_last && is_marked);
            }
            Some(Err(_)) => self.done.is_limit_reached = true,
            Some(Ok(new)) => {
                reach(Step::Recompressed);
                // The age stays: nobody used the page. The mark goes, as in zram.
                let mut found = word;
                let exchanged = loop {
                    let aged = slot::with_age(new.pack(), slot::age(found).unwrap_or(0));
                    match zram.table.compare_exchange(index, found, aged) {
                        Ok(()) => break true,
                        // Read, marked or aged meanwhile.
                        Err(other) if slot::is_same_object(other, word) => found = other,
                        Err(_) => break false,
                    }
                };
                if exchanged {
                    drop(guard);
                    self.replaced(word, new, len);
                } else {
                    // SAFETY: the new object was never in the table.
                    unsafe { zram.free(self.id, new.pack()) };
                }
            }
        }
    }

    fn replaced(&mut self, word: u64, new: Slot, len: usize) {
        let Slot::Stored { len: new_len, .. } = new else { return };
        let cells = &self.zram.cells[self.id].0;
        account(cells, Slot::unpack(word), new);
        cells.retired.add(1);
        self.retired.push(word);
        if self.retired.open() >= RETIRED_OPEN_MAX {
            self.reclaim();
        }
        self.done.pages_recompressed += 1;
        self.done.bytes_gained += (len - new_len) as u64;
    }

    /// Lets others run as long as it has run, after each slice.
    fn rest(&mut self) {
        let worked = self.slice.elapsed();
        if worked >= SLICE {
            self.reclaim();
            std::thread::sleep(worked);
            self.slice = Instant::now();
        }
    }

    fn reclaim(&mut self) {
        let Run { zram, id, retired, .. } = self;
        zram.reclaim(*id, retired);
    }
}

impl Drop for Run<'_> {
    fn drop(&mut self) {
        self.reclaim();
        self.zram.leave_orphans(std::mem::take(&mut self.retired));
        self.zram.epochs.leave(self.id);
    }
}
