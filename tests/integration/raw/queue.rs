//! The driver's side of a split virtqueue, written by hand.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use virtio_bindings::virtio_config::VIRTIO_F_IN_ORDER;
use virtio_bindings::virtio_ring::*;
use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};
use vmm_sys_util::poll::PollContext;

use super::{Descriptor, INDIRECT, NEXT, OK, Reply, Request, UNTOUCHED, Used, WRITE, bit, descriptor};
use crate::support::PATIENCE;

const GUARD: u8 = 0xc3;
const GUARD_LEN: u64 = 32;
/// What a buffer for the device to write holds beforehand.
const POISON: u8 = 0xa5;

/// A request on its way.
pub struct Ticket {
    pub head: u16,
    descriptors: Vec<u16>,
    readable: Vec<(u64, Vec<u8>)>,
    writable: Vec<(u64, usize)>,
}

/// The driver's side of one split virtqueue.
pub struct Queue {
    pub memory: Arc<GuestMemoryMmap>,
    pub index: usize,
    pub size: u16,
    pub table: u64,
    pub avail: u64,
    pub used: u64,
    pub kick: EventFd,
    pub call: Option<EventFd>,
    pub err: EventFd,
    pub event_idx: bool,
    /// The avail index: chains offered so far, modulo 2^16.
    pub offered: u16,
    /// The used entries looked at so far, modulo 2^16.
    pub seen: u16,
    free: Vec<u16>,
    in_flight: VecDeque<u16>,
    in_order: bool,
    buffers: u64,
    buffers_next: u64,
    buffers_end: u64,
}

impl Queue {
    /// A queue whose rings begin at `table` and whose requests use `buffers`. No memory is touched yet.
    pub fn new(
        memory: &Arc<GuestMemoryMmap>,
        (offered, negotiated): (u64, u64),
        (index, size): (usize, u16),
        table: u64,
        buffers: Range<u64>,
    ) -> Queue {
        let avail = table + u64::from(size) * 16;
        let used = (avail + 6 + u64::from(size) * 2).next_multiple_of(4);
        Queue {
            memory: memory.clone(),
            index,
            size,
            table,
            avail,
            used,
            kick: EventFd::new(EFD_NONBLOCK).unwrap(),
            call: Some(EventFd::new(EFD_NONBLOCK).unwrap()),
            err: EventFd::new(EFD_NONBLOCK).unwrap(),
            event_idx: negotiated & bit(VIRTIO_RING_F_EVENT_IDX) != 0,
            offered: 0,
            seen: 0,
            free: (0..size).rev().collect(),
            in_flight: VecDeque::new(),
            in_order: offered & bit(VIRTIO_F_IN_ORDER) != 0,
            buffers: buffers.start,
            buffers_next: buffers.start,
            buffers_end: buffers.end,
        }
    }

    /// The first address behind the rings.
    pub fn end(&self) -> u64 {
        self.used + 6 + u64::from(self.size) * 8
    }

    pub fn bytes(&self, addr: u64, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.memory.read_slice(&mut bytes, GuestAddress(addr)).unwrap();
        bytes
    }

    pub fn put(&self, addr: u64, bytes: &[u8]) {
        self.memory.write_slice(bytes, GuestAddress(addr)).unwrap();
    }

    fn load(&self, addr: u64) -> u16 {
        u16::from_le(self.memory.load(GuestAddress(addr), Ordering::SeqCst).unwrap())
    }

    fn store(&self, addr: u64, value: u16) {
        self.memory
            .store(value.to_le(), GuestAddress(addr), Ordering::SeqCst)
            .unwrap();
    }

    pub fn used_index(&self) -> u16 {
        self.load(self.used + 2)
    }

    pub fn set_avail_index(&self, index: u16) {
        self.store(self.avail + 2, index);
    }

    /// Writes a descriptor into the ring's table.
    pub fn describe(&self, slot: u16, descriptor: Descriptor) {
        self.describe_at(self.table, slot, descriptor);
    }

    /// Writes a descriptor into the table at `table`.
    pub fn describe_at(&self, table: u64, slot: u16, descriptor: Descriptor) {
        let mut bytes = [0; 16];
        bytes[..8].copy_from_slice(&descriptor.addr.to_le_bytes());
        bytes[8..12].copy_from_slice(&descriptor.len.to_le_bytes());
        bytes[12..14].copy_from_slice(&descriptor.flags.to_le_bytes());
        bytes[14..].copy_from_slice(&descriptor.next.to_le_bytes());
        self.put(table + u64::from(slot) * 16, &bytes);
    }

    /// Makes the chain at `head` available, without a kick.
    pub fn offer(&mut self, head: u16) {
        let entry = self.avail + 4 + u64::from(self.offered % self.size) * 2;
        self.store(entry, head);
        self.offered = self.offered.wrapping_add(1);
        self.in_flight.push_back(head);
        self.set_avail_index(self.offered);
    }

    /// Kicks if the device asked for it; `since` is the avail index before the chains that it is told about.
    pub fn kick(&self, since: u16) {
        std::sync::atomic::fence(Ordering::SeqCst);
        let wanted = if self.event_idx {
            let event = self.load(self.used + 4 + u64::from(self.size) * 8);
            self.offered.wrapping_sub(event).wrapping_sub(1) < self.offered.wrapping_sub(since)
        } else {
            self.load(self.used) & VRING_USED_F_NO_NOTIFY as u16 == 0
        };
        if wanted {
            self.kick.write(1).unwrap();
        }
    }

    /// Looks for the next used entry and asks for a call when the one after comes.
    pub fn take_used(&mut self) -> Option<Used> {
        if self.used_index() == self.seen {
            return None;
        }
        let entry = self.bytes(self.used + 4 + u64::from(self.seen % self.size) * 8, 8);
        let id = u32::from_le_bytes(entry[..4].try_into().unwrap());
        let len = u32::from_le_bytes(entry[4..].try_into().unwrap());
        self.seen = self.seen.wrapping_add(1);
        if self.event_idx {
            self.store(self.avail + 4 + u64::from(self.size) * 2, self.seen);
        }
        let id = u16::try_from(id).expect("used id");
        let place = self.in_flight.iter().position(|head| *head == id);
        let place =
            place.unwrap_or_else(|| panic!("used entry for {id}, which is not in flight: {:?}", self.in_flight));
        assert!(
            !self.in_order || place == 0,
            "{id} completed before {:?}",
            self.in_flight[0]
        );
        self.in_flight.remove(place);
        Some(Used { id, len })
    }

    /// Waits for a used entry; between looks it sleeps on the call descriptor, so a call that is never made is noticed.
    pub fn wait_used(&mut self, patience: Duration) -> Option<Used> {
        let deadline = Instant::now() + patience;
        loop {
            if let Some(used) = self.take_used() {
                return Some(used);
            }
            let left = deadline.saturating_duration_since(Instant::now());
            let Some(call) = &self.call else {
                if left.is_zero() {
                    return None;
                }
                std::thread::sleep(Duration::from_micros(100));
                continue;
            };
            if !is_readable(call, left) {
                assert!(
                    self.used_index() == self.seen,
                    "queue {}: completed, but no call within {patience:?}",
                    self.index
                );
                return None;
            }
            call.read().unwrap();
        }
    }

    /// Puts a request into memory and into the descriptor table, and makes it available.
    pub fn submit(&mut self, request: &Request) -> Ticket {
        let ticket = self.prepare(request);
        self.offer(ticket.head);
        ticket
    }

    /// As `submit`, but the chain is not yet available.
    pub fn prepare(&mut self, request: &Request) -> Ticket {
        let mut header = Vec::with_capacity(16 + request.data.len());
        header.extend_from_slice(&request.kind.to_le_bytes());
        header.extend_from_slice(&0u32.to_le_bytes());
        header.extend_from_slice(&request.sector.to_le_bytes());
        header.extend_from_slice(&request.data);
        let readable: Vec<(u64, Vec<u8>)> = pieces(&header, &request.readable)
            .into_iter()
            .map(|piece| (self.place(&piece), piece))
            .collect();
        let mut preset = vec![POISON; request.in_len];
        preset.push(UNTOUCHED);
        let writable: Vec<(u64, usize)> = pieces(&preset, &request.writable)
            .into_iter()
            .map(|piece| (self.place(&piece), piece.len()))
            .collect();
        let all: Vec<Descriptor> = readable
            .iter()
            .map(|(addr, piece)| descriptor(*addr, piece.len() as u32, 0, 0))
            .chain(
                writable
                    .iter()
                    .map(|(addr, len)| descriptor(*addr, *len as u32, WRITE, 0)),
            )
            .collect();
        let descriptors = if request.indirect {
            self.link_indirect(&all)
        } else {
            self.link(&all)
        };
        Ticket {
            head: descriptors[0],
            descriptors,
            readable,
            writable,
        }
    }

    fn link(&mut self, all: &[Descriptor]) -> Vec<u16> {
        let slots: Vec<u16> = all
            .iter()
            .map(|_| self.free.pop().expect("a free descriptor"))
            .collect();
        for (i, descriptor) in all.iter().enumerate() {
            let next = slots.get(i + 1);
            let flags = descriptor.flags | if next.is_some() { NEXT } else { 0 };
            self.describe(
                slots[i],
                Descriptor {
                    flags,
                    next: next.copied().unwrap_or(0),
                    ..*descriptor
                },
            );
        }
        slots
    }

    fn link_indirect(&mut self, all: &[Descriptor]) -> Vec<u16> {
        let table = self.place(&vec![0; all.len() * 16]);
        for (i, descriptor) in all.iter().enumerate() {
            let last = i + 1 == all.len();
            let flags = descriptor.flags | if last { 0 } else { NEXT };
            self.describe_at(
                table,
                i as u16,
                Descriptor {
                    flags,
                    next: if last { 0 } else { i as u16 + 1 },
                    ..*descriptor
                },
            );
        }
        self.link(&[descriptor(table, all.len() as u32 * 16, INDIRECT, 0)])
    }

    /// Copies bytes to a free place in guest memory, with guards before and after. Any alignment is legal, so most are odd.
    fn place(&mut self, bytes: &[u8]) -> u64 {
        let addr = self.buffers_next + GUARD_LEN + 1;
        let end = addr + bytes.len() as u64;
        assert!(
            end + GUARD_LEN <= self.buffers_end,
            "no room for a buffer of {} bytes",
            bytes.len()
        );
        self.put(addr - GUARD_LEN, &[GUARD; GUARD_LEN as usize]);
        self.put(addr, bytes);
        self.put(end, &[GUARD; GUARD_LEN as usize]);
        self.buffers_next = end + GUARD_LEN;
        addr
    }

    /// Copies bytes to a place in guest memory that stays theirs, for chains that a test writes by hand.
    pub fn keep(&mut self, bytes: &[u8]) -> u64 {
        self.buffers_end -= bytes.len() as u64 + 1;
        assert!(
            self.buffers_next + GUARD_LEN <= self.buffers_end,
            "no room for a buffer of {} bytes",
            bytes.len()
        );
        self.put(self.buffers_end, bytes);
        self.buffers_end
    }

    fn assert_guarded(&self, addr: u64, len: usize) {
        let guard = [GUARD; GUARD_LEN as usize];
        assert_eq!(
            self.bytes(addr - GUARD_LEN, guard.len()),
            guard,
            "bytes before a buffer were written"
        );
        assert_eq!(
            self.bytes(addr + len as u64, guard.len()),
            guard,
            "bytes after a buffer were written"
        );
    }

    /// Checks what the device left of a finished request and frees its descriptors.
    pub fn finish(&mut self, ticket: Ticket, used: Used) -> Reply {
        assert_eq!(used.id, ticket.head, "used id");
        for (addr, piece) in &ticket.readable {
            self.assert_guarded(*addr, piece.len());
            assert!(
                self.bytes(*addr, piece.len()) == *piece,
                "bytes that the device may only read were written"
            );
        }
        let mut data = Vec::new();
        for (addr, len) in &ticket.writable {
            self.assert_guarded(*addr, *len);
            data.extend(self.bytes(*addr, *len));
        }
        self.free.extend(ticket.descriptors);
        if self.in_flight.is_empty() {
            self.buffers_next = self.buffers;
        }
        let status = data.pop().expect("every request has a status byte");
        let written = data.iter().rposition(|byte| *byte != POISON).map_or(0, |last| last + 1);
        assert!(
            used.len as usize <= data.len() + 1,
            "used length {} of {} writable bytes",
            used.len,
            data.len() + 1
        );
        if status == OK && (used.len as usize) < written {
            panic!("used length {}, but {written} bytes were written", used.len);
        }
        Reply {
            status,
            used_len: used.len,
            data,
        }
    }

    /// One request from beginning to end.
    pub fn run(&mut self, request: &Request) -> Reply {
        let since = self.offered;
        let ticket = self.submit(request);
        self.kick(since);
        let used = self.wait_used(PATIENCE);
        let used = used.unwrap_or_else(|| panic!("queue {}: no answer to type {}", self.index, request.kind));
        self.finish(ticket, used)
    }

    /// Reads `len` bytes, which must succeed.
    pub fn read(&mut self, sector: u64, len: usize) -> Vec<u8> {
        let reply = self.run(&Request::read(sector, len));
        assert_eq!(
            (reply.status, reply.used_len),
            (OK, len as u32 + 1),
            "read of {len} bytes at sector {sector}"
        );
        reply.data
    }

    /// Writes bytes, which must succeed.
    pub fn write(&mut self, sector: u64, data: &[u8]) {
        let reply = self.run(&Request::write(sector, data));
        assert_eq!(
            (reply.status, reply.used_len),
            (OK, 1),
            "write of {} bytes at sector {sector}",
            data.len()
        );
    }

    /// Forgets all that happened, as a driver does that starts anew; the memory of the ring is cleared.
    pub fn forget(&mut self) {
        self.put(self.table, &vec![0; (self.end() - self.table) as usize]);
        self.offered = 0;
        self.seen = 0;
        self.free = (0..self.size).rev().collect();
        self.in_flight.clear();
        self.buffers_next = self.buffers;
    }
}

/// Waits until an event descriptor is readable.
pub fn is_readable(event: &EventFd, patience: Duration) -> bool {
    let poll = PollContext::new().unwrap();
    poll.add(event, 0u32).unwrap();
    poll.wait_timeout(patience).unwrap().iter_readable().next().is_some()
}

fn pieces(bytes: &[u8], cuts: &[usize]) -> Vec<Vec<u8>> {
    let mut pieces = Vec::new();
    let mut rest = bytes;
    for cut in cuts {
        let (piece, after) = rest.split_at(*cut);
        if !piece.is_empty() {
            pieces.push(piece.to_vec());
        }
        rest = after;
    }
    if !rest.is_empty() {
        pieces.push(rest.to_vec());
    }
    pieces
}
