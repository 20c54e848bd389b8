//! Backends under test as child processes, conditions with deadlines, and the dice.

use std::ffi::OsString;
use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;

/// How long anything may take that should take milliseconds. Long, because test machines are shared.
pub const PATIENCE: Duration = Duration::from_secs(10);

/// No backend lives longer than this: when one hangs, its end makes its test fail instead of waiting for ever.
const LIFE_MAX: Duration = Duration::from_secs(120);

/// Waits until `condition` gives something. Panics with `what` when the deadline passes.
pub fn wait_for<T>(what: &str, patience: Duration, mut condition: impl FnMut() -> Option<T>) -> T {
    let deadline = Instant::now() + patience;
    loop {
        if let Some(value) = condition() {
            return value;
        }
        assert!(Instant::now() < deadline, "waited {patience:?} in vain for: {what}");
        thread::sleep(Duration::from_millis(1));
    }
}

/// A vhost-user-blk backend: the daemon under test, or qemu-storage-daemon as the second opinion.
pub struct Backend {
    child: Child,
    dir: TempDir,
    stderr: Arc<Mutex<String>>,
    stderr_reader: Option<JoinHandle<()>>,
    // Dropping it ends the thread that guards LIFE_MAX.
    _alive: mpsc::Sender<()>,
    /// The program and its arguments.
    arguments: Vec<OsString>,
}

impl Backend {
    /// The daemon with a disk of `size` and further arguments.
    pub fn daemon(size: &str, args: &[&str]) -> Backend {
        let dir = TempDir::with_prefix("zram-it-").unwrap();
        let mut command = Command::new(env!("CARGO_BIN_EXE_vhost-user-zram"));
        command.arg("--socket-path").arg(dir.path().join("disk.sock"));
        command.arg("--control-path").arg(dir.path().join("control.sock"));
        command.args(["--size", size]).args(args);
        Backend::launch(command, dir)
    }

    /// qemu-storage-daemon with a raw file of `size_bytes` zeroes.
    pub fn qsd(size_bytes: u64, num_queues: u16) -> Backend {
        let dir = TempDir::with_prefix("zram-it-").unwrap();
        let image = dir.path().join("disk.img");
        fs::File::create(&image).unwrap().set_len(size_bytes).unwrap();
        let mut command = Command::new("qemu-storage-daemon");
        command.arg("--blockdev").arg(format!(
            "driver=file,node-name=f,filename={},discard=unmap",
            image.display()
        ));
        command.args(["--blockdev", "driver=raw,node-name=d,file=f,discard=unmap", "--export"]);
        command.arg(format!(
            "type=vhost-user-blk,id=e,node-name=d,addr.type=unix,addr.path={},writable=on,num-queues={num_queues}",
            dir.path().join("disk.sock").display()
        ));
        Backend::launch(command, dir)
    }

    /// Starts the process and waits until it listens.
    fn launch(mut command: Command, dir: TempDir) -> Backend {
        let program = std::iter::once(command.get_program());
        let arguments = program.chain(command.get_args()).map(OsString::from).collect();
        let mut child = command
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap_or_else(|error| panic!("{:?} does not start: {error}", command.get_program()));
        let mut pipe = child.stderr.take().unwrap();
        let stderr = Arc::new(Mutex::new(String::new()));
        let sink = stderr.clone();
        let stderr_reader = thread::spawn(move || {
            let mut bytes = [0; 4096];
            while let Ok(n @ 1..) = pipe.read(&mut bytes) {
                sink.lock().unwrap().push_str(&String::from_utf8_lossy(&bytes[..n]));
            }
        });
        let (alive, guarded) = mpsc::channel::<()>();
        let pid = pid_of(&child);
        thread::spawn(move || {
            if guarded.recv_timeout(LIFE_MAX) == Err(RecvTimeoutError::Timeout) {
                let _ = kill_process(pid, Signal::KILL);
            }
        });
        let mut backend = Backend {
            child,
            dir,
            stderr,
            stderr_reader: Some(stderr_reader),
            _alive: alive,
            arguments,
        };
        let socket = backend.socket();
        wait_for("the backend listens", PATIENCE, || {
            if let Some(status) = backend.child.try_wait().unwrap() {
                backend.finish_stderr();
                panic!(
                    "the backend ended with {status} before it listened; it said:\n{}",
                    backend.stderr()
                );
            }
            is_listening(&socket).then_some(())
        });
        backend
    }

    /// The same daemon once more, after its death, over what that left behind.
    pub fn again(mut self) -> Backend {
        let arguments = self.arguments.clone();
        let dir = std::mem::replace(&mut self.dir, TempDir::new().unwrap());
        drop(self);
        let mut command = Command::new(&arguments[0]);
        command.args(&arguments[1..]);
        Backend::launch(command, dir)
    }

    pub fn socket(&self) -> PathBuf {
        self.dir.path().join("disk.sock")
    }

    pub fn control(&self) -> PathBuf {
        self.dir.path().join("control.sock")
    }

    pub fn connect(&self) -> UnixStream {
        UnixStream::connect(self.socket()).unwrap()
    }

    /// What the control socket says of the disk.
    pub fn stats(&self) -> serde_json::Value {
        let mut stream = UnixStream::connect(self.control()).unwrap();
        stream.write_all(b"{\"command\":\"stats\"}\n").unwrap();
        let mut line = String::new();
        BufReader::new(stream).read_line(&mut line).unwrap();
        serde_json::from_str(&line).unwrap()
    }

    /// What the process has written to standard error so far.
    pub fn stderr(&self) -> String {
        self.stderr.lock().unwrap().clone()
    }

    pub fn signal(&self, signal: Signal) {
        kill_process(pid_of(&self.child), signal).unwrap();
    }

    /// Waits for the process to end by itself.
    pub fn wait(&mut self, patience: Duration) -> ExitStatus {
        let child = &mut self.child;
        let status = wait_for("the backend ends", patience, || child.try_wait().unwrap());
        self.finish_stderr();
        status
    }

    pub fn assert_alive(&mut self) {
        if let Some(status) = self.child.try_wait().unwrap() {
            self.finish_stderr();
            panic!(
                "the backend ended with {status}, signal {:?}:\n{}",
                status.signal(),
                self.stderr()
            );
        }
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    pub fn fd_count(&self) -> usize {
        let listed = fs::read_dir(self.proc("fd"));
        listed.expect("root can look, for the daemon is not dumpable").count()
    }

    pub fn thread_count(&self) -> usize {
        fs::read_dir(self.proc("task")).unwrap().count()
    }

    /// Descriptors and threads, once their numbers stay the same for a while: threads start and end on their own time.
    pub fn settled_counts(&self) -> (usize, usize) {
        wait_for("the numbers of descriptors and threads settle", PATIENCE, || {
            let counts = (self.fd_count(), self.thread_count());
            thread::sleep(Duration::from_millis(20));
            (counts == (self.fd_count(), self.thread_count())).then_some(counts)
        })
    }

    pub fn rss_bytes(&self) -> u64 {
        let status = fs::read_to_string(self.proc("status")).unwrap();
        let line = status.lines().find(|line| line.starts_with("VmRSS:")).unwrap();
        line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap() * 1024
    }

    /// Processor time of all threads alive now.
    pub fn cpu_time(&self) -> Duration {
        let tasks = fs::read_dir(self.proc("task")).unwrap().flatten();
        let nanoseconds = tasks
            // A thread may end between the listing and the look.
            .filter_map(|task| fs::read_to_string(task.path().join("schedstat")).ok())
            .filter_map(|text| text.split_whitespace().next()?.parse::<u64>().ok())
            .sum();
        Duration::from_nanos(nanoseconds)
    }

    /// No thread runs in circles: over a tenth of a second with nothing to do, the process takes next to no processor time.
    pub fn assert_idle(&self) {
        wait_for("the process is idle for 100 ms", PATIENCE, || {
            let before = self.cpu_time();
            // This is not waiting for something to happen: it is the span over which it must not.
            thread::sleep(Duration::from_millis(100));
            (self.cpu_time().saturating_sub(before) < Duration::from_millis(10)).then_some(())
        });
    }

    fn proc(&self, entry: &str) -> PathBuf {
        PathBuf::from(format!("/proc/{}/{entry}", self.child.id()))
    }

    fn finish_stderr(&mut self) {
        if let Some(reader) = self.stderr_reader.take() {
            reader.join().unwrap();
        }
    }
}

impl Drop for Backend {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        self.finish_stderr();
        if thread::panicking() {
            eprintln!("the backend's standard error:\n{}", self.stderr());
        }
    }
}

fn pid_of(child: &Child) -> Pid {
    Pid::from_child(child)
}

/// Whether somebody listens at `path`, seen without connecting: a trial connection would be the backend's first frontend.
fn is_listening(path: &Path) -> bool {
    const ACCEPTS_CONNECTIONS: &str = "00010000";
    let path = path.to_str().unwrap();
    fs::read_to_string("/proc/net/unix").unwrap().lines().any(|line| {
        let fields: Vec<&str> = line.split_whitespace().collect();
        fields.get(3) == Some(&ACCEPTS_CONNECTIONS) && fields.get(7) == Some(&path)
    })
}

/// A small generator (splitmix64). The seed is printed, so that a failing run can be repeated with `ZRAM_TEST_SEED`.
pub struct Dice(u64);

impl Dice {
    pub fn new() -> Dice {
        let seed = match std::env::var("ZRAM_TEST_SEED") {
            Ok(seed) => seed.parse().unwrap(),
            Err(_) => std::time::UNIX_EPOCH.elapsed().unwrap().as_nanos() as u64,
        };
        println!("ZRAM_TEST_SEED={seed}");
        Dice(seed)
    }

    pub fn seeded(seed: u64) -> Dice {
        Dice(seed)
    }

    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A number in `0..end`.
    pub fn below(&mut self, end: u64) -> u64 {
        self.next() % end
    }

    pub fn chance(&mut self, one_in: u64) -> bool {
        self.below(one_in) == 0
    }

    pub fn pick<T: Copy>(&mut self, of: &[T]) -> T {
        of[self.below(of.len() as u64) as usize]
    }

    /// Bytes that no codec makes smaller.
    pub fn bytes(&mut self, len: usize) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(len + 8);
        while bytes.len() < len {
            bytes.extend_from_slice(&self.next().to_le_bytes());
        }
        bytes.truncate(len);
        bytes
    }

    /// Content of one of the kinds that take different paths: zeroes, one repeated word, text-like, noise, a mix.
    pub fn content(&mut self, len: usize) -> Vec<u8> {
        match self.below(5) {
            0 => vec![0; len],
            1 => self.next().to_le_bytes().into_iter().cycle().take(len).collect(),
            2 => {
                let words: [&[u8]; 6] = [b"the ", b"page ", b"of a ", b"guest ", b"\0\0\0\0", b"swap\n"];
                let mut text = Vec::with_capacity(len + 8);
                while text.len() < len {
                    text.extend_from_slice(self.pick(&words));
                }
                text.truncate(len);
                text
            }
            3 => self.bytes(len),
            _ => {
                let mut mixed = self.bytes(len);
                let cut = self.below(len as u64 + 1) as usize;
                mixed[..cut].fill(b'x');
                mixed
            }
        }
    }
}
