//! One split virtqueue (virtio 1.3 section 2.7) as its present owner sees it.
//!
//! For: popping chains three ways (empty, chain, broken), the used ring, whom to notify when. Not for: what a chain means.
//!
//! Invariants, whatever the guest writes:
//! 1. Each descriptor, head and index is read once, into private memory, and the copy is checked and used.
//! 2. The walk of a chain is bounded by [`Ring::descriptors_max`]; a pop never loops over the ring.
//! 3. `next_avail` and `next_used` are ours; the guest's used index is believed once, when a frontend sets the ring up.
//! 4. Chains are completed in the order in which they were popped, so between batches `next_used` accounts for all.
//!
//! The state is virtio-queue's [`Queue`]; popping is not, because its iterators end silently on a fault, follow what was
//! not negotiated, and report an index jump as "empty, but there is more", on which a loop spins.

use std::num::Wrapping;
use std::sync::atomic::{Ordering, fence};

use virtio_bindings::virtio_ring::VRING_AVAIL_F_NO_INTERRUPT;
use virtio_queue::desc::split::Descriptor;
use virtio_queue::{Queue, QueueOwnedT, QueueT};
use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};

use crate::config_space::SEG_MAX;
use crate::memory;

/// Bytes of one descriptor.
const DESCRIPTOR_BYTES: u64 = size_of::<Descriptor>() as u64;

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

/// The areas overlap, or are not in memory, or are not aligned.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the ring's areas overlap or are not aligned or not in memory")]
pub(crate) struct BadAreas;

/// A virtqueue's state. It moves to the worker at start and comes back at stop.
#[derive(Debug)]
pub(crate) struct Ring {
    queue: Queue,
    indirect: bool,
    /// The avail index as last read: entries from `next_avail` to here may be popped without reading it again.
    avail_seen: Wrapping<u16>,
    /// Chains completed since the last look at whether the driver wants a call.
    completed: bool,
    bad_chains: u32,
    broken: Option<BrokenRing>,
}

impl Ring {
    /// A ring of at most `size_max` descriptors, a power of two. `None` if it is not.
    pub fn new(size_max: u16) -> Option<Ring> {
        let queue = Queue::new(size_max).ok()?;
        let avail_seen = Wrapping(0);
        Some(Ring {
            queue,
            indirect: false,
            avail_seen,
            completed: false,
            bad_chains: 0,
            broken: None,
        })
    }

    /// Takes over what the frontend and the driver have settled. Fails if the areas cannot be a ring's.
    pub fn set_up(
        &mut self,
        mem: &GuestMemoryMmap,
        size: u16,
        areas: Areas,
        event_idx: bool,
        indirect: bool,
    ) -> Result<(), BadAreas> {
        self.queue.try_set_size(size).map_err(|_| BadAreas)?;
        self.queue
            .try_set_desc_table_address(areas.descriptors)
            .map_err(|_| BadAreas)?;
        self.queue
            .try_set_avail_ring_address(areas.avail)
            .map_err(|_| BadAreas)?;
        self.queue.try_set_used_ring_address(areas.used).map_err(|_| BadAreas)?;
        check_areas(mem, size, areas)?;
        self.queue.set_event_idx(event_idx);
        self.queue.set_ready(true);
        self.indirect = indirect;
        self.avail_seen = Wrapping(self.queue.next_avail());
        Ok(())
    }

    /// Where to go on in the avail ring, as the frontend says.
    pub fn set_base(&mut self, base: u16) {
        self.queue.set_next_avail(base);
        self.avail_seen = Wrapping(base);
    }

    /// Where to go on in the avail ring: all before it is completed.
    pub fn base(&self) -> u16 {
        self.queue.next_avail()
    }

    /// Takes the used index from guest memory: the one time it is believed. Breaks the ring if more would be in flight
    /// than fit.
    pub fn adopt_used_index(&mut self, mem: &GuestMemoryMmap) {
        match self.queue.used_idx(mem, Ordering::Acquire) {
            Ok(used) if (Wrapping(self.queue.next_avail()) - used).0 <= self.queue.size() => {
                self.queue.set_next_used(used.0);
            }
            Ok(_) => self.broken = Some(BrokenRing::Base),
            Err(_) => self.broken = Some(BrokenRing::Memory),
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
        u32::from(self.queue.size()).max(SEG_MAX + 2)
    }

    /// Takes the next chain off the avail ring, into `chain`.
    pub fn pop(&mut self, mem: &GuestMemoryMmap, chain: &mut Chain) -> Pop {
        match self.pop_head(mem) {
            Ok(None) => Pop::Empty,
            Ok(Some(head)) => match self.walk(mem, head, chain) {
                Some(()) => Pop::Chain(head),
                None => Pop::BadChain(head),
            },
            Err(reason) => Pop::Broken(reason),
        }
    }

    /// Puts the last popped chain back: it will be popped again. Only before it is completed.
    pub fn unpop(&mut self) {
        self.queue.go_to_previous_position();
    }

    fn pop_head(&mut self, mem: &GuestMemoryMmap) -> Result<Option<u16>, BrokenRing> {
        let next = Wrapping(self.queue.next_avail());
        if self.avail_seen == next {
            self.avail_seen = self.read_avail_index(mem, next)?;
            if self.avail_seen == next {
                return Ok(None);
            }
        }
        // A ring's size is never 0: `try_set_size` refuses it.
        let entry = u64::from(next.0 % self.queue.size());
        let addr = GuestAddress(self.queue.avail_ring())
            .0
            .checked_add(4 + 2 * entry)
            .ok_or(BrokenRing::Memory)?;
        // The Acquire load of the index has ordered this read behind the driver's write of the entry.
        let head = mem
            .load(GuestAddress(addr), Ordering::Relaxed)
            .map(u16::from_le)
            .map_err(|_| BrokenRing::Memory)?;
        if head >= self.queue.size() {
            return Err(BrokenRing::Head);
        }
        self.queue.set_next_avail((next + Wrapping(1)).0);
        Ok(Some(head))
    }

    fn read_avail_index(&self, mem: &GuestMemoryMmap, next: Wrapping<u16>) -> Result<Wrapping<u16>, BrokenRing> {
        let index = self
            .queue
            .avail_idx(mem, Ordering::Acquire)
            .map_err(|_| BrokenRing::Memory)?;
        if (index - next).0 > self.queue.size() {
            return Err(BrokenRing::AvailIndex);
        }
        Ok(index)
    }

    /// Copies the chain's descriptors. `None` if it loops, leaves its table, or uses indirection as it must not.
    fn walk(&self, mem: &GuestMemoryMmap, head: u16, chain: &mut Chain) -> Option<()> {
        chain.clear();
        let mut table = Table {
            addr: self.queue.desc_table(),
            entries: u32::from(self.queue.size()),
            nested: false,
        };
        let mut index = head;
        // One more than a chain has: the descriptor that refers to a table is not of the chain. Without a table that one
        // more is a loop, and has a next.
        for _ in 0..=self.descriptors_max() {
            let descriptor = table.read(mem, index)?;
            if descriptor.refers_to_indirect_table() {
                table = self.indirect_table(&table, &descriptor)?;
                index = 0;
                continue;
            }
            let segment = Segment {
                addr: descriptor.addr(),
                len: descriptor.len(),
            };
            chain.push(segment, descriptor.is_write_only());
            if !descriptor.has_next() {
                return Some(());
            }
            index = descriptor.next();
        }
        None
    }

    fn indirect_table(&self, outer: &Table, descriptor: &Descriptor) -> Option<Table> {
        let bytes = u64::from(descriptor.len());
        let entries = u32::try_from(bytes / DESCRIPTOR_BYTES).ok()?;
        let fits = bytes % DESCRIPTOR_BYTES == 0 && (1..=self.descriptors_max()).contains(&entries);
        let allowed = self.indirect && !outer.nested && !descriptor.has_next();
        (fits && allowed).then_some(Table {
            addr: descriptor.addr().0,
            entries,
            nested: true,
        })
    }

    /// Completes the chain that was popped under `head`, of which `len` bytes were written.
    pub fn complete(&mut self, mem: &GuestMemoryMmap, head: u16, len: u32) -> Result<(), BrokenRing> {
        self.completed = true;
        self.queue.add_used(mem, head, len).map_err(|_| BrokenRing::Memory)
    }

    /// Completes a chain that cannot be answered, as often as a session may.
    pub fn complete_bad(&mut self, mem: &GuestMemoryMmap, head: u16) -> Result<(), BrokenRing> {
        self.complete(mem, head, 0)?;
        self.bad_chains = self.bad_chains.saturating_add(1);
        if self.bad_chains > BAD_CHAINS_MAX {
            Err(BrokenRing::TooManyBadChains)
        } else {
            Ok(())
        }
    }

    /// Whether something was completed since the last time and the driver wants to hear of it.
    pub fn wants_call(&mut self, mem: &GuestMemoryMmap) -> Result<bool, BrokenRing> {
        if !std::mem::take(&mut self.completed) {
            return Ok(false);
        }
        if self.queue.event_idx_enabled() {
            return self.queue.needs_notification(mem).map_err(|_| BrokenRing::Memory);
        }
        // Publishing the used index before reading the flag, as the driver writes the flag before reading the index.
        fence(Ordering::SeqCst);
        let flags: u16 = mem
            .load(GuestAddress(self.queue.avail_ring()), Ordering::Relaxed)
            .map(u16::from_le)
            .map_err(|_| BrokenRing::Memory)?;
        Ok(u32::from(flags) & VRING_AVAIL_F_NO_INTERRUPT == 0)
    }

    /// Asks the driver not to kick: the worker is looking anyway.
    pub fn silence_kicks(&mut self, mem: &GuestMemoryMmap) -> Result<(), BrokenRing> {
        self.queue.disable_notification(mem).map_err(|_| BrokenRing::Memory)
    }

    /// Asks the driver to kick from now on; true if something became available meanwhile, so that it may not.
    pub fn await_kicks(&mut self, mem: &GuestMemoryMmap) -> Result<bool, BrokenRing> {
        self.queue.enable_notification(mem).map_err(|_| BrokenRing::Memory)
    }
}

/// A table of descriptors: the ring's, or one that a descriptor refers to.
struct Table {
    addr: u64,
    entries: u32,
    nested: bool,
}

impl Table {
    /// Copies one descriptor. An indirect table may lie at any address, aligned or not.
    fn read(&self, mem: &GuestMemoryMmap, index: u16) -> Option<Descriptor> {
        if u32::from(index) >= self.entries {
            return None;
        }
        let addr = self.addr.checked_add(u64::from(index) * DESCRIPTOR_BYTES)?;
        mem.read_obj(GuestAddress(addr)).ok()
    }
}

fn check_areas(mem: &GuestMemoryMmap, size: u16, areas: Areas) -> Result<(), BadAreas> {
    let size = u64::from(size);
    // Virtio 1.3 section 2.7; both rings count their event index.
    let areas = [
        (areas.descriptors, DESCRIPTOR_BYTES * size),
        (areas.avail, 6 + 2 * size),
        (areas.used, 6 + 8 * size),
    ];
    if areas
        .iter()
        .any(|(start, bytes)| !memory::contains(mem, *start, *bytes))
    {
        return Err(BadAreas);
    }
    for (index, (a_start, a_bytes)) in areas.iter().enumerate() {
        for (b_start, b_bytes) in areas.iter().skip(index + 1) {
            // In memory, so the sums do not overflow.
            if a_start.0 < b_start.0 + b_bytes && b_start.0 < a_start.0 + a_bytes {
                return Err(BadAreas);
            }
        }
    }
    Ok(())
}

#[cfg(test)]
pub(crate) mod tests {
    use virtio_bindings::virtio_ring::{VRING_DESC_F_INDIRECT, VRING_DESC_F_NEXT, VRING_DESC_F_WRITE};
    use virtio_queue::desc::RawDescriptor;
    use virtio_queue::mock::MockSplitQueue;

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
        let mut ring = Ring::new(256).unwrap();
        let areas = Areas {
            descriptors: mock.desc_table_addr(),
            avail: mock.avail_addr(),
            used: USED,
        };
        ring.set_up(mem, mock.desc_table().total_size() as u16 / 16, areas, event_idx, true)
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
        let pop = ring.pop(&mem, &mut chain);
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
        assert_eq!(ring.pop(&mem, &mut chain), Pop::Empty);
        set(&mock, 3, 0x1000, 16, NEXT, 5);
        set(&mock, 5, 0x2000, 4096, NEXT | WRITE, 1);
        set(&mock, 1, 0x3000, 1, WRITE, 0);
        set(&mock, 9, 0x4000, 7, 0, 0);
        publish(&mock, &[3, 9]);
        assert_eq!(ring.pop(&mem, &mut chain), Pop::Chain(3));
        assert_eq!(chain.readable, [segment(0x1000, 16)]);
        assert_eq!(chain.writable, [segment(0x2000, 4096), segment(0x3000, 1)]);
        assert_eq!(
            (chain.readable_bytes(), chain.writable_bytes(), chain.misordered),
            (16, 4097, false)
        );
        ring.unpop();
        assert_eq!(ring.pop(&mem, &mut chain), Pop::Chain(3));
        assert_eq!(ring.pop(&mem, &mut chain), Pop::Chain(9));
        assert_eq!(ring.pop(&mem, &mut chain), Pop::Empty);
        assert_eq!(ring.base(), 2);
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
        assert_eq!(ring.pop(&mem, &mut Chain::default()), Pop::BadChain(0));
    }

    #[test]
    fn an_index_that_jumps_or_goes_back_breaks_the_ring() {
        for index in [SIZE + 1, 0x8000, u16::MAX] {
            let mem = guest(0x10000);
            let mock = MockSplitQueue::new(&mem, SIZE);
            let mut ring = ring_on(&mem, &mock, false);
            mock.avail().idx().store(index.to_le());
            assert_eq!(
                ring.pop(&mem, &mut Chain::default()),
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
            assert_eq!(ring.pop(&mem, &mut Chain::default()), Pop::Broken(BrokenRing::Head));
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
        ring.adopt_used_index(&mem);
        assert_eq!(ring.broken(), None);
        set(&mock, 0, 0x1000, 16, 0, 0);
        publish(&mock, &[0, 0, 0]);
        let mut chain = Chain::default();
        for _ in 0..3 {
            assert_eq!(ring.pop(&mem, &mut chain), Pop::Chain(0));
            ring.complete(&mem, 0, 1).unwrap();
        }
        assert_eq!(ring.pop(&mem, &mut chain), Pop::Empty);
        let used: u16 = mem.read_obj(GuestAddress(USED.0 + 2)).unwrap();
        assert_eq!((ring.base(), u16::from_le(used)), (2, 2));
    }

    #[test]
    fn a_base_too_far_from_the_used_index_breaks_the_ring() {
        let mem = guest(0x10000);
        let mock = MockSplitQueue::new(&mem, SIZE);
        let mut ring = ring_on(&mem, &mock, false);
        ring.set_base(SIZE);
        ring.adopt_used_index(&mem);
        assert_eq!(ring.broken(), None);
        ring.set_base(SIZE + 1);
        ring.adopt_used_index(&mem);
        assert_eq!(ring.broken(), Some(BrokenRing::Base));
    }

    #[test]
    fn bad_chains_have_a_budget() {
        let mem = guest(0x10000);
        let mock = MockSplitQueue::new(&mem, SIZE);
        let mut ring = ring_on(&mem, &mock, false);
        for _ in 0..BAD_CHAINS_MAX {
            assert_eq!(ring.complete_bad(&mem, 0), Ok(()));
        }
        assert_eq!(ring.complete_bad(&mem, 0), Err(BrokenRing::TooManyBadChains));
    }

    #[test]
    fn without_event_index_the_flag_of_the_avail_ring_counts() {
        let mem = guest(0x10000);
        let mock = MockSplitQueue::new(&mem, SIZE);
        let mut ring = ring_on(&mem, &mock, false);
        assert_eq!(ring.wants_call(&mem), Ok(false), "nothing completed");
        ring.complete(&mem, 0, 1).unwrap();
        assert_eq!(ring.wants_call(&mem), Ok(true));
        assert_eq!(ring.wants_call(&mem), Ok(false), "once");
        mem.write_obj(1u16.to_le(), mock.avail_addr()).unwrap();
        ring.complete(&mem, 0, 1).unwrap();
        assert_eq!(ring.wants_call(&mem), Ok(false));
    }

    #[test]
    fn with_event_index_the_flag_is_ignored_and_the_index_counts() {
        let mem = guest(0x10000);
        let mock = MockSplitQueue::new(&mem, SIZE);
        let mut ring = ring_on(&mem, &mock, true);
        let used_event = GuestAddress(mock.avail_addr().0 + 4 + 2 * u64::from(SIZE));
        mem.write_obj(1u16.to_le(), mock.avail_addr()).unwrap();
        mem.write_obj(1u16.to_le(), used_event).unwrap();
        ring.complete(&mem, 0, 1).unwrap();
        assert_eq!(ring.wants_call(&mem), Ok(false));
        ring.complete(&mem, 0, 1).unwrap();
        assert_eq!(ring.wants_call(&mem), Ok(true));
    }

    #[test]
    fn areas_outside_memory_or_overlapping_are_refused() {
        let mem = guest(0x10000);
        let good = Areas {
            descriptors: GuestAddress(0x1000),
            avail: GuestAddress(0x2000),
            used: GuestAddress(0x3000),
        };
        let set_up = |areas: Areas, size: u16| Ring::new(256).unwrap().set_up(&mem, size, areas, false, false);
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
