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
