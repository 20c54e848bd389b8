//! One split virtqueue (virtio 1.3 section 2.7) as its present owner sees it.
//!
//! For: popping chains three ways (empty, chain, broken), the used ring, whom to notify when. Not for: what a chain means.
//!
//! Invariants, whatever the guest writes:
//! 1. Each descriptor, head and index is read once, into private memory, and the copy is checked and used.
//! 2. The walk of a chain is bounded by [`Ring::descriptors_max`]; a pop never loops over the ring.
//! 3. `next_avail` and `next_used` are ours; the guest's used index is believed once, when a frontend sets the ring up.
//! 4. Chains are completed in the order in which they were popped, so once a batch is published its index accounts for all.
//!
//! Not virtio-queue's `Queue`: its iterators end silently on a fault, follow what was not negotiated, and report an index
//! jump as "empty, but there is more", on which a loop spins; it looks each address up anew, and publishes one by one. Here
//! the areas are found in memory once, when the ring is set up, and a batch is published with one store.

use std::num::Wrapping;
use std::sync::atomic::{Ordering, fence};

use virtio_bindings::virtio_ring::{
    VRING_AVAIL_F_NO_INTERRUPT, VRING_DESC_F_INDIRECT, VRING_DESC_F_NEXT, VRING_DESC_F_WRITE, VRING_USED_F_NO_NOTIFY,
};
use vm_memory::GuestAddress;

use crate::config_space::SEG_MAX;
use crate::guest::{Guest, Place};
use crate::inflight::Inflight;

/// Bytes of one descriptor: address (8), length (4), flags (2), next (2).
const DESCRIPTOR_BYTES: usize = 16;

/// Unanswerable chains that a ring may return in one session before it is taken for broken.
pub(crate) const BAD_CHAINS_MAX: u32 = 1024;

/// One buffer of a chain, copied from its descriptor; never empty.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Segment {
    pub addr: GuestAddress,
    pub len: u32,
}

/// The buffers of one chain, in order. Owned by the worker and used again for each chain.
#[derive(Debug, Default)]
pub(crate) struct Chain {
    /// What the device may read: header, then data.
    pub readable: Vec<Segment>,
    /// What the device may write: data, then the status byte.
    pub writable: Vec<Segment>,
    /// A readable buffer came after a writable one, which the standard forbids.
    pub misordered: bool,
}

impl Chain {
    fn clear(&mut self) {
        self.readable.clear();
        self.writable.clear();
        self.misordered = false;
    }

    /// Appends a buffer. Empty ones, legal and meaningless, are dropped here so that nobody else meets them.
    pub fn push(&mut self, segment: Segment, writable: bool) {
        if segment.len == 0 {
            return;
        }
        if writable {
            self.writable.push(segment);
        } else {
            self.misordered |= !self.writable.is_empty();
            self.readable.push(segment);
        }
    }

    /// Bytes that the device may read.
    pub fn readable_bytes(&self) -> u64 {
        bytes(&self.readable)
    }

    /// Bytes that the device may write.
    pub fn writable_bytes(&self) -> u64 {
        bytes(&self.writable)
    }
}

/// At most 2^16 segments of less than 2^32 bytes: no overflow.
fn bytes(segments: &[Segment]) -> u64 {
    segments.iter().map(|segment| u64::from(segment.len)).sum()
}

/// What a pop found.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Pop {
    /// Nothing is available.
    Empty,
    /// A chain, now in the worker's [`Chain`], to be completed under this head.
    Chain(u16),
    /// A chain that cannot be walked, to be returned under this head with used length 0.
    BadChain(u16),
    /// The ring itself makes no sense.
    Broken(BrokenRing),
}

/// Why a ring cannot be served until the frontend has stopped and started it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub(crate) enum BrokenRing {
    #[error("the avail index is ahead by more than the ring's size")]
    AvailIndex,
    #[error("a head in the avail ring is not below the ring's size")]
    Head,
    #[error("the ring is not in guest memory")]
    Memory,
    #[error("guest memory is gone: its file was cut, or the host has no page for it")]
    MemoryLost,
    #[error("the start index is ahead of the used index by more than the ring's size")]
    Base,
    #[error("too many malformed chains")]
    TooManyBadChains,
    #[error("a defect of ours in its worker")]
    Defect,
}

/// Where a ring's three areas lie.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Areas {
    pub descriptors: GuestAddress,
    pub avail: GuestAddress,
    pub used: GuestAddress,
}

/// The areas overlap, or are not each in one region of memory, or are not aligned.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the ring's areas overlap or are not aligned or not in memory")]
pub(crate) struct BadAreas;

/// A virtqueue's state. It moves to the worker at start and comes back at stop.
#[derive(Debug)]
pub(crate) struct Ring {
    size_max: u16,
    /// A power of two, at most `size_max`; 0 before the ring is first set up.
    size: u16,
    /// The areas in mapped memory, from set-up until the ring comes home.
    places: Option<Places>,
    event_idx: bool,
    indirect: bool,
    /// The entry of the avail ring to be popped next.
    next_avail: Wrapping<u16>,
    /// The avail index as last read: entries from `next_avail` to here may be popped without reading it again.
    avail_seen: Wrapping<u16>,
    /// Chains popped and not completed yet.
    in_hand: Wrapping<u16>,
    /// The entry of the used ring to be written next.
    next_used: Wrapping<u16>,
    /// The used index as the driver sees it.
    published: Wrapping<u16>,
    /// The used index up to which it was decided whether to call.
    called: Wrapping<u16>,
    inflight: Option<Inflight>,
    bad_chains: u32,
    broken: Option<BrokenRing>,
}

/// A ring's three areas, found in guest memory once.
#[derive(Debug)]
struct Places {
    descriptors: Place,
    avail: Place,
    used: Place,
}

/// Both rings begin with flags and index, then come the entries.
const FLAGS: usize = 0;
const INDEX: usize = 2;
const ENTRIES: usize = 4;
const AVAIL_ENTRY_BYTES: usize = 2;
const USED_ENTRY_BYTES: usize = 8;

impl Ring {
    /// A ring of at most `size_max` descriptors.
    pub fn new(size_max: u16) -> Ring {
        Ring {
            size_max,
            size: 0,
            places: None,
            event_idx: false,
            indirect: false,
            next_avail: Wrapping(0),
            avail_seen: Wrapping(0),
            in_hand: Wrapping(0),
            next_used: Wrapping(0),
            published: Wrapping(0),
            called: Wrapping(0),
            inflight: None,
            bad_chains: 0,
            broken: None,
        }
    }

    /// Takes over what the frontend and the driver have settled. Fails if the areas cannot be a ring's.
    pub fn set_up(
        &mut self,
        guest: &Guest,
        size: u16,
        areas: Areas,
        event_idx: bool,
        indirect: bool,
    ) -> Result<(), BadAreas> {
        if !size.is_power_of_two() || size > self.size_max {
            return Err(BadAreas);
        }
        self.places = Some(find_places(guest, size, areas)?);
        self.size = size;
        self.event_idx = event_idx;
        self.indirect = indirect;
        self.avail_seen = self.next_avail;
        self.in_hand = Wrapping(0);
        Ok(())
    }

    /// Lets go of guest memory. What was popped and not completed is to be popped again.
    pub fn bring_home(&mut self) {
        self.unpop();
        self.places = None;
        self.inflight = None;
    }

    /// Where to go on in the avail ring, as the frontend says.
    pub fn set_base(&mut self, base: u16) {
        self.next_avail = Wrapping(base);
        self.avail_seen = Wrapping(base);
    }

    /// Where to go on in the avail ring: all before it is completed.
    pub fn base(&self) -> u16 {
        (self.next_avail - self.in_hand).0
    }

    /// Takes the used index from guest memory: the one time it is believed. Breaks the ring if more would be in flight
    /// than fit.
    pub fn adopt_used_index(&mut self) {
        match self.load(|places| &places.used, INDEX, Ordering::Acquire) {
            Ok(used) if (self.next_avail - Wrapping(used)).0 <= self.size => {
                self.next_used = Wrapping(used);
                self.published = Wrapping(used);
                self.called = Wrapping(used);
            }
            Ok(_) => self.broken = Some(BrokenRing::Base),
            Err(reason) => self.broken = Some(reason),
        }
    }

    /// Tracks what is in flight in `part`, from now until the ring comes home. If it was tracked there before, the ring
    /// goes on from its used index.
    pub fn track(&mut self, part: Place) {
        match Inflight::begin(part, self.size, self.published.0) {
            Some((inflight, was_in_use)) => {
                self.inflight = Some(inflight);
                if was_in_use {
                    self.set_base(self.published.0);
                }
            }
            None => self.broken = Some(BrokenRing::Memory),
        }
    }

    /// Why the ring is broken, if it is.
    pub fn broken(&self) -> Option<BrokenRing> {
        self.broken
    }

    /// Marks the ring as not to be served any more.
    pub fn break_for(&mut self, reason: BrokenRing) {
        self.broken = Some(reason);
    }

    /// The frontend has stopped the ring: it may be set up anew.
    pub fn mend(&mut self) {
        self.broken = None;
    }

    /// Descriptors of one chain, indirect or not. The standard says the ring's size; but Linux, given an indirect table,
    /// goes by SEG_MAX alone, so a ring smaller than that must bear a chain of SEG_MAX and two.
    fn descriptors_max(&self) -> u32 {
        u32::from(self.size).max(SEG_MAX + 2)
    }

    fn places(&self) -> Result<&Places, BrokenRing> {
        self.places.as_ref().ok_or(BrokenRing::Memory)
    }

    fn load(&self, area: impl Fn(&Places) -> &Place, offset: usize, order: Ordering) -> Result<u16, BrokenRing> {
        area(self.places()?).load(offset, order).ok_or(BrokenRing::Memory)
    }

    /// The entry of a ring that an index means. A ring's size is a power of two once it is set up.
    fn entry(&self, index: Wrapping<u16>) -> usize {
        usize::from(index.0 & self.size.wrapping_sub(1))
    }

    /// The event index lies behind the entries.
    fn avail_tail(&self) -> usize {
        ENTRIES + AVAIL_ENTRY_BYTES * usize::from(self.size)
    }

    fn used_tail(&self) -> usize {
        ENTRIES + USED_ENTRY_BYTES * usize::from(self.size)
    }

    /// Takes the next chain off the avail ring, into `chain`.
    pub fn pop(&mut self, guest: &Guest, chain: &mut Chain) -> Pop {
        match self.pop_head() {
            Ok(None) => Pop::Empty,
            Ok(Some(head)) => match self.walk(guest, head, chain) {
                Some(()) => Pop::Chain(head),
                None => Pop::BadChain(head),
            },
            Err(reason) => Pop::Broken(reason),
        }
    }

    /// Puts everything back that was popped and not completed: it will be popped again.
    pub fn unpop(&mut self) {
        self.next_avail -= self.in_hand;
        self.in_hand = Wrapping(0);
        if let Some(inflight) = &mut self.inflight {
            inflight.put_back();
        }
    }

    fn pop_head(&mut self) -> Result<Option<u16>, BrokenRing> {
        if self.avail_seen == self.next_avail {
            self.avail_seen = self.read_avail_index(Ordering::Acquire)?;
            if self.avail_seen == self.next_avail {
                return Ok(None);
            }
        }
        let offset = ENTRIES + AVAIL_ENTRY_BYTES * self.entry(self.next_avail);
        // The Acquire load of the index has ordered this read behind the driver's write of the entry.
        let head = self.load(|places| &places.avail, offset, Ordering::Relaxed)?;
        if head >= self.size {
            return Err(BrokenRing::Head);
        }
        self.next_avail += 1;
        self.in_hand += 1;
        if let Some(inflight) = &mut self.inflight {
            inflight.take(head).ok_or(BrokenRing::Memory)?;
        }
        Ok(Some(head))
    }

    fn read_avail_index(&self, order: Ordering) -> Result<Wrapping<u16>, BrokenRing> {
        let index = Wrapping(self.load(|places| &places.avail, INDEX, order)?);
        // All that was made available and not completed has a head of its own.
        if (index - self.next_avail).0 > self.size.saturating_sub(self.in_hand.0) {
            return Err(BrokenRing::AvailIndex);
        }
        Ok(index)
    }

    /// Whether the driver has made something available that was not popped. For polling: a broken index counts.
    pub fn has_more(&self) -> bool {
        let index = self.load(|places| &places.avail, INDEX, Ordering::Relaxed);
        index != Ok(self.next_avail.0)
    }

    /// Chains that the driver has made available and does not see completed yet.
    pub fn in_flight(&self) -> usize {
        let index = self.load(|places| &places.avail, INDEX, Ordering::Relaxed);
        index.map_or(0, |index| {
            usize::from((Wrapping(index) - self.published).0.min(self.size))
        })
    }

    /// Copies the chain's descriptors. `None` if it loops, leaves its table, or uses indirection as it must not.
    fn walk(&self, guest: &Guest, head: u16, chain: &mut Chain) -> Option<()> {
        chain.clear();
        let mut table = Table::Ring(&self.places.as_ref()?.descriptors);
        let mut index = head;
        // One more than a chain has: the descriptor that refers to a table is not of the chain. Without a table that one
        // more is a loop, and has a next.
        for _ in 0..=self.descriptors_max() {
            let descriptor = table.read(guest, index)?;
            if descriptor.has(VRING_DESC_F_INDIRECT) {
                table = self.indirect_table(&table, &descriptor)?;
                index = 0;
                continue;
            }
            let segment = Segment {
                addr: GuestAddress(descriptor.addr),
                len: descriptor.len,
            };
            chain.push(segment, descriptor.has(VRING_DESC_F_WRITE));
            if !descriptor.has(VRING_DESC_F_NEXT) {
                return Some(());
            }
            index = descriptor.next;
        }
        None
    }

    fn indirect_table(&self, outer: &Table<'_>, descriptor: &Descriptor) -> Option<Table<'static>> {
        let entries = descriptor.len / DESCRIPTOR_BYTES as u32;
        let fits =
            descriptor.len.is_multiple_of(DESCRIPTOR_BYTES as u32) && (1..=self.descriptors_max()).contains(&entries);
        let nested = matches!(outer, Table::Indirect { .. });
        let allowed = self.indirect && !nested && !descriptor.has(VRING_DESC_F_NEXT);
        (fits && allowed).then_some(Table::Indirect {
            addr: descriptor.addr,
            entries,
        })
    }

    /// Completes the oldest chain in hand, that was popped under `head` and of which `len` bytes were written. The driver
    /// sees it once it is published.
    pub fn complete(&mut self, head: u16, len: u32) -> Result<(), BrokenRing> {
        debug_assert!(self.in_hand.0 > 0, "completed what was not popped");
        let offset = ENTRIES + USED_ENTRY_BYTES * self.entry(self.next_used);
        let entry = u64::from(head) | u64::from(len) << 32;
        self.places()?
            .used
            .write(offset, &entry.to_le_bytes())
            .ok_or(BrokenRing::Memory)?;
        self.next_used += 1;
        self.in_hand -= 1;
        if let Some(inflight) = &mut self.inflight {
            inflight.complete();
        }
        Ok(())
    }

    /// Completes a chain that cannot be answered, as often as a session may.
    pub fn complete_bad(&mut self, head: u16) -> Result<(), BrokenRing> {
        self.complete(head, 0)?;
        self.bad_chains = self.bad_chains.saturating_add(1);
        if self.bad_chains > BAD_CHAINS_MAX {
            Err(BrokenRing::TooManyBadChains)
        } else {
            Ok(())
        }
    }

    /// Shows the driver what was completed. Release: it finds the entries, statuses and data behind the index.
    pub fn publish(&mut self) -> Result<(), BrokenRing> {
        if self.published == self.next_used {
            return Ok(());
        }
        let used = self.next_used.0;
        if let Some(inflight) = &mut self.inflight {
            inflight.before_publishing().ok_or(BrokenRing::Memory)?;
        }
        let stored = self.places()?.used.store(INDEX, used, Ordering::Release);
        stored.ok_or(BrokenRing::Memory)?;
        self.published = self.next_used;
        match &mut self.inflight {
            Some(inflight) => inflight.after_publishing(used).ok_or(BrokenRing::Memory),
            None => Ok(()),
        }
    }

    /// Whether something was published since the last time and the driver wants to hear of it.
    pub fn wants_call(&mut self) -> Result<bool, BrokenRing> {
        let before = std::mem::replace(&mut self.called, self.published);
        let new = self.published - before;
        if new.0 == 0 {
            return Ok(false);
        }
        // Publishing the used index before reading flag or event index, as the driver writes them before reading the index.
        fence(Ordering::SeqCst);
        if self.event_idx {
            let event = self.load(|places| &places.avail, self.avail_tail(), Ordering::Relaxed)?;
            // Virtio 1.3 section 2.7.7: the event index is among the new entries.
            return Ok(self.published - Wrapping(event) - Wrapping(1) < new);
        }
        let flags = self.load(|places| &places.avail, FLAGS, Ordering::Relaxed)?;
        Ok(u32::from(flags) & VRING_AVAIL_F_NO_INTERRUPT == 0)
    }

    /// Asks the driver not to kick: the worker is looking anyway. With event index there is nothing to be said: an index
    /// that was passed asks for nothing more.
    pub fn silence_kicks(&mut self) -> Result<(), BrokenRing> {
        if self.event_idx {
            return Ok(());
        }
        let silent = self
            .places()?
            .used
            .store(FLAGS, VRING_USED_F_NO_NOTIFY as u16, Ordering::Relaxed);
        silent.ok_or(BrokenRing::Memory)
    }

    /// Asks the driver to kick from now on; true if something became available meanwhile, so that it may not.
    pub fn await_kicks(&mut self) -> Result<bool, BrokenRing> {
        let used = &self.places()?.used;
        let stored = if self.event_idx {
            used.store(self.used_tail(), self.next_avail.0, Ordering::Relaxed)
        } else {
            used.store(FLAGS, 0, Ordering::Relaxed)
        };
        stored.ok_or(BrokenRing::Memory)?;
        // Asking before looking, as the driver publishes before it reads what was asked.
        fence(Ordering::SeqCst);
        Ok(self.read_avail_index(Ordering::Relaxed)? != self.next_avail)
    }
}

/// One descriptor, copied.
struct Descriptor {
    addr: u64,
    len: u32,
    flags: u16,
    next: u16,
}

impl Descriptor {
    fn has(&self, flag: u32) -> bool {
        u32::from(self.flags) & flag != 0
    }

    /// Little-endian throughout: one copy, and the fields are shifts.
    fn of(bytes: [u8; DESCRIPTOR_BYTES]) -> Descriptor {
        let raw = u128::from_le_bytes(bytes);
        Descriptor {
            addr: raw as u64,
            len: (raw >> 64) as u32,
            flags: (raw >> 96) as u16,
            next: (raw >> 112) as u16,
        }
    }
}

/// A table of descriptors: the ring's, or one that a descriptor refers to.
enum Table<'a> {
    Ring(&'a Place),
    Indirect { addr: u64, entries: u32 },
}

impl Table<'_> {
    /// Copies one descriptor. An indirect table may lie at any address, aligned or not.
    fn read(&self, guest: &Guest, index: u16) -> Option<Descriptor> {
        let offset = usize::from(index) * DESCRIPTOR_BYTES;
        match self {
            // The place ends with the table.
            Table::Ring(place) => place.read(offset).map(Descriptor::of),
            Table::Indirect { entries, .. } if u32::from(index) >= *entries => None,
            Table::Indirect { addr, .. } => {
                let mut bytes = [0; DESCRIPTOR_BYTES];
                let addr = GuestAddress(addr.checked_add(offset as u64)?);
                guest.read(addr, &mut bytes).ok()?;
                Some(Descriptor::of(bytes))
            }
        }
    }
}

fn find_places(guest: &Guest, size: u16, areas: Areas) -> Result<Places, BadAreas> {
    let size = u64::from(size);
    // Virtio 1.3 section 2.7: sizes and alignments; both rings count their event index.
    let list = [
        (areas.descriptors, DESCRIPTOR_BYTES as u64 * size, 16),
        (areas.avail, 6 + AVAIL_ENTRY_BYTES as u64 * size, 2),
        (areas.used, 6 + USED_ENTRY_BYTES as u64 * size, 4),
    ];
    let place = |(start, bytes, align): (GuestAddress, u64, u64)| {
        let aligned = start.0.is_multiple_of(align);
        aligned.then(|| guest.place(start, bytes)).flatten().ok_or(BadAreas)
    };
    let [descriptors, avail, used] = list;
    let places = Places {
        descriptors: place(descriptors)?,
        avail: place(avail)?,
        used: place(used)?,
    };
    for (index, (a_start, a_bytes, _)) in list.iter().enumerate() {
        for (b_start, b_bytes, _) in list.iter().skip(index + 1) {
            // In memory, so the sums do not overflow.
            if a_start.0 < b_start.0 + b_bytes && b_start.0 < a_start.0 + a_bytes {
                return Err(BadAreas);
            }
        }
    }
    Ok(places)
}

#[cfg(test)]
pub(crate) mod tests;
