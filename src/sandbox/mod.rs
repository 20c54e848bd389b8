//! What the daemon gives up once it has all that it needs: a guest or a frontend that takes over one of its threads finds
//! itself with next to no system calls and no files.
//!
//! 1. Nothing is given up before sockets and memory are there.
//! 2. Each thread enters at its start, before it looks at a frontend, a guest or a client; main, which starts the others
//!    and serves nobody, as soon as they run.
//! 3. What the host does not have is told once, at start, and can be seen in the disk's status: a container may well keep
//!    a part of it to itself. What it has, every thread has: a thread that cannot enter ends the daemon.
//!
//! The parts: no new privileges and no core dumps (prctl(2)), and `files`, for all threads alike, which inherit them from
//! main; then `calls`, for each kind of thread.

mod calls;
mod files;

use std::backtrace::Backtrace;
use std::path::PathBuf;
use std::sync::Arc;
use std::{env, io, thread};

use landlock::RulesetStatus;
use rustix::process::{DumpableBehavior, set_dumpable_behavior};
use rustix::thread::set_no_new_privs;
use seccompiler::BpfProgram;

use crate::logging::{Priority, say};
use crate::protocol::SandboxStatus;

/// What happens to a thread that does what it should not.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Mode {
    /// Nothing: there is no sandbox.
    Off,
    /// The kernel logs the system call and lets it through. Files are not looked after: nothing would be logged there.
    Log,
    /// The daemon ends at once, by SIGSYS.
    Kill,
}

/// A kind of thread.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Waits for signals, and ends the daemon.
    Main,
    /// Speaks vhost-user.
    Device,
    /// Serves a virtqueue.
    Worker,
    /// Moves objects together, gives memory back.
    Upkeep,
    /// Accepts control clients.
    ControlSocket,
    /// Answers one of them.
    ControlClient,
}

impl Kind {
    const ALL: [Kind; 6] = [
        Kind::Main,
        Kind::Device,
        Kind::Worker,
        Kind::Upkeep,
        Kind::ControlSocket,
        Kind::ControlClient,
    ];
}

/// The sandbox of this process. Cheap to clone: for each thread that starts others.
#[derive(Debug, Clone)]
pub struct Sandbox(Arc<Parts>);

#[derive(Debug)]
struct Parts {
    status: SandboxStatus,
    /// The filters of each kind, in the order of [`Kind::ALL`]. None when the host takes no filters.
    filters: Vec<Vec<BpfProgram>>,
}

impl Sandbox {
    /// Restricts this thread as far as all threads are to be restricted, and finds out what the host has. To be called
    /// before any other thread starts. `directories` hold sockets that will have to be removed.
    pub fn prepare(mode: Mode, directories: &[PathBuf]) -> io::Result<Sandbox> {
        if mode == Mode::Off {
            return Ok(Sandbox::of(mode, RulesetStatus::NotEnforced, Vec::new()));
        }
        read_symbols_if_asked();
        set_no_new_privs(true)?;
        set_dumpable_behavior(DumpableBehavior::NotDumpable)?;
        let files = match mode {
            Mode::Kill => restrict_files(directories),
            _ => RulesetStatus::NotEnforced,
        };
        let filters = Kind::ALL
            .map(|kind| calls::filters(kind, mode))
            .into_iter()
            .collect::<Result<Vec<_>, _>>()
            .map_err(io::Error::other)?;
        let filters = match try_out(&filters[Kind::Worker as usize])? {
            Ok(()) => filters,
            Err(error) => {
                warn(&format!(
                    "system calls are not restricted, this host takes no filters: {error}"
                ));
                Vec::new()
            }
        };
        Ok(Sandbox::of(mode, files, filters))
    }

    fn of(mode: Mode, files: RulesetStatus, filters: Vec<Vec<BpfProgram>>) -> Sandbox {
        let status = SandboxStatus {
            mode: match mode {
                Mode::Off => "off",
                Mode::Log => "log",
                Mode::Kill => "kill",
            }
            .into(),
            system_calls: !filters.is_empty(),
            files: match files {
                RulesetStatus::FullyEnforced => "all",
                RulesetStatus::PartiallyEnforced => "some",
                RulesetStatus::NotEnforced => "none",
            }
            .into(),
        };
        Sandbox(Arc::new(Parts { status, filters }))
    }

    /// What is in force.
    pub fn status(&self) -> &SandboxStatus {
        &self.0.status
    }

    /// Restricts the calling thread for good. Ends the daemon if that fails.
    pub fn enter(&self, kind: Kind) {
        let filters = self.0.filters.get(kind as usize);
        if let Err(error) = filters.map_or(Ok(()), |filters| install(filters)) {
            say(
                Priority::Error,
                &format!("a thread cannot be put into the sandbox: {error}"),
            );
            std::process::exit(1);
        }
    }
}

/// Filters are for ever, so whether the host takes them is found out on a thread that ends.
fn try_out(filters: &[BpfProgram]) -> io::Result<Result<(), seccompiler::Error>> {
    thread::scope(|scope| {
        let tried = thread::Builder::new().spawn_scoped(scope, || install(filters))?;
        tried
            .join()
            .map_err(|_| io::Error::other("a panic while filters were tried out"))
    })
}

fn install(filters: &[BpfProgram]) -> Result<(), seccompiler::Error> {
    filters.iter().try_for_each(|filter| seccompiler::apply_filter(filter))
}

fn restrict_files(directories: &[PathBuf]) -> RulesetStatus {
    match files::restrict(directories) {
        Ok(RulesetStatus::NotEnforced) => {
            warn("files are not restricted, this host has no Landlock (Linux 5.13, with landlock among its lsm=)");
            RulesetStatus::NotEnforced
        }
        Ok(status) => status,
        Err(error) => {
            warn(&format!("files are not restricted: {error}"));
            RulesetStatus::NotEnforced
        }
    }
}

fn warn(message: &str) {
    say(Priority::Warning, &format!("sandbox: {message}"));
}

/// A backtrace that a panic prints later finds the names of functions only if they were read before: the program's file
/// cannot be opened any more. It takes time and memory, so only where backtraces are asked for.
fn read_symbols_if_asked() {
    let asked = |name| env::var_os(name).is_some_and(|value| value != "0");
    if asked("RUST_BACKTRACE") || asked("RUST_LIB_BACKTRACE") {
        let _ = Backtrace::force_capture().to_string();
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;
    use std::os::unix::net::UnixDatagram;
    use std::os::unix::process::ExitStatusExt;
    use std::path::Path;
    use std::process::{Command, Output};
    use std::time::{Duration, Instant};
    use std::{fs, net};

    use rustix::process::dumpable_behavior;

    use super::*;

    const SIGSYS: i32 = 31;

    /// Runs `deed` in another process, on a thread of this kind that has entered the sandbox.
    fn child(mode: Mode, kind: Kind, deed: &str) -> Output {
        let mut command = Command::new(env::current_exe().expect("this test"));
        command.args(["--exact", "sandbox::tests::victim", "--ignored", "--nocapture"]);
        command
            .env("SANDBOX_VICTIM", format!("{mode:?} {kind:?} {deed}"))
            .env("RUST_BACKTRACE", "1");
        command.output().expect("it runs")
    }

    #[test]
    #[ignore = "runs as the victim of other tests"]
    fn victim() {
        let order = env::var("SANDBOX_VICTIM").expect("an order");
        let words: Vec<&str> = order.split(' ').collect();
        let mode = if words[0] == "Log" { Mode::Log } else { Mode::Kill };
        let kind = Kind::ALL
            .into_iter()
            .find(|kind| format!("{kind:?}") == words[1])
            .expect("a kind");
        let deed = words[2].to_string();
        let sandbox = Sandbox::prepare(mode, &[env::temp_dir()]).expect("a sandbox");
        let done = thread::Builder::new()
            .spawn(move || {
                sandbox.enter(kind);
                perform(&deed)
            })
            .expect("a thread")
            .join();
        match done {
            Ok(said) => println!("said: {said}"),
            Err(_) => println!("said: panicked"),
        }
    }

    fn perform(deed: &str) -> String {
        let told = |result: io::Result<()>| {
            result.map_or_else(|error| format!("{:?}", error.raw_os_error()), |()| "done".into())
        };
        told(match deed {
            "run" => Command::new("true").status().map(drop),
            "network" => net::UdpSocket::bind("127.0.0.1:0").map(drop),
            "local" => UnixDatagram::unbound().map(drop),
            "thread" => thread::Builder::new()
                .spawn(|| ())
                .map(|thread| thread.join().expect("it ends")),
            "write" => fs::OpenOptions::new().write(true).open("/dev/null").map(drop),
            "read" => fs::File::open("/etc/passwd").map(drop),
            "comm" => fs::read_to_string(format!("/proc/{}/comm", std::process::id())).map(drop),
            "chmod" => fs::set_permissions("/dev/null", fs::Permissions::from_mode(0o666)),
            "remove" => fs::remove_file(env::temp_dir().join("vzram-no-such-file")),
            "live" => live(),
            "panic" => panic!("as asked"),
            other => panic!("no such deed: {other}"),
        })
    }

    /// What any thread does.
    fn live() -> io::Result<()> {
        let mut lists: Vec<Vec<u8>> = (0..100).map(|shift| vec![1; 1 << (shift % 24)]).collect();
        lists.iter_mut().for_each(|list| list.resize(list.len() * 2, 2));
        let set: std::collections::HashSet<usize> = lists.iter().map(Vec::len).collect();
        let start = Instant::now();
        thread::sleep(Duration::from_millis(1));
        assert!(start.elapsed() >= Duration::from_millis(1) && set.len() > 1);
        thread::yield_now();
        eprintln!("alive at {:?}", std::time::SystemTime::now());
        Ok(())
    }

    fn said(output: &Output) -> String {
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        let said = text.split("said: ").nth(1).and_then(|rest| rest.lines().next());
        said.unwrap_or_else(|| panic!("it said nothing: {output:?}"))
            .to_string()
    }

    fn assert_dies(kind: Kind, deed: &str) {
        let output = child(Mode::Kill, kind, deed);
        assert_eq!(output.status.signal(), Some(SIGSYS), "{kind:?} {deed}: {output:?}");
    }

    #[test]
    fn no_thread_runs_a_program_opens_a_network_socket_or_changes_a_file() {
        for kind in Kind::ALL {
            for deed in ["run", "network", "write", "chmod"] {
                match (kind, deed) {
                    // Refused as all opening is, lest a backtrace kill.
                    (Kind::Main | Kind::Worker | Kind::Upkeep | Kind::ControlSocket | Kind::ControlClient, "write") => {
                        assert_eq!(
                            said(&child(Mode::Kill, kind, deed)),
                            format!("{:?}", Some(libc::ENOSYS))
                        );
                    }
                    _ => assert_dies(kind, deed),
                }
            }
        }
    }

    #[test]
    fn threads_that_serve_start_no_threads_and_make_no_sockets() {
        for kind in [Kind::Worker, Kind::Upkeep, Kind::ControlClient] {
            assert_dies(kind, "thread");
            assert_dies(kind, "local");
            assert_dies(kind, "remove");
        }
    }

    #[test]
    fn what_each_thread_is_for_goes_on() {
        for kind in Kind::ALL {
            assert_eq!(said(&child(Mode::Kill, kind, "live")), "done", "{kind:?}");
        }
        for (kind, deed) in [
            (Kind::Main, "local"),
            (Kind::Main, "thread"),
            (Kind::Device, "thread"),
            (Kind::Device, "comm"),
            (Kind::ControlSocket, "thread"),
        ] {
            assert_eq!(said(&child(Mode::Kill, kind, deed)), "done", "{kind:?} {deed}");
        }
        // Allowed, where a socket can be, and there is none.
        assert_eq!(
            said(&child(Mode::Kill, Kind::Main, "remove")),
            format!("{:?}", Some(libc::ENOENT))
        );
    }

    #[test]
    fn files_are_closed_to_the_one_thread_that_may_open_some() {
        if !Path::new("/proc/self").exists() || said(&child(Mode::Log, Kind::Device, "read")) != "done" {
            panic!("this test needs /proc and /etc/passwd");
        }
        let expected = match files_status() {
            RulesetStatus::NotEnforced => "done".to_string(),
            _ => format!("{:?}", Some(libc::EACCES)),
        };
        assert_eq!(said(&child(Mode::Kill, Kind::Device, "read")), expected);
    }

    /// Whether this host has Landlock, found out on a thread that ends.
    fn files_status() -> RulesetStatus {
        let tried = thread::spawn(|| files::restrict(&[])).join().expect("it ends");
        tried.expect("restricted as far as can be")
    }

    #[test]
    fn a_panic_costs_what_it_did_before_and_names_functions() {
        for kind in Kind::ALL {
            let output = child(Mode::Kill, kind, "panic");
            assert_eq!(said(&output), "panicked", "{kind:?}");
            let told = String::from_utf8_lossy(&output.stderr);
            assert!(
                told.contains("as asked") && told.contains("sandbox::tests::perform"),
                "{kind:?}: {told}"
            );
        }
    }

    #[test]
    fn in_log_mode_everything_goes_through_and_the_kernel_logs_it() {
        use std::io::{Read, Seek, SeekFrom};
        use std::os::unix::fs::OpenOptionsExt;
        let log = fs::OpenOptions::new()
            .read(true)
            .custom_flags(libc::O_NONBLOCK)
            .open("/dev/kmsg");
        let mut log = log.ok().filter(|mut log| log.seek(SeekFrom::End(0)).is_ok());
        let deadline = Instant::now() + Duration::from_secs(30);
        loop {
            assert_eq!(said(&child(Mode::Log, Kind::Worker, "network")), "done");
            let Some(log) = &mut log else {
                eprintln!("the kernel's log cannot be read here: whether the call is in it was not looked at");
                return;
            };
            let mut entry = [0; 8192];
            while let Ok(length) = log.read(&mut entry) {
                let entry = String::from_utf8_lossy(&entry[..length]);
                if entry.contains("type=1326") && entry.contains(&format!("syscall={} ", libc::SYS_socket)) {
                    return;
                }
            }
            // The kernel logs ten lines in five seconds, and other tests have theirs.
            assert!(Instant::now() < deadline, "nothing is logged");
            thread::sleep(Duration::from_millis(500));
        }
    }

    #[test]
    fn off_is_off() {
        let sandbox = Sandbox::prepare(Mode::Off, &[]).expect("nothing to fail");
        Kind::ALL.into_iter().for_each(|kind| sandbox.enter(kind));
        assert_eq!(perform("network"), "done");
        assert_eq!(dumpable_behavior().expect("known"), DumpableBehavior::Dumpable);
    }
}
