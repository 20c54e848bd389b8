//! What a frontend sends: a row of messages, right, nearly right and wrong, with descriptors of all kinds, to a real device
//! over a real socket. Whatever it is, the device lets go of the frontend when that hangs up, gives everything back, and
//! serves the next one as if nothing had been.

use std::fs::File;
use std::io::{PipeReader, PipeWriter, Read, Write};
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::os::unix::net::UnixStream;
use std::sync::{Arc, OnceLock};

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use rustix::io::Errno;
use vmm_sys_util::sock_ctrl_msg::ScmSocket;
use zram_core::{Page, SlotIndex, Zram};

use super::{Choices, config, zram};
use crate::device::{Device, Endpoint};

const QUEUES: u16 = 4;
const RING_SIZE: u16 = 64;
const MEMORY_BYTES: u64 = 1 << 20;
/// Where the frontend has the guest's memory in its own address space: anywhere.
const USER_ADDR: u64 = 0x7000_0000_0000;
const MESSAGES_MAX: usize = 40;
const PATIENCE: Timespec = Timespec { tv_sec: 20, tv_nsec: 0 };

/// Requests by their numbers in the vhost-user specification, "Front-end message types".
mod number {
    pub const GET_FEATURES: u32 = 1;
    pub const SET_FEATURES: u32 = 2;
    pub const SET_OWNER: u32 = 3;
    pub const SET_MEM_TABLE: u32 = 5;
    pub const SET_VRING_NUM: u32 = 8;
    pub const SET_VRING_ADDR: u32 = 9;
    pub const SET_VRING_BASE: u32 = 10;
    pub const GET_VRING_BASE: u32 = 11;
    pub const SET_VRING_KICK: u32 = 12;
    pub const SET_VRING_CALL: u32 = 13;
    pub const SET_VRING_ERR: u32 = 14;
    pub const SET_PROTOCOL_FEATURES: u32 = 16;
    pub const SET_VRING_ENABLE: u32 = 18;
    pub const SET_BACKEND_REQ_FD: u32 = 21;
    pub const GET_CONFIG: u32 = 24;
    pub const SET_CONFIG: u32 = 25;
    pub const GET_INFLIGHT_FD: u32 = 31;
    pub const SET_INFLIGHT_FD: u32 = 32;
    pub const ADD_MEM_REG: u32 = 37;
    pub const REM_MEM_REG: u32 = 38;
    pub const LAST: u32 = 45;
}

/// The disk that all sessions meet; its first page is known.
fn disk() -> &'static Arc<Zram> {
    static DISK: OnceLock<Arc<Zram>> = OnceLock::new();
    DISK.get_or_init(|| {
        let zram = zram();
        let mut worker = zram.worker().expect("the first worker");
        worker.write_page(SlotIndex(0), &known()).expect("memory for a page");
        drop(worker);
        zram
    })
}

fn known() -> Box<Page> {
    let mut page = Page::zeroed();
    page.iter_mut()
        .enumerate()
        .for_each(|(at, byte)| *byte = (at / 3) as u8);
    page
}

/// One input: a row of choices. The disk is read-only, so that its first page stays known.
pub fn session(input: &[u8]) {
    let mut choices = Choices::new(input);
    let zram = disk().clone();
    let fds_before = count_fds();
    let (ours, theirs) = UnixStream::pair().expect("a socket pair");
    let mut config = config(QUEUES, RING_SIZE);
    config.read_only = true;
    let device = Device::start(zram, Endpoint::Stream(theirs), config).expect("a device");
    converse(&mut choices, &ours);
    drop(ours);
    // It ends by itself once the frontend has hung up.
    let ended = device.ended();
    let mut fds = [PollFd::new(&ended, PollFlags::IN)];
    let count = loop {
        match rustix::event::poll(&mut fds, Some(&PATIENCE)) {
            Err(Errno::INTR) => {} // the fuzzer's own alarm
            count => break count.expect("poll"),
        }
    };
    assert_eq!(count, 1, "the device does not let go of its frontend");
    let status = device.status();
    assert_eq!(status.requests.panics, 0);
    assert_eq!(status.queues_running, 0);
    device.stop();
    assert_eq!(count_fds(), fds_before, "descriptors are left");
    let mut page = Page::zeroed();
    let mut worker = disk().worker().expect("workers came back");
    worker.read_page(SlotIndex(0), &mut page).expect("it decodes");
    assert!(page[..] == known()[..], "the disk has changed");
}

/// Closing is done by other threads here and there, in the tests that run beside.
#[cfg(test)]
fn count_fds() -> usize {
    0
}

#[cfg(not(test))]
fn count_fds() -> usize {
    std::fs::read_dir("/proc/self/fd").expect("proc").count()
}

/// What a frontend has at hand.
struct Things {
    memory: OwnedFd,
    event: OwnedFd,
    pipe: (PipeReader, PipeWriter),
    file: File,
    channel: UnixStream,
    inflight: Option<File>,
}

impl Things {
    fn new() -> Things {
        let memory = memfd_create("fuzz", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).expect("a memfd");
        ftruncate(&memory, MEMORY_BYTES).expect("a length");
        let things = Things {
            memory,
            event: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).expect("an eventfd"),
            pipe: std::io::pipe().expect("a pipe"),
            // Its other end is gone at once.
            channel: UnixStream::pair().expect("a socket pair").0,
            file: File::open("/dev/null").expect("/dev/null"),
            inflight: None,
        };
        things.lay_out_ring();
        things
    }

    /// One read of the first page, on each ring that is set up as [`vring_addr`] has it.
    fn lay_out_ring(&self) {
        let put = |at: u64, bytes: &[u8]| {
            rustix::io::pwrite(&self.memory, bytes, at).expect("in the memfd");
        };
        let descriptor = |addr: u64, len: u32, flags: u16, next: u16| {
            let mut bytes = addr.to_le_bytes().to_vec();
            bytes.extend(len.to_le_bytes());
            bytes.extend(flags.to_le_bytes());
            bytes.extend(next.to_le_bytes());
            bytes
        };
        put(0, &descriptor(0x4000, 16, 1, 1));
        put(16, &descriptor(0x5000, 4096, 3, 2));
        put(32, &descriptor(0x6000, 1, 2, 0));
        put(0x1002, &1u16.to_le_bytes());
    }

    fn fd(&self, choices: &mut Choices<'_>, usual: RawFd) -> RawFd {
        match choices.below(12) {
            0 => self.file.as_raw_fd(),
            1 => self.pipe.0.as_raw_fd(),
            2 => self.pipe.1.as_raw_fd(),
            3 => self.memory.as_raw_fd(),
            4 => self.event.as_raw_fd(),
            _ => usual,
        }
    }
}

fn converse(choices: &mut Choices<'_>, stream: &UnixStream) {
    stream.set_nonblocking(true).expect("a socket");
    let mut things = Things::new();
    if choices.one_in(2) {
        set_up(stream, &things);
    }
    for _ in 0..MESSAGES_MAX {
        if choices.is_empty() || speak(choices, stream, &mut things).is_none() {
            return;
        }
        listen(stream, &mut things);
    }
}

/// Right up to where a queue runs.
fn set_up(stream: &UnixStream, things: &Things) {
    let event = things.event.as_raw_fd();
    let messages: [(u32, Vec<u8>, Option<RawFd>); 11] = [
        (number::SET_OWNER, vec![], None),
        (
            number::SET_FEATURES,
            (1u64 << 30 | 1 << 32 | 1 << 29).to_ne_bytes().to_vec(),
            None,
        ),
        (number::SET_PROTOCOL_FEATURES, 0x9229u64.to_ne_bytes().to_vec(), None),
        (
            number::SET_MEM_TABLE,
            mem_table(&[region(0, MEMORY_BYTES, 0)]),
            Some(things.memory.as_raw_fd()),
        ),
        (number::SET_VRING_NUM, state(0, 64), None),
        (number::SET_VRING_BASE, state(0, 0), None),
        (number::SET_VRING_ADDR, vring_addr(0, 0, 0x2000, 0x1000), None),
        (number::SET_VRING_CALL, 0u64.to_ne_bytes().to_vec(), Some(event)),
        (number::SET_VRING_KICK, 0u64.to_ne_bytes().to_vec(), Some(event)),
        (number::SET_VRING_ENABLE, state(0, 1), None),
        (number::GET_VRING_BASE, state(1, 0), None),
    ];
    for (request, body, fd) in messages {
        let _ = send(stream, request, 1, &body, fd.as_slice());
    }
}

fn state(index: u32, value: u32) -> Vec<u8> {
    [index.to_ne_bytes(), value.to_ne_bytes()].concat()
}

fn region(guest_addr: u64, bytes: u64, offset: u64) -> [u64; 4] {
    [guest_addr, bytes, USER_ADDR.wrapping_add(guest_addr), offset]
}

fn words(words: &[u64]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_ne_bytes()).collect()
}

fn mem_table(regions: &[[u64; 4]]) -> Vec<u8> {
    let mut body = [(regions.len() as u32).to_ne_bytes(), [0; 4]].concat();
    regions.iter().for_each(|region| body.extend(words(region)));
    body
}

fn vring_addr(index: u32, descriptors: u64, used: u64, avail: u64) -> Vec<u8> {
    let mut body = state(index, 0);
    let user = [descriptors, used, avail].map(|addr| USER_ADDR.wrapping_add(addr));
    body.extend(words(&user));
    body.extend(0u64.to_ne_bytes());
    body
}

/// Sends one message. `None` when there is no more to be said.
fn speak(choices: &mut Choices<'_>, stream: &UnixStream, things: &mut Things) -> Option<()> {
    let index = match choices.below(10) {
        0 => choices.any::<u32>(),
        1 => u32::from(QUEUES),
        n => n as u32 % 2,
    };
    let place = |choices: &mut Choices<'_>| match choices.below(6) {
        0 => choices.any::<u64>(),
        1 => MEMORY_BYTES - choices.below(64),
        n => 0x1000 * (n - 2),
    };
    let event = things.event.as_raw_fd();
    let memory = things.memory.as_raw_fd();
    let mut fds = vec![];
    let (request, body) = match choices.below(24) {
        0 => (number::SET_FEATURES, words(&[pick_features(choices)])),
        1 => (number::SET_PROTOCOL_FEATURES, words(&[pick_protocol_features(choices)])),
        2 => {
            let count = choices.below(4) + u64::from(choices.one_in(8)) * 8;
            let regions: Vec<_> = (0..count).map(|at| pick_region(choices, at)).collect();
            regions.iter().for_each(|_| fds.push(things.fd(choices, memory)));
            (number::SET_MEM_TABLE, mem_table(&regions))
        }
        3 | 4 => {
            let at = choices.below(3);
            let mut body = vec![0; 8];
            body.extend(words(&pick_region(choices, at)));
            let request = choices.pick(&[number::ADD_MEM_REG, number::REM_MEM_REG]);
            if request == number::ADD_MEM_REG || choices.one_in(3) {
                fds.push(things.fd(choices, memory));
            }
            (request, body)
        }
        5 => (
            number::SET_VRING_NUM,
            state(index, choices.pick(&[64, 2, 0, 3, 128, 65536, 1 << 31])),
        ),
        6 | 7 => {
            let [descriptors, used, avail] = match choices.one_in(3) {
                true => [place(choices), place(choices), place(choices)],
                false => [0, 0x2000, 0x1000],
            };
            (number::SET_VRING_ADDR, vring_addr(index, descriptors, used, avail))
        }
        8 => (
            number::SET_VRING_BASE,
            state(index, choices.pick(&[0, 1, 2, 64, 65, 0xffff, 0x1_0000])),
        ),
        9 | 10 => (number::GET_VRING_BASE, state(index, 0)),
        11..=14 => {
            let request = choices.pick(&[
                number::SET_VRING_KICK,
                number::SET_VRING_CALL,
                number::SET_VRING_ERR,
                number::SET_VRING_KICK,
            ]);
            let no_fd = choices.one_in(6);
            if !no_fd {
                fds.push(things.fd(choices, event));
            }
            (request, words(&[u64::from(index & 0xff) | u64::from(no_fd) << 8]))
        }
        15 | 16 => (number::SET_VRING_ENABLE, state(index, choices.pick(&[1, 0, 1, 2]))),
        17 => {
            let request = choices.pick(&[number::GET_CONFIG, number::SET_CONFIG]);
            let (offset, size) = (
                choices.pick(&[0u32, 8, 59, 60, 0x100, u32::MAX]),
                choices.pick(&[60u32, 8, 0, 255]),
            );
            let mut body = [offset.to_ne_bytes(), size.to_ne_bytes(), [0; 4]].concat();
            body.resize(12 + size as usize, 0);
            (request, body)
        }
        18 | 19 => {
            let size = choices.pick(&[0u64, 4096, 8192, u64::MAX]);
            let mut body = words(&[size, choices.pick(&[0, 1, 4096])]);
            body.extend(choices.pick(&[1u16, 4, 0, 5]).to_ne_bytes());
            body.extend(choices.pick(&[64u16, 2, 0, 3]).to_ne_bytes());
            body.extend([0; 4]);
            let request = choices.pick(&[number::GET_INFLIGHT_FD, number::SET_INFLIGHT_FD]);
            if request == number::SET_INFLIGHT_FD {
                let given = things.inflight.as_ref().map_or(memory, AsRawFd::as_raw_fd);
                fds.push(things.fd(choices, given));
            }
            (request, body)
        }
        20 => {
            fds.push(things.fd(choices, things.channel.as_raw_fd()));
            (number::SET_BACKEND_REQ_FD, vec![])
        }
        21 => {
            rustix::io::write(&things.event, &1u64.to_ne_bytes()).ok()?;
            (number::GET_FEATURES, vec![])
        }
        22 => {
            // Memory that goes away under the device.
            ftruncate(&things.memory, choices.pick(&[0x1800, 0, MEMORY_BYTES])).ok()?;
            (number::GET_FEATURES, vec![])
        }
        _ => {
            let size = choices.below(300) as usize;
            fds.extend((0..choices.below(9)).map(|_| things.fd(choices, event)));
            let body = (0..size).map(|_| choices.any()).collect();
            (choices.below(u64::from(number::LAST)) as u32, body)
        }
    };
    let flags = choices.pick(&[1u32, 9, 9, 1]);
    let flags = if choices.one_in(40) { choices.any() } else { flags };
    send(stream, request, flags, &body, &fds)
}

fn pick_features(choices: &mut Choices<'_>) -> u64 {
    let usual = 1u64 << 30 | 1 << 32;
    match choices.below(6) {
        0 => choices.any(),
        1 => usual | 1 << 29,
        2 => usual | 1 << 28,
        3 => 0,
        _ => usual | 1 << 28 | 1 << 29,
    }
}

fn pick_protocol_features(choices: &mut Choices<'_>) -> u64 {
    match choices.below(4) {
        0 => choices.any(),
        1 => 0,
        // MQ, REPLY_ACK, BACKEND_REQ, CONFIG, INFLIGHT_SHMFD, CONFIGURE_MEM_SLOTS.
        _ => 0x9229,
    }
}

fn pick_region(choices: &mut Choices<'_>, at: u64) -> [u64; 4] {
    let part = MEMORY_BYTES / 4;
    match choices.below(8) {
        0 => [choices.any(), choices.any(), choices.any(), choices.any()],
        1 => region(at * part + 0x800, part, at * part),
        2 => region(at * part, MEMORY_BYTES * 2, 0),
        3 => region(u64::MAX - part + 1, part, 0),
        4 => region(0, MEMORY_BYTES, 0),
        _ => region(at * part, part, at * part),
    }
}

/// A header and what follows it, in one piece. `None` when the device has hung up or takes no more.
fn send(stream: &UnixStream, request: u32, flags: u32, body: &[u8], fds: &[RawFd]) -> Option<()> {
    let header = [request, flags, body.len() as u32].map(u32::to_ne_bytes).concat();
    let bytes = [header, body.to_vec()].concat();
    match fds {
        [] => (&*stream).write_all(&bytes).ok(),
        fds => stream.send_with_fds(&[&bytes[..]], fds).ok().map(drop),
    }
}

/// Takes what the device has answered so far; keeps the in-flight region that it gave.
fn listen(mut stream: &UnixStream, things: &mut Things) {
    let mut bytes = [0; 4096];
    if let Ok((_, Some(file))) = stream.recv_with_fd(&mut bytes) {
        things.inflight = Some(file);
    }
    while stream.read(&mut bytes).is_ok_and(|count| count > 0) {}
}
