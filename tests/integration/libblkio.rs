//! A frontend that nobody here wrote: libblkio's vhost-user driver. It names its own addresses as guest addresses, has rings
//! in memory that is no multiple of a page, and calls for no indirect descriptors. Its weak points (a status byte preset to
//! success, used lengths ignored) are what the raw frontend is for.

use std::fs::{File, OpenOptions};
use std::io::{Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::AsRawFd;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use blkio::{Blkio, Blkioq, Completion, MemoryRegion, ReqFlags};
use rustix::fs::{MemfdFlags, memfd_create};
use rustix::process::Signal;
use vm_memory::{FileOffset, MmapRegion, VolatileMemory};

use crate::raw::PAGE;
use crate::support::{Backend, Dice, PATIENCE, wait_for};
use crate::wiretap::{CONNECTED, Wiretap};

const MIB: usize = 1 << 20;

/// Requests by their numbers in the vhost-user specification, each with the number of descriptors that come with it, as
/// libblkio starts two queues. It stops by hanging up.
const LIBBLKIO: [(u32, usize); 24] = [
    (3, 0),  // SET_OWNER
    (1, 0),  // GET_FEATURES
    (2, 0),  // SET_FEATURES
    (15, 0), // GET_PROTOCOL_FEATURES
    (16, 0), // SET_PROTOCOL_FEATURES
    (17, 0), // GET_QUEUE_NUM
    (36, 0), // GET_MAX_MEM_SLOTS
    (24, 0), // GET_CONFIG
    (24, 0),
    (24, 0),
    (37, 1), // ADD_MEM_REG, its rings
    (8, 0),  // SET_VRING_NUM
    (10, 0), // SET_VRING_BASE
    (9, 0),  // SET_VRING_ADDR
    (12, 1), // SET_VRING_KICK
    (13, 1), // SET_VRING_CALL
    (18, 0), // SET_VRING_ENABLE
    (8, 0),
    (10, 0),
    (9, 0),
    (12, 1),
    (13, 1),
    (18, 0),
    (37, 1), // ADD_MEM_REG, its user's buffers
];

/// A connection, its queues, and the memory that both sides see.
struct Client {
    // Keeps the connection.
    _blkio: Blkio,
    lanes: Vec<Lane>,
}

/// One queue and its part of the shared memory.
struct Lane {
    queue: Blkioq,
    memory: Arc<MmapRegion>,
    begin: usize,
}

impl Client {
    /// Connects with `queues` queues that have `lane_bytes` of memory each.
    fn try_new(socket: &Path, queues: usize, lane_bytes: usize) -> blkio::Result<Client> {
        let mut blkio = Blkio::new("virtio-blk-vhost-user")?;
        blkio.set_str("path", socket.to_str().unwrap())?;
        blkio.connect()?;
        blkio.set_i32("num-queues", queues as i32)?;
        let started = blkio.start()?;
        let len = queues * lane_bytes;
        let file = File::from(memfd_create("client", MemfdFlags::CLOEXEC).unwrap());
        file.set_len(len as u64).unwrap();
        let fd = file.as_raw_fd();
        let memory: Arc<MmapRegion> = Arc::new(MmapRegion::from_file(FileOffset::new(file, 0), len).unwrap());
        let addr = memory.as_ptr() as usize;
        blkio.map_mem_region(&MemoryRegion {
            addr,
            iova: 0,
            len,
            fd,
            fd_offset: 0,
            flags: 0,
        })?;
        let lanes = started
            .queues
            .into_iter()
            .enumerate()
            .map(|(i, queue)| Lane {
                queue,
                memory: memory.clone(),
                begin: i * lane_bytes,
            })
            .collect();
        Ok(Client { _blkio: blkio, lanes })
    }

    fn new(backend: &Backend, queues: usize, lane_bytes: usize) -> Client {
        Client::try_new(&backend.socket(), queues, lane_bytes).unwrap()
    }
}

impl Lane {
    fn pointer(&self, offset: usize) -> *mut u8 {
        self.memory.as_ptr().wrapping_add(self.begin + offset)
    }

    fn put(&self, offset: usize, bytes: &[u8]) {
        self.memory
            .get_slice(self.begin + offset, bytes.len())
            .unwrap()
            .copy_from(bytes);
    }

    fn get(&self, offset: usize, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.memory
            .get_slice(self.begin + offset, len)
            .unwrap()
            .copy_to(&mut bytes);
        bytes
    }

    fn submit_write(&mut self, at: u64, offset: usize, bytes: &[u8], tag: usize) {
        self.put(offset, bytes);
        let pointer = self.pointer(offset);
        self.queue.write(at, pointer, bytes.len(), tag, ReqFlags::empty());
    }

    fn submit_read(&mut self, at: u64, offset: usize, len: usize, tag: usize) {
        let pointer = self.pointer(offset);
        self.queue.read(at, pointer, len, tag, ReqFlags::empty());
    }

    /// Waits for one completion: its tag, and 0 or a negative error number. An error when the connection is gone or hangs.
    fn complete(&mut self) -> blkio::Result<(usize, i32)> {
        let none = Completion {
            user_data: 0,
            error_msg: std::ptr::null(),
            ret: 0,
            reserved_: [0; 12],
        };
        let mut completion = [MaybeUninit::new(none)];
        let mut timeout = PATIENCE;
        self.queue.do_io(&mut completion, 1, Some(&mut timeout), None)?;
        // SAFETY: the element was initialised above, and libblkio only overwrites it with another completion.
        #[expect(unsafe_code, reason = "libblkio takes completions as maybe uninitialised")]
        let completion = unsafe { completion[0].assume_init_ref() };
        Ok((completion.user_data, completion.ret))
    }

    fn result(&mut self) -> Result<(), i32> {
        match self.complete().unwrap() {
            (_, 0) => Ok(()),
            (_, error) => Err(-error),
        }
    }

    fn write(&mut self, at: u64, bytes: &[u8]) -> Result<(), i32> {
        self.submit_write(at, 0, bytes, 0);
        self.result()
    }

    fn read(&mut self, at: u64, len: usize) -> Vec<u8> {
        // What an earlier request left here must not pass for the answer.
        self.put(0, &vec![0xee; len]);
        self.submit_read(at, 0, len, 0);
        assert_eq!(self.result(), Ok(()), "read of {len} bytes at {at}");
        self.get(0, len)
    }

    fn discard(&mut self, at: u64, len: u64) -> Result<(), i32> {
        self.queue.discard(at, len, 0, ReqFlags::empty());
        self.result()
    }
}

/// A connection as soon as the backend has noticed the end of the last one.
fn reconnect(backend: &Backend, queues: usize, lane_bytes: usize) -> Client {
    wait_for("the backend takes a new connection", PATIENCE, || {
        Client::try_new(&backend.socket(), queues, lane_bytes).ok()
    })
}

const DEPTH: usize = 4;
const REQUEST_MAX: usize = MIB;

enum Pending {
    Change,
    Read { at: usize, len: usize },
}

/// Random requests, four in flight, each in its own quarter of the lane's part of the disk, against a model of that part.
fn exercise(lane: &mut Lane, begin: u64, model: &mut [u8], requests: usize, dice: &mut Dice) {
    let quarter = model.len() / DEPTH;
    let mut pending: [Option<Pending>; DEPTH] = [const { None }; DEPTH];
    let mut submitted = 0;
    loop {
        for (slot, place) in pending.iter_mut().enumerate() {
            if place.is_some() || submitted == requests {
                continue;
            }
            submitted += 1;
            // Lengths of all magnitudes, 512 bytes to 1 MiB; half of them are at most 16 KiB.
            let len = (512 << dice.below(12)) - 512 * dice.below(2) as usize;
            let len = len.clamp(512, REQUEST_MAX);
            let at = slot * quarter + 512 * dice.below(((quarter - len) / 512 + 1) as u64) as usize;
            let disk = begin + at as u64;
            let memory = slot * REQUEST_MAX;
            *place = Some(match dice.below(10) {
                0..4 => {
                    let content = dice.content(len);
                    lane.submit_write(disk, memory, &content, slot);
                    model[at..at + len].copy_from_slice(&content);
                    Pending::Change
                }
                // Whole pages: what a discard does to a part of one is the device's choice.
                4 => {
                    let first = at.next_multiple_of(PAGE);
                    let end = (at + len) / PAGE * PAGE;
                    let (first, len) = if first < end {
                        (first, end - first)
                    } else {
                        (slot * quarter, PAGE)
                    };
                    lane.queue
                        .discard(begin + first as u64, len as u64, slot, ReqFlags::empty());
                    model[first..first + len].fill(0);
                    Pending::Change
                }
                5 => {
                    let flags = if dice.chance(2) {
                        ReqFlags::NO_UNMAP
                    } else {
                        ReqFlags::empty()
                    };
                    lane.queue.write_zeroes(disk, len as u64, slot, flags);
                    model[at..at + len].fill(0);
                    Pending::Change
                }
                _ => {
                    lane.put(memory, &vec![0xee; len]);
                    lane.submit_read(disk, memory, len, slot);
                    Pending::Read { at, len }
                }
            });
        }
        if pending.iter().all(Option::is_none) {
            return;
        }
        let (slot, result) = lane.complete().unwrap();
        assert_eq!(result, 0, "a request failed");
        if let Some(Pending::Read { at, len }) = pending[slot].take() {
            assert!(
                lane.get(slot * REQUEST_MAX, len) == model[at..at + len],
                "{len} bytes at {at} differ"
            );
        }
    }
}

/// Requests of all kinds on `queues` queues at once, then the whole disk is compared from another connection.
fn exercise_queues(queues: usize) {
    const PART: usize = 8 * MIB;
    let disk = Backend::daemon("32M", &["--logical-block-size", "512"]);
    let mut dice = Dice::new();
    let client = Client::new(&disk, queues, DEPTH * REQUEST_MAX);
    let workers: Vec<_> = client
        .lanes
        .into_iter()
        .enumerate()
        .map(|(i, mut lane)| {
            let mut dice = Dice::seeded(dice.next());
            thread::spawn(move || {
                let mut model = vec![0; PART];
                exercise(&mut lane, (i * PART) as u64, &mut model, 1200 / queues, &mut dice);
                model
            })
        })
        .collect();
    let models: Vec<Vec<u8>> = workers.into_iter().map(|worker| worker.join().unwrap()).collect();
    drop(client._blkio);
    let mut client = reconnect(&disk, 1, MIB);
    for (i, model) in models.iter().enumerate() {
        for at in (0..PART).step_by(MIB) {
            let stored = client.lanes[0].read((i * PART + at) as u64, MIB);
            assert!(
                stored == model[at..at + MIB],
                "queue {i}'s part at {at} differs after the end"
            );
        }
    }
}

#[test]
fn random_requests_on_one_queue_agree_with_a_model() {
    exercise_queues(1);
}

#[test]
fn random_requests_on_two_queues_agree_with_a_model() {
    exercise_queues(2);
}

#[test]
fn random_requests_on_four_queues_agree_with_a_model() {
    exercise_queues(4);
}

#[test]
fn the_properties_that_libblkio_sees_are_those_of_the_disk() {
    let disk = Backend::daemon("64M", &[]);
    let mut blkio = Blkio::new("virtio-blk-vhost-user").unwrap();
    blkio.set_str("path", disk.socket().to_str().unwrap()).unwrap();
    blkio.connect().unwrap();
    assert_eq!(blkio.get_u64("capacity").unwrap(), 64 << 20);
    assert_eq!(blkio.get_i32("request-alignment").unwrap(), 4096);
    assert_eq!(blkio.get_i32("max-queues").unwrap(), 64);
    assert_eq!(blkio.get_i32("max-segments").unwrap(), 126);
    assert_eq!(blkio.get_i32("discard-alignment").unwrap(), 4096);
}

/// What it says to start, to use two queues, to stop and to come again: the order that it is served in.
#[test]
fn libblkio_starts_stops_and_comes_again_in_these_words() {
    let disk = Backend::daemon("16M", &[]);
    let tap = Wiretap::new(disk.socket());
    for round in 0..2 {
        let mut client = wait_for("the backend takes it", PATIENCE, || {
            Client::try_new(&tap.socket(), 2, PAGE).ok()
        });
        for (index, lane) in client.lanes.iter_mut().enumerate() {
            let at = (index * PAGE) as u64;
            if round == 0 {
                lane.write(at, &[index as u8 + 1; PAGE]).unwrap();
            }
            assert_eq!(lane.read(at, PAGE), [index as u8 + 1; PAGE]);
        }
    }
    let heard = tap.heard();
    // Between the first and the last may be some that found the backend busy with the end of the first.
    let sessions: Vec<_> = heard.split(|message| *message == CONNECTED).skip(1).collect();
    assert!(sessions.len() >= 2);
    assert_eq!(*sessions[0], LIBBLKIO);
    assert_eq!(**sessions.last().unwrap(), LIBBLKIO);
}

#[test]
fn a_thousand_connections_leave_nothing_behind() {
    let disk = Backend::daemon("16M", &[]);
    let page = Dice::new().bytes(PAGE);
    let cycle = |expected: &[u8]| {
        let mut client = reconnect(&disk, 2, MIB);
        assert!(client.lanes[1].read(0, PAGE) == expected);
        client.lanes[0].write(0, &page).unwrap();
    };
    cycle(&[0; PAGE]);
    for _ in 0..49 {
        cycle(&page);
    }
    let (counts, rss) = (disk.settled_counts(), disk.rss_bytes());
    for _ in 0..950 {
        cycle(&page);
    }
    assert_eq!(disk.settled_counts(), counts, "descriptors and threads");
    let grown = disk.rss_bytes().saturating_sub(rss);
    assert!(grown < 2 << 20, "{grown} bytes more after 950 connections");
}

#[test]
fn sigterm_with_requests_in_flight_ends_the_daemon_within_a_second() {
    let mut disk = Backend::daemon("64M", &[]);
    let client = Client::new(&disk, 2, 32 * MIB);
    let load = |mut lane: Lane, noise: Vec<u8>| {
        for slot in 0..32 {
            lane.submit_write((slot * MIB) as u64, slot * MIB, &noise, slot);
        }
        // Until the daemon is gone: then nothing completes any more.
        while let Ok((slot, 0)) = lane.complete() {
            lane.submit_write((slot * MIB) as u64, slot * MIB, &noise, slot);
        }
    };
    let mut dice = Dice::new();
    let workers: Vec<_> = client
        .lanes
        .into_iter()
        .map(|lane| {
            let noise = dice.content(MIB);
            thread::spawn(move || load(lane, noise))
        })
        .collect();
    wait_for("the load has begun", PATIENCE, || {
        (disk.cpu_time() > Duration::from_millis(50)).then_some(())
    });
    let begin = Instant::now();
    disk.signal(Signal::TERM);
    let status = disk.wait(PATIENCE);
    let took = begin.elapsed();
    assert_eq!(status.code(), Some(0), "{}", disk.stderr());
    assert!(took < Duration::from_secs(1), "the end took {took:?}");
    assert!(!disk.socket().exists(), "the socket is left behind");
    for worker in workers {
        worker.join().unwrap();
    }
}

#[test]
fn sigterm_without_a_frontend_ends_the_daemon_at_once() {
    let mut disk = Backend::daemon("64M", &[]);
    disk.signal(Signal::TERM);
    assert_eq!(disk.wait(Duration::from_secs(1)).code(), Some(0));
    assert!(!disk.socket().exists(), "the socket is left behind");
}

/// Where the killed client is told its work, and how the tests call it.
const CLIENT_SOCKET: &str = "ZRAM_TEST_CLIENT_SOCKET";
const CLIENT_JOURNAL: &str = "ZRAM_TEST_CLIENT_JOURNAL";
const CLIENT_SEED: &str = "ZRAM_TEST_CLIENT_SEED";
const CLIENT_PAGES: u64 = 512;
const CLIENT_DEPTH: usize = 32;

/// One line of the client's journal: what is about to be written, or what was acknowledged.
#[derive(Clone, Copy)]
struct Record {
    acknowledged: bool,
    page: u64,
    seed: u64,
}

impl Record {
    fn to_bytes(self) -> [u8; 24] {
        let words = [u64::from(self.acknowledged), self.page, self.seed];
        let mut bytes = [0; 24];
        for (to, word) in bytes.chunks_mut(8).zip(words) {
            to.copy_from_slice(&word.to_le_bytes());
        }
        bytes
    }

    fn from_bytes(bytes: &[u8]) -> Record {
        let word = |i: usize| u64::from_le_bytes(bytes[i * 8..i * 8 + 8].try_into().unwrap());
        Record {
            acknowledged: word(0) == 1,
            page: word(1),
            seed: word(2),
        }
    }
}

/// Not a test by itself: the client that `every_acknowledged_write_survives_...` starts as a process and kills.
#[test]
#[ignore = "runs as the victim of another test"]
fn client_to_be_killed() {
    let Ok(socket) = std::env::var(CLIENT_SOCKET) else {
        return;
    };
    let mut journal = OpenOptions::new()
        .append(true)
        .open(std::env::var(CLIENT_JOURNAL).unwrap())
        .unwrap();
    let mut dice = Dice::seeded(std::env::var(CLIENT_SEED).unwrap().parse().unwrap());
    let mut client = wait_for("a connection", PATIENCE, || {
        Client::try_new(Path::new(&socket), 1, CLIENT_DEPTH * PAGE).ok()
    });
    let lane = &mut client.lanes[0];
    let mut in_flight: Vec<Option<Record>> = vec![None; CLIENT_DEPTH];
    loop {
        for (slot, place) in in_flight.iter_mut().enumerate() {
            if place.is_some() {
                continue;
            }
            // A slot has its own pages, so that no page has two writes in flight.
            let page = dice.below(CLIENT_PAGES / CLIENT_DEPTH as u64) * CLIENT_DEPTH as u64 + slot as u64;
            let record = Record {
                acknowledged: false,
                page,
                seed: dice.next(),
            };
            journal.write_all(&record.to_bytes()).unwrap();
            lane.submit_write(
                page * PAGE as u64,
                slot * PAGE,
                &Dice::seeded(record.seed).content(PAGE),
                slot,
            );
            *place = Some(record);
        }
        let (slot, result) = lane.complete().unwrap();
        assert_eq!(result, 0);
        let record = in_flight[slot].take().unwrap();
        journal
            .write_all(
                &Record {
                    acknowledged: true,
                    ..record
                }
                .to_bytes(),
            )
            .unwrap();
    }
}

fn spawn_client(disk: &Backend, journal: &Path, seed: u64) -> Child {
    Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "libblkio::client_to_be_killed", "--ignored", "--nocapture"])
        .env(CLIENT_SOCKET, disk.socket())
        .env(CLIENT_JOURNAL, journal)
        .env(CLIENT_SEED, seed.to_string())
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .spawn()
        .unwrap()
}

#[test]
fn every_acknowledged_write_survives_the_death_of_the_client() {
    let disk = Backend::daemon("16M", &[]);
    let dir = tempfile::tempdir().unwrap();
    let journal = dir.path().join("journal");
    File::create(&journal).unwrap();
    let mut dice = Dice::new();
    // What each page may hold: the last acknowledged content, or that of a later write that may or may not have happened.
    let mut allowed: Vec<Vec<Option<u64>>> = vec![vec![None]; CLIENT_PAGES as usize];
    let mut read_so_far = 0;
    for round in 0..200 {
        let mut client = spawn_client(&disk, &journal, dice.next());
        let target = read_so_far + 24 * (20 + dice.below(400));
        wait_for("the client writes", PATIENCE, || {
            assert!(
                client.try_wait().unwrap().is_none(),
                "the client ended by itself in round {round}"
            );
            (std::fs::metadata(&journal).unwrap().len() >= target).then_some(())
        });
        client.kill().unwrap();
        client.wait().unwrap();

        let mut bytes = Vec::new();
        File::open(&journal).unwrap().read_to_end(&mut bytes).unwrap();
        for record in bytes[read_so_far as usize..].chunks_exact(24).map(Record::from_bytes) {
            let page = &mut allowed[record.page as usize];
            if record.acknowledged {
                page.clear();
            }
            page.push(Some(record.seed));
        }
        read_so_far = bytes.len() as u64;

        let mut client = reconnect(&disk, 1, PAGE);
        for (page, contents) in allowed.iter_mut().enumerate() {
            let stored = client.lanes[0].read((page * PAGE) as u64, PAGE);
            let content = |seed: Option<u64>| seed.map_or(vec![0; PAGE], |seed| Dice::seeded(seed).content(PAGE));
            let found = contents.iter().copied().find(|seed| content(*seed) == stored);
            let found = found.unwrap_or_else(|| panic!("round {round}: page {page} holds none of {contents:?}"));
            *contents = vec![found];
        }
    }
    disk.assert_idle();
}

const EIO: i32 = 5;

#[test]
fn at_the_memory_limit_writes_fail_and_all_else_goes_on() {
    const LIMIT: usize = 4 * MIB;
    const CHUNK: usize = 64 << 10;
    let disk = Backend::daemon("64M", &["--mem-limit", "4M"]);
    let mut client = Client::new(&disk, 1, MIB);
    let lane = &mut client.lanes[0];
    let mut dice = Dice::new();
    let mut stored: Vec<Vec<u8>> = Vec::new();
    let refused = loop {
        let noise = dice.bytes(CHUNK);
        match lane.write((stored.len() * CHUNK) as u64, &noise) {
            Ok(()) => stored.push(noise),
            Err(error) => break error,
        }
        assert!(
            stored.len() * CHUNK <= LIMIT,
            "more incompressible bytes than the limit"
        );
    };
    assert_eq!(refused, EIO);
    assert!(
        stored.len() * CHUNK > LIMIT / 2,
        "only {} bytes fit under a limit of {LIMIT}",
        stored.len() * CHUNK
    );
    let check = |lane: &mut Lane, stored: &[Vec<u8>]| {
        for (i, noise) in stored.iter().enumerate() {
            assert!(lane.read((i * CHUNK) as u64, CHUNK) == *noise, "chunk {i}");
        }
    };
    check(lane, &stored);

    // A full disk: page by page until not one more fits, then what is there can be overwritten.
    let mut extra = 32u64 << 20;
    while lane.write(extra, &dice.bytes(PAGE)).is_ok() {
        extra += PAGE as u64;
    }
    for (i, chunk) in stored.iter_mut().enumerate() {
        for page in 0..CHUNK / PAGE {
            let noise = dice.bytes(PAGE);
            let at = i * CHUNK + page * PAGE;
            assert_eq!(
                lane.write(at as u64, &noise),
                Ok(()),
                "overwrite at {at} on a full disk"
            );
            chunk[page * PAGE..(page + 1) * PAGE].copy_from_slice(&noise);
        }
    }
    check(lane, &stored);
    // Zeroes need no room, in any place.
    assert_eq!(lane.write(48 << 20, &[0; PAGE]), Ok(()));
    // Overwriting may have made a hole or two, but no more room than that.
    let more = (0..)
        .take_while(|page| lane.write((40 << 20) + page * PAGE as u64, &dice.bytes(PAGE)).is_ok())
        .count();
    assert!(more < 32, "{more} more pages fit on a full disk");

    // Room that is given back is room again.
    let half = stored.len() / 2;
    lane.discard(0, (half * CHUNK) as u64).unwrap();
    for chunk in &mut stored[..half] {
        chunk.fill(0);
    }
    check(lane, &stored);
    for (i, chunk) in stored[..half].iter_mut().enumerate().take(half / 2) {
        *chunk = dice.bytes(CHUNK);
        let written = lane.write((i * CHUNK) as u64, chunk);
        assert_eq!(written, Ok(()), "chunk {i} of {half} after a discard");
    }
    check(lane, &stored);

    let stats = disk.stats();
    let number = |key: &str| stats[key].as_u64().unwrap();
    assert_eq!(number("mem_limit"), LIMIT as u64);
    assert!(number("mem_used_max") <= number("mem_limit"), "{stats}");
    assert!(number("failed_writes") >= 3, "{stats}");
    assert_eq!(number("failed_reads"), 0, "{stats}");
    disk.assert_idle();
}
