//! Runs the daemon and vzramctl, and keeps what they said.

use std::ffi::OsStr;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::sync::mpsc::{self, Receiver};
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

/// How long anything may take that should take milliseconds. Long, because test machines are shared.
pub const PATIENCE: Duration = Duration::from_secs(10);

pub const DAEMON: &str = env!("CARGO_BIN_EXE_vhost-user-zram");
pub const VZRAMCTL: &str = env!("CARGO_BIN_EXE_vzramctl");

/// Waits until `condition` gives something. Panics with `what` when it does not.
pub fn wait_for<T>(what: &str, mut condition: impl FnMut() -> Option<T>) -> T {
    let deadline = Instant::now() + PATIENCE;
    loop {
        if let Some(value) = condition() {
            return value;
        }
        assert!(Instant::now() < deadline, "waited {PATIENCE:?} in vain for: {what}");
        thread::sleep(Duration::from_millis(1));
    }
}

/// The daemon with these arguments, which must make it end by itself.
pub fn daemon_output<S: AsRef<OsStr>>(arguments: impl IntoIterator<Item = S>) -> Output {
    let mut command = Command::new(DAEMON);
    command.args(arguments);
    output(command)
}

pub fn vzramctl<S: AsRef<OsStr>>(arguments: impl IntoIterator<Item = S>) -> Output {
    let mut command = Command::new(VZRAMCTL);
    command.args(arguments);
    output(command)
}

/// Runs a program to its end; one that does not end is a failure and not a hang.
pub fn output(mut command: Command) -> Output {
    let child = command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let pid = Pid::from_child(&child);
    let (done, result) = mpsc::channel();
    thread::spawn(move || done.send(child.wait_with_output()));
    result.recv_timeout(PATIENCE).map(Result::unwrap).unwrap_or_else(|_| {
        let _ = kill_process(pid, Signal::KILL);
        panic!("{command:?} does not end");
    })
}

pub fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

/// The one line that a program may say when it fails.
pub fn only_line(output: &Output) -> String {
    let said = text(&output.stderr);
    assert_eq!(said.lines().count(), 1, "one line, not:\n{said}");
    said.trim_end().to_string()
}

/// A daemon that runs until it is told to end.
pub struct Daemon {
    child: Child,
    stdout: Receiver<String>,
    stderr: Receiver<String>,
    stderr_lines: Vec<String>,
    /// What it printed when it was ready.
    pub block: Vec<String>,
}

impl Daemon {
    /// Starts it on `directory/disk.sock` with a control socket `directory/control.sock`.
    pub fn start(directory: &Path, more: &[&str]) -> Daemon {
        let mut command = Command::new(DAEMON);
        command
            .arg("--socket-path")
            .arg(socket(directory))
            .arg("--control-path")
            .arg(control(directory))
            .args(more);
        if !more.contains(&"--size") {
            command.args(["--size", "16M"]);
        }
        Daemon::spawn(command)
    }

    /// Starts the daemon with a command line of its own, and waits until it is ready.
    pub fn spawn(mut command: Command) -> Daemon {
        let mut child = command
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let stdout = lines(child.stdout.take().unwrap());
        let stderr = lines(child.stderr.take().unwrap());
        let mut daemon = Daemon {
            child,
            stdout,
            stderr,
            stderr_lines: Vec::new(),
            block: Vec::new(),
        };
        // The last line has the arguments of cloud-hypervisor, or, without a path, the slot table.
        let inherited = command.get_args().any(|argument| argument == "--fd");
        while !daemon
            .block
            .last()
            .is_some_and(|line| line.contains("--disk") || inherited && line.contains("table"))
        {
            match daemon.stdout.recv_timeout(PATIENCE) {
                Ok(line) => daemon.block.push(line),
                Err(_) => panic!(
                    "it did not start: {:?}; it said: {:?}",
                    daemon.child.try_wait(),
                    daemon.stderr_so_far()
                ),
            }
        }
        daemon
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    pub fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).unwrap();
    }

    /// Tells it to end, and how long that took.
    pub fn end(&mut self, signal: Signal) -> (ExitStatus, Duration) {
        let start = Instant::now();
        self.signal(signal);
        (self.wait(), start.elapsed())
    }

    pub fn wait(&mut self) -> ExitStatus {
        wait_for("the daemon ends", || self.child.try_wait().unwrap())
    }

    pub fn is_running(&mut self) -> bool {
        self.child.try_wait().unwrap().is_none()
    }

    /// Waits for a line on stderr with `part` in it.
    pub fn hears(&mut self, part: &str) -> String {
        while let Ok(line) = self.stderr.recv_timeout(PATIENCE) {
            self.stderr_lines.push(line.clone());
            if line.contains(part) {
                return line;
            }
        }
        panic!("no line with {part:?} among {:?}", self.stderr_lines);
    }

    /// All that it said on stderr, once it has ended.
    pub fn all_stderr(&mut self) -> String {
        while let Ok(line) = self.stderr.recv_timeout(PATIENCE) {
            self.stderr_lines.push(line);
        }
        self.stderr_lines.join("\n")
    }

    /// All that came on stderr by now.
    pub fn stderr_so_far(&mut self) -> String {
        self.stderr_lines.extend(self.stderr.try_iter());
        self.stderr_lines.join("\n")
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        if thread::panicking() {
            eprintln!("the daemon's stderr:\n{}", self.stderr_so_far());
        }
    }
}

fn lines(pipe: impl std::io::Read + Send + 'static) -> Receiver<String> {
    let (sender, receiver) = mpsc::channel();
    thread::spawn(move || {
        for line in BufReader::new(pipe).lines().map_while(Result::ok) {
            if sender.send(line).is_err() {
                return;
            }
        }
    });
    receiver
}

pub fn socket(directory: &Path) -> PathBuf {
    directory.join("disk.sock")
}

pub fn control(directory: &Path) -> PathBuf {
    directory.join("control.sock")
}

/// docs/conformance.md names tests, and a name that is none would be a promise that nobody keeps.
#[test]
fn the_tests_that_the_documentation_names_exist() {
    let root = std::path::Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut sources = String::new();
    let mut directories: Vec<_> = ["tests", "vhost/src", "vhost/tests"].map(|part| root.join(part)).into();
    while let Some(directory) = directories.pop() {
        for entry in std::fs::read_dir(directory).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                directories.push(path);
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                sources += &std::fs::read_to_string(path).unwrap();
            }
        }
    }
    let page = std::fs::read_to_string(root.join("docs/conformance.md")).unwrap();
    let named = page.split('`').skip(1).step_by(2);
    let named: Vec<_> = named.filter(|name| name.matches('_').count() > 1).collect();
    assert!(named.len() > 80, "{}", named.len());
    for name in named {
        assert!(sources.contains(&format!("fn {name}()")), "there is no test {name}");
    }
}
