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
        ("bandwidth-limit=1KB", "K, M, G, T"),
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
