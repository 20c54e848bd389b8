//! What the operator changes while a frontend is connected, and what it sees of that.

use std::process::{Command, Output};
use std::time::{Duration, Instant};

use crate::raw::{Guest, Request, range};
use crate::support::Backend;

const DISK: &str = "64M";
const PAGE: usize = 4096;
const PATIENCE: Duration = Duration::from_secs(30);

fn ctl(backend: &Backend, args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_vzramctl"))
        .arg("--control")
        .arg(backend.control())
        .args(args)
        .output()
        .unwrap()
}

fn said(backend: &Backend, args: &[&str]) -> String {
    let output = ctl(backend, args);
    assert_eq!(
        output.status.code(),
        Some(0),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    String::from_utf8(output.stdout).unwrap()
}

fn refused(backend: &Backend, args: &[&str]) -> String {
    let output = ctl(backend, args);
    assert!(matches!(output.status.code(), Some(1 | 2)), "{args:?}");
    String::from_utf8(output.stderr).unwrap()
}

#[test]
fn rate_limits_change_under_a_running_guest() {
    let disk = Backend::daemon(DISK, &["--serial", "d"]);
    let mut guest = Guest::new(disk.connect());
    let mut queue = guest.queue(0, 64);
    queue.read(0, PAGE);

    let line = said(&disk, &["set", "d", "iops-limit=100", "limit-burst-ms=0"]);
    assert!(
        line.ends_with("\nd: iops-limit=100 bandwidth-limit=none limit-burst-ms=0\n"),
        "{line}"
    );
    // A limit is a lower bound of the time, whatever else the machine does.
    let timed = |queue: &mut crate::raw::Queue, reads: u64| {
        let started = Instant::now();
        (0..reads).for_each(|i| drop(queue.read(i * 8, PAGE)));
        started.elapsed()
    };
    let took = timed(&mut queue, 21);
    assert!(took >= Duration::from_millis(195), "{took:?}");
    said(&disk, &["set", "d", "iops-limit=none", "bandwidth-limit=400K"]);
    let took = timed(&mut queue, 21);
    assert!(took >= Duration::from_millis(195), "{took:?}");
    let stats = disk.stats();
    assert_eq!(
        (&stats["iops_limit"], &stats["bandwidth_limit"]),
        (&0.into(), &409_600.into())
    );
    // No data, so no bandwidth: a second's worth of it many times over.
    let started = Instant::now();
    for i in 0..200 {
        assert_eq!(queue.run(&Request::discard(&[range(i * 8, 1024)])).status, 0);
    }
    assert!(started.elapsed() < Duration::from_secs(100), "{:?}", started.elapsed());

    // Who waits is let go when the limit goes, and not when it would have been allowed.
    said(&disk, &["set", "d", "bandwidth-limit=1"]);
    queue.read(0, PAGE);
    let waiting = Request::read(0, PAGE);
    let since = queue.offered;
    let ticket = queue.submit(&waiting);
    queue.kick(since);
    assert!(
        queue.wait_used(Duration::from_millis(300)).is_none(),
        "4096 seconds are owed"
    );
    said(&disk, &["set", "d", "bandwidth-limit=none"]);
    let used = queue.wait_used(PATIENCE).expect("an answer");
    assert_eq!(queue.finish(ticket, used).status, 0);
}

#[test]
fn what_is_no_rate_limit_is_refused_and_changes_nothing() {
    let disk = Backend::daemon(DISK, &["--serial", "d", "--iops-limit", "1000"]);
    for (value, reason) in [
        ("iops-limit=0", "from 1, or none"),
        ("bandwidth-limit=0", "from 1, or none"),
        ("limit-burst-ms=60001", "0 to 60000"),
        ("limit-burst-ms=none", "0 to 60000"),
        ("iops=5", "iops-limit"),
        ("algorithm=zstd", "algorithm is fixed while the disk is there"),
        ("size=8M", "resize changes it"),
        ("bandwidth-limit=1KB", "K, M, G, T"),
        ("iops-limit=5K", "a whole number"),
        ("iops-limit=-5", "a whole number"),
    ] {
        let error = refused(&disk, &["set", "d", "mem-limit=1M", value]);
        assert!(error.contains(reason), "{value}: {error}");
    }
    let stats = disk.stats();
    assert_eq!(stats["iops_limit"], 1000);
    assert_eq!(stats["bandwidth_limit"], 0);
    assert_eq!(stats["mem_limit"], 0);
    assert_eq!(stats["limit_burst_ms"], 100);
}

/// Names and allowed CPUs of the daemon's threads.
fn threads(backend: &Backend) -> Vec<(String, String)> {
    let tasks = std::fs::read_dir(format!("/proc/{}/task", backend.pid())).unwrap();
    let field = |status: &str, key: &str| {
        let line = status.lines().find(|line| line.starts_with(key)).unwrap();
        line.split_whitespace().last().unwrap().to_string()
    };
    tasks
        .filter_map(|task| std::fs::read_to_string(task.unwrap().path().join("status")).ok())
        .map(|status| (field(&status, "Name:"), field(&status, "Cpus_allowed_list:")))
        .collect()
}

#[test]
fn workers_stay_on_the_cpus_that_were_given_and_other_threads_do_not() {
    let own = std::fs::read_to_string("/proc/self/status").unwrap();
    let all = own
        .lines()
        .find_map(|line| line.strip_prefix("Cpus_allowed_list:"))
        .unwrap()
        .trim()
        .to_string();
    let first = all.split([',', '-']).next().unwrap();
    let last = all.rsplit([',', '-']).next().unwrap();
    let list = if first == last {
        first.to_string()
    } else {
        format!("{last},{first}")
    };
    let disk = Backend::daemon(DISK, &["--serial", "d", "--cpus", &list]);
    let mut guest = Guest::new(disk.connect());
    let mut queues: Vec<_> = (0..3).map(|index| guest.queue(index, 64)).collect();
    queues.iter_mut().for_each(|queue| drop(queue.read(0, PAGE)));
    for (name, cpus) in threads(&disk) {
        let expected = match name.as_str() {
            "zram-d-q0" | "zram-d-q2" => last,
            "zram-d-q1" => first,
            _ => &all,
        };
        assert_eq!(cpus, expected, "{name}");
    }
    assert_eq!(threads(&disk).iter().filter(|(name, _)| name.contains("-q")).count(), 3);
    // The next frontend's are new threads.
    drop(queues);
    drop(guest);
    let mut guest = Guest::reconnect(&disk);
    guest.queue(0, 64).read(0, PAGE);
    assert!(threads(&disk).contains(&("zram-d-q0".into(), last.into())));
}

fn stream_of_pages(queue: &mut crate::raw::Queue, pages: std::ops::Range<u64>) {
    for number in pages {
        queue.write(number * 8, &vec![number as u8 | 1; PAGE]);
    }
}

#[test]
fn a_disk_grows_under_its_guest_and_shrinks_when_its_end_is_empty() {
    let disk = Backend::daemon("4M", &["--serial", "d", "--size-max", "64M"]);
    let line = said(&disk, &["resize", "d", "8M"]);
    assert_eq!(line, "d: 4M -> 8M\nd: no VMM is connected; the next one will see it\n");
    let mut guest = Guest::new(disk.connect());
    let mut queue = guest.queue(0, 64);
    assert_eq!(guest.capacity_sectors(), 16384);
    stream_of_pages(&mut queue, 1900..2048);

    let line = said(&disk, &["resize", "d", "64M"]);
    assert_eq!(
        line,
        "d: 8M -> 64M\nd: its VMM cannot be told; the guest sees it when the VMM connects again\n"
    );
    assert_eq!(guest.capacity_sectors(), 131_072);
    assert_eq!(disk.stats()["disksize"], 64 << 20);
    assert_eq!(queue.read(131_064, PAGE), [0; PAGE]);
    stream_of_pages(&mut queue, 16_380..16_384);

    let error = refused(&disk, &["resize", "d", "4M"]);
    assert!(error.contains("152 pages behind that hold data"), "{error}");
    assert!(error.contains("ends at byte 67108864"), "{error}");
    assert_eq!(queue.read(16_380 * 8, PAGE), [16_380u64 as u8 | 1; PAGE]);
    let zeroed = queue.run(&Request::discard(&[range(1900 * 8, (16_384 - 1900) * 8)]));
    assert_eq!(zeroed.status, 0);
    stream_of_pages(&mut queue, 1000..1001);
    assert!(said(&disk, &["resize", "d", "4M"]).starts_with("d: 64M -> 4M\n"));
    assert_eq!(guest.capacity_sectors(), 8192);
    assert_eq!(queue.run(&Request::read(8192, PAGE)).status, 1, "behind the end");
    assert_eq!(queue.read(8000, PAGE), [1000u64 as u8 | 1; PAGE]);
    assert_eq!(said(&disk, &["resize", "d", "4M"]), "d: it has 4M already\n");
}

#[test]
fn a_frontend_with_a_channel_is_told_of_a_new_size() {
    use std::io::Read;

    use vhost::vhost_user::VhostUserFrontend;
    let disk = Backend::daemon("4M", &["--serial", "d"]);
    let mut guest = Guest::new(disk.connect());
    let (ours, mut theirs) = std::os::unix::net::UnixStream::pair().unwrap();
    guest.frontend.set_backend_request_fd(&ours).unwrap();
    let mut queue = guest.queue(0, 64);
    queue.read(0, PAGE);
    assert_eq!(
        said(&disk, &["resize", "d", "5M"]),
        "d: 4M -> 5M\nd: its VMM was told\n"
    );
    let mut message = [0; 12];
    theirs.read_exact(&mut message).unwrap();
    assert_eq!(message, [2, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0]);
    assert_eq!(guest.capacity_sectors(), 10_240);
}

#[test]
fn a_size_that_a_disk_cannot_have_is_refused_with_those_that_it_can() {
    let disk = Backend::daemon("4M", &["--serial", "d", "--size-max", "8M"]);
    for (size, reason) in [
        ("8M1", "K, M, G, T"),
        ("0", "1 byte to 16T"),
        ("17T", "1 byte to 16T"),
        ("9M", "9 MiB: it can have 8 MiB at most"),
        ("16T", "16 TiB: it can have 8 MiB at most"),
    ] {
        let error = refused(&disk, &["resize", "d", size]);
        assert!(error.contains(reason), "{size}: {error}");
    }
    assert_eq!(disk.stats()["disksize"], 4 << 20);
    assert!(
        said(&disk, &["resize", "d", "4194305"]).starts_with("d: 4M -> 4M\n"),
        "whole pages"
    );
    assert_eq!(disk.stats()["disksize"], (4 << 20) + 4096);
}

#[test]
fn guests_go_on_while_the_size_changes() {
    let disk = Backend::daemon("4M", &["--serial", "d"]);
    let mut guest = Guest::new(disk.connect());
    let mut queues: Vec<_> = (0..2).map(|index| guest.queue(index, 64)).collect();
    let control = disk.control();
    let resizing = std::thread::spawn(move || {
        for round in 0..40 {
            let size = if round % 2 == 0 { "32M" } else { "2M" };
            let output = Command::new(env!("CARGO_BIN_EXE_vzramctl"))
                .arg("--control")
                .arg(&control)
                .args(["resize", "d", size])
                .output()
                .unwrap();
            assert_eq!(
                output.status.code(),
                Some(0),
                "{}",
                String::from_utf8_lossy(&output.stderr)
            );
        }
    });
    let mut round = 0u64;
    while !resizing.is_finished() {
        for (index, queue) in queues.iter_mut().enumerate() {
            let page = index as u64 * 250 + round % 250;
            let content = vec![round as u8; PAGE];
            queue.write(page * 8, &content);
            assert_eq!(queue.read(page * 8, PAGE), content);
        }
        round += 1;
    }
    resizing.join().unwrap();
    assert_eq!(disk.stats()["disksize"], 2 << 20);
}
