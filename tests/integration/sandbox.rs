//! What the daemon gives up, seen from outside, and hosts that do not let it.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::thread;

use rustix::process::Signal;
use seccompiler::{SeccompAction, SeccompFilter};
use tempfile::tempdir;

use crate::control::stats;
use crate::program::{Daemon, control, wait_for};
use crate::raw::Guest;
use crate::support::Backend;

/// One line of /proc/PID/task/TID/status for each thread, by the thread's name.
fn of_threads(pid: u32, key: &str) -> Vec<(String, u32)> {
    let tasks = fs::read_dir(format!("/proc/{pid}/task")).unwrap().flatten();
    let mut all: Vec<(String, u32)> = tasks
        .filter_map(|task| {
            let status = fs::read_to_string(task.path().join("status")).ok()?;
            let value = |key: &str| {
                status
                    .lines()
                    .find_map(|line| line.strip_prefix(key)?.strip_prefix(':').map(str::trim))
            };
            Some((value("Name")?.to_string(), value(key)?.parse().unwrap()))
        })
        .collect();
    all.sort();
    all
}

#[test]
fn every_thread_of_a_served_disk_is_in_the_sandbox() {
    // With its filters: each kind has two, and those of the thread that started it.
    const THREADS: [(&str, u32); 7] = [
        ("control", 2),
        ("control-client", 4),
        ("vhost-user-zram", 2),
        ("zram-disk", 2),
        ("zram-disk-q0", 4),
        ("zram-disk-q1", 4),
        ("zram-upkeep", 2),
    ];
    for mode in ["kill", "log", "off"] {
        let backend = Backend::daemon("16M", &["--sandbox", mode]);
        let mut guest = Guest::new(backend.connect());
        let (mut first, _second) = (guest.queue(0, 16), guest.queue(1, 16));
        first.write(0, &[7; 4096]);
        let _client = UnixStream::connect(backend.control()).unwrap();
        let on = u32::from(mode != "off");
        for key in ["Seccomp", "NoNewPrivs", "Seccomp_filters"] {
            let expected = |filters| match key {
                "Seccomp" => 2, // SECCOMP_MODE_FILTER
                "NoNewPrivs" => 1,
                _ => filters,
            };
            let expected = THREADS.map(|(name, filters)| (name.to_string(), on * expected(filters)));
            wait_for(&format!("{key} in mode {mode}"), || {
                (of_threads(backend.pid(), key) == expected).then_some(())
            });
        }
        let stats = backend.stats();
        assert_eq!(stats["sandbox"]["mode"], mode);
        assert_eq!(stats["sandbox"]["system_calls"], mode != "off");
        assert_ne!(
            stats["frontend"]["command"], "",
            "the one thing that is read from a file"
        );
        if mode != "kill" {
            assert_eq!(stats["sandbox"]["files"], "none", "{mode}");
        }
    }
}

/// A daemon on a host that answers these system calls with `errno`.
fn on_a_host_without(directory: &Path, calls: &[i64], errno: i32) -> Daemon {
    let rules: BTreeMap<i64, _> = calls.iter().map(|&call| (call, Vec::new())).collect();
    let refuses = SeccompAction::Errno(errno as u32);
    let architecture = std::env::consts::ARCH.try_into().unwrap();
    let filter = SeccompFilter::new(rules, SeccompAction::Allow, refuses, architecture).unwrap();
    let program: seccompiler::BpfProgram = filter.try_into().unwrap();
    // Filters are for ever, and inherited: on a thread that ends.
    thread::scope(|scope| {
        let started = scope.spawn(|| {
            seccompiler::apply_filter(&program).unwrap();
            Daemon::start(directory, &[])
        });
        started.join().unwrap()
    })
}

#[test]
fn a_host_without_landlock_is_told_of_and_done_without() {
    for errno in [libc::ENOSYS, libc::EOPNOTSUPP, libc::EPERM] {
        let directory = tempdir().unwrap();
        let mut daemon = on_a_host_without(directory.path(), &[libc::SYS_landlock_create_ruleset], errno);
        assert!(daemon.hears("sandbox:").contains("Landlock"));
        let stats = stats(directory.path());
        assert_eq!(stats["sandbox"]["system_calls"], true);
        assert_eq!(stats["sandbox"]["files"], "none");
        assert_eq!(daemon.end(Signal::TERM).0.code(), Some(0));
        assert!(!control(directory.path()).exists());
    }
}

#[test]
fn a_host_that_takes_no_filters_is_told_of_and_done_without() {
    let directory = tempdir().unwrap();
    let mut daemon = on_a_host_without(directory.path(), &[libc::SYS_seccomp], libc::EPERM);
    assert!(daemon.hears("sandbox:").contains("takes no filters"));
    assert_eq!(stats(directory.path())["sandbox"]["system_calls"], false);
    assert_eq!(daemon.end(Signal::TERM).0.code(), Some(0));
}
