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
pub(crate) mod tests {
    use virtio_bindings::virtio_ring::{VRING_DESC_F_INDIRECT, VRING_DESC_F_NEXT, VRING_DESC_F_WRITE};
    use virtio_queue::desc::RawDescriptor;
    use virtio_queue::desc::split::Descriptor;
    use virtio_queue::mock::MockSplitQueue;
    use vm_memory::{Bytes, GuestMemoryMmap};

    use super::*;

    pub(crate) const NEXT: u16 = VRING_DESC_F_NEXT as u16;
    pub(crate) const WRITE: u16 = VRING_DESC_F_WRITE as u16;
    pub(crate) const INDIRECT: u16 = VRING_DESC_F_INDIRECT as u16;

    const SIZE: u16 = 16;
    const TABLE: u64 = 0x8000;
    /// Not where the mock has it: its rings overlap.
    const USED: GuestAddress = GuestAddress(0x7000);

    pub(crate) fn guest(bytes: usize) -> GuestMemoryMmap {
        GuestMemoryMmap::from_ranges(&[(GuestAddress(0), bytes)]).unwrap()
    }

    pub(crate) fn ring_on(mem: &GuestMemoryMmap, mock: &MockSplitQueue<'_, GuestMemoryMmap>, event_idx: bool) -> Ring {
        let mut ring = Ring::new(256);
        let areas = Areas {
            descriptors: mock.desc_table_addr(),
            avail: mock.avail_addr(),
            used: USED,
        };
        ring.set_up(
            &Guest::of(mem),
            mock.desc_table().total_size() as u16 / 16,
            areas,
            event_idx,
            true,
        )
        .unwrap();
        ring
    }

    fn set(mock: &MockSplitQueue<'_, GuestMemoryMmap>, index: u16, addr: u64, len: u32, flags: u16, next: u16) {
        mock.desc_table()
            .store(index, RawDescriptor::from(Descriptor::new(addr, len, flags, next)))
            .unwrap();
    }

    fn publish(mock: &MockSplitQueue<'_, GuestMemoryMmap>, heads: &[u16]) {
        let start = u16::from_le(mock.avail().idx().load());
        for (index, head) in heads.iter().enumerate() {
            let entry = usize::from(start.wrapping_add(index as u16) % SIZE);
            mock.avail().ring().ref_at(entry).unwrap().store(head.to_le());
        }
        mock.avail().idx().store(start.wrapping_add(heads.len() as u16).to_le());
    }

    /// Sets up one chain by `build`, pops once.
    fn pop_one(build: impl FnOnce(&GuestMemoryMmap, &MockSplitQueue<'_, GuestMemoryMmap>)) -> (Pop, Chain) {
        let mem = guest(0x10000);
        let mock = MockSplitQueue::new(&mem, SIZE);
        let mut ring = ring_on(&mem, &mock, false);
        build(&mem, &mock);
        publish(&mock, &[0]);
        let mut chain = Chain::default();
        let pop = ring.pop(&Guest::of(&mem), &mut chain);
        (pop, chain)
    }

    fn segment(addr: u64, len: u32) -> Segment {
        Segment {
            addr: GuestAddress(addr),
            len,
        }
    }

    #[test]
    fn chains_come_in_order_then_empty() {
        let mem = guest(0x10000);
        let mock = MockSplitQueue::new(&mem, SIZE);
        let mut ring = ring_on(&mem, &mock, false);
        let mut chain = Chain::default();
        assert_eq!(ring.pop(&Guest::of(&mem), &mut chain), Pop::Empty);
        set(&mock, 3, 0x1000, 16, NEXT, 5);
        set(&mock, 5, 0x2000, 4096, NEXT | WRITE, 1);
        set(&mock, 1, 0x3000, 1, WRITE, 0);
        set(&mock, 9, 0x4000, 7, 0, 0);
        publish(&mock, &[3, 9]);
        assert_eq!(ring.pop(&Guest::of(&mem), &mut chain), Pop::Chain(3));
        assert_eq!(chain.readable, [segment(0x1000, 16)]);
        assert_eq!(chain.writable, [segment(0x2000, 4096), segment(0x3000, 1)]);
        assert_eq!(
            (chain.readable_bytes(), chain.writable_bytes(), chain.misordered),
            (16, 4097, false)
        );
        ring.unpop();
        assert_eq!(ring.pop(&Guest::of(&mem), &mut chain), Pop::Chain(3));
        assert_eq!(ring.pop(&Guest::of(&mem), &mut chain), Pop::Chain(9));
        assert_eq!(ring.pop(&Guest::of(&mem), &mut chain), Pop::Empty);
        assert_eq!(ring.base(), 0, "nothing is completed");
        ring.complete(3, 1).unwrap();
        assert_eq!(ring.base(), 1);
        ring.unpop();
        assert_eq!(ring.pop(&Guest::of(&mem), &mut chain), Pop::Chain(9));
    }

    #[test]
    fn a_readable_buffer_behind_a_writable_one_is_noticed() {
        let (pop, chain) = pop_one(|_, mock| {
            set(mock, 0, 0x1000, 16, NEXT | WRITE, 1);
            set(mock, 1, 0x2000, 16, 0, 0);
        });
        assert_eq!(pop, Pop::Chain(0));
        assert!(chain.misordered);
    }

    #[test]
    fn empty_buffers_are_dropped() {
        let (pop, chain) = pop_one(|_, mock| {
            set(mock, 0, 0x1000, 0, NEXT | WRITE, 1);
            set(mock, 1, 0x2000, 16, 0, 0);
        });
        assert_eq!((pop, chain.readable.len(), chain.writable.len()), (Pop::Chain(0), 1, 0));
        assert!(!chain.misordered);
    }

    #[test]
    fn a_chain_that_loops_or_leaves_its_table_is_bad() {
        let bad = |build: fn(&MockSplitQueue<'_, GuestMemoryMmap>)| {
            assert_eq!(pop_one(|_, mock| build(mock)).0, Pop::BadChain(0));
        };
        bad(|mock| set(mock, 0, 0x1000, 16, NEXT, 0));
        bad(|mock| {
            set(mock, 0, 0x1000, 16, NEXT, 1);
            set(mock, 1, 0x1000, 16, NEXT, 0);
        });
        bad(|mock| set(mock, 0, 0x1000, 16, NEXT, SIZE));
        bad(|mock| set(mock, 0, 0x1000, 16, NEXT, u16::MAX));
    }

    fn table(mem: &GuestMemoryMmap, descriptors: &[(u64, u32, u16, u16)]) {
        for (index, (addr, len, flags, next)) in descriptors.iter().enumerate() {
            let descriptor = Descriptor::new(*addr, *len, *flags, *next);
            mem.write_obj(descriptor, GuestAddress(TABLE + 16 * index as u64))
                .unwrap();
        }
    }

    #[test]
    fn an_indirect_table_is_followed_even_behind_direct_descriptors() {
        let (pop, chain) = pop_one(|mem, mock| {
            set(mock, 0, 0x1000, 16, NEXT, 4);
            set(mock, 4, TABLE, 32, INDIRECT | WRITE, 0);
            table(mem, &[(0x2000, 512, NEXT | WRITE, 1), (0x3000, 1, WRITE, 0)]);
        });
        assert_eq!(pop, Pop::Chain(0));
        assert_eq!(chain.readable, [segment(0x1000, 16)]);
        assert_eq!(chain.writable, [segment(0x2000, 512), segment(0x3000, 1)]);
    }

    #[test]
    fn indirect_tables_obey_their_rules() {
        let bad = |len: u32, flags: u16, first: (u64, u32, u16, u16)| {
            let (pop, _) = pop_one(|mem, mock| {
                table(mem, &[first]);
                set(mock, 0, TABLE, len, INDIRECT | flags, 1);
                set(mock, 1, 0x1000, 16, 0, 0);
            });
            assert_eq!(pop, Pop::BadChain(0), "len {len} flags {flags} first {first:?}");
        };
        let good = (0x1000, 16, 0, 0);
        for len in [0, 15, 17, 129 * 16, u32::MAX, 65_535 * 16] {
            bad(len, 0, good);
        }
        bad(16, NEXT, good);
        bad(16, 0, (TABLE, 16, INDIRECT, 0)); // nested
        bad(16, 0, (0x1000, 16, NEXT, 1)); // next beyond the table
        bad(32, 0, (0x1000, 16, NEXT, 0)); // loop in the table
        let (pop, _) = pop_one(|_, mock| set(mock, 0, 0xffff, 32, INDIRECT, 0));
        assert_eq!(pop, Pop::BadChain(0), "outside memory");
        let (pop, _) = pop_one(|_, mock| set(mock, 0, u64::MAX - 8, 32, INDIRECT, 0));
        assert_eq!(pop, Pop::BadChain(0), "wrapping");
    }

    #[test]
    fn direct_and_indirect_descriptors_are_counted_together() {
        let pop_with = |entries: u16| {
            pop_one(|mem, mock| {
                for index in 0..10 {
                    set(mock, index, 0x1000, 16, NEXT, index + 1);
                }
                let list: Vec<_> = (1..=entries)
                    .map(|next| (0x2000, 1, if next < entries { NEXT } else { 0 }, next))
                    .collect();
                table(mem, &list);
                set(mock, 10, TABLE, 16 * u32::from(entries), INDIRECT, 0);
            })
            .0
        };
        // Ten direct ones and the table's; the one that refers to the table does not count.
        assert_eq!(pop_with(SEG_MAX as u16 + 2 - 10), Pop::Chain(0));
        assert_eq!(pop_with(SEG_MAX as u16 + 2 - 9), Pop::BadChain(0));
    }

    #[test]
    fn an_indirect_table_not_negotiated_is_bad() {
        let mem = guest(0x10000);
        let mock = MockSplitQueue::new(&mem, SIZE);
        let mut ring = ring_on(&mem, &mock, false);
        ring.indirect = false;
        table(&mem, &[(0x1000, 16, 0, 0)]);
        set(&mock, 0, TABLE, 16, INDIRECT, 0);
        publish(&mock, &[0]);
        assert_eq!(ring.pop(&Guest::of(&mem), &mut Chain::default()), Pop::BadChain(0));
    }

    #[test]
    fn an_index_that_jumps_or_goes_back_breaks_the_ring() {
        for index in [SIZE + 1, 0x8000, u16::MAX] {
            let mem = guest(0x10000);
            let mock = MockSplitQueue::new(&mem, SIZE);
            let mut ring = ring_on(&mem, &mock, false);
            mock.avail().idx().store(index.to_le());
            assert_eq!(
                ring.pop(&Guest::of(&mem), &mut Chain::default()),
                Pop::Broken(BrokenRing::AvailIndex),
                "{index}"
            );
        }
    }

    #[test]
    fn a_head_beyond_the_table_breaks_the_ring() {
        for head in [SIZE, SIZE + 1, u16::MAX] {
            let mem = guest(0x10000);
            let mock = MockSplitQueue::new(&mem, SIZE);
            let mut ring = ring_on(&mem, &mock, false);
            publish(&mock, &[head]);
            assert_eq!(
                ring.pop(&Guest::of(&mem), &mut Chain::default()),
                Pop::Broken(BrokenRing::Head)
            );
        }
    }

    #[test]
    fn indexes_wrap() {
        let mem = guest(0x10000);
        let mock = MockSplitQueue::new(&mem, SIZE);
        let mut ring = ring_on(&mem, &mock, false);
        mock.avail().idx().store(0xffff_u16.to_le());
        mem.write_obj(0xffff_u16.to_le(), GuestAddress(USED.0 + 2)).unwrap();
        ring.set_base(0xffff);
        ring.adopt_used_index();
        assert_eq!(ring.broken(), None);
        set(&mock, 0, 0x1000, 16, 0, 0);
        publish(&mock, &[0, 0, 0]);
        let mut chain = Chain::default();
        for _ in 0..3 {
            assert_eq!(ring.pop(&Guest::of(&mem), &mut chain), Pop::Chain(0));
            ring.complete(0, 1).unwrap();
            ring.publish().unwrap();
        }
        assert_eq!(ring.pop(&Guest::of(&mem), &mut chain), Pop::Empty);
        let used: u16 = mem.read_obj(GuestAddress(USED.0 + 2)).unwrap();
        assert_eq!((ring.base(), u16::from_le(used)), (2, 2));
    }

    #[test]
    fn a_base_too_far_from_the_used_index_breaks_the_ring() {
        let mem = guest(0x10000);
        let mock = MockSplitQueue::new(&mem, SIZE);
        let mut ring = ring_on(&mem, &mock, false);
        ring.set_base(SIZE);
        ring.adopt_used_index();
        assert_eq!(ring.broken(), None);
        ring.set_base(SIZE + 1);
        ring.adopt_used_index();
        assert_eq!(ring.broken(), Some(BrokenRing::Base));
    }

    #[test]
    fn bad_chains_have_a_budget() {
        let mem = guest(0x10000);
        let mock = MockSplitQueue::new(&mem, SIZE);
        let mut ring = ring_on(&mem, &mock, false);
        for _ in 0..BAD_CHAINS_MAX {
            ring.in_hand = Wrapping(1);
            assert_eq!(ring.complete_bad(0), Ok(()));
        }
        ring.in_hand = Wrapping(1);
        assert_eq!(ring.complete_bad(0), Err(BrokenRing::TooManyBadChains));
    }

    fn complete_one(ring: &mut Ring) {
        ring.in_hand += 1;
        ring.complete(0, 1).unwrap();
        assert_eq!(ring.wants_call(), Ok(false), "not published");
        ring.publish().unwrap();
    }

    #[test]
    fn without_event_index_the_flag_of_the_avail_ring_counts() {
        let mem = guest(0x10000);
        let mock = MockSplitQueue::new(&mem, SIZE);
        let mut ring = ring_on(&mem, &mock, false);
        assert_eq!(ring.wants_call(), Ok(false), "nothing completed");
        complete_one(&mut ring);
        assert_eq!(ring.wants_call(), Ok(true));
        assert_eq!(ring.wants_call(), Ok(false), "once");
        mem.write_obj(1u16.to_le(), mock.avail_addr()).unwrap();
        complete_one(&mut ring);
        assert_eq!(ring.wants_call(), Ok(false));
    }

    #[test]
    fn with_event_index_the_flag_is_ignored_and_the_index_counts() {
        let mem = guest(0x10000);
        let mock = MockSplitQueue::new(&mem, SIZE);
        let mut ring = ring_on(&mem, &mock, true);
        let used_event = GuestAddress(mock.avail_addr().0 + 4 + 2 * u64::from(SIZE));
        mem.write_obj(1u16.to_le(), mock.avail_addr()).unwrap();
        mem.write_obj(1u16.to_le(), used_event).unwrap();
        complete_one(&mut ring);
        assert_eq!(ring.wants_call(), Ok(false));
        complete_one(&mut ring);
        assert_eq!(ring.wants_call(), Ok(true));
    }

    #[test]
    fn areas_outside_memory_or_overlapping_are_refused() {
        let mem = guest(0x10000);
        let good = Areas {
            descriptors: GuestAddress(0x1000),
            avail: GuestAddress(0x2000),
            used: GuestAddress(0x3000),
        };
        let set_up = |areas: Areas, size: u16| Ring::new(256).set_up(&Guest::of(&mem), size, areas, false, false);
        assert_eq!(set_up(good, 256), Ok(()));
        for size in [0, 3, 512] {
            assert_eq!(set_up(good, size), Err(BadAreas), "{size}");
        }
        for wrong in [0x1008, 0x10000, 0xfff0, !0xf] {
            assert_eq!(
                set_up(
                    Areas {
                        descriptors: GuestAddress(wrong),
                        ..good
                    },
                    256
                ),
                Err(BadAreas),
                "{wrong:x}"
            );
        }
        for wrong in [0x1001, 0x1ffe, 0xffff] {
            assert_eq!(
                set_up(
                    Areas {
                        avail: GuestAddress(wrong),
                        ..good
                    },
                    256
                ),
                Err(BadAreas),
                "{wrong:x}"
            );
        }
        for wrong in [0x2002, 0x2204, 0xf800, 0x1000] {
            assert_eq!(
                set_up(
                    Areas {
                        used: GuestAddress(wrong),
                        ..good
                    },
                    256
                ),
                Err(BadAreas),
                "{wrong:x}"
            );
        }
    }
}
