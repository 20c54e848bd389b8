//! Builds the disk, serves it, ends. Read `Daemon::start` and `Daemon::serve` from top to bottom: they are the life of
//! the process.

use std::io::{self, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use sd_notify::NotifyState;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM, SIGUSR1, SIGXFSZ};
use signal_hook::{flag, low_level};
use tracing::info;
use zram_core::{Algorithm, Codecs, CreateError, DecompressionContexts, LoadError, Options, PRIORITIES, Zram};
use zram_vhost::{Device, DeviceConfig, Endpoint, ThreadKind, ThreadStart};

use crate::config::{Config, EndpointConfig, Permissions, default_name};
use crate::cpus::Pins;
use crate::disk::Disk;
use crate::logging::{self, Priority};
use crate::sandbox::{Kind, Sandbox};
use crate::socket::{self, Inherited, SocketFile};
use crate::{announce, control, host};

const EXIT_FAILURE: u8 = 1;
const EXIT_USAGE: u8 = 2;

/// Serves a disk until it is told to end.
pub fn run(config: &Config) -> ExitCode {
    logging::start(config.log_level);
    match Daemon::start(config).and_then(Daemon::serve) {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => fail(&failure),
    }
}

/// Prints what was asked for instead of serving.
pub fn print(text: &str) -> ExitCode {
    // Whoever asked may have hung up.
    let _ = io::stdout().write_all(text.as_bytes());
    ExitCode::SUCCESS
}

/// Ends because of the command line.
pub fn refuse(message: &str) -> ExitCode {
    fail(&Failure {
        exit_code: EXIT_USAGE,
        message: message.into(),
    })
}

/// One line on stderr, and the same as the unit's status when systemd wants to know.
fn fail(failure: &Failure) -> ExitCode {
    logging::say(Priority::Error, &failure.message);
    notify(&[NotifyState::Status(&failure.message)]);
    ExitCode::from(failure.exit_code)
}

/// Why a start or a run ended badly. Nobody handles the cases apart; people read them.
struct Failure {
    exit_code: u8,
    message: String,
}

impl Failure {
    fn new(message: impl ToString) -> Failure {
        Failure {
            exit_code: EXIT_FAILURE,
            message: message.to_string(),
        }
    }
}

struct Daemon {
    disk: Arc<Disk>,
    signals: Signals,
    /// Readable when the device has ended by itself.
    device_ended: OwnedFd,
    /// Ours to remove at the end: the vhost-user socket and the control socket, as far as there are any.
    socket_files: Vec<SocketFile>,
}

impl Daemon {
    fn start(config: &Config) -> Result<Daemon, Failure> {
        let signals =
            Signals::register().map_err(|error| Failure::new(format!("signals cannot be handled: {error}")))?;
        host::raise_descriptor_limit();
        let size_bytes_max = host::largest_size(config).map_err(Failure::new)?;
        if let Some(cpus) = &config.cpus {
            cpus.check()
                .map_err(|message| Failure::new(format!("--cpus: {message}")))?;
        }

        let codecs = codecs(config)?;

        let Frontdoor {
            endpoint,
            path,
            mut files,
        } = Frontdoor::open(&config.endpoint)?;
        let control = match &config.control_path {
            Some(path) => {
                let (listener, file) = socket::listen_at(path, CONTROL_PERMISSIONS)
                    .map_err(|message| Failure::new(format!("--control-path {message}")))?;
                files.push(file);
                Some(listener)
            }
            None => None,
        };

        let name = name_of(config, path.as_deref());
        let zram = Zram::create(&Options {
            name: name.clone(),
            size_bytes: config.size_bytes,
            size_bytes_max: Some(size_bytes_max),
            mem_limit_bytes: config.mem_limit_bytes,
            codecs,
        })
        .map_err(|error| Failure::new(told(&error)))?;
        if config.memory_lock {
            host::lock_memory(&zram).map_err(Failure::new)?;
        }
        for hint in announce::hints(config) {
            logging::say(Priority::Notice, &hint);
        }
        if let Some(warning) = host::memory_warning(config) {
            logging::say(Priority::Warning, &warning);
        }
        let directories: Vec<PathBuf> = files.iter().map(SocketFile::directory).collect();
        let sandbox = Sandbox::prepare(config.sandbox, &directories).map_err(|error| {
            Failure::new(format!(
                "no sandbox can be had: {error}; with --sandbox off there is none"
            ))
        })?;
        let device = Device::start(zram.clone(), endpoint, device_config(config, &name, &sandbox)?)
            .map_err(|error| Failure::new(format!("the device cannot be started: {error}")))?;
        let device_ended = device.ended().try_clone_to_owned().map_err(Failure::new)?;

        let disk = Disk::new(name.clone(), config.num_queues, config.read_only, zram, &sandbox)
            .map_err(|error| Failure::new(format!("no thread for the disk: {error}")))?;
        let disk = Arc::new(disk);
        disk.attach(device);
        if let Some(listener) = control {
            control::serve(listener, disk.clone(), sandbox.clone())
                .map_err(|error| Failure::new(format!("--control-path: {error}")))?;
        }

        sandbox.enter(Kind::Main);

        print(&announce::block(config, &name, path.as_deref()));
        notify(&[
            NotifyState::Ready,
            NotifyState::Status(&format!("disk {name} is ready for a frontend")),
        ]);
        Ok(Daemon {
            disk,
            signals,
            device_ended,
            socket_files: files,
        })
    }

    /// Waits for the end, and ends: first no new frontend can find the socket, then the device stops.
    fn serve(self) -> Result<(), Failure> {
        loop {
            match self.next_event().map_err(Failure::new)? {
                Event::Dump => self.dump(),
                Event::DeviceEnded => {
                    info!(disk = self.disk.name(), "the frontend hung up");
                    break;
                }
                Event::Stop => {
                    info!(disk = self.disk.name(), "told to end");
                    break;
                }
            }
        }
        notify(&[NotifyState::Stopping]);
        drop(self.socket_files);
        let disk = self.disk;
        if !ends_within(STOP_TIME_MAX, move || disk.stop()) {
            logging::say(
                Priority::Warning,
                "the device does not stop, its frontend holds it up: ending without it",
            );
        }
        Ok(())
    }

    fn next_event(&self) -> io::Result<Event> {
        loop {
            let mut sources = [
                PollFd::new(&self.signals.stop, PollFlags::IN),
                PollFd::new(&self.device_ended, PollFlags::IN),
                PollFd::new(&self.signals.dump, PollFlags::IN),
            ];
            match poll(&mut sources, None) {
                Err(Errno::INTR) => continue,
                result => result?,
            };
            let [stop, ended, dump] = sources.map(|source| !source.revents().is_empty());
            if stop {
                return Ok(Event::Stop);
            }
            if ended {
                return Ok(Event::DeviceEnded);
            }
            if dump {
                drain(&self.signals.dump);
                return Ok(Event::Dump);
            }
        }
    }

    fn dump(&self) {
        let stats = serde_json::to_string(&self.disk.stats()).unwrap_or_default();
        info!(disk = self.disk.name(), "state: {stats}");
    }
}

enum Event {
    Stop,
    Dump,
    DeviceEnded,
}

/// How long the device may take to stop. It takes milliseconds, unless a frontend has found a way to hold a worker up: by
/// memory that it serves itself and does not serve, for one.
const STOP_TIME_MAX: Duration = Duration::from_millis(800);

/// Does `work` on the side, and waits for it so long. What is not done then is left to the end of the process.
fn ends_within(time: Duration, work: impl FnOnce() + Send + 'static) -> bool {
    let (done, is_done) = mpsc::channel();
    let worker = thread::Builder::new().name("stop".into()).spawn(move || {
        work();
        let _ = done.send(());
    });
    worker.is_ok() && is_done.recv_timeout(time).is_ok()
}

/// The control socket is for the daemon's user alone.
const CONTROL_PERMISSIONS: Permissions = Permissions {
    mode: 0o600,
    group: None,
};

/// Where frontends come in.
struct Frontdoor {
    endpoint: Endpoint,
    /// Where it can be found from outside.
    path: Option<PathBuf>,
    files: Vec<SocketFile>,
}

impl Frontdoor {
    fn open(config: &EndpointConfig) -> Result<Frontdoor, Failure> {
        match config {
            EndpointConfig::Path(path, permissions) => {
                let (listener, file) = socket::listen_at(path, *permissions)
                    .map_err(|message| Failure::new(format!("--socket-path {message}")))?;
                Ok(Frontdoor {
                    endpoint: Endpoint::Listener(listener),
                    path: Some(path.clone()),
                    files: vec![file],
                })
            }
            EndpointConfig::Inherited(number) => {
                let said = |message| Failure {
                    exit_code: EXIT_USAGE,
                    message: format!("--fd {number}: {message}"),
                };
                Ok(match socket::inherit(*number).map_err(said)? {
                    Inherited::Listener(listener) => {
                        let path = path_of(&listener);
                        Frontdoor {
                            endpoint: Endpoint::Listener(listener),
                            path,
                            files: Vec::new(),
                        }
                    }
                    Inherited::Stream(stream) => Frontdoor {
                        endpoint: Endpoint::Stream(stream),
                        path: None,
                        files: Vec::new(),
                    },
                })
            }
        }
    }
}

/// The algorithm with its dictionary read, and contexts to decode with. Fails before anything can be seen of the daemon.
fn codecs(config: &Config) -> Result<Arc<Codecs>, Failure> {
    let load = |option: &str, algorithm: &Algorithm| {
        algorithm.load().map_err(|error| match &error {
            LoadError::Read(_, cause) => Failure::new(format!("{option}: {error}: {cause}")),
            error => Failure::new(format!("{option}: {error}")),
        })
    };
    let primary = load("--algorithm", &config.algorithm)?;
    let mut secondary = [const { None }; PRIORITIES - 1];
    for (place, algorithm) in secondary.iter_mut().zip(&config.recompress_algorithms) {
        let loaded = algorithm
            .as_ref()
            .map(|algorithm| load("--recompress-algorithm", algorithm));
        *place = loaded.transpose()?;
    }
    let contexts = DecompressionContexts::new(config.decompression_contexts);
    Codecs::new(primary, secondary, contexts)
        .map(Arc::new)
        .map_err(Failure::new)
}

/// The store's errors with what lies beneath them, which says more.
fn told(error: &CreateError) -> String {
    match error {
        CreateError::Map(cause) => format!("{error}: {cause}"),
        error => error.to_string(),
    }
}

fn path_of(listener: &UnixListener) -> Option<PathBuf> {
    listener.local_addr().ok()?.as_pathname().map(PathBuf::from)
}

/// `--serial`, or what the socket is called, or just zram.
fn name_of(config: &Config, path: Option<&std::path::Path>) -> String {
    config
        .name
        .clone()
        .or_else(|| path.map(default_name))
        .unwrap_or_else(|| "zram".into())
}

fn device_config(config: &Config, name: &str, sandbox: &Sandbox) -> Result<DeviceConfig, Failure> {
    let sandbox = sandbox.clone();
    let pins = Pins::new(config.cpus.clone());
    Ok(DeviceConfig {
        name: name.into(),
        num_queues: config.num_queues,
        queue_size_max: config.queue_size_max,
        read_only: config.read_only,
        serial: name
            .parse()
            .map_err(|error| Failure::new(format!("--serial '{name}': {error}")))?,
        logical_block_size: config.logical_block_size,
        // A RAM disk keeps nothing by flushing; without the bit a guest sends no flushes.
        flush: false,
        thread_start: ThreadStart::new(move |kind| {
            sandbox.enter(match kind {
                ThreadKind::Control => Kind::Device,
                ThreadKind::Worker(queue) => {
                    pins.pin(queue);
                    Kind::Worker
                }
            });
        }),
        require_sealed_memory: config.require_sealed_memory,
        rate_limit: config.rate_limit,
        poll_max: Duration::from_micros(u64::from(config.poll_us)),
    })
}

/// Tells systemd, if it started us and wants to know. That it cannot be told is no reason to end.
fn notify(state: &[NotifyState<'_>]) {
    if let Err(error) = sd_notify::notify(state) {
        info!("systemd cannot be told: {error}");
    }
}

/// Signals as descriptors: each is readable once its signal came.
struct Signals {
    /// SIGTERM and SIGINT.
    stop: UnixStream,
    /// SIGUSR1.
    dump: UnixStream,
}

impl Signals {
    fn register() -> io::Result<Signals> {
        let (stop, stop_writer) = UnixStream::pair()?;
        let (dump, dump_writer) = UnixStream::pair()?;
        dump.set_nonblocking(true)?;
        let asked_before = Arc::new(AtomicBool::new(false));
        for signal in [SIGTERM, SIGINT] {
            // In this order: the first signal finds the flag down and raises it, the second one finds it up.
            flag::register_conditional_shutdown(signal, EXIT_FAILURE.into(), asked_before.clone())?;
            flag::register(signal, asked_before.clone())?;
            low_level::pipe::register(signal, stop_writer.try_clone()?)?;
        }
        low_level::pipe::register(SIGUSR1, dump_writer)?;
        // Nothing to do for these; but by default they would kill. std ignores SIGPIPE by itself.
        for signal in [SIGHUP, SIGXFSZ] {
            flag::register(signal, Arc::new(AtomicBool::new(false)))?;
        }
        Ok(Signals { stop, dump })
    }
}

/// Several signals that came together are one.
fn drain(mut source: &UnixStream) {
    let mut bytes = [0; 64];
    while source.read(&mut bytes).is_ok_and(|count| count == bytes.len()) {}
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_end_does_not_wait_for_what_never_ends() {
        assert!(ends_within(Duration::from_secs(10), || {}));
        assert!(!ends_within(Duration::from_millis(10), || thread::sleep(
            Duration::from_secs(60)
        )));
    }
}
