use std::os::fd::AsRawFd;
use std::time::Duration;

use virtio_queue::desc::split::Descriptor;
use vm_memory::{Bytes, GuestMemoryMmap};
use vmm_sys_util::sock_ctrl_msg::ScmSocket;

use super::*;
use crate::config::DeviceConfig;
use crate::config::tests::disk;
use crate::counters::RequestCounts;
use crate::limit::RateLimit;
use crate::ring::Areas;
use crate::ring::tests::{NEXT, WRITE, guest};

/// A disk of this name panics when it is asked for its serial: the stand-in for a defect of ours.
pub(crate) const PANICKING_DISK: &str = "panics";

pub(super) fn panic_if_asked(disk: &Disk, request: Request) {
    if disk.name() == PANICKING_DISK && matches!(request, Request::GetId(_)) {
        panic!("as asked");
    }
}

const SIZE: u16 = 16;
const DESCRIPTORS: u64 = 0;
const AVAIL: u64 = 0x1000;
const USED: u64 = 0x2000;
const HEADER: u64 = 0x3000;
const DATA: u64 = 0x4000;
const STATUS: u64 = 0x8000;

/// A queue without a thread, and the driver's side of it.
struct Bench {
    queue: QueueWorker,
    shared: Arc<Shared>,
    mem: Arc<GuestMemoryMmap>,
    call: EventFd,
    stop: AtomicBool,
    avail: u16,
}

impl Bench {
    fn new(change: impl FnOnce(&mut DeviceConfig)) -> Bench {
        let shared = Arc::new(Shared {
            disk: disk(64 << 30, change),
            counters: vec![QueueCounters::default()],
            log_limit: LogLimit::new("test"),
            failures: Burst::default(),
            channel: Default::default(),
            resizing: Default::default(),
        });
        let mem = Arc::new(guest(0x1_0000));
        let mut ring = Ring::new(SIZE);
        let areas = Areas {
            descriptors: GuestAddress(DESCRIPTORS),
            avail: GuestAddress(AVAIL),
            used: GuestAddress(USED),
        };
        ring.set_up(&Guest::of(&mem), SIZE, areas, false, false).unwrap();
        let signals = Arc::<Signals>::default();
        let call = EventFd::new(EFD_NONBLOCK).unwrap();
        signals.set_call(Some(file_of(&call)));
        let parts = Parts {
            index: 0,
            ring,
            guest: Guest::of(&mem),
            kick: Kick::Polled,
            signals,
            shared: shared.clone(),
        };
        let queue = QueueWorker::new(parts, shared.disk.zram.worker().unwrap());
        Bench {
            queue,
            shared,
            mem,
            call,
            stop: AtomicBool::new(false),
            avail: 0,
        }
    }

    fn put(&mut self, kind: u32, data: &[u8], writable: bool) {
        self.mem.write_obj(kind, GuestAddress(HEADER)).unwrap();
        self.mem.write_slice(data, GuestAddress(DATA)).unwrap();
        self.mem.write_obj(0xffu8, GuestAddress(STATUS)).unwrap();
        let flags = if writable { NEXT | WRITE } else { NEXT };
        let chain = [
            (HEADER, 16, NEXT, 1),
            (DATA, data.len() as u32, flags, 2),
            (STATUS, 1, WRITE, 0),
        ];
        for (index, (addr, len, flags, next)) in chain.into_iter().enumerate() {
            let descriptor = Descriptor::new(addr, len, flags, next);
            self.mem
                .write_obj(descriptor, GuestAddress(DESCRIPTORS + 16 * index as u64))
                .unwrap();
        }
        self.avail += 1;
        self.mem.write_obj(self.avail, GuestAddress(AVAIL + 2)).unwrap();
    }

    fn turn(&mut self) {
        self.queue.guarded(|queue| queue.turn(&self.stop));
    }

    fn used_and_status(&self) -> (u16, u8) {
        let used = self.mem.read_obj(GuestAddress(USED + 2)).unwrap();
        (used, self.mem.read_obj(GuestAddress(STATUS)).unwrap())
    }

    fn counts(&self) -> RequestCounts {
        RequestCounts::sum(self.shared.counters.iter())
    }
}

/// A descriptor of the same event, as one that came over the socket.
fn file_of(event: &EventFd) -> File {
    let (ours, theirs) = std::os::unix::net::UnixStream::pair().unwrap();
    ours.send_with_fd(&[0][..], event.as_raw_fd()).unwrap();
    theirs.recv_with_fd(&mut [0]).unwrap().1.unwrap()
}

fn range(sector: u64, count: u32) -> Vec<u8> {
    [&sector.to_le_bytes()[..], &count.to_le_bytes(), &[0; 4]].concat()
}

#[test]
fn a_panic_breaks_the_ring_and_no_more() {
    let mut bench = Bench::new(|config| config.name = PANICKING_DISK.to_string());
    bench.put(8, &[0; 20], true);
    bench.turn();
    assert_eq!((bench.counts().panics, bench.counts().broken_rings), (1, 1));
    assert_eq!(bench.used_and_status(), (0, 0xff));
    bench.turn();
    assert_eq!(bench.counts().panics, 1, "a broken ring is left alone");
    let mut ring = bench.queue.into_ring();
    assert_eq!(ring.broken(), Some(BrokenRing::Defect));
    ring.mend();
    assert_eq!(ring.broken(), None);
}

#[test]
fn requests_allocate_nothing() {
    let mut bench = Bench::new(|_| {});
    let mut serve = |rounds: u16| {
        for round in 0..rounds {
            let content: Vec<u8> = (0..4096u32).map(|at| (at / 9) as u8 ^ round as u8).collect();
            for (kind, writable) in [(1, false), (0, true)] {
                bench.put(kind, &content, writable);
                let counted = allocation_counter::measure(|| {
                    bench.queue.turn(&bench.stop);
                });
                assert!(
                    round < 300 || counted.count_total == 0,
                    "round {round}, type {kind}: {counted:?}"
                );
            }
        }
    };
    // What lasts is made with the first ones.
    serve(600);
    assert_eq!(bench.used_and_status().1, 0);
}

#[test]
fn a_batch_calls_once() {
    let mut bench = Bench::new(|_| {});
    for _ in 0..SIZE {
        bench.put(8, &[0; 20], true);
    }
    bench.turn();
    assert_eq!(bench.used_and_status(), (SIZE, 0));
    assert_eq!((bench.counts().get_ids, bench.counts().calls), (u64::from(SIZE), 1));
    assert_eq!(bench.call.read().unwrap(), 1);
}

#[test]
fn a_driver_that_keeps_many_in_flight_hears_of_half_of_them_at_a_time() {
    let mut bench = Bench::new(|_| {});
    for turn in 1..=2 {
        for _ in 0..SIZE {
            bench.put(8, &[0; 20], true);
        }
        bench.turn();
        assert_eq!(bench.used_and_status(), (turn * SIZE, 0));
    }
    // At first nothing is known of it.
    assert_eq!(bench.counts().calls, 1 + 2);
}

#[test]
fn nothing_waits_for_a_long_request_behind_it() {
    let long = |change: fn(Instant) -> (Request, Instant)| {
        let mut bench = Bench::new(|_| {});
        bench.put(8, &[0; 20], true);
        assert!(bench.queue.take().1.is_ok());
        assert!(bench.queue.answer(0, &bench.stop).is_ok());
        let (request, mut started) = change(Instant::now());
        bench.queue.show_before(request, &mut started).unwrap();
        (bench.used_and_status().0, bench.counts().calls) == (1, 1)
    };
    assert!(long(|now| (Request::Discard, now)));
    assert!(long(|now| (Request::WriteZeroes, now)));
    assert!(!long(|now| (Request::Flush, now)));
    assert!(long(|now| (Request::Flush, now - BATCH_TIME_MAX)));
}

#[test]
fn an_endless_producer_does_not_keep_a_stop_waiting() {
    let mut bench = Bench::new(|config| config.poll_max = Duration::from_micros(100));
    bench.queue.polling.woken(); // with a window
    bench.put(8, &[0; 20], true);
    bench.stop.store(true, Ordering::Relaxed);
    bench.turn();
    assert_eq!(bench.used_and_status(), (0, 0xff));
    assert_eq!(bench.queue.into_ring().base(), 0);
}

#[test]
fn a_request_that_a_stop_interrupts_is_put_back_and_done_again() {
    let mut bench = Bench::new(|_| {});
    // Parsed before the flag is looked at again: as if the stop came while it was executed.
    bench.put(11, &range(0, 1 << 20), false);
    assert_eq!(bench.queue.take(), (1, Ok(ControlFlow::Break(()))));
    let stop = AtomicBool::new(true);
    assert_eq!(bench.queue.answer_all(1, &stop), Ok(ControlFlow::Break(())));
    assert_eq!(bench.used_and_status(), (0, 0xff));
    assert_eq!(bench.queue.ring.base(), 0);
    bench.turn();
    assert_eq!(bench.used_and_status(), (1, 0));
}

#[test]
fn requests_above_the_limit_wait_in_the_ring_and_are_not_lost() {
    let limit = |per_second| RateLimit {
        iops: Some(per_second),
        burst: Duration::ZERO,
        ..RateLimit::default()
    };
    let mut bench = Bench::new(|config| config.rate_limit = limit(1));
    for _ in 0..3 {
        bench.put(0, &[0; 512], true);
    }
    bench.turn();
    assert_eq!(bench.used_and_status().0, 1, "the first passes");
    assert_eq!(bench.counts().calls, 1, "and is told of");
    assert!(
        (90..=101).contains(&bench.queue.sleep_ms()),
        "{}",
        bench.queue.sleep_ms()
    );
    bench.turn();
    assert_eq!(bench.used_and_status().0, 1, "a kick changes nothing");
    bench.shared.disk.limiter.set(&limit(1000));
    let end = Instant::now() + Duration::from_secs(10);
    while bench.used_and_status().0 < 3 {
        assert!(Instant::now() < end);
        std::thread::sleep(Duration::from_millis(bench.queue.sleep_ms().max(0) as u64));
        bench.turn();
    }
    assert_eq!(bench.counts().reads, 3);
}

#[test]
fn discards_pass_whatever_the_limit() {
    let mut bench = Bench::new(|config| {
        config.rate_limit.bytes_per_second = Some(1);
        config.rate_limit.burst = Duration::ZERO;
    });
    for used in 1..=3 {
        bench.put(11, &range(0, 8), false);
        bench.turn();
        assert_eq!(bench.used_and_status(), (used, 0));
    }
}

#[test]
fn a_whole_disk_is_discarded_at_once() {
    let mut bench = Bench::new(|_| {});
    bench.put(11, &range(0, (64u64 << 30 >> 9) as u32), false);
    bench.turn();
    assert_eq!(bench.used_and_status(), (1, 0));
}

#[test]
fn refusals_are_counted_by_kind() {
    let mut bench = Bench::new(|_| {});
    bench.put(99, &[0; 16], false);
    bench.turn();
    assert_eq!((bench.used_and_status(), bench.counts().unsupported), ((1, 2), 1));
    bench.put(1, &[0; 100], false);
    bench.turn();
    assert_eq!((bench.used_and_status(), bench.counts().io_errors), ((2, 1), 1));
    assert_eq!(bench.shared.disk.zram.stats().invalid_io, 1);
}

#[test]
fn a_full_pipe_as_call_is_a_lost_call_and_nothing_else() {
    let mut bench = Bench::new(|_| {});
    let (reader, writer) = std::io::pipe().unwrap();
    let writer = File::from(std::os::fd::OwnedFd::from(writer));
    rustix::fs::fcntl_setfl(&writer, rustix::fs::OFlags::NONBLOCK).unwrap();
    while (&writer).write(&[0; 4096]).is_ok() {}
    bench.queue.signals.set_call(Some(writer));
    bench.put(8, &[0; 20], true);
    bench.turn();
    assert_eq!((bench.used_and_status(), bench.counts().calls_lost), ((1, 0), 1));
    drop(reader);
    bench.put(8, &[0; 20], true);
    bench.turn();
    assert_eq!((bench.used_and_status(), bench.counts().calls_lost), ((2, 0), 2));
}

#[test]
fn thread_names_fit_and_keep_the_queue() {
    assert_eq!(thread_name("vm7", Some(0)), "zram-vm7-q0");
    assert_eq!(thread_name("a-rather-long-name", Some(63)), "zram-a-rath-q63");
    assert_eq!(thread_name("a-rather-long-name", None), "zram-a-rather-l");
    assert_eq!(
        thread_name("\u{e4}\u{e4}\u{e4}\u{e4}", Some(63)),
        "zram-\u{e4}\u{e4}\u{e4}-q63"
    );
}
