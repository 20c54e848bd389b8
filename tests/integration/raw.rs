//! A frontend with its own hands: it negotiates through the `vhost` crate, and writes descriptors and rings itself, so that
//! it can frame a request in any way and break any rule. The other side is held to what it promises: every byte round a
//! buffer is a guard, the status byte starts as 0xFF, used entries come in the order of the chains, and a completion that
//! is waited for must come with a call.
//!
//! Guest memory, as QEMU lays it out below 1 MiB, then two regions that touch:
//!
//! ```text
//! 0x000000..0x0a0000  rings
//! 0x0a0000..0x0c0000  hole
//! 0x0c0000..0x400000  buffers from 0x100000 on
//! 0x400000..0x800000  buffers up to 0x700000, then room for the rings that are too large for the first region
//! ```

use std::collections::VecDeque;
use std::io::{self, Read, Write};
use std::os::fd::RawFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use rustix::fs::{MemfdFlags, memfd_create};
use vhost::vhost_user::message::{VhostUserHeaderFlag, VhostUserProtocolFeatures};
use vhost::vhost_user::{Frontend, VhostUserFrontend};
use vhost::{VhostBackend, VhostUserMemoryRegionInfo, VringConfigData};
use virtio_bindings::virtio_blk::*;
use virtio_bindings::virtio_config::*;
use virtio_bindings::virtio_ring::*;
use vm_memory::{Bytes, FileOffset, GuestAddress, GuestMemoryBackend, GuestMemoryMmap};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};
use vmm_sys_util::poll::PollContext;
use vmm_sys_util::sock_ctrl_msg::ScmSocket;

use crate::support::{PATIENCE, wait_for};

pub const SECTOR: usize = 512;
pub const PAGE: usize = 4096;

pub const OK: u8 = VIRTIO_BLK_S_OK as u8;
pub const IOERR: u8 = VIRTIO_BLK_S_IOERR as u8;
pub const UNSUPP: u8 = VIRTIO_BLK_S_UNSUPP as u8;
/// What a status byte holds until the device writes it.
pub const UNTOUCHED: u8 = 0xff;

pub const NEXT: u16 = VRING_DESC_F_NEXT as u16;
pub const WRITE: u16 = VRING_DESC_F_WRITE as u16;
pub const INDIRECT: u16 = VRING_DESC_F_INDIRECT as u16;

pub const HOLE: u64 = 0xa_0000;
pub const HOLE_END: u64 = 0xc_0000;
/// Where the second and the third region touch.
pub const SEAM: u64 = 0x40_0000;
pub const MEMORY_END: u64 = 0x80_0000;
const REGIONS: [(u64, u64); 3] = [(0, HOLE), (HOLE_END, SEAM - HOLE_END), (SEAM, MEMORY_END - SEAM)];
const RINGS: u64 = 0x1000;
const BUFFERS: u64 = 0x10_0000;
const BUFFERS_END: u64 = 0x70_0000;
/// Free for tests that place bytes by hand, unless a ring of more than 1,024 entries lies here.
pub const PLAYGROUND: u64 = BUFFERS_END;

/// Frontend addresses are guest addresses moved by this: who mixes the two up finds nothing.
const FRONTEND_OFFSET: u64 = 0x5500_0000_0000;

const GUARD: u8 = 0xc3;
const GUARD_LEN: u64 = 32;
/// What a buffer for the device to write holds beforehand.
const POISON: u8 = 0xa5;

pub const fn bit(feature: u32) -> u64 {
    1 << feature
}

pub const PROTOCOL_FEATURES_BIT: u64 = bit(30);

/// What a modern Linux guest asks for.
pub const LINUX_FEATURES: u64 = bit(VIRTIO_F_VERSION_1)
    | bit(VIRTIO_RING_F_EVENT_IDX)
    | bit(VIRTIO_RING_F_INDIRECT_DESC)
    | bit(VIRTIO_F_IN_ORDER)
    | bit(VIRTIO_BLK_F_MQ)
    | bit(VIRTIO_BLK_F_SEG_MAX)
    | bit(VIRTIO_BLK_F_BLK_SIZE)
    | bit(VIRTIO_BLK_F_TOPOLOGY)
    | bit(VIRTIO_BLK_F_RO)
    | bit(VIRTIO_BLK_F_DISCARD)
    | bit(VIRTIO_BLK_F_WRITE_ZEROES)
    | PROTOCOL_FEATURES_BIT;

/// One connection with its guest memory.
pub struct Guest {
    pub frontend: Frontend,
    /// The same socket, for messages that the `vhost` crate refuses to form.
    pub stream: UnixStream,
    pub memory: Arc<GuestMemoryMmap>,
    pub offered: u64,
    pub features: u64,
    rings_next: u64,
    large_rings_next: u64,
    buffers_next: u64,
    buffers_len: u64,
}

impl Guest {
    /// Connects and negotiates what Linux would, without a memory table.
    pub fn without_memory(stream: UnixStream, wanted: u64) -> io::Result<Guest> {
        let mut frontend = Frontend::from_stream(stream.try_clone()?, 64);
        let protocol = |error| io::Error::other(format!("{error}"));
        frontend.set_owner().map_err(protocol)?;
        let offered = frontend.get_features().map_err(protocol)?;
        let features = offered & wanted;
        let all = frontend.get_protocol_features().map_err(protocol)?;
        let used = VhostUserProtocolFeatures::MQ
            | VhostUserProtocolFeatures::REPLY_ACK
            | VhostUserProtocolFeatures::CONFIG
            | VhostUserProtocolFeatures::CONFIGURE_MEM_SLOTS
            | VhostUserProtocolFeatures::RESET_DEVICE;
        frontend.set_protocol_features(all & used).map_err(protocol)?;
        if all.contains(VhostUserProtocolFeatures::REPLY_ACK) {
            frontend.set_hdr_flags(VhostUserHeaderFlag::NEED_REPLY);
        }
        frontend.set_features(features).map_err(protocol)?;
        Ok(Guest {
            frontend,
            stream,
            memory: Arc::new(guest_memory()),
            offered,
            features,
            rings_next: RINGS,
            large_rings_next: PLAYGROUND,
            buffers_next: BUFFERS,
            buffers_len: (BUFFERS_END - BUFFERS) / 4,
        })
    }

    pub fn try_new(stream: UnixStream, wanted: u64) -> io::Result<Guest> {
        let guest = Guest::without_memory(stream, wanted)?;
        let regions: Vec<VhostUserMemoryRegionInfo> = (0..REGIONS.len()).map(|i| guest.region(i)).collect();
        guest
            .frontend
            .set_mem_table(&regions)
            .map_err(|error| io::Error::other(format!("{error}")))?;
        Ok(guest)
    }

    pub fn new(stream: UnixStream) -> Guest {
        Guest::try_new(stream, LINUX_FEATURES).unwrap()
    }

    pub fn with_features(stream: UnixStream, wanted: u64) -> Guest {
        Guest::try_new(stream, wanted).unwrap()
    }

    /// Keeps trying: a backend that has not yet noticed the end of the last connection may turn the next one away.
    pub fn reconnect(backend: &crate::support::Backend) -> Guest {
        wait_for("the backend takes a new connection", PATIENCE, || {
            Guest::try_new(backend.connect(), LINUX_FEATURES).ok()
        })
    }

    /// Leaves room for the buffers of this many queues instead of four.
    pub fn share_buffers_among(&mut self, queues: u64) {
        self.buffers_len = (BUFFERS_END - BUFFERS) / queues;
    }

    pub fn region(&self, index: usize) -> VhostUserMemoryRegionInfo {
        let (start, len) = REGIONS[index];
        let region = self.memory.find_region(GuestAddress(start)).unwrap();
        VhostUserMemoryRegionInfo {
            userspace_addr: start + FRONTEND_OFFSET,
            memory_size: len,
            ..VhostUserMemoryRegionInfo::from_guest_region(region).unwrap()
        }
    }

    /// A queue of `size` entries, set up and enabled.
    pub fn queue(&mut self, index: usize, size: u16) -> Queue {
        let queue = self.lay_out_queue(index, size);
        self.start(&queue, 0);
        queue
    }

    /// The memory of a queue, of which the backend knows nothing yet.
    pub fn lay_out_queue(&mut self, index: usize, size: u16) -> Queue {
        let next = if size <= 1024 {
            &mut self.rings_next
        } else {
            &mut self.large_rings_next
        };
        let table = next.next_multiple_of(4096);
        let avail = table + u64::from(size) * 16;
        let used = (avail + 6 + u64::from(size) * 2).next_multiple_of(4);
        *next = used + 6 + u64::from(size) * 8;
        assert!(
            *next <= HOLE || (*next > HOLE_END && *next <= MEMORY_END),
            "no room for rings"
        );
        let buffers = self.buffers_next;
        self.buffers_next += self.buffers_len;
        assert!(self.buffers_next <= BUFFERS_END, "no room for buffers");
        Queue {
            memory: self.memory.clone(),
            index,
            size,
            table,
            avail,
            used,
            kick: EventFd::new(EFD_NONBLOCK).unwrap(),
            call: Some(EventFd::new(EFD_NONBLOCK).unwrap()),
            err: EventFd::new(EFD_NONBLOCK).unwrap(),
            event_idx: self.features & bit(VIRTIO_RING_F_EVENT_IDX) != 0,
            offered: 0,
            seen: 0,
            free: (0..size).rev().collect(),
            in_flight: VecDeque::new(),
            in_order: self.offered & bit(VIRTIO_F_IN_ORDER) != 0,
            buffers,
            buffers_next: buffers,
            buffers_end: self.buffers_next,
        }
    }

    pub fn ring_addresses(queue: &Queue) -> VringConfigData {
        VringConfigData {
            queue_max_size: queue.size,
            queue_size: queue.size,
            flags: 0,
            desc_table_addr: queue.table + FRONTEND_OFFSET,
            used_ring_addr: queue.used + FRONTEND_OFFSET,
            avail_ring_addr: queue.avail + FRONTEND_OFFSET,
            log_addr: None,
        }
    }

    /// Tells the backend all about a queue, in QEMU's order.
    pub fn start(&mut self, queue: &Queue, base: u16) {
        let index = queue.index;
        self.frontend.set_vring_num(index, queue.size).unwrap();
        self.frontend.set_vring_base(index, base).unwrap();
        self.frontend
            .set_vring_addr(index, &Guest::ring_addresses(queue))
            .unwrap();
        self.frontend.set_vring_err(index, &queue.err).unwrap();
        match &queue.call {
            Some(call) => self.frontend.set_vring_call(index, call).unwrap(),
            None => self.vring_without_fd(SET_VRING_CALL, index),
        }
        self.frontend.set_vring_kick(index, &queue.kick).unwrap();
        self.frontend.set_vring_enable(index, true).unwrap();
    }

    /// Stops a queue as QEMU does when the driver resets the device. Gives the ring's base.
    pub fn stop(&mut self, queue: &Queue) -> u16 {
        self.frontend.set_vring_enable(queue.index, false).unwrap();
        self.frontend.get_vring_base(queue.index).unwrap() as u16
    }

    /// SET_VRING_KICK, _CALL or _ERR with the "no descriptor" flag. Panics unless the backend agrees.
    pub fn vring_without_fd(&self, request: u32, index: usize) {
        const NO_FD: u64 = 1 << 8;
        send(&self.stream, request, &(index as u64 | NO_FD).to_le_bytes(), &[]).unwrap();
        let (_, reply) = receive(&self.stream).unwrap();
        assert_eq!(
            reply,
            0u64.to_le_bytes(),
            "request {request} without a descriptor was refused"
        );
    }

    pub fn config(&mut self, offset: u32, len: usize) -> Vec<u8> {
        let flags = vhost::vhost_user::message::VhostUserConfigFlags::empty();
        self.frontend
            .get_config(offset, len as u32, flags, &vec![0; len])
            .unwrap()
            .1
    }

    pub fn capacity_sectors(&mut self) -> u64 {
        u64::from_le_bytes(self.config(0, 60)[..8].try_into().unwrap())
    }
}

pub const SET_MEM_TABLE: u32 = 5;
pub const SET_VRING_NUM: u32 = 8;
pub const SET_VRING_KICK: u32 = 12;
pub const SET_VRING_CALL: u32 = 13;
const NEED_REPLY: u32 = 0x8;

/// Sends one message with a wish for a reply, whatever it says.
pub fn send(stream: &UnixStream, request: u32, payload: &[u8], fds: &[RawFd]) -> io::Result<()> {
    let header = [request, 1 | NEED_REPLY, payload.len() as u32];
    let mut message: Vec<u8> = header.into_iter().flat_map(u32::to_le_bytes).collect();
    message.extend_from_slice(payload);
    if fds.is_empty() {
        return (&mut &*stream).write_all(&message);
    }
    let sent = stream
        .send_with_fds(&[&message[..]], fds)
        .map_err(|e| io::Error::from_raw_os_error(e.errno()))?;
    assert_eq!(sent, message.len());
    Ok(())
}

/// Receives one reply: the request that it answers, and the payload. `UnexpectedEof` when the backend has closed.
pub fn receive(stream: &UnixStream) -> io::Result<(u32, Vec<u8>)> {
    stream.set_read_timeout(Some(PATIENCE))?;
    let mut header = [0; 12];
    let result = (&mut &*stream).read_exact(&mut header).and_then(|()| {
        let field = |i: usize| u32::from_le_bytes(header[i * 4..i * 4 + 4].try_into().unwrap());
        let mut payload = vec![0; field(2) as usize];
        (&mut &*stream).read_exact(&mut payload)?;
        Ok((field(0), payload))
    });
    stream.set_read_timeout(None)?;
    result
}

/// Whether the backend closes this connection. What it still had to say is skipped.
pub fn is_closed_by_backend(stream: &UnixStream) -> bool {
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    let mut bytes = [0; 4096];
    loop {
        match (&mut &*stream).read(&mut bytes) {
            Ok(0) => return true,
            Ok(_) => {}
            Err(error) if error.kind() == io::ErrorKind::ConnectionReset => return true,
            Err(_) => return false,
        }
    }
}

fn guest_memory() -> GuestMemoryMmap {
    let memfd = memfd_create("guest", MemfdFlags::CLOEXEC).unwrap();
    let file = Arc::new(std::fs::File::from(memfd));
    file.set_len(REGIONS.iter().map(|(_, len)| len).sum()).unwrap();
    let mut offset = 0;
    let ranges = REGIONS.map(|(start, len)| {
        let range = (
            GuestAddress(start),
            len as usize,
            Some(FileOffset::from_arc(file.clone(), offset)),
        );
        offset += len;
        range
    });
    GuestMemoryMmap::from_ranges_with_files(ranges).unwrap()
}

/// A request and the way it is cut into descriptors. The readable bytes are header and data, the writable bytes data and
/// status; each list of cuts gives the lengths of the first descriptors, and what is left over makes one more.
#[derive(Clone, Debug)]
pub struct Request {
    pub kind: u32,
    pub sector: u64,
    pub data: Vec<u8>,
    pub in_len: usize,
    pub readable: Vec<usize>,
    pub writable: Vec<usize>,
    pub indirect: bool,
}

/// One range of a discard or write zeroes request.
#[derive(Clone, Copy, Debug)]
pub struct Range {
    pub sector: u64,
    pub sectors: u32,
    pub flags: u32,
}

pub fn range(sector: u64, sectors: u32) -> Range {
    Range {
        sector,
        sectors,
        flags: 0,
    }
}

impl Request {
    pub fn new(kind: u32, sector: u64, data: &[u8], in_len: usize) -> Request {
        let data = data.to_vec();
        Request {
            kind,
            sector,
            data,
            in_len,
            readable: vec![16],
            writable: vec![in_len],
            indirect: false,
        }
    }

    pub fn read(sector: u64, len: usize) -> Request {
        Request::new(VIRTIO_BLK_T_IN, sector, &[], len)
    }

    pub fn write(sector: u64, data: &[u8]) -> Request {
        Request::new(VIRTIO_BLK_T_OUT, sector, data, 0)
    }

    pub fn get_id(len: usize) -> Request {
        Request::new(VIRTIO_BLK_T_GET_ID, 0, &[], len)
    }

    pub fn discard(ranges: &[Range]) -> Request {
        Request::new(VIRTIO_BLK_T_DISCARD, 0, &range_bytes(ranges), 0)
    }

    pub fn write_zeroes(ranges: &[Range]) -> Request {
        Request::new(VIRTIO_BLK_T_WRITE_ZEROES, 0, &range_bytes(ranges), 0)
    }

    pub fn cut(mut self, readable: &[usize], writable: &[usize]) -> Request {
        self.readable = readable.to_vec();
        self.writable = writable.to_vec();
        self
    }

    pub fn indirect(mut self) -> Request {
        self.indirect = true;
        self
    }
}

fn range_bytes(ranges: &[Range]) -> Vec<u8> {
    let mut bytes = Vec::new();
    for range in ranges {
        bytes.extend_from_slice(&range.sector.to_le_bytes());
        bytes.extend_from_slice(&range.sectors.to_le_bytes());
        bytes.extend_from_slice(&range.flags.to_le_bytes());
    }
    bytes
}

#[derive(Clone, Copy, Debug)]
pub struct Descriptor {
    pub addr: u64,
    pub len: u32,
    pub flags: u16,
    pub next: u16,
}

pub fn descriptor(addr: u64, len: u32, flags: u16, next: u16) -> Descriptor {
    Descriptor { addr, len, flags, next }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Used {
    pub id: u16,
    pub len: u32,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reply {
    pub status: u8,
    pub used_len: u32,
    /// The writable bytes without the status.
    pub data: Vec<u8>,
}

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
    pub fn place(&mut self, bytes: &[u8]) -> u64 {
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
        let end = self.used + 6 + u64::from(self.size) * 8;
        self.put(self.table, &vec![0; (end - self.table) as usize]);
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
