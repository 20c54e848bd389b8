//! Arguments, sockets, signals and exit codes.

use std::fs;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::os::unix::net::{UnixDatagram, UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use command_fds::{CommandFdExt, FdMapping};
use rustix::process::{Signal, geteuid};
use tempfile::{TempDir, tempdir};

use crate::control::stats;
use crate::program::{DAEMON, Daemon, PATIENCE, control, daemon_output, only_line, output, socket, text, wait_for};

/// The number under which descriptors are handed to the daemon.
const FD: i32 = 7;

/// Valid, but for what a test adds.
fn arguments<'a>(path: &'a str, more: &[&'a str]) -> Vec<&'a str> {
    [&["--size", "16M", "--socket-path", path], more].concat()
}

fn inode(path: &Path) -> u64 {
    fs::symlink_metadata(path).unwrap().ino()
}

/// A socket on which nobody listens any more.
fn dead_socket(path: &Path) {
    drop(UnixListener::bind(path).unwrap());
    assert_eq!(
        UnixStream::connect(path).unwrap_err().kind(),
        std::io::ErrorKind::ConnectionRefused
    );
}

#[test]
fn a_wrong_value_ends_with_one_line_that_names_the_flag_the_value_and_what_is_allowed() {
    let long = "x".repeat(108);
    let cases: &[(&[&str], &[&str])] = &[
        (&[], &["--size", "--socket-path", "--fd"]),
        (&["--size", "1G"], &["--socket-path", "--fd"]),
        (&["--socket-path", "/run/z"], &["--size"]),
        (&["--socket-path", "/run/z", "--size"], &["--size"]),
        (
            &["--socket-path", "/run/z", "--size", "5X"],
            &["--size", "5X", "K, M, G, T"],
        ),
        (
            &["--socket-path", "/run/z", "--size", "1GB"],
            &["--size", "1GB", "KiB, MiB, GiB, TiB"],
        ),
        (
            &["--socket-path", "/run/z", "--size", "-5"],
            &["--size", "-5", "K, M, G, T"],
        ),
        (
            &["--socket-path", "/run/z", "--size=-5"],
            &["--size", "-5", "K, M, G, T"],
        ),
        (
            &["--socket-path", "/run/z", "--size", "0"],
            &["--size", "'0'", "1 byte to 16T"],
        ),
        (
            &["--socket-path", "/run/z", "--size", "17T"],
            &["--size", "17T", "1 byte to 16T"],
        ),
        (
            &["--socket-path", "/run/z", "--size", "99999999T"],
            &["--size", "99999999T"],
        ),
        (
            &["--socket-path", &long, "--size", "1G"],
            &["--socket-path", "1 to 107 bytes"],
        ),
        (
            &["--socket-path", "", "--size", "1G"],
            &["--socket-path", "1 to 107 bytes"],
        ),
        (&["--socket-path", "/run/", "--size", "1G"], &["--socket-path", "/run/"]),
        (
            &["--socket-path", "/run/z", "--fd", "3", "--size", "1G"],
            &["--socket-path", "--fd"],
        ),
        (&["--fd", "x", "--size", "1G"], &["--fd", "'x'", "0, or 3 and up"]),
        (&["--fd", "1", "--size", "1G"], &["--fd", "'1'", "0, or 3 and up"]),
        (
            &["--fd", "7", "--size", "1G", "--socket-mode", "0600"],
            &["--fd", "--socket-mode"],
        ),
        (
            &["--fd", "7", "--size", "1G", "--socket-group", "root"],
            &["--fd", "--socket-group"],
        ),
        (
            &arguments("/run/z", &["--mem-limit", "0"]),
            &["--mem-limit", "'0'", "256K to 16T"],
        ),
        (
            &arguments("/run/z", &["--mem-limit", "4095"]),
            &["--mem-limit", "4095", "256K to 16T"],
        ),
        (
            &arguments("/run/z", &["--mem-limit", "half"]),
            &["--mem-limit", "half", "K, M, G, T"],
        ),
        (
            &arguments("/run/z", &["--algorithm", "lzma"]),
            &["--algorithm", "lzma", "lz4", "zstd"],
        ),
        (
            &arguments("/run/z", &["--algorithm", "zstd(level=99)"]),
            &["--algorithm", "zstd(level=99)", "level", "22"],
        ),
        (
            &arguments("/run/z", &["--algorithm", "lz4(foo=1)"]),
            &["--algorithm", "lz4(foo=1)"],
        ),
        (
            &arguments("/run/z", &["--algorithm", "deflate(winbits=8)"]),
            &["--algorithm", "winbits=8", "9..15 (zlib) or -15..-9 (raw)"],
        ),
        (
            &arguments("/run/z", &["--decompression-contexts", "0"]),
            &["--decompression-contexts", "'0'", "1 to 128"],
        ),
        (
            &arguments("/run/z", &["--decompression-contexts", "129"]),
            &["--decompression-contexts", "129", "1 to 128"],
        ),
        (
            &arguments("/run/z", &["--num-queues", "0"]),
            &["--num-queues", "0", "1..=64"],
        ),
        (
            &arguments("/run/z", &["--num-queues", "65"]),
            &["--num-queues", "65", "1..=64"],
        ),
        (
            &arguments("/run/z", &["--num-queues", "-1"]),
            &["--num-queues", "-1", "1..=64"],
        ),
        (&arguments("/run/z", &["--num-queues", "two"]), &["--num-queues", "two"]),
        (
            &arguments("/run/z", &["--queue-size-max", "1"]),
            &["--queue-size-max", "1", "2 to 32768"],
        ),
        (
            &arguments("/run/z", &["--queue-size-max", "1000"]),
            &["--queue-size-max", "1000", "powers of two"],
        ),
        (
            &arguments("/run/z", &["--queue-size-max", "65536"]),
            &["--queue-size-max", "65536", "2 to 32768"],
        ),
        (&arguments("/run/z", &["--serial", ""]), &["--serial", "1 to 20"]),
        (
            &arguments("/run/z", &["--serial", "123456789012345678901"]),
            &["--serial", "1 to 20"],
        ),
        (
            &arguments("/run/z", &["--serial", "caf\u{e9}"]),
            &["--serial", "caf\u{e9}", "ASCII"],
        ),
        (
            &arguments("/run/z", &["--serial", "a b"]),
            &["--serial", "a b", "spaces"],
        ),
        (
            &arguments("/run/z", &["--logical-block-size", "1024"]),
            &["--logical-block-size", "1024", "512, 4096"],
        ),
        (
            &arguments("/run/z", &["--socket-mode", "0888"]),
            &["--socket-mode", "0888", "0 to 777"],
        ),
        (
            &arguments("/run/z", &["--socket-mode", "1777"]),
            &["--socket-mode", "1777", "0 to 777"],
        ),
        (
            &arguments("/run/z", &["--socket-group", "no-such-group"]),
            &["--socket-group", "no-such-group"],
        ),
        (
            &arguments("/run/z", &["--control-path", &long]),
            &["--control-path", "1 to 107 bytes"],
        ),
        (
            &arguments("/run/z", &["--control-path", "/run/z"]),
            &["--control-path", "--socket-path"],
        ),
        (
            &arguments("/run/z", &["--log-level", "loud"]),
            &["--log-level", "loud", "off, error, warn, info, debug, trace"],
        ),
        (
            &arguments("/run/z", &["--sandbox", "maybe"]),
            &["--sandbox", "maybe", "off, log, kill"],
        ),
        (&arguments("/run/z", &["--bogus"]), &["--bogus"]),
        (&arguments("/run/z", &["stray"]), &["stray"]),
        (&arguments("/run/z", &["--size", "1G"]), &["--size"]),
    ];
    for (arguments, parts) in cases {
        let output = daemon_output(*arguments);
        assert_eq!(output.status.code(), Some(2), "{arguments:?}");
        assert_eq!(text(&output.stdout), "", "{arguments:?}");
        let line = only_line(&output);
        assert!(line.starts_with("vhost-user-zram: "), "{line}");
        for part in *parts {
            assert!(line.contains(part), "{arguments:?}: no {part:?} in: {line}");
        }
    }
}

#[test]
fn capabilities_are_printed_whatever_else_is_asked() {
    for more in [&[][..], &["--bogus", "--size", "5X"]] {
        let output = daemon_output([more, &["--print-capabilities"]].concat());
        assert_eq!(output.status.code(), Some(0));
        let said: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
        assert_eq!(said, serde_json::json!({"type": "block", "features": ["read-only"]}));
        assert_eq!(text(&output.stderr), "");
    }
}

#[test]
fn version_and_help_are_no_failures_and_fit_80_columns() {
    let version = daemon_output(["--version"]);
    assert_eq!(
        text(&version.stdout),
        format!("vhost-user-zram {}\n", env!("CARGO_PKG_VERSION"))
    );
    assert_eq!(version.status.code(), Some(0));
    for program in [DAEMON, crate::program::VZRAMCTL] {
        let mut command = Command::new(program);
        command.arg("--help");
        let help = output(command);
        assert_eq!(help.status.code(), Some(0));
        for line in text(&help.stdout).lines() {
            assert!(line.chars().count() <= 80, "{line}");
        }
    }
}

#[test]
fn a_start_prints_the_disk_and_the_arguments_that_attach_it() {
    let directory = tempdir().unwrap();
    let mut daemon = Daemon::start(directory.path(), &["--size", "1G", "--mem-limit", "512M"]);
    let block = daemon.block.join("\n");
    let path = socket(directory.path()).display().to_string();
    for part in [
        "disk disk is ready",
        "1 GiB (1073741824 bytes)",
        "512 MiB (536870912 bytes)",
        "lz4",
        &path,
        "-object memory-backend-memfd,id=mem,size=SIZE,share=on",
        "-machine memory-backend=mem",
        &format!("socket,id=disk,path={path},reconnect-ms=500"),
        "-device vhost-user-blk-pci,chardev=disk",
        "--memory size=SIZE,shared=on",
        &format!("vhost_user=on,socket={path}"),
    ] {
        assert!(block.contains(part), "no {part:?} in:\n{block}");
    }
    assert!(!daemon.stderr_so_far().contains("hint"), "{}", daemon.stderr_so_far());
}

#[test]
fn sizes_that_are_unlikely_to_be_meant_get_a_hint() {
    for (sizes, part) in [
        (
            ["--size", "16M", "--mem-limit", "32M"],
            "is less than --mem-limit 32 MiB",
        ),
        (
            ["--size", "160M", "--mem-limit", "32M"],
            "is more than 4 times --mem-limit 32 MiB",
        ),
        (["--size", "16T", "--mem-limit", "8T"], "the host has"),
        (["--size", "1000001", "--mem-limit", "512K"], "1003520 bytes"),
    ] {
        let directory = tempdir().unwrap();
        let mut daemon = Daemon::start(directory.path(), &sizes);
        daemon.hears(part);
    }
}

#[test]
fn a_dead_socket_is_replaced() {
    let directory = tempdir().unwrap();
    dead_socket(&socket(directory.path()));
    dead_socket(&control(directory.path()));
    let _daemon = Daemon::start(directory.path(), &[]);
    UnixStream::connect(socket(directory.path())).unwrap();
    UnixStream::connect(control(directory.path())).unwrap();
    assert_eq!(
        fs::read_dir(directory.path()).unwrap().count(),
        2,
        "nothing else is left behind"
    );
}

#[test]
fn a_dictionary_that_is_none_ends_the_start_before_anything_is_there() {
    let directory = tempdir().unwrap();
    let (missing, empty) = (directory.path().join("missing"), directory.path().join("empty"));
    fs::write(&empty, "").unwrap();
    let cases = [
        (missing.as_path(), "No such file"),
        (&empty, "is empty"),
        (directory.path(), "but a directory"),
    ];
    for (path, why) in cases {
        let algorithm = format!("zstd(dict={})", path.display());
        let socket = socket(directory.path());
        let arguments = [
            "--size",
            "1M",
            "--algorithm",
            &algorithm,
            "--socket-path",
            socket.to_str().unwrap(),
        ];
        let output = daemon_output(arguments);
        assert_eq!(output.status.code(), Some(1));
        let line = only_line(&output);
        for part in ["--algorithm", path.to_str().unwrap(), why] {
            assert!(line.contains(part), "{line}");
        }
        assert!(!socket.exists(), "a start that failed leaves nothing");
    }
    let dictionary = directory.path().join("dictionary");
    fs::write(&dictionary, "what pages have in common").unwrap();
    let algorithm = format!("zstd(level=3,dict={})", dictionary.display());
    let _daemon = Daemon::start(
        directory.path(),
        &["--algorithm", &algorithm, "--decompression-contexts", "1"],
    );
    assert_eq!(stats(directory.path())["algorithm"], algorithm);
}

#[test]
fn a_socket_that_somebody_listens_on_is_refused_and_goes_on() {
    let directory = tempdir().unwrap();
    let (path, control_path) = (socket(directory.path()), control(directory.path()));
    let mut first = Daemon::start(directory.path(), &[]);
    let before = (inode(&path), inode(&control_path));
    for (path, flag) in [(&path, "--socket-path"), (&control_path, "--control-path")] {
        let other = directory.path().join("other");
        let (socket, control) = if flag == "--socket-path" {
            (path, &other)
        } else {
            (&other, path)
        };
        let arguments = [
            "--size",
            "1M",
            "--socket-path",
            socket.to_str().unwrap(),
            "--control-path",
            control.to_str().unwrap(),
        ];
        let output = daemon_output(arguments);
        assert_eq!(output.status.code(), Some(1));
        let line = only_line(&output);
        assert!(line.contains(flag) && line.contains("somebody listens"), "{line}");
        assert!(!other.exists(), "a start that failed leaves nothing");
    }
    assert_eq!((inode(&path), inode(&control_path)), before);
    assert_eq!(stats(directory.path())["name"], "disk");
    assert!(first.is_running());
}

#[test]
fn what_is_no_socket_is_left_alone() {
    let directory = tempdir().unwrap();
    let file = directory.path().join("file");
    fs::write(&file, "precious").unwrap();
    let link = directory.path().join("link");
    symlink(&file, &link).unwrap();
    let folder = directory.path().join("folder");
    fs::create_dir(&folder).unwrap();
    for path in [&file, &link, &folder] {
        let output = daemon_output(arguments(path.to_str().unwrap(), &[]));
        assert_eq!(output.status.code(), Some(1));
        assert!(only_line(&output).contains("is not a socket"), "{}", only_line(&output));
    }
    assert_eq!(fs::read_to_string(&file).unwrap(), "precious");
    assert!(link.is_symlink() && folder.is_dir());
}

#[test]
fn a_directory_that_is_not_there_is_named() {
    let output = daemon_output(arguments("/no-such-directory/z.sock", &[]));
    assert_eq!(output.status.code(), Some(1));
    assert!(only_line(&output).contains("/no-such-directory/z.sock"));
}

/// Looks at `path` without pause until told to stop, and keeps each mode and group that it saw.
fn watch(path: PathBuf, stop: &AtomicBool) -> Vec<(u32, u32)> {
    let mut seen = Vec::new();
    while !stop.load(Ordering::Relaxed) {
        if let Ok(metadata) = fs::symlink_metadata(&path) {
            let now = (metadata.mode() & 0o7777, metadata.gid());
            if seen.last() != Some(&now) {
                seen.push(now);
            }
        }
    }
    seen
}

#[test]
fn mode_and_group_are_there_from_the_first_moment() {
    let directory = tempdir().unwrap();
    let own_group = fs::metadata(directory.path()).unwrap().gid();
    // Only root may give any group away.
    let group = if geteuid().is_root() { 54321 } else { own_group };
    for mask in ["000", "022", "777"] {
        let path = socket(directory.path());
        let stop = AtomicBool::new(false);
        let seen = thread::scope(|scope| {
            let watcher = scope.spawn(|| watch(path.clone(), &stop));
            for _ in 0..10 {
                let mut command = Command::new("sh");
                command
                    .arg("-c")
                    .arg(format!("umask {mask}; exec \"$@\""))
                    .args(["sh", DAEMON]);
                command.args(arguments(
                    path.to_str().unwrap(),
                    &["--socket-mode", "0662", "--socket-group"],
                ));
                command.arg(group.to_string());
                Daemon::spawn(command).end(Signal::TERM);
            }
            stop.store(true, Ordering::Relaxed);
            watcher.join().unwrap()
        });
        assert_eq!(seen, [(0o662, group)], "umask {mask}");
    }
}

#[test]
fn a_directory_that_gives_its_own_group_is_overruled() {
    if !geteuid().is_root() {
        return; // a plain user has no group to give
    }
    let directory = tempdir().unwrap();
    fs::set_permissions(directory.path(), fs::Permissions::from_mode(0o2755)).unwrap();
    let _daemon = Daemon::start(directory.path(), &["--socket-group", "54321"]);
    let metadata = fs::symlink_metadata(socket(directory.path())).unwrap();
    assert_eq!((metadata.mode() & 0o7777, metadata.gid()), (0o660, 54321));
}

#[test]
fn the_control_socket_is_for_the_daemons_user_alone() {
    let directory = tempdir().unwrap();
    let _daemon = Daemon::start(directory.path(), &["--socket-mode", "0666"]);
    assert_eq!(
        fs::symlink_metadata(control(directory.path())).unwrap().mode() & 0o7777,
        0o600
    );
    assert_eq!(
        fs::symlink_metadata(socket(directory.path())).unwrap().mode() & 0o7777,
        0o666
    );
}

#[test]
fn term_and_int_end_it_quickly_and_take_its_sockets_away() {
    for signal in [Signal::TERM, Signal::INT] {
        let directory = tempdir().unwrap();
        let mut daemon = Daemon::start(directory.path(), &[]);
        let _frontend = UnixStream::connect(socket(directory.path())).unwrap();
        let _client = UnixStream::connect(control(directory.path())).unwrap();
        let (status, took) = daemon.end(signal);
        assert_eq!(status.code(), Some(0));
        assert!(took < Duration::from_secs(1), "{took:?}");
        assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 0);
    }
}

#[test]
fn sockets_that_others_put_in_place_of_its_own_stay() {
    let directory = tempdir().unwrap();
    let mut daemon = Daemon::start(directory.path(), &[]);
    fs::remove_file(socket(directory.path())).unwrap();
    let _other = UnixListener::bind(socket(directory.path())).unwrap();
    assert_eq!(daemon.end(Signal::TERM).0.code(), Some(0));
    assert!(socket(directory.path()).exists());
    assert!(!control(directory.path()).exists());
}

#[test]
fn a_second_signal_ends_it_at_once() {
    let directory = tempdir().unwrap();
    let mut daemon = Daemon::start(directory.path(), &[]);
    // Both are pending when it goes on, so it has no time to end after the first.
    daemon.signal(Signal::STOP);
    daemon.signal(Signal::TERM);
    daemon.signal(Signal::INT);
    daemon.signal(Signal::CONT);
    assert_eq!(daemon.wait().code(), Some(1));
}

#[test]
fn hup_pipe_and_usr1_do_not_end_it_and_usr1_logs_the_state() {
    let directory = tempdir().unwrap();
    let mut daemon = Daemon::start(directory.path(), &[]);
    daemon.signal(Signal::HUP);
    daemon.signal(Signal::PIPE);
    for _ in 0..2 {
        daemon.signal(Signal::USR1);
        let line = daemon.hears("state: ");
        let state = &line[line.find('{').unwrap()..=line.rfind('}').unwrap()];
        assert_eq!(
            serde_json::from_str::<serde_json::Value>(state).unwrap()["disksize"],
            16 << 20
        );
    }
    assert_eq!(daemon.end(Signal::TERM).0.code(), Some(0));
    assert_eq!(daemon.all_stderr().matches("state: ").count(), 2, "one for each signal");
}

#[test]
fn it_outlives_whoever_reads_what_it_says() {
    let directory = tempdir().unwrap();
    let path = socket(directory.path());
    let mut command = Command::new(DAEMON);
    // The size makes it say something on stderr at start too.
    command.args(["--size", "1000001", "--socket-path"]).arg(&path);
    command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    drop((child.stdout.take(), child.stderr.take()));
    wait_for("it listens", || UnixStream::connect(&path).ok());
    let pid = rustix::process::Pid::from_child(&child);
    rustix::process::kill_process(pid, Signal::USR1).unwrap();
    // It logs that it was told to end as well.
    rustix::process::kill_process(pid, Signal::TERM).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(0));
}

#[test]
fn the_log_level_is_obeyed() {
    let directory = tempdir().unwrap();
    let mut daemon = Daemon::start(directory.path(), &["--log-level", "off"]);
    daemon.signal(Signal::USR1);
    daemon.end(Signal::TERM);
    assert_eq!(daemon.all_stderr(), "");
}

#[test]
fn lines_have_a_priority_if_and_only_if_stderr_is_the_journal() {
    let directory = tempdir().unwrap();
    for (inode_offset, is_journal) in [(0, true), (1, false)] {
        let log = directory.path().join(format!("log-{inode_offset}"));
        let file = fs::File::create(&log).unwrap();
        let metadata = file.metadata().unwrap();
        let run = |arguments: Vec<&str>, journal: String| {
            let mut command = Command::new(DAEMON);
            command
                .args(arguments)
                .env("JOURNAL_STREAM", journal)
                .stderr(file.try_clone().unwrap());
            command.stdin(Stdio::null()).stdout(Stdio::null()).spawn().unwrap()
        };
        let journal = format!("{}:{}", metadata.dev(), metadata.ino() + inode_offset);
        let path = socket(directory.path()).display().to_string();
        let mut served = run(arguments(&path, &[]), journal.clone());
        wait_for("it listens", || UnixStream::connect(&path).ok());
        rustix::process::kill_process(rustix::process::Pid::from_child(&served), Signal::TERM).unwrap();
        served.wait().unwrap();
        run(arguments(&path, &["--bogus"]), journal).wait().unwrap();
        let said = fs::read_to_string(&log).unwrap();
        let (told, failed) = (
            said.lines().find(|line| line.contains("told to end")),
            said.lines().last(),
        );
        assert_eq!(told.unwrap().starts_with("<6>"), is_journal, "{said}");
        assert_eq!(failed.unwrap().starts_with("<3>"), is_journal, "{said}");
    }
}

#[test]
fn systemd_hears_that_it_is_ready_once_it_listens_and_why_it_failed() {
    let directory = tempdir().unwrap();
    let notify = UnixDatagram::bind(directory.path().join("notify")).unwrap();
    notify.set_read_timeout(Some(PATIENCE)).unwrap();
    let receive = || {
        let mut bytes = [0; 4096];
        let count = notify.recv(&mut bytes).unwrap();
        text(&bytes[..count])
    };
    let run = |path: &str| {
        let mut command = Command::new(DAEMON);
        command
            .args(arguments(path, &[]))
            .env("NOTIFY_SOCKET", directory.path().join("notify"));
        command
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap()
    };
    let path = socket(directory.path());
    let mut served = run(path.to_str().unwrap());
    let ready = receive();
    UnixStream::connect(&path).unwrap();
    assert!(
        ready.contains("READY=1") && ready.contains("STATUS=disk disk is ready"),
        "{ready}"
    );
    rustix::process::kill_process(rustix::process::Pid::from_child(&served), Signal::TERM).unwrap();
    served.wait().unwrap();
    assert!(receive().contains("STOPPING=1"));
    run("/no-such-directory/z.sock").wait().unwrap();
    let failed = receive();
    assert!(
        failed.contains("STATUS=") && failed.contains("/no-such-directory"),
        "{failed}"
    );
}

/// The daemon's one line when it is started by a shell that first runs `before`.
fn refused_after(before: &str, wrapper: &[&str], more: &[&str]) -> String {
    let directory = tempdir().unwrap();
    let script = format!("{before}; exec \"$@\"");
    let line = [wrapper, &["sh", "-c", &script, "sh", DAEMON]].concat();
    let mut command = Command::new(line[0]);
    command.args(&line[1..]);
    command.args(arguments(socket(directory.path()).to_str().unwrap(), more));
    let output = output(command);
    assert_eq!(output.status.code(), Some(1));
    assert!(!socket(directory.path()).exists());
    only_line(&output)
}

#[test]
fn a_file_size_limit_below_the_disk_is_named() {
    let said = refused_after("ulimit -f 1024", &[], &[]); // blocks of 512 bytes
    for part in ["RLIMIT_FSIZE", "is 512 KiB", "needs 320 MiB", "LimitFSIZE=infinity"] {
        assert!(said.contains(part), "no {part:?} in: {said}");
    }
    // Nobody is told who may raise it.
    let directory = tempdir().unwrap();
    let mut command = Command::new("sh");
    command.args(["-c", "ulimit -S -f 1024; exec \"$@\"", "sh", DAEMON]);
    command.args(arguments(socket(directory.path()).to_str().unwrap(), &[]));
    Daemon::spawn(command);
}

/// A process without CAP_IPC_LOCK, whoever we are.
const MAY_NOT_LOCK: &[&str] = &["setpriv", "--bounding-set", "-ipc_lock", "--inh-caps", "-ipc_lock"];

#[test]
fn a_limit_of_locked_memory_below_the_disk_is_named_if_memory_is_to_be_locked() {
    let wrapper = if geteuid().is_root() { MAY_NOT_LOCK } else { &[] };
    let said = refused_after("ulimit -l 64", wrapper, &["--memory-lock"]); // KiB
    for part in [
        "RLIMIT_MEMLOCK",
        "is 64 KiB",
        "needs 320 MiB",
        "LimitMEMLOCK=infinity",
        "CAP_IPC_LOCK",
    ] {
        assert!(said.contains(part), "no {part:?} in: {said}");
    }
}

/// Bytes of locked address space of the process.
fn locked_bytes(pid: u32) -> u64 {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = status.lines().find(|line| line.starts_with("VmLck:")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap() << 10
}

#[test]
fn memory_is_locked_if_and_only_if_asked_for() {
    if !geteuid().is_root() {
        return; // a plain user's limit is what it is
    }
    let directory = tempdir().unwrap();
    let mut daemon = Daemon::start(directory.path(), &[]);
    assert_eq!(locked_bytes(daemon.pid()), 0);
    daemon.end(Signal::TERM);
    let daemon = Daemon::start(directory.path(), &["--memory-lock"]);
    assert!(locked_bytes(daemon.pid()) > 16 << 20);
}

#[test]
fn the_descriptor_limit_is_raised() {
    let directory = tempdir().unwrap();
    let mut command = Command::new("sh");
    // The shell becomes the daemon, so its number is the daemon's.
    command.args(["-c", "ulimit -S -n 64; echo $$ >\"$1\"; shift; exec \"$@\"", "sh"]);
    command.arg(directory.path().join("pid")).arg(DAEMON);
    command.args(arguments(socket(directory.path()).to_str().unwrap(), &[]));
    let _daemon = Daemon::spawn(command);
    let pid = fs::read_to_string(directory.path().join("pid")).unwrap();
    let limits = fs::read_to_string(format!("/proc/{}/limits", pid.trim())).unwrap();
    let line: Vec<&str> = limits
        .lines()
        .find(|line| line.starts_with("Max open files"))
        .unwrap()
        .split_whitespace()
        .collect();
    assert_eq!(line[3], line[4], "soft and hard");
    assert_ne!(line[3], "64");
}

/// The daemon with `descriptor` as number [`FD`].
fn with_descriptor(descriptor: OwnedFd, more: &[&str]) -> Command {
    let mut command = Command::new(DAEMON);
    command.args(["--size", "16M", "--fd", &FD.to_string()]).args(more);
    command
        .fd_mappings(vec![FdMapping {
            parent_fd: descriptor,
            child_fd: FD,
        }])
        .unwrap();
    command
}

#[test]
fn an_inherited_listening_socket_is_served_and_not_removed() {
    let directory = tempdir().unwrap();
    let path = socket(directory.path());
    let listener = UnixListener::bind(&path).unwrap();
    let mut daemon = Daemon::spawn(with_descriptor(
        listener.into(),
        &["--control-path", control(directory.path()).to_str().unwrap()],
    ));
    assert!(daemon.block.join("\n").contains(path.to_str().unwrap()));
    for connections in 1..=3 {
        drop(UnixStream::connect(&path).unwrap());
        wait_for("the connection is counted", || {
            (stats(directory.path())["connections_total"] == connections).then_some(())
        });
    }
    assert_eq!(stats(directory.path())["name"], "disk");
    assert_eq!(daemon.end(Signal::TERM).0.code(), Some(0));
    assert!(path.exists());
}

#[test]
fn an_inherited_connection_is_served_until_it_ends() {
    let (ours, theirs) = UnixStream::pair().unwrap();
    let mut daemon = Daemon::spawn(with_descriptor(theirs.into(), &["--serial", "given"]));
    assert!(daemon.block[0].contains("disk given is ready"));
    // It must not end by itself. That takes a moment in which it could.
    thread::sleep(Duration::from_millis(100));
    assert!(daemon.is_running());
    let hung_up = Instant::now();
    drop(ours);
    assert_eq!(daemon.wait().code(), Some(0));
    assert!(hung_up.elapsed() < Duration::from_secs(1));
}

#[test]
fn an_inherited_connection_does_not_keep_it_from_ending() {
    let (_ours, theirs) = UnixStream::pair().unwrap();
    let mut daemon = Daemon::spawn(with_descriptor(theirs.into(), &[]));
    let (status, took) = daemon.end(Signal::TERM);
    assert_eq!(status.code(), Some(0));
    assert!(took < Duration::from_secs(1), "{took:?}");
}

#[test]
fn a_descriptor_that_cannot_be_served_is_a_usage_error() {
    let file: OwnedFd = fs::File::open("/dev/null").unwrap().into();
    let datagrams: OwnedFd = UnixDatagram::unbound().unwrap().into();
    let network: OwnedFd = std::net::TcpListener::bind("127.0.0.1:0").unwrap().into();
    for (descriptor, part) in [(file, "not a Unix"), (datagrams, "not a Unix"), (network, "not a Unix")] {
        let output = output(with_descriptor(descriptor, &[]));
        assert_eq!(output.status.code(), Some(2));
        assert!(
            only_line(&output).contains("--fd 7") && only_line(&output).contains(part),
            "{}",
            only_line(&output)
        );
    }
    let missing = daemon_output(["--size", "1M", "--fd", "9999"]);
    assert_eq!(missing.status.code(), Some(2));
    assert!(
        only_line(&missing).contains("--fd 9999: is not an open descriptor"),
        "{}",
        only_line(&missing)
    );
}

#[test]
fn disks_whose_names_do_not_fit_a_serial_still_have_different_ones() {
    let names = |directory: &TempDir, file: &str| {
        let path = directory.path().join(file);
        let mut command = Command::new(DAEMON);
        command
            .args(arguments(path.to_str().unwrap(), &["--control-path"]))
            .arg(control(directory.path()));
        let _daemon = Daemon::spawn(command);
        stats(directory.path())["name"].as_str().unwrap().to_string()
    };
    let (one, two) = (tempdir().unwrap(), tempdir().unwrap());
    let same = names(&one, "customer-4711-scratch-a.sock");
    let others = [
        names(&one, "customer-4711-scratch-b.sock"),
        names(&two, "customer-4711-scratch-a.sock"),
        names(&one, "b\u{e4}d name.sock"),
        names(&one, "b_d name.sock"),
    ];
    for name in others.iter().chain([&same]) {
        assert!(name.len() <= 20, "{name}");
        assert_eq!(
            others.iter().chain([&same]).filter(|other| *other == name).count(),
            1,
            "{name}"
        );
    }
    assert!(same.starts_with("customer-47"), "{same}");
    assert_eq!(
        names(&one, "customer-4711-scratch-a.sock"),
        same,
        "the same path has the same name"
    );
    assert_eq!(names(&one, "exactly-20-bytes-abc.sock"), "exactly-20-bytes-abc");
}
