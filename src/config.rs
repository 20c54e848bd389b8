//! The command line of the daemon, made into one [`Config`]. Every value is checked here and nowhere else; what the rest of
//! the daemon gets is in range. Nothing here opens or creates anything; the only look at the host is for a group's number.

use std::ffi::{OsStr, OsString};
use std::num::NonZero;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::builder::PossibleValuesParser;
use clap::error::ErrorKind;
use clap::{ArgGroup, Parser};
use nix::unistd::Group;
use rustix::fs::Gid;
use tracing_subscriber::filter::LevelFilter;
use zram_core::{Algorithm, DISK_BYTES_MAX, DecompressionContexts, MEM_LIMIT_MIN, PAGE_SIZE, PRIORITIES, WORKERS_MAX};
use zram_vhost::{
    BURST_DEFAULT, BURST_MAX, POLL_MAX, QUEUE_SIZE_DEFAULT, QUEUE_SIZE_MAX, QUEUES_MAX, RateLimit, Serial,
};

use crate::cpus::CpuList;
use crate::{sandbox, size};

/// A path in a `sockaddr_un` has 108 bytes, the last of them zero (unix(7)).
pub const SOCKET_PATH_BYTES_MAX: usize = 107;
const QUEUE_SIZE_MIN: u16 = 2;
/// By measurement, driver and worker on a core each: a lone read takes 22 us instead of 41, and 23 us of CPU instead of 32.
const POLL_US_DEFAULT: u16 = 50;

/// How far a disk can grow when nobody says how far.
const SIZE_MAX_FACTOR: u64 = 8;
const SIZE_MAX_LEAST: u64 = 256 << 30;

/// Everything the daemon was told, valid.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Config {
    /// Where frontends come from.
    pub endpoint: EndpointConfig,
    /// The disk's one name: in log lines, threads and tables, and its serial in the guest. Unknown until the socket is
    /// when the socket is inherited and no `--serial` was given.
    pub name: Option<String>,
    /// As asked for. Bytes, 1..=16 TiB.
    pub size_bytes_asked: u64,
    /// `size_bytes_asked` rounded up to whole pages.
    pub size_bytes: u64,
    /// The largest size that the disk can be given later. Bytes, whole pages, `size_bytes` to 16 TiB.
    pub size_bytes_max: u64,
    /// Whether that was said, and is no default.
    pub size_max_is_asked: bool,
    /// Host memory for the data. Bytes, 256 KiB to 16 TiB; `None` is no limit.
    pub mem_limit_bytes: Option<u64>,
    /// Whether slot table and arena are kept out of the host's swap.
    pub memory_lock: bool,
    /// The codec. Its dictionary is not read yet.
    pub algorithm: Algorithm,
    /// The codecs of recompression by their priority less one, their dictionaries not read yet.
    pub recompress_algorithms: [Option<Algorithm>; PRIORITIES - 1],
    /// Pages that can be decoded at a time by a codec that needs a context for it, 1..=128.
    pub decompression_contexts: NonZero<usize>,
    /// The most queues offered, 1..=64.
    pub num_queues: u16,
    /// The most entries of a queue, a power of two, 2..=32768.
    pub queue_size_max: u16,
    /// Whether guests may only read.
    pub read_only: bool,
    /// Bytes, 512 or 4096.
    pub logical_block_size: u32,
    /// The longest that a queue is watched before its worker sleeps. Microseconds, 0..=1000.
    pub poll_us: u16,
    /// Where the queues' workers run; `None` is wherever the scheduler likes.
    pub cpus: Option<CpuList>,
    /// How much the disk may move.
    pub rate_limit: RateLimit,
    /// Whether memory that its frontend could cut is refused.
    pub require_sealed_memory: bool,
    /// Where the control socket goes.
    pub control_path: Option<PathBuf>,
    /// What happens to a thread that makes a system call it should not make.
    pub sandbox: sandbox::Mode,
    /// The least urgent lines that are logged.
    pub log_level: LevelFilter,
}

/// Where frontends come from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum EndpointConfig {
    /// A socket to be made at this path.
    Path(PathBuf, Permissions),
    /// An inherited descriptor: 0, or 3 and up.
    Inherited(i32),
}

/// What a socket's file gets before anybody can see it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Permissions {
    /// Permission bits, 0..=0o777.
    pub mode: u32,
    /// The group; `None` leaves the daemon's own.
    pub group: Option<Gid>,
}

/// What a command line asks for.
#[derive(Debug)]
#[expect(clippy::large_enum_variant, reason = "there is one, at start")]
pub enum Invocation {
    /// Serve this disk.
    Serve(Config),
    /// Print this on stdout and end well: help, version, capabilities.
    Print(String),
    /// A usage error: one line that names flag, value and what would be allowed.
    Refuse(String),
}

/// Per QEMU's docs/interop/vhost-user.json.
const CAPABILITIES: &str = "{\n  \"type\": \"block\",\n  \"features\": [\n    \"read-only\"\n  ]\n}\n";

/// Reads a command line, the program's name included.
pub fn parse(arguments: impl IntoIterator<Item = OsString>) -> Invocation {
    let arguments: Vec<OsString> = arguments.into_iter().collect();
    // QEMU's conventions for backend programs: with this option all others are ignored, valid or not.
    if arguments.iter().any(|argument| argument == "--print-capabilities") {
        return Invocation::Print(CAPABILITIES.into());
    }
    match Arguments::try_parse_from(arguments) {
        Ok(arguments) => Config::new(arguments).map_or_else(Invocation::Refuse, Invocation::Serve),
        Err(error) => match error.kind() {
            ErrorKind::DisplayHelp | ErrorKind::DisplayVersion => Invocation::Print(error.to_string()),
            _ => Invocation::Refuse(one_line(&error)),
        },
    }
}

/// Serves a virtual machine a RAM disk whose content lies compressed in this host's memory.
///
/// The disk is a virtio-blk device, served over vhost-user to QEMU or cloud-hypervisor; once it listens, the daemon
/// prints the arguments that attach it. It stays in the foreground until SIGTERM or SIGINT, and its content goes with it.
#[derive(Parser, Debug)]
#[command(name = "vhost-user-zram", version, max_term_width = 80, after_long_help = AFTER_HELP)]
#[command(group = ArgGroup::new("endpoint").required(true).args(["socket_path", "fd"]))]
struct Arguments {
    /// Make a Unix socket at PATH and wait there for frontends, one at a time
    ///
    /// A socket that nobody listens on any more is replaced; one that somebody listens on, or any other file, is left
    /// alone and refused. At most 107 bytes.
    #[arg(long, value_name = "PATH", value_parser = socket_path)]
    socket_path: Option<PathBuf>,

    /// Use the inherited socket N instead: a listening one, or one that is already connected
    ///
    /// A listening socket is served like a path. A connected one is served until the frontend hangs up; then the daemon
    /// ends with exit code 0. N is 0, or 3 and up.
    #[arg(long, value_name = "N", allow_negative_numbers = true, value_parser = inherited_descriptor)]
    fd: Option<i32>,

    /// Size of the disk as the guest sees it, 1 byte to 16T
    ///
    /// In bytes, or with a unit: K, M, G, T or KiB, MiB, GiB, TiB, powers of 1024. Rounded up to whole pages of 4 KiB.
    /// This is not memory: a page costs some only once it was written.
    #[arg(long, value_name = "SIZE", allow_negative_numbers = true, value_parser = disk_size)]
    size: u64,

    /// The largest size that vzramctl resize can give the disk [default: 8 times --size, at least 256G]
    ///
    /// Written like --size, up to 16T. Address space for it is reserved, which costs no memory. With --memory-lock the
    /// default is --size, since the limit of locked memory has to cover all address space.
    #[arg(long, value_name = "SIZE", allow_negative_numbers = true, value_parser = disk_size)]
    size_max: Option<u64>,

    /// The most host memory the disk's data may take, at least 256K [default: no limit]
    ///
    /// Written like --size, used in steps of 64 KiB. Never exceeded: a write that needs more fails in the guest as an I/O
    /// error, and the old content stays. The slot table comes on top: 8 bytes for each page, 2 MiB for each GiB of the disk.
    #[arg(long, value_name = "SIZE", allow_negative_numbers = true, value_parser = mem_limit)]
    mem_limit: Option<u64>,

    /// Keep the disk's data out of the host's swap
    ///
    /// Memory is locked as it is used. RLIMIT_MEMLOCK (ulimit -l, LimitMEMLOCK= in a systemd unit) has to cover all
    /// address space of the disk, some 4 times its size and 256 MiB, or the daemon to have CAP_IPC_LOCK.
    #[arg(long)]
    memory_lock: bool,

    /// Compression: lz4, lzo, lzo-rle, 842, lz4hc, zstd or deflate, with parameters as in zstd(level=3,dict=PATH)
    ///
    /// lz4 is the fastest; zstd stores about half as much and takes two to three times as long. lz4hc reads as fast as lz4
    /// and stores a fifth less, but writes three to eight times slower; deflate is slower than zstd in all. level: lz4 1 to
    /// 65537 (higher is faster), lz4hc 1 to 12, zstd -5 to 22, deflate -1 to 9. winbits of deflate: -15 to -9, or 9 to 15
    /// with zlib's checksum. dict names a file of bytes that pages have in common, up to 64 KiB, of zstd 1 MiB; deflate
    /// takes none.
    #[arg(long, value_name = "NAME", default_value = "lz4", value_parser = algorithm)]
    algorithm: Algorithm,

    /// Compression that vzramctl recompress uses, up to three, each [PRIORITY:]NAME
    ///
    /// NAME as for --algorithm. PRIORITY, 1 to 3, is the order in which they are tried; without it the lowest that is free.
    /// Each takes one compression context, whatever the number of queues.
    #[arg(long, value_name = "NAME", value_parser = recompress_algorithm)]
    recompress_algorithm: Vec<(Option<usize>, Algorithm)>,

    /// Pages that zstd or deflate can decode at a time, 1 to 128 [default: one more than cores or queues]
    ///
    /// Each takes 97 KiB with zstd and 12 KiB with deflate. The queues share them; contexts_waited of the control socket counts how
    /// often all were in use, and should stay 0. The default is the lesser of cores and queues, and one.
    #[arg(long, value_name = "N", allow_negative_numbers = true, value_parser = decompression_contexts)]
    decompression_contexts: Option<NonZero<usize>>,

    /// The most virtqueues offered, 1 to 64
    ///
    /// QEMU takes one per vCPU and refuses a disk that offers fewer. A queue that is not used costs nothing.
    #[arg(long, value_name = "N", default_value_t = QUEUES_MAX, allow_negative_numbers = true,
          value_parser = clap::value_parser!(u16).range(1..=64))]
    num_queues: u16,

    /// The most entries of a virtqueue, a power of two, 2 to 32768
    #[arg(long, value_name = "N", default_value_t = QUEUE_SIZE_DEFAULT, allow_negative_numbers = true, value_parser = queue_size)]
    queue_size_max: u16,

    /// Watch a queue for up to N microseconds, 0 to 1000, before its worker sleeps; 0 never watches
    ///
    /// Shortens the answer to a lone request, for CPU time: a queue is watched only as long as that gains something, and
    /// an idle one is not.
    #[arg(long, value_name = "N", default_value_t = POLL_US_DEFAULT, allow_negative_numbers = true,
          value_parser = clap::value_parser!(u16).range(..=POLL_MAX.as_micros() as i64))]
    poll_us: u16,

    /// Keep the queues' workers on these CPUs, such as 2 or 0,4-7 [default: wherever the scheduler likes]
    ///
    /// Each worker stays on one of them: the first queue's on the first of the list, and so on, from the beginning again
    /// after the last. The CPUs have to be among those that the daemon may use. Its other threads stay where they are.
    #[arg(long, value_name = "LIST", allow_negative_numbers = true)]
    cpus: Option<CpuList>,

    /// The most reads and writes a second, all queues together, from 1 [default: no limit]
    ///
    /// Discarding and zeroing are not counted, here and in --bandwidth-limit.
    #[arg(long, value_name = "N", allow_negative_numbers = true, value_parser = clap::value_parser!(u64).range(1..))]
    iops_limit: Option<u64>,

    /// The most bytes read and written a second, all queues together, from 1 [default: no limit]
    ///
    /// Written like --size.
    #[arg(long, value_name = "SIZE", allow_negative_numbers = true, value_parser = bandwidth)]
    bandwidth_limit: Option<u64>,

    /// How much of the limits may be saved up while the disk is idle, in milliseconds' worth, 0 to 60000
    #[arg(long, value_name = "MS", default_value_t = BURST_DEFAULT.as_millis() as u16, allow_negative_numbers = true,
          value_parser = clap::value_parser!(u16).range(..=BURST_MAX.as_millis() as i64))]
    limit_burst_ms: u16,

    /// Refuse VMs whose memory is not sealed against shrinking
    ///
    /// QEMU seals what memory-backend-memfd shares, cloud-hypervisor its own since 2026. Without this option a VM whose
    /// memory file is cut loses its disk, and nobody else does.
    #[arg(long)]
    require_sealed_memory: bool,

    /// Let guests read only
    #[arg(long)]
    read_only: bool,

    /// Serial number of the disk in the guest, and its name here: 1 to 20 printable ASCII characters, no spaces
    ///
    /// Left out, it is the socket's file name without its suffix; where that does not fit, its beginning and a hash of the
    /// whole path. Guests find the disk as /dev/disk/by-id/virtio-TEXT.
    #[arg(long, value_name = "TEXT", value_parser = serial)]
    serial: Option<String>,

    /// Smallest unit in which guests read and write, in bytes: 512 or 4096
    ///
    /// Writes smaller than 4096 bytes cost a read and a whole new page.
    #[arg(long, value_name = "BYTES", default_value = "4096", value_parser = PossibleValuesParser::new(["512", "4096"]))]
    logical_block_size: String,

    /// Group that owns the socket, by name or number [default: the daemon's own]
    #[arg(long, value_name = "NAME", value_parser = group, conflicts_with = "fd")]
    socket_group: Option<u32>,

    /// Permission bits of the socket, octal, 0 to 777 [default: 0660]
    ///
    /// Mode and group are set before the socket can be seen, whatever the umask.
    #[arg(long, value_name = "OCTAL", allow_negative_numbers = true, value_parser = socket_mode, conflicts_with = "fd")]
    socket_mode: Option<u32>,

    /// Answer vzramctl on a Unix socket at PATH, which only the daemon's user can open (mode 0600)
    #[arg(long, value_name = "PATH", value_parser = socket_path)]
    control_path: Option<PathBuf>,

    /// What happens to a thread of the daemon that makes a system call it has no use for: off, log or kill
    ///
    /// Before it serves a frontend the daemon gives up what it does not need: new privileges, core dumps, most system
    /// calls (seccomp, a list for each kind of thread) and files (Landlock). With kill a thread that tries all the same,
    /// because a guest has taken it over, ends the daemon (SIGSYS). With log the kernel logs the call, as type=1326, and
    /// lets it through, and files are open. What the host does not have is told at start and done without.
    #[arg(long, value_name = "MODE", default_value = "kill", hide_possible_values = true)]
    sandbox: sandbox::Mode,

    /// The least urgent lines that are logged to stderr: off, error, warn, info, debug or trace
    #[arg(long, value_name = "LEVEL", default_value = "info", hide_possible_values = true,
          value_parser = PossibleValuesParser::new(["off", "error", "warn", "info", "debug", "trace"]))]
    log_level: String,

    /// Print what this program can do as JSON, as QEMU's conventions ask, and end. All other options are ignored
    #[arg(long)]
    print_capabilities: bool,
}

const AFTER_HELP: &str = "\
Signals:
  SIGTERM, SIGINT  end within a second and remove the sockets; a second one ends
                   at once and leaves them
  SIGUSR1          write the state of the disk to the log, at level info
  SIGHUP, SIGPIPE  ignored

Exit codes:
  0  ended by a signal, or the connected socket of --fd was closed
  1  failed at run time: the socket is in use, memory was refused, ...
  2  the command line is wrong";

impl Config {
    fn new(arguments: Arguments) -> Result<Config, String> {
        let endpoint = match (arguments.socket_path, arguments.fd) {
            (Some(path), _) => EndpointConfig::Path(
                path,
                Permissions {
                    mode: arguments.socket_mode.unwrap_or(0o660),
                    group: arguments.socket_group.map(Gid::from_raw),
                },
            ),
            (None, Some(number)) => EndpointConfig::Inherited(number),
            (None, None) => return Err("--socket-path PATH or --fd N is needed".into()),
        };
        if let EndpointConfig::Path(path, _) = &endpoint
            && arguments
                .control_path
                .as_ref()
                .is_some_and(|control| absolute(control) == absolute(path))
        {
            return Err(format!(
                "--control-path '{}' is the --socket-path too; they must differ",
                path.display()
            ));
        }
        let name = match (&endpoint, arguments.serial) {
            (_, Some(serial)) => Some(serial),
            (EndpointConfig::Path(path, _), None) => Some(default_name(path)),
            (EndpointConfig::Inherited(_), None) => None,
        };
        let size_bytes = arguments.size.next_multiple_of(PAGE_SIZE as u64);
        let size_bytes_max = match arguments.size_max.map(|size| size.next_multiple_of(PAGE_SIZE as u64)) {
            Some(max) if max < size_bytes => {
                return Err(format!("--size-max {max}: it is at least --size, {size_bytes}"));
            }
            Some(max) => max,
            None if arguments.memory_lock => size_bytes,
            None => size_bytes
                .saturating_mul(SIZE_MAX_FACTOR)
                .clamp(SIZE_MAX_LEAST, DISK_BYTES_MAX),
        };
        Ok(Config {
            endpoint,
            name,
            size_bytes_asked: arguments.size,
            size_bytes,
            size_bytes_max,
            size_max_is_asked: arguments.size_max.is_some(),
            mem_limit_bytes: arguments.mem_limit,
            memory_lock: arguments.memory_lock,
            algorithm: arguments.algorithm,
            recompress_algorithms: by_priority(arguments.recompress_algorithm)?,
            decompression_contexts: arguments
                .decompression_contexts
                .unwrap_or_else(|| DecompressionContexts::count_for(arguments.num_queues.into())),
            num_queues: arguments.num_queues,
            queue_size_max: arguments.queue_size_max,
            poll_us: arguments.poll_us,
            cpus: arguments.cpus,
            require_sealed_memory: arguments.require_sealed_memory,
            rate_limit: RateLimit {
                iops: arguments.iops_limit,
                bytes_per_second: arguments.bandwidth_limit,
                burst: Duration::from_millis(u64::from(arguments.limit_burst_ms)),
            },
            read_only: arguments.read_only,
            logical_block_size: if arguments.logical_block_size == "512" {
                512
            } else {
                4096
            },
            control_path: arguments.control_path,
            sandbox: arguments.sandbox,
            log_level: arguments
                .log_level
                .parse()
                .map_err(|_| "--log-level is not a level".to_string())?,
        })
    }
}

/// The socket's file name without its suffix, made fit to be a serial.
///
/// Two sockets whose names differ only where a serial would be cut, or only in bytes that a serial cannot have, get
/// different names: the hash of the whole path stands at the end. It must not change from one version to the next, for
/// guests find their disks by it.
pub fn default_name(path: &Path) -> String {
    let stem = path.file_stem().unwrap_or(OsStr::new("zram")).as_bytes();
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-._".contains(&byte);
    let fit: String = stem
        .iter()
        .map(|&byte| if plain(byte) { char::from(byte) } else { '_' })
        .collect();
    if fit.as_bytes() == stem && stem.len() <= Serial::BYTES {
        return fit;
    }
    let hash = fnv1a(absolute(path).as_os_str().as_bytes());
    let kept = fit.len().min(Serial::BYTES - "-01234567".len());
    format!("{}-{:08x}", &fit[..kept], (hash >> 32) as u32 ^ hash as u32)
}

/// FNV-1a, 64 bits: short, and the same for ever, which the hashes of the standard library do not promise.
fn fnv1a(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |hash, &byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3)
    })
}

/// The path from the root, whether or not it exists.
pub fn absolute(path: &Path) -> PathBuf {
    std::path::absolute(path).unwrap_or_else(|_| path.into())
}

fn disk_size(text: &str) -> Result<u64, String> {
    in_range(size::parse(text)?, 1, DISK_BYTES_MAX, "1 byte to 16T")
}

fn bandwidth(text: &str) -> Result<u64, String> {
    in_range(
        size::parse(text)?,
        1,
        u64::MAX,
        "1 byte and up; leave the option out for no limit",
    )
}

fn mem_limit(text: &str) -> Result<u64, String> {
    in_range(
        size::parse(text)?,
        MEM_LIMIT_MIN,
        DISK_BYTES_MAX,
        "256K to 16T; leave the option out for no limit",
    )
}

fn in_range(value: u64, min: u64, max: u64, range: &str) -> Result<u64, String> {
    if (min..=max).contains(&value) {
        Ok(value)
    } else {
        Err(format!("allowed is {range}"))
    }
}

fn algorithm(text: &str) -> Result<Algorithm, String> {
    text.parse()
        .map_err(|error: zram_core::ParseAlgorithmError| error.to_string())
}

fn recompress_algorithm(text: &str) -> Result<(Option<usize>, Algorithm), String> {
    // A name has no colon before its parameters, a dictionary's path may have one.
    match text.split_once(':').filter(|(priority, _)| !priority.contains('(')) {
        None => Ok((None, algorithm(text)?)),
        Some((priority, name)) => {
            let priority = priority
                .parse()
                .ok()
                .filter(|priority| (1..PRIORITIES).contains(priority));
            Ok((Some(priority.ok_or("PRIORITY is 1 to 3")?), algorithm(name)?))
        }
    }
}

fn by_priority(given: Vec<(Option<usize>, Algorithm)>) -> Result<[Option<Algorithm>; PRIORITIES - 1], String> {
    let mut all = [const { None }; PRIORITIES - 1];
    let (named, free): (Vec<_>, Vec<_>) = given.into_iter().partition(|(priority, _)| priority.is_some());
    for (priority, algorithm) in named.into_iter().chain(free) {
        let place = match priority {
            Some(priority) => all.get_mut(priority - 1).filter(|place| place.is_none()),
            None => all.iter_mut().find(|place| place.is_none()),
        };
        *place.ok_or_else(|| match priority {
            Some(priority) => format!("--recompress-algorithm: priority {priority} is given twice"),
            None => "--recompress-algorithm: there are three at most".into(),
        })? = Some(algorithm);
    }
    Ok(all)
}

fn decompression_contexts(text: &str) -> Result<NonZero<usize>, String> {
    text.parse()
        .ok()
        .filter(|count: &NonZero<usize>| count.get() <= WORKERS_MAX)
        .ok_or_else(|| format!("allowed is 1 to {WORKERS_MAX}"))
}

fn queue_size(text: &str) -> Result<u16, String> {
    text.parse()
        .ok()
        .filter(|size: &u16| size.is_power_of_two() && (QUEUE_SIZE_MIN..=QUEUE_SIZE_MAX).contains(size))
        .ok_or_else(|| format!("allowed are powers of two from {QUEUE_SIZE_MIN} to {QUEUE_SIZE_MAX}"))
}

fn serial(text: &str) -> Result<String, String> {
    text.parse::<Serial>()
        .map(|_| text.to_string())
        .map_err(|error| error.to_string())
}

fn socket_path(text: &str) -> Result<PathBuf, String> {
    match text.len() {
        1..=SOCKET_PATH_BYTES_MAX if !text.ends_with('/') => Ok(text.into()),
        1..=SOCKET_PATH_BYTES_MAX => Err("allowed is the path of a file".into()),
        _ => Err(format!(
            "allowed are 1 to {SOCKET_PATH_BYTES_MAX} bytes, the most a Unix socket's path can have"
        )),
    }
}

fn inherited_descriptor(text: &str) -> Result<i32, String> {
    text.parse()
        .ok()
        .filter(|&number: &i32| number == 0 || number > 2)
        .ok_or_else(|| {
            "allowed is the number of an open descriptor: 0, or 3 and up (1 and 2 are stdout and stderr)".into()
        })
}

fn socket_mode(text: &str) -> Result<u32, String> {
    let digits = text.strip_prefix("0o").unwrap_or(text);
    u32::from_str_radix(digits, 8)
        .ok()
        .filter(|&mode| mode <= 0o777 && digits.bytes().all(|byte| byte.is_ascii_digit()))
        .ok_or_else(|| "allowed is an octal number from 0 to 777, such as 0660".into())
}

fn group(text: &str) -> Result<u32, String> {
    match Group::from_name(text) {
        Ok(Some(group)) => Ok(group.gid.as_raw()),
        // u32::MAX means "leave it" to chown(2).
        Ok(None) => {
            text.parse().ok().filter(|&gid| gid != u32::MAX).ok_or_else(|| {
                "allowed is the name of a group of this host, or a number; there is no such group".into()
            })
        }
        Err(error) => Err(format!("the groups of this host cannot be read: {error}")),
    }
}

/// clap explains itself over several lines. Whoever starts a daemon looks at one line of a journal: this keeps what was
/// wrong and what would be right.
pub fn one_line(error: &clap::Error) -> String {
    let text = error.to_string();
    let told = text
        .lines()
        .map(str::trim)
        .take_while(|line| !line.starts_with("Usage:"));
    let parts: Vec<&str> = told
        .filter(|line| !line.is_empty() && !line.starts_with("For more information"))
        .collect();
    parts.join(" ").trim_start_matches("error: ").replace(" tip: ", "; ")
}
