//! End to end: 4 KiB random reads and writes through libblkio, of any vhost-user-blk backends in turn.
//!
//! `cargo bench --bench device -- [--pages FILE] [--mib N] [--depth N] [--seconds N] [--rounds N] NAME=SOCKET[,PID]...`
//!
//! One queue. The first `--mib` (default 256) of each disk are filled with the 4 KiB pages of FILE, or with pages made
//! here, and every read is compared. With the backend's PID its CPU time a request is shown (of all its threads). Medians
//! of the rounds. Start backend and bench on different cores (taskset), and rivals in the same run: absolute figures
//! wander on shared machines, ratios less. Without a disk it does nothing, so that `cargo bench` builds it.
#![allow(clippy::unwrap_used)] // a bench: an error is a failure

use std::fs::{self, File};
use std::mem::MaybeUninit;
use std::os::fd::AsRawFd;
use std::time::{Duration, Instant};

use blkio::{Blkio, Blkioq, Completion, MemoryRegion, ReqFlags};
use rustix::fs::{MemfdFlags, memfd_create};
use vm_memory::{FileOffset, MmapRegion, VolatileMemory};

const PAGE: usize = 4096;
/// The kernel's unit of CPU times in /proc: 1/100 s on all its architectures.
const TICKS_PER_SECOND: f64 = 100.0;

struct Options {
    pages: Vec<Vec<u8>>,
    disk_pages: u64,
    depth: usize,
    time: Duration,
    rounds: usize,
    disks: Vec<Disk>,
}

struct Disk {
    name: String,
    socket: String,
    pid: Option<u32>,
}

fn main() {
    let options = parse();
    let mut results: Vec<[Vec<Figures>; 2]> = options.disks.iter().map(|_| Default::default()).collect();
    for disk in &options.disks {
        Load::connect(disk, &options).fill();
    }
    for _ in 0..options.rounds {
        for (disk, [reads, writes]) in options.disks.iter().zip(&mut results) {
            reads.push(Load::connect(disk, &options).run(false));
            writes.push(Load::connect(disk, &options).run(true));
        }
    }
    if !results.is_empty() {
        println!(
            "4 KiB random, one queue, depth {}, medians of {} rounds",
            options.depth, options.rounds
        );
        println!(
            "{:<12} {:>9} {:>9} {:>12} {:>12}",
            "disk", "reads/s", "writes/s", "CPU us/read", "CPU us/write"
        );
    }
    for (disk, [reads, writes]) in options.disks.iter().zip(&results) {
        let [rate, cpu] = [|f: &Figures| f.rate, |f: &Figures| f.cpu_us]
            .map(|of: fn(&Figures) -> f64| [reads, writes].map(|figures| median(figures.iter().map(of).collect())));
        println!(
            "{:<12} {:>9.0} {:>9.0} {:>12.2} {:>12.2}",
            disk.name, rate[0], rate[1], cpu[0], cpu[1]
        );
    }
}

fn parse() -> Options {
    let (mut pages, mut mib, mut depth, mut seconds, mut rounds, mut disks) = (None, 256, 32, 2.0, 5, vec![]);
    let mut arguments = std::env::args().skip(1);
    while let Some(argument) = arguments.next() {
        let mut value = || arguments.next().unwrap_or_else(|| panic!("{argument} needs a value"));
        match argument.as_str() {
            "--bench" => {} // cargo's own
            "--pages" => pages = Some(value()),
            "--mib" => mib = value().parse().expect("--mib N"),
            "--depth" => depth = value().parse().expect("--depth N"),
            "--seconds" => seconds = value().parse().expect("--seconds N"),
            "--rounds" => rounds = value().parse().expect("--rounds N"),
            disk => {
                let (name, rest) = disk.split_once('=').expect("NAME=SOCKET[,PID]");
                let (socket, pid) = rest
                    .rsplit_once(',')
                    .map_or((rest, None), |(socket, pid)| (socket, pid.parse().ok()));
                disks.push(Disk {
                    name: name.into(),
                    socket: socket.into(),
                    pid,
                });
            }
        }
    }
    let bytes = pages.map_or_else(made_pages, |file| fs::read(file).unwrap());
    Options {
        pages: bytes.chunks_exact(PAGE).map(<[u8]>::to_vec).collect(),
        disk_pages: mib << 20 >> 12,
        depth,
        time: Duration::from_secs_f64(seconds),
        rounds,
        disks,
    }
}

/// Pages that shrink to a third or so: words of few kinds, with numbers between.
fn made_pages() -> Vec<u8> {
    let mut random = Random(1);
    (0..4096 * PAGE / 16)
        .flat_map(|_| format!("{:06x} guest:{:02x} ", random.next() & 0xff_ffff, random.next() & 3).into_bytes())
        .collect()
}

struct Figures {
    rate: f64,
    cpu_us: f64,
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }
}

/// A connection to one disk: its queue, and a buffer of a page for each request in flight.
struct Load<'a> {
    options: &'a Options,
    pid: Option<u32>,
    memory: MmapRegion,
    queue: Blkioq,
    _blkio: Blkio,
}

impl<'a> Load<'a> {
    fn connect(disk: &Disk, options: &'a Options) -> Load<'a> {
        // A backend may need a moment to notice that the last connection is gone.
        let deadline = Instant::now() + Duration::from_secs(5);
        let (mut blkio, started) = loop {
            let mut blkio = Blkio::new("virtio-blk-vhost-user").unwrap();
            blkio.set_str("path", &disk.socket).unwrap();
            match blkio.connect().and_then(|()| blkio.start()) {
                Ok(started) => break (blkio, started),
                Err(error) => assert!(Instant::now() < deadline, "{}: {error}", disk.socket),
            }
        };
        let file = File::from(memfd_create("bench", MemfdFlags::CLOEXEC).unwrap());
        let len = options.depth * PAGE;
        file.set_len(len as u64).unwrap();
        let fd = file.as_raw_fd();
        let memory: MmapRegion = MmapRegion::from_file(FileOffset::new(file, 0), len).unwrap();
        let addr = memory.as_ptr() as usize;
        blkio
            .map_mem_region(&MemoryRegion {
                addr,
                iova: 0,
                len,
                fd,
                fd_offset: 0,
                flags: 0,
            })
            .unwrap();
        let queue = started.queues.into_iter().next().unwrap();
        Load {
            options,
            pid: disk.pid,
            memory,
            queue,
            _blkio: blkio,
        }
    }

    /// What page of the disk holds: every version of it is the same, so that a read can be compared at any time.
    fn content(&self, page: u64) -> &[u8] {
        &self.options.pages[(page * 7 % self.options.pages.len() as u64) as usize]
    }

    fn fill(mut self) {
        for page in 0..self.options.disk_pages {
            self.submit(0, page, true);
            self.complete();
        }
    }

    fn run(mut self, writes: bool) -> Figures {
        let mut random = Random(0x9e37_79b9_7f4a_7c15 ^ u64::from(writes));
        let mut in_flight = vec![0; self.options.depth];
        let (start, cpu) = (Instant::now(), self.cpu_seconds());
        let mut done = 0_u64;
        for (slot, page) in in_flight.iter_mut().enumerate() {
            *page = random.next() % self.options.disk_pages;
            self.submit(slot, *page, writes);
        }
        let mut left = self.options.depth;
        while left > 0 {
            let slot = self.complete();
            done += 1;
            if !writes {
                let mut got = [0; PAGE];
                self.memory.get_slice(slot * PAGE, PAGE).unwrap().copy_to(&mut got);
                assert!(
                    got == *self.content(in_flight[slot]),
                    "page {} is wrong",
                    in_flight[slot]
                );
            }
            if start.elapsed() < self.options.time {
                in_flight[slot] = random.next() % self.options.disk_pages;
                self.submit(slot, in_flight[slot], writes);
            } else {
                left -= 1;
            }
        }
        let (seconds, cpu) = (start.elapsed().as_secs_f64(), self.cpu_seconds() - cpu);
        Figures {
            rate: done as f64 / seconds,
            cpu_us: cpu * 1e6 / done as f64,
        }
    }

    fn submit(&mut self, slot: usize, page: u64, write: bool) {
        let pointer = self.memory.as_ptr().wrapping_add(slot * PAGE);
        let at = page * PAGE as u64;
        if write {
            self.memory
                .get_slice(slot * PAGE, PAGE)
                .unwrap()
                .copy_from(self.content(page));
            self.queue.write(at, pointer, PAGE, slot, ReqFlags::empty());
        } else {
            self.queue.read(at, pointer, PAGE, slot, ReqFlags::empty());
        }
    }

    /// Waits for one request; gives its slot.
    fn complete(&mut self) -> usize {
        let none = Completion {
            user_data: 0,
            error_msg: std::ptr::null(),
            ret: 0,
            reserved_: [0; 12],
        };
        let mut completion = [MaybeUninit::new(none)];
        self.queue
            .do_io(&mut completion, 1, Some(&mut Duration::from_secs(10)), None)
            .unwrap();
        // SAFETY: the element was initialised above, and libblkio only overwrites it with another completion.
        let completion = unsafe { completion[0].assume_init_ref() };
        assert_eq!(completion.ret, 0, "a request failed");
        completion.user_data
    }

    /// CPU time of the backend so far, user and system, all threads.
    fn cpu_seconds(&self) -> f64 {
        let Some(pid) = self.pid else { return f64::NAN };
        let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
        let fields: Vec<_> = stat.rsplit(')').next().unwrap().split_whitespace().collect();
        (fields[11].parse::<f64>().unwrap() + fields[12].parse::<f64>().unwrap()) / TICKS_PER_SECOND
    }
}
