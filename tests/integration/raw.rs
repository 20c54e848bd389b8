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

use std::io::{self, Read, Write};
use std::os::fd::RawFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;

use rustix::fs::{MemfdFlags, memfd_create};
use vhost::vhost_user::message::{VhostUserHeaderFlag, VhostUserProtocolFeatures};
use vhost::vhost_user::{Frontend, VhostUserFrontend};
use vhost::{VhostBackend, VhostUserMemoryRegionInfo, VringConfigData};
use virtio_bindings::virtio_blk::*;
use virtio_bindings::virtio_config::*;
use virtio_bindings::virtio_ring::*;
use vm_memory::{FileOffset, GuestAddress, GuestMemoryBackend, GuestMemoryMmap};
use vmm_sys_util::sock_ctrl_msg::ScmSocket;

use crate::support::{PATIENCE, wait_for};

mod queue;
mod request;

pub use queue::*;
pub use request::*;

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
pub const REGIONS: [(u64, u64); 3] = [(0, HOLE), (HOLE_END, SEAM - HOLE_END), (SEAM, MEMORY_END - SEAM)];
const RINGS: u64 = 0x1000;
const BUFFERS: u64 = 0x10_0000;
const BUFFERS_END: u64 = 0x70_0000;
/// Free for tests that place bytes by hand, unless a ring of more than 1,024 entries lies here.
pub const PLAYGROUND: u64 = BUFFERS_END;

/// Frontend addresses are guest addresses moved by this: who mixes the two up finds nothing.
const FRONTEND_OFFSET: u64 = 0x5500_0000_0000;

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
            | VhostUserProtocolFeatures::BACKEND_REQ
            | VhostUserProtocolFeatures::INFLIGHT_SHMFD
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
        guest.share_memory()?;
        Ok(guest)
    }

    /// The same guest on a new connection, as after the backend has gone and come back: memory and rings are as they were.
    pub fn move_to(&mut self, stream: UnixStream) -> io::Result<()> {
        let mut moved = Guest::without_memory(stream, self.features)?;
        std::mem::swap(&mut self.frontend, &mut moved.frontend);
        std::mem::swap(&mut self.stream, &mut moved.stream);
        self.share_memory()
    }

    fn share_memory(&self) -> io::Result<()> {
        let regions: Vec<VhostUserMemoryRegionInfo> = (0..REGIONS.len()).map(|i| self.region(i)).collect();
        let shared = self.frontend.set_mem_table(&regions);
        shared.map(|_| ()).map_err(|error| io::Error::other(format!("{error}")))
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
        let buffers = self.buffers_next..self.buffers_next + self.buffers_len;
        assert!(buffers.end <= BUFFERS_END, "no room for buffers");
        self.buffers_next = buffers.end;
        let queue = Queue::new(
            &self.memory,
            (self.offered, self.features),
            (index, size),
            next.next_multiple_of(4096),
            buffers,
        );
        *next = queue.end();
        assert!(
            *next <= HOLE || (*next > HOLE_END && *next <= MEMORY_END),
            "no room for rings"
        );
        queue
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

impl Drop for Guest {
    /// Closing alone may come late: while another test starts a process, that process has all our descriptors for a moment.
    fn drop(&mut self) {
        // It fails when the backend has closed before.
        let _ = self.stream.shutdown(std::net::Shutdown::Both);
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
