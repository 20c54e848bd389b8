//! The cleaner: empties sparse segments, so that their memory goes back to the host.
//!
//! A pass has four steps. It *chooses* the sparsest segments and closes them: nothing is allocated there any more. It
//! *walks* the slot table and moves what lies in them: pin, load the word, copy the object to a place elsewhere, exchange
//! the word for one with the new place, retire the old object. It *waits* for the grace periods of what it retired. And
//! it *opens* again what did not get empty. It moves some slices of a millisecond at a time, on whatever thread calls.
//!
//! 1. The exchange moves nothing that changed: the pin lasts from load to exchange, so an equal word means an equal
//!    object. A writer that comes in between wins, and the copy is freed.
//! 2. Nobody waits for the cleaner. It locks heaps as everybody does, for one place or for a look at some segments; a
//!    reader finds the old object or the new, which are equal; a sub-page writer whose exchange fails for a move starts
//!    again, and a pass moves an object once.
//! 3. It stores copies only within the limit, and stops where there is no room.

use std::time::{Duration, Instant};

use crate::arena::{Purpose, Room, SEGMENT_GRANULES, SEGMENT_SIZE, Sparse, segment_of};
use crate::epoch::{ParticipantId, Retired};
use crate::page::PAGE_SIZE;
use crate::pause::{Step, reach};
use crate::slot::{self, Slot, SlotIndex};
use crate::stats;
use crate::zram::{RETIRED_OPEN_MAX, Zram, slot_granules};

/// How long a pass works before it lets others run.
pub(crate) const SLICE: Duration = Duration::from_micros(500);
/// Slots that are walked between two looks at the clock, whether or not they hold anything.
const SLOTS_A_LOOK: u64 = 1 << 16;
/// Objects that are moved between two looks at the clock.
const MOVES_A_LOOK: u32 = 16;
/// A pass that waits longer for a reader leaves the segment to the next pass.
const GRACE_WAIT_MAX: Duration = Duration::from_secs(1);
/// What lies in the spare segment for longer than this was not taken from there by who put it there.
const SPARE_TIME_MAX: Duration = Duration::from_secs(1);
/// A pass moves at most this share of the segments in use, so that copies do not take much memory beside the originals.
const PASS_SHARE: u64 = 8;
/// But at least so many segments' worth.
const PASS_SEGMENTS_MIN: u64 = 32;

/// When a pass is worth its work; shares are in 1,024ths of the segments in use.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Goal {
    /// No pass while less is free.
    starts_above: u64,
    /// Segments are chosen until no more is free in the others.
    leaves: u64,
    /// Segments with less to gain are left alone.
    segment_free_min: u64,
    /// What was left in the spare segment is moved, too: not while a writer at the limit waits for a place there.
    with_spare: bool,
}

impl Goal {
    /// In the background: what costs little to move for what it brings.
    pub(crate) const BACKGROUND: Goal = Goal {
        starts_above: 26,
        leaves: 16,
        segment_free_min: 64,
        with_spare: true,
    };
    /// On command and at the limit: whatever there is to gain.
    pub(crate) const COMPACT: Goal = Goal {
        starts_above: 0,
        leaves: 0,
        segment_free_min: 16,
        with_spare: false,
    };
}

/// What there is to do after a slice.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Progress {
    /// More of the same.
    Working,
    /// Objects wait for readers.
    Waiting,
    /// Nothing is worth moving.
    Done,
}

/// What `Zram::compact` did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Compacted {
    /// Objects that were moved.
    pub objects_moved: u64,
    /// Pages of host memory that it gained, as in the `pages_compacted` of zram's `mm_stat`.
    pub pages_compacted: u64,
}

/// The state of cleaning: one for each store, and whoever has it cleans.
#[derive(Debug)]
pub(crate) struct Cleaner {
    pub(crate) id: ParticipantId,
    pub(crate) retired: Retired,
    pass: Option<Pass>,
    /// Changes of slots there had been when a pass last brought nothing.
    futile_at: Option<u64>,
    /// Since when something lies in the spare segment.
    spare_since: Option<Instant>,
    total: Compacted,
}

#[derive(Debug)]
struct Pass {
    closed: Vec<Sparse>,
    /// One bit for each segment's number: it is to be emptied.
    chosen: Vec<u64>,
    next_slot: u64,
    fresh_before: u64,
    emptied: u64,
    waits_since: Option<Instant>,
}

impl Cleaner {
    pub(crate) fn new(id: ParticipantId) -> Cleaner {
        Cleaner {
            id,
            retired: Retired::default(),
            pass: None,
            futile_at: None,
            spare_since: None,
            total: Compacted::default(),
        }
    }

    /// A change of the limit may have made worth while what was not.
    pub(crate) fn forget_futility(&mut self) {
        self.futile_at = None;
    }
}

impl Pass {
    fn is_chosen(&self, segment: u32) -> bool {
        let word = self.chosen.get(segment as usize / 64);
        word.is_some_and(|word| word >> (segment % 64) & 1 != 0)
    }
}

impl Zram {
    /// Moves what is worth moving until all is done, or as much was moved as there is, since guests go on writing: for
    /// the operator's command. Takes milliseconds to seconds of the caller's thread and holds up no request. At most half
    /// of the time is worked.
    pub fn compact(&self) -> Compacted {
        let mut cleaner = self.lock_cleaner();
        let before = cleaner.total;
        let moves_max = stats::gauge(&self.cells, |cells| &cells.pages_stored);
        cleaner.forget_futility();
        while cleaner.pass.is_some() || cleaner.total.objects_moved - before.objects_moved <= moves_max {
            match self.clean(&mut cleaner, Goal::COMPACT) {
                Progress::Done => break,
                Progress::Working | Progress::Waiting => std::thread::sleep(SLICE),
            }
        }
        self.reclaim_for(&mut cleaner);
        while self.arena.give_back() != 0 {}
        Compacted {
            objects_moved: cleaner.total.objects_moved - before.objects_moved,
            pages_compacted: cleaner.total.pages_compacted - before.pages_compacted,
        }
    }

    /// One slice of a pass, begun when there is none and `goal` says so.
    pub(crate) fn clean(&self, cleaner: &mut Cleaner, goal: Goal) -> Progress {
        if cleaner.pass.is_none() {
            let is_spare_left = goal.with_spare && self.is_spare_left(cleaner);
            if !is_spare_left && !self.is_worth_a_pass(cleaner, goal) {
                return Progress::Done;
            }
            cleaner.pass = self.choose(goal, is_spare_left);
            reach(Step::Chosen);
        }
        let Some(mut pass) = cleaner.pass.take() else {
            cleaner.futile_at = Some(self.changes());
            return Progress::Done;
        };
        self.walk(cleaner, &mut pass, Instant::now());
        if pass.next_slot < self.table.slots() {
            cleaner.pass = Some(pass);
            return Progress::Working;
        }
        self.reclaim_for(cleaner);
        let since = *pass.waits_since.get_or_insert_with(Instant::now);
        if !cleaner.retired.is_empty() && since.elapsed() < GRACE_WAIT_MAX {
            cleaner.pass = Some(pass);
            return Progress::Waiting;
        }
        self.open_again(&mut pass);
        if !pass.closed.is_empty() {
            cleaner.pass = Some(pass);
            return Progress::Waiting; // for heaps in use
        }
        self.account_for_pass(cleaner, &pass);
        Progress::Working
    }

    /// Frees what the cleaner retired, as far as readers let it.
    pub(crate) fn reclaim_for(&self, cleaner: &mut Cleaner) {
        self.reclaim(cleaner.id, &mut cleaner.retired);
    }

    /// Whether a writer at the limit could not take its object out of the spare segment, because of a slow reader. Others
    /// need the place.
    fn is_spare_left(&self, cleaner: &mut Cleaner) -> bool {
        if !self.arena.has_spare() {
            cleaner.spare_since = None;
            return false;
        }
        let since = *cleaner.spare_since.get_or_insert_with(Instant::now);
        let is_left = since.elapsed() >= SPARE_TIME_MAX;
        if is_left {
            cleaner.spare_since = None; // not again at once when there is no room for it
        }
        is_left
    }

    fn is_worth_a_pass(&self, cleaner: &Cleaner, goal: Goal) -> bool {
        let used = self.arena.granules_in_use();
        let free = used.saturating_sub(self.live_granules());
        let is_sparse = free * 1024 > used * goal.starts_above && free >= SEGMENT_GRANULES as u64;
        // After a pass that brought nothing, not before something changed that could matter.
        let pages = stats::gauge(&self.cells, |cells| &cells.pages_stored);
        let may_bring = |at: u64| self.changes() - at > (pages / 64).max(256);
        is_sparse && cleaner.futile_at.is_none_or(may_bring)
    }

    /// Closes the sparsest segments, as many as the goal asks for and there is room to empty.
    fn choose(&self, goal: Goal, with_spare: bool) -> Option<Pass> {
        let mut open = self.arena.survey();
        open.sort_unstable_by_key(|segment| std::cmp::Reverse(segment.free_granules));
        let segment = SEGMENT_GRANULES as u64;
        let total = open.len() as u64 * segment;
        let mut free_in_others: u64 = open.iter().map(|segment| u64::from(segment.free_granules)).sum();
        let moves_max = (total / PASS_SHARE).max(PASS_SEGMENTS_MIN * segment);
        let (mut moves, mut gains) = (0, 0);
        let mut closed = vec![];
        for sparse in open {
            let free = u64::from(sparse.free_granules);
            let is_enough =
                free_in_others * 1024 <= total * goal.leaves || free * 1024 < goal.segment_free_min * segment;
            // Half of what is free elsewhere may be in holes of no use.
            let room = self.arena.fresh_granules() + (free_in_others - free) / 2;
            if is_enough || moves + segment - free > moves_max.min(room) {
                break;
            }
            if self.arena.close(&sparse) {
                free_in_others -= free;
                moves += segment - free;
                gains += free;
                closed.push(sparse);
            }
        }
        if gains < segment {
            // What is moved takes as much as what is emptied.
            closed.retain(|segment| self.arena.reopen(segment).is_none());
        }
        if with_spare {
            closed.extend(self.arena.close_spare());
        }
        if closed.is_empty() {
            return None;
        }
        let mut chosen = vec![0; self.arena.segments_used() as usize / 64 + 1];
        for sparse in &closed {
            chosen[sparse.number as usize / 64] |= 1_u64 << (sparse.number % 64);
        }
        Some(Pass {
            closed,
            chosen,
            next_slot: 0,
            fresh_before: self.arena.fresh_for_moves(),
            emptied: 0,
            waits_since: None,
        })
    }

    /// Moves what lies in chosen segments, from where the pass stands, for a slice of time.
    fn walk(&self, cleaner: &mut Cleaner, pass: &mut Pass, since: Instant) {
        let slots = self.table.slots();
        while pass.next_slot < slots {
            let end = (pass.next_slot + SLOTS_A_LOOK).min(slots);
            let mut moved = 0;
            for (index, hint) in self.table.walk(pass.next_slot..end) {
                let found = slot_granules(Slot::unpack(hint));
                if !found.is_some_and(|(handle, _)| pass.is_chosen(segment_of(handle))) {
                    continue;
                }
                if self.move_object(cleaner, pass, index).is_none() {
                    pass.next_slot = slots;
                    return;
                }
                moved += 1;
                if moved % MOVES_A_LOOK == 0 && since.elapsed() >= SLICE {
                    pass.next_slot = u64::from(index.0) + 1;
                    return;
                }
            }
            pass.next_slot = end;
            if since.elapsed() >= SLICE {
                return;
            }
        }
    }

    /// Moves the object of a slot, if it still lies in a chosen segment. `None`: there is no room.
    fn move_object(&self, cleaner: &mut Cleaner, pass: &Pass, index: SlotIndex) -> Option<()> {
        let guard = self.epochs.pin(cleaner.id);
        let word = self.table.load(index);
        reach(Step::MoveLoaded);
        let slot = Slot::unpack(word);
        let Some((handle, _)) = slot_granules(slot).filter(|&(handle, _)| pass.is_chosen(segment_of(handle))) else {
            return Some(());
        };
        let len = match slot {
            Slot::Stored { len, .. } => len,
            _ => size_of::<u64>(),
        };
        // SAFETY: the word was loaded under the guard. A same-filled page's word is content like any other.
        let content = unsafe { self.arena.content(handle, len, &guard) };
        let room = Room {
            heap: self.arena.heap_of(handle),
            purpose: Purpose::Move,
            live_granules: &|| 0,
        };
        let copy = self.arena.store(&room, content).ok()?;
        reach(Step::Copied);
        let new = slot::moved(word, copy);
        let exchanged = self.table.compare_exchange(index, word, new);
        drop(guard);
        match exchanged {
            Ok(()) => {
                reach(Step::Moved);
                self.cells[cleaner.id].0.retired.add(1);
                cleaner.retired.push(word);
                cleaner.total.objects_moved += 1;
                if cleaner.retired.open() >= RETIRED_OPEN_MAX {
                    self.reclaim_for(cleaner);
                }
            }
            // SAFETY: the copy was never in the table.
            Err(_) => unsafe { self.free(cleaner.id, new) },
        }
        Some(())
    }

    /// Opens what did not get empty. What stays in `closed` is in a heap in use now.
    fn open_again(&self, pass: &mut Pass) {
        let (arena, emptied) = (&self.arena, &mut pass.emptied);
        pass.closed.retain(|segment| match arena.reopen(segment) {
            Some(is_there) => {
                *emptied += u64::from(!is_there);
                false
            }
            None => true,
        });
    }

    fn account_for_pass(&self, cleaner: &mut Cleaner, pass: &Pass) {
        let taken = self.arena.fresh_for_moves() - pass.fresh_before;
        let gained = pass.emptied.saturating_sub(taken);
        let pages = gained * (SEGMENT_SIZE / PAGE_SIZE) as u64;
        self.cells[cleaner.id].0.pages_compacted.add(pages);
        cleaner.total.pages_compacted += pages;
        cleaner.futile_at = (gained == 0).then(|| self.changes());
    }
}
