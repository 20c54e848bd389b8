//! Ends in the middle: of the daemon, of frontends, of what they say; and who notices nothing of it.

use std::io::Write;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use rustix::process::Signal;
use vhost::VhostBackend;
use vhost::vhost_user::VhostUserFrontend;
use vhost::vhost_user::message::VhostUserConfigFlags;
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use crate::raw::{Guest, LINUX_FEATURES, REGIONS};
use crate::support::{Backend, Dice, wait_for};

const DISK: &str = "16M";
const PAGE: usize = 4096;
const PATIENCE: Duration = Duration::from_secs(30);

type Step = fn(&mut Guest) -> bool;

/// What a frontend says after it has negotiated, in QEMU's order; true where it went well.
const SETUP: [Step; 14] = [
    |guest| guest.frontend.get_queue_num().is_ok(),
    |guest| guest.frontend.get_max_mem_slots().is_ok(),
    |guest| {
        guest
            .frontend
            .get_config(0, 60, VhostUserConfigFlags::empty(), &[0; 60])
            .is_ok()
    },
    |guest| guest.frontend.set_features(guest.features).is_ok(),
    |guest| {
        let regions: Vec<_> = (0..REGIONS.len()).map(|index| guest.region(index)).collect();
        guest.frontend.set_mem_table(&regions).is_ok()
    },
    |guest| guest.frontend.set_vring_enable(0, true).is_ok(),
    |guest| guest.frontend.set_vring_num(0, 64).is_ok(),
    |guest| guest.frontend.set_vring_base(0, 0).is_ok(),
    |guest| {
        let queue = guest.lay_out_queue(0, 64);
        guest.frontend.set_vring_addr(0, &Guest::ring_addresses(&queue)).is_ok()
    },
    |guest| {
        guest
            .frontend
            .set_vring_kick(0, &EventFd::new(EFD_NONBLOCK).unwrap())
            .is_ok()
    },
    |guest| {
        guest
            .frontend
            .set_vring_call(0, &EventFd::new(EFD_NONBLOCK).unwrap())
            .is_ok()
    },
    |guest| guest.frontend.get_vring_base(0).is_ok(),
    |guest| guest.frontend.reset_device().is_ok(),
    |guest| guest.frontend.get_features().is_ok(),
];

/// The next steps end with an error, soon: nobody waits for an answer that never comes.
#[test]
fn a_frontend_learns_at_once_that_its_backend_died_and_the_next_backend_takes_its_place() {
    let mut disk = Backend::daemon(DISK, &[]);
    for died_after in 0..SETUP.len() {
        let mut guest = Guest::without_memory(disk.connect(), LINUX_FEATURES).unwrap();
        for step in &SETUP[..died_after] {
            assert!(step(&mut guest), "a step before {died_after}");
        }
        disk.signal(Signal::KILL);
        disk.wait(PATIENCE);
        let started = Instant::now();
        let answered = SETUP[died_after..].iter().filter(|step| step(&mut guest)).count();
        assert_eq!(answered, 0, "died after {died_after}");
        assert!(started.elapsed() < PATIENCE);
        // Socket files are where the last one left them.
        disk = disk.again();
        let mut guest = Guest::new(disk.connect());
        guest.queue(0, 64).read(0, PAGE);
    }
}

#[test]
fn a_storm_of_connections_and_half_messages_is_not_noticed_by_the_frontend_that_is_served() {
    let disk = Backend::daemon(DISK, &[]);
    let mut guest = Guest::new(disk.connect());
    let mut queue = guest.queue(0, 64);
    queue.write(0, &[7; PAGE]);
    let before = disk.settled_counts();
    let stop = AtomicBool::new(false);
    let reads = std::thread::scope(|scope| {
        let storm = |seed: u64| {
            let (disk, stop) = (&disk, &stop);
            move || {
                let mut dice = Dice::seeded(seed);
                let mut connections = 0;
                while !stop.load(Ordering::Relaxed) {
                    // The backlog may be full for a moment: that is what a storm does.
                    let Ok(mut stream) = UnixStream::connect(disk.socket()) else {
                        continue;
                    };
                    let len = dice.below(40) as usize;
                    // It may be closed already.
                    let _ = stream.write_all(&dice.bytes(len));
                    connections += 1;
                }
                connections
            }
        };
        let storms: Vec<_> = (0..2).map(|seed| scope.spawn(storm(seed))).collect();
        let started = Instant::now();
        let mut reads = 0;
        while reads < 500 || started.elapsed() < Duration::from_secs(2) {
            assert_eq!(queue.read(0, PAGE), [7; PAGE]);
            reads += 1;
        }
        stop.store(true, Ordering::Relaxed);
        let connections: u64 = storms.into_iter().map(|storm| storm.join().unwrap()).sum();
        assert!(connections > 500, "only {connections}");
        reads
    });
    assert!(reads >= 500);
    let stats = disk.stats();
    assert_eq!(stats["connections_total"], 1);
    assert!(stats["refused_connections"].as_u64().unwrap() > 500, "{stats}");
    assert!(disk.stderr().len() < 10_000, "the log is filled");
    wait_for("nothing is left", PATIENCE, || {
        (disk.settled_counts() == before).then_some(())
    });
}

#[test]
fn queues_come_and_go_a_thousand_times_and_leave_nothing() {
    let disk = Backend::daemon(DISK, &[]);
    let mut dice = Dice::new();
    let mut cycle = |disk: &Backend, round: u64| {
        let mut guest = Guest::reconnect(disk);
        let mut queues: Vec<_> = (0..1 + dice.below(4) as usize)
            .map(|index| guest.queue(index, 64))
            .collect();
        for (index, queue) in queues.iter_mut().enumerate() {
            let sector = 8 * (round % 1000 + 1000 * index as u64);
            queue.write(sector, &vec![round as u8; PAGE]);
            assert_eq!(queue.read(sector, PAGE), vec![round as u8; PAGE]);
        }
        if dice.chance(2) {
            for queue in &queues {
                guest.stop(queue);
            }
        }
    };
    (0..50).for_each(|round| cycle(&disk, round));
    let before = disk.settled_counts();
    let rss_before = disk.rss_bytes();
    (0..1000).for_each(|round| cycle(&disk, round));
    wait_for("descriptors and threads are as before", PATIENCE, || {
        (disk.settled_counts() == before).then_some(())
    });
    // Four pages a round were stored at most, and 4000 there are.
    let grown = disk.rss_bytes().saturating_sub(rss_before);
    assert!(grown < 4000 * PAGE as u64 + (4 << 20), "{grown} bytes more");
}

#[test]
fn sixty_four_queues_without_requests_use_no_cpu() {
    let disk = Backend::daemon("64M", &["--poll-us", "1000"]);
    let mut guest = Guest::new(disk.connect());
    guest.share_buffers_among(64);
    let mut queues: Vec<_> = (0..64).map(|index| guest.queue(index, 64)).collect();
    for (index, queue) in queues.iter_mut().enumerate() {
        for round in 0..20 {
            queue.write(8 * (index as u64 * 100 + round), &[index as u8; PAGE]);
        }
    }
    disk.assert_idle();
    let before = disk.cpu_time();
    let started = Instant::now();
    wait_for("three seconds pass", PATIENCE, || {
        (started.elapsed() >= Duration::from_secs(3)).then_some(())
    });
    let used = disk.cpu_time() - before;
    assert!(used <= Duration::from_millis(20), "{used:?} in three seconds of rest");
}
