//! A driver and its frontend in one: rust-vmm's `Frontend` on the socket, raw rings in a memfd.
//!
//! It trusts nothing: the status byte is preset to 0xff, the used length is returned, and bytes around each read buffer are
//! guarded.

use std::fs::File;
use std::io::Write;
use std::os::fd::AsFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};
use std::time::{Duration, Instant};

use vhost::vhost_user::message::{VhostUserHeaderFlag, VhostUserProtocolFeatures};
use vhost::vhost_user::{Frontend, VhostUserFrontend};
use vhost::{VhostBackend, VhostUserMemoryRegionInfo, VringConfigData};
use virtio_queue::desc::split::Descriptor;
use vm_memory::{Bytes, FileOffset, GuestAddress, GuestMemoryMmap};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};
use zram_core::{Algorithm, Codecs, Options, Zram};
use zram_vhost::{Device, DeviceConfig, Endpoint};

pub const IN: u32 = 0;
pub const OUT: u32 = 1;
pub const GET_ID: u32 = 8;
pub const DISCARD: u32 = 11;
pub const WRITE_ZEROES: u32 = 13;

pub const OK: u8 = 0;
pub const IOERR: u8 = 1;
pub const UNSUPP: u8 = 2;
pub const UNTOUCHED: u8 = 0xff;

pub const VERSION_1: u64 = 1 << 32;
pub const EVENT_IDX: u64 = 1 << 29;
pub const INDIRECT: u64 = 1 << 28;
pub const PROTOCOL: u64 = 1 << 30;

pub const GUEST_BYTES: u64 = 16 << 20;
/// Where the frontend says it has the guest's address 0.
pub const USER_BASE: u64 = 0x7f12_3400_0000;

const RING_SIZE: u16 = 64;
const DEADLINE: Duration = Duration::from_secs(20);

pub const NEXT: u16 = 1;
pub const WRITE: u16 = 2;

/// Waits for `condition`, with a deadline.
pub fn wait_until(what: &str, mut condition: impl FnMut() -> bool) {
    let end = Instant::now() + DEADLINE;
    while !condition() {
        assert!(Instant::now() < end, "waited in vain: {what}");
        std::thread::sleep(Duration::from_micros(200));
    }
}

/// A device on a socket in a directory of its own.
pub struct Rig {
    pub device: Option<Device>,
    pub zram: Arc<Zram>,
    pub path: PathBuf,
    _directory: tempfile::TempDir,
}

impl Rig {
    pub fn new(size_bytes: u64, change: impl FnOnce(&mut DeviceConfig)) -> Rig {
        let options = Options {
            name: "story".to_string(),
            size_bytes,
            size_bytes_max: Some(2 * size_bytes),
            mem_limit_bytes: None,
            codecs: Codecs::alone(&Algorithm::default()).unwrap(),
        };
        let zram = Zram::create(&options).unwrap();
        let mut config = DeviceConfig {
            name: "story".to_string(),
            num_queues: 4,
            queue_size_max: 1024,
            read_only: false,
            serial: "story-serial".parse().unwrap(),
            logical_block_size: 4096,
            flush: false,
            thread_start: Default::default(),
            poll_max: Duration::ZERO,
            require_sealed_memory: false,
            rate_limit: Default::default(),
        };
        change(&mut config);
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("sock");
        let listener = UnixListener::bind(&path).unwrap();
        let device = Device::start(zram.clone(), Endpoint::Listener(listener), config).unwrap();
        Rig {
            device: Some(device),
            zram,
            path,
            _directory: directory,
        }
    }

    pub fn device(&self) -> &Device {
        self.device.as_ref().unwrap()
    }

    pub fn connect(&self) -> Client {
        Client::connect(&self.path)
    }

    /// A client that has negotiated the usual features and shared its memory.
    pub fn client(&self) -> Client {
        let mut client = self.connect();
        client.negotiate(VERSION_1 | EVENT_IDX | INDIRECT | PROTOCOL);
        client.share_memory();
        client
    }

    pub fn wait_for_queues(&self, count: usize) {
        wait_until("queues running", || self.device().status().queues_running == count);
    }
}

pub struct Client {
    pub frontend: Frontend,
    /// The same socket, for what the frontend library will not send.
    pub raw: UnixStream,
    pub file: File,
    pub mem: GuestMemoryMmap,
    features: u64,
}

impl Client {
    pub fn connect(path: &Path) -> Client {
        let stream = UnixStream::connect(path).unwrap();
        Client::on(stream)
    }

    pub fn on(stream: UnixStream) -> Client {
        let fd = rustix::fs::memfd_create("guest", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(fd.as_fd(), GUEST_BYTES).unwrap();
        Client::with_memory(stream, File::from(fd))
    }

    /// A new connection of the same guest.
    pub fn with_memory(stream: UnixStream, file: File) -> Client {
        let range = (
            GuestAddress(0),
            GUEST_BYTES as usize,
            Some(FileOffset::new(file.try_clone().unwrap(), 0)),
        );
        let mem = GuestMemoryMmap::from_ranges_with_files([range]).unwrap();
        let raw = stream.try_clone().unwrap();
        let frontend = Frontend::from_stream(stream, 64);
        frontend.set_hdr_flags(VhostUserHeaderFlag::NEED_REPLY);
        Client {
            frontend,
            raw,
            file,
            mem,
            features: 0,
        }
    }

    pub fn negotiate(&mut self, features: u64) {
        self.frontend.set_owner().unwrap();
        let offered = self.frontend.get_features().unwrap();
        assert_eq!(offered & features, features);
        let protocol = self.frontend.get_protocol_features().unwrap();
        let wanted = VhostUserProtocolFeatures::MQ
            | VhostUserProtocolFeatures::REPLY_ACK
            | VhostUserProtocolFeatures::CONFIG
            | VhostUserProtocolFeatures::CONFIGURE_MEM_SLOTS
            | VhostUserProtocolFeatures::BACKEND_REQ
            | VhostUserProtocolFeatures::INFLIGHT_SHMFD
            | VhostUserProtocolFeatures::RESET_DEVICE;
        assert_eq!(protocol, wanted);
        self.frontend.set_protocol_features(wanted).unwrap();
        self.set_features(features);
    }

    pub fn set_features(&mut self, features: u64) {
        self.frontend.set_features(features).unwrap();
        self.features = features;
    }

    pub fn region(&self) -> VhostUserMemoryRegionInfo {
        use std::os::fd::AsRawFd;
        VhostUserMemoryRegionInfo {
            guest_phys_addr: 0,
            memory_size: GUEST_BYTES,
            userspace_addr: USER_BASE,
            mmap_offset: 0,
            mmap_handle: self.file.as_raw_fd(),
        }
    }

    pub fn share_memory(&mut self) {
        self.frontend.set_mem_table(&[self.region()]).unwrap();
    }

    /// Sends a request about a descriptor without the descriptor.
    pub fn send_no_fd(&mut self, request: u32, queue: u64) {
        let mut message = Vec::new();
        message.extend(request.to_ne_bytes());
        message.extend(1u32.to_ne_bytes()); // version 1, no reply wanted
        message.extend(8u32.to_ne_bytes());
        message.extend((queue | 0x100).to_ne_bytes());
        self.raw.write_all(&message).unwrap();
    }

    /// Sets a queue up and starts it in QEMU's order.
    pub fn start_queue(&mut self, index: usize) -> Queue {
        let queue = Queue::new(self, index);
        self.start_at(&queue, 0);
        queue
    }

    pub fn start_at(&mut self, queue: &Queue, base: u16) {
        self.configure(queue, base);
        self.frontend.set_vring_kick(queue.index, &queue.kick).unwrap();
        self.frontend.set_vring_call(queue.index, &queue.call).unwrap();
        self.frontend.set_vring_enable(queue.index, true).unwrap();
    }

    /// Size, base and addresses.
    pub fn configure(&mut self, queue: &Queue, base: u16) {
        self.frontend.set_vring_num(queue.index, RING_SIZE).unwrap();
        self.frontend.set_vring_base(queue.index, base).unwrap();
        self.frontend.set_vring_addr(queue.index, &queue.addresses()).unwrap();
    }
}

/// A driver's side of one virtqueue. Each queue has a megabyte of guest memory: rings first, then one slot of 12 KiB for
/// each request.
pub struct Queue {
    pub index: usize,
    pub mem: GuestMemoryMmap,
    pub kick: EventFd,
    pub call: EventFd,
    start: u64,
    avail: u16,
    used: u16,
    event_idx: bool,
}

/// One request as the driver laid it out.
#[derive(Clone, Copy)]
pub struct Slot {
    pub head: u16,
    pub header: u64,
    pub data: u64,
    pub status: u64,
}

impl Queue {
    pub fn new(client: &Client, index: usize) -> Queue {
        let start = (index as u64 + 1) << 20;
        let queue = Queue {
            index,
            mem: client.mem.clone(),
            kick: EventFd::new(EFD_NONBLOCK).unwrap(),
            call: EventFd::new(EFD_NONBLOCK).unwrap(),
            start,
            avail: 0,
            used: 0,
            event_idx: client.features & EVENT_IDX != 0,
        };
        queue.mem.write_slice(&[0; 0x2000], GuestAddress(start)).unwrap();
        queue
    }

    /// The same queue as another connection of the same guest sees it.
    pub fn reconnected(&self, client: &Client) -> Queue {
        let mut queue = Queue {
            index: self.index,
            mem: client.mem.clone(),
            kick: EventFd::new(EFD_NONBLOCK).unwrap(),
            call: EventFd::new(EFD_NONBLOCK).unwrap(),
            start: self.start,
            avail: self.avail,
            used: self.used,
            event_idx: self.event_idx,
        };
        queue.event_idx = client.features & EVENT_IDX != 0;
        queue
    }

    pub fn addresses(&self) -> VringConfigData {
        VringConfigData {
            queue_max_size: RING_SIZE,
            queue_size: RING_SIZE,
            flags: 0,
            desc_table_addr: USER_BASE + self.start,
            used_ring_addr: USER_BASE + self.used_addr(),
            avail_ring_addr: USER_BASE + self.avail_addr(),
            log_addr: None,
        }
    }

    fn avail_addr(&self) -> u64 {
        self.start + 16 * u64::from(RING_SIZE)
    }

    fn used_addr(&self) -> u64 {
        self.start + 0x1000
    }

    /// The request slot of descriptors `3 * number` and the two after it.
    pub fn slot(&self, number: u16) -> Slot {
        let start = self.start + 0x4000 + 0x3000 * u64::from(number);
        Slot {
            head: 3 * number,
            header: start,
            data: start + 0x1000,
            status: start + 0x2800,
        }
    }

    pub fn set_descriptor(&self, index: u16, addr: u64, len: u32, flags: u16, next: u16) {
        let descriptor = Descriptor::new(addr, len, flags, next);
        self.mem
            .write_obj(descriptor, GuestAddress(self.start + 16 * u64::from(index)))
            .unwrap();
    }

    fn fill_header(&self, slot: &Slot, kind: u32, sector: u64) {
        self.mem.write_obj(kind.to_le(), GuestAddress(slot.header)).unwrap();
        self.mem.write_obj(0u32, GuestAddress(slot.header + 4)).unwrap();
        self.mem
            .write_obj(sector.to_le(), GuestAddress(slot.header + 8))
            .unwrap();
        self.mem.write_obj(UNTOUCHED, GuestAddress(slot.status)).unwrap();
    }

    /// Lays out header, data and status, in three descriptors.
    pub fn lay_out(&self, number: u16, kind: u32, sector: u64, data: &[u8], data_len: u32) -> Slot {
        let slot = self.slot(number);
        self.fill_header(&slot, kind, sector);
        self.mem.write_slice(data, GuestAddress(slot.data)).unwrap();
        let flags = if matches!(kind, IN | GET_ID) {
            NEXT | WRITE
        } else {
            NEXT
        };
        self.set_descriptor(slot.head, slot.header, 16, NEXT, slot.head + 1);
        self.set_descriptor(slot.head + 1, slot.data, data_len, flags, slot.head + 2);
        self.set_descriptor(slot.head + 2, slot.status, 1, WRITE, 0);
        slot
    }

    /// Makes a head available, without a kick.
    pub fn publish(&mut self, head: u16) {
        let entry = self.avail_addr() + 4 + 2 * u64::from(self.avail % RING_SIZE);
        self.mem.write_obj(head.to_le(), GuestAddress(entry)).unwrap();
        self.avail = self.avail.wrapping_add(1);
        self.set_avail_index(self.avail);
    }

    pub fn set_avail_index(&self, index: u16) {
        self.mem
            .store(index.to_le(), GuestAddress(self.avail_addr() + 2), Ordering::Release)
            .unwrap();
        fence(Ordering::SeqCst);
    }

    pub fn kick(&self) {
        self.kick.write(1).unwrap();
    }

    /// Kicks for the last `count` heads as a thrifty driver does: only if the device has asked for it.
    pub fn kick_if_wanted(&self, count: u16) {
        fence(Ordering::SeqCst);
        let load = |addr: u64| u16::from_le(self.mem.load(GuestAddress(addr), Ordering::SeqCst).unwrap());
        let wanted = if self.event_idx {
            let avail_event = load(self.used_addr() + 4 + 8 * u64::from(RING_SIZE));
            self.avail.wrapping_sub(avail_event).wrapping_sub(1) < count
        } else {
            load(self.used_addr()) & 1 == 0
        };
        if wanted {
            self.kick();
        }
    }

    pub fn used_index(&self) -> u16 {
        u16::from_le(
            self.mem
                .load(GuestAddress(self.used_addr() + 2), Ordering::Acquire)
                .unwrap(),
        )
    }

    pub fn completed(&self) -> u16 {
        self.used_index().wrapping_sub(self.used)
    }

    /// Requests made available and not yet taken back.
    pub fn in_flight(&self) -> u16 {
        self.avail.wrapping_sub(self.used)
    }

    /// Takes the next used element, waiting for it.
    pub fn next_used(&mut self) -> (u16, u32) {
        wait_until("a used element", || self.used_index() != self.used);
        self.take_used()
    }

    fn take_used(&mut self) -> (u16, u32) {
        let entry = self.used_addr() + 4 + 8 * u64::from(self.used % RING_SIZE);
        let id: u32 = self.mem.read_obj(GuestAddress(entry)).unwrap();
        let len: u32 = self.mem.read_obj(GuestAddress(entry + 4)).unwrap();
        self.used = self.used.wrapping_add(1);
        // Asks to be called for the next one, where that is how it is asked.
        let used_event = self.avail_addr() + 4 + 2 * u64::from(RING_SIZE);
        if self.event_idx {
            self.mem
                .store(self.used.to_le(), GuestAddress(used_event), Ordering::SeqCst)
                .unwrap();
        }
        (u32::from_le(id) as u16, u32::from_le(len))
    }

    pub fn status(&self, slot: &Slot) -> u8 {
        self.mem.read_obj(GuestAddress(slot.status)).unwrap()
    }

    /// One request from beginning to end: status and used length.
    pub fn request(&mut self, kind: u32, sector: u64, data: &[u8], data_len: u32) -> (u8, u32) {
        let slot = self.lay_out(0, kind, sector, data, data_len);
        self.publish(slot.head);
        self.kick_if_wanted(1);
        let (head, len) = self.next_used();
        assert_eq!(head, slot.head);
        (self.status(&slot), len)
    }

    pub fn write(&mut self, sector: u64, data: &[u8]) {
        assert_eq!(self.request(OUT, sector, data, data.len() as u32), (OK, 1));
    }

    pub fn read(&mut self, sector: u64, len: u32) -> Vec<u8> {
        const GUARD: u8 = 0xa5;
        let data = GuestAddress(self.slot(0).data);
        self.mem.write_slice(&[GUARD; 0x1800], data).unwrap();
        assert_eq!(self.request(IN, sector, &[], len), (OK, len + 1));
        let mut got = vec![0; 0x1800];
        self.mem.read_slice(&mut got, data).unwrap();
        assert!(
            got[len as usize..].iter().all(|byte| *byte == GUARD),
            "bytes behind the buffer changed"
        );
        got.truncate(len as usize);
        got
    }
}

/// A page that tells which it is.
pub fn page(number: u64) -> Vec<u8> {
    (0..4096u64)
        .map(|at| (number.wrapping_mul(31) ^ (at / 16)) as u8)
        .collect()
}
