//! The messages of the control socket: one JSON object a line, a request and its answer. `docs/control.md` tells it to
//! people who write clients. Fields that came later are 0 where an older daemon does not know them.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

/// Goes up when a client that knew the old messages would misread the new ones. New fields do not count.
pub const PROTOCOL_VERSION: u32 = 1;

/// The longest request, its newline not counted.
pub const REQUEST_BYTES_MAX: usize = 4096;

/// What a client asks.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Request {
    /// `version`, `stats`, `mm-stat`, `io-stat`, `arena`, `compact`, `set`, `resize`, `idle`, `recompress` or `train-dict`.
    pub command: String,
    /// The name of the disk that is meant. Without it, the daemon's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub disk: Option<String>,
    /// For `set`, `resize`, `idle`, `recompress` and `train-dict` only: values by their keys.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub values: Option<Map<String, Value>>,
}

/// The answer to `version`.
#[derive(Debug, Serialize, Deserialize)]
pub struct Version {
    /// The daemon's.
    pub version: String,
    /// See [`PROTOCOL_VERSION`].
    pub protocol: u32,
}

/// The answer to `mm-stat`: zram's line of that name.
#[derive(Debug, Serialize, Deserialize)]
pub struct MmStat {
    /// Newline included.
    pub mm_stat: String,
}

/// The answer to `io-stat`: zram's line of that name.
#[derive(Debug, Serialize, Deserialize)]
pub struct IoStat {
    /// Newline included.
    pub io_stat: String,
}

/// The answer to `set`: what is in force now. Sizes are in bytes.
#[derive(Debug, Serialize, Deserialize)]
pub struct Settings {
    /// The disk's name.
    pub name: String,
    /// As in [`DiskStats`].
    pub mem_limit: u64,
    /// As in [`DiskStats`]. It may be more than a limit that was lowered.
    pub mem_used_total: u64,
    /// As in [`DiskStats`].
    pub mem_used_max: u64,
    /// As in [`DiskStats`].
    #[serde(default)]
    pub iops_limit: u64,
    /// As in [`DiskStats`].
    #[serde(default)]
    pub bandwidth_limit: u64,
    /// As in [`DiskStats`].
    #[serde(default)]
    pub limit_burst_ms: u64,
}

/// The answer to `compact`, when all is done. Sizes are in bytes.
#[derive(Debug, Serialize, Deserialize)]
pub struct CompactReport {
    /// The disk's name.
    pub name: String,
    /// Objects that were moved.
    pub objects_moved: u64,
    /// OS pages that this gained.
    pub pages_compacted: u64,
    /// `mem_used_total` before.
    pub mem_used_before: u64,
    /// `mem_used_total` after. Guests go on writing meanwhile.
    pub mem_used_total: u64,
}

/// The answer to `resize`. Sizes are in bytes.
#[derive(Debug, Serialize, Deserialize)]
pub struct ResizeReport {
    /// The disk's name.
    pub name: String,
    /// Before.
    pub disksize_before: u64,
    /// Now.
    pub disksize: u64,
    /// `told`: the frontend was, and tells the guest. `no-channel`, `unread`: it takes no notices, or does not read them,
    /// and sees the size when it connects again. `no-frontend`: none is connected. `unchanged`: there was nothing to tell.
    pub notice: String,
}

/// The answer to `train-dict`. Sizes are in bytes.
#[derive(Debug, Serialize, Deserialize)]
pub struct DictionaryReport {
    /// The disk's name, or the file of pages.
    pub name: String,
    /// The disk's.
    pub algorithm: String,
    /// Pages that it was made from.
    pub pages_trained: u64,
    /// Pages that it was tried on, none of them among the others.
    pub pages_held_out: u64,
    /// For `algorithm`, unless that takes no dictionaries, and zstd.
    pub gains: Vec<DictionaryGain>,
    /// The dictionary in hexadecimal digits.
    pub dictionary: String,
}

/// What a dictionary does to the pages held out.
#[derive(Debug, Serialize, Deserialize)]
pub struct DictionaryGain {
    /// With these parameters.
    pub algorithm: String,
    /// What they take without one, none more than a page.
    pub bytes_without: u64,
    /// And with it.
    pub bytes_with: u64,
}

/// The answer to `arena`: how the memory that holds the objects is used. Sizes are in bytes.
#[derive(Debug, Default, Serialize, Deserialize)]
pub struct Arena {
    /// The disk's name.
    pub name: String,
    /// Size of a segment.
    pub segment_bytes: u64,
    /// Segments that hold objects.
    pub segments_in_use: u64,
    /// Empty segments that have not gone back to the host yet.
    pub segments_empty: u64,
    /// Segments by the share of them that objects take, in equal steps up to all of it.
    pub live_shares: Vec<u64>,
    /// Holes between objects by their length, shortest first.
    pub holes: Vec<Holes>,
    /// Who owns segments.
    pub heaps: Vec<Heap>,
    /// Heaps that were in use whenever they were looked at; their segments are missing above.
    pub busy_heaps: u64,
}

/// Holes of similar length.
#[derive(Debug, Serialize, Deserialize)]
pub struct Holes {
    /// The shortest of this class; all are less than twice as long.
    pub bytes_min: u64,
    /// Their number.
    pub count: u64,
    /// All their bytes.
    pub bytes: u64,
}

/// What one heap owns.
#[derive(Debug, Serialize, Deserialize)]
pub struct Heap {
    /// Its number.
    pub heap: u64,
    /// Its segments.
    pub segments: u64,
    /// Bytes of objects in them.
    pub live_bytes: u64,
    /// Bytes of holes in them.
    pub hole_bytes: u64,
}

/// The answer to anything that cannot be answered.
#[derive(Debug, Serialize, Deserialize)]
pub struct Refusal {
    /// Why.
    pub error: ErrorBody,
}

/// Why a request was refused.
#[derive(Debug, Serialize, Deserialize)]
pub struct ErrorBody {
    /// For programs; docs/control.md has them all.
    pub kind: String,
    /// For people.
    pub message: String,
}

/// The answer to `stats`. Names and meanings are zram's where zram has them; sizes are in bytes.
///
/// The numbers are read one after the other while guests go on writing, so sums may be off by what is on its way.
#[derive(Debug, Serialize, Deserialize)]
pub struct DiskStats {
    /// The disk's name.
    pub name: String,
    /// Size of the disk as the guest sees it.
    pub disksize: u64,
    /// The largest size that `resize` can give it.
    #[serde(default)]
    pub disksize_max: u64,
    /// As the `--algorithm` option takes it.
    pub algorithm: String,
    /// What `recompress` can use.
    pub recompress_algorithms: Vec<RecompressAlgorithm>,
    /// What contexts take.
    pub context_bytes: ContextBytes,
    /// Whether guests may only read.
    pub read_only: bool,
    /// Data stored, uncompressed: pages in use times 4096, same-filled ones included.
    pub orig_data_size: u64,
    /// Data stored, as it is kept: the sum of the objects' sizes.
    pub compr_data_size: u64,
    /// Host memory that holds the objects.
    pub mem_used_total: u64,
    /// The most that `mem_used_total` may be; 0 is no limit.
    pub mem_limit: u64,
    /// The most that `mem_used_total` has been.
    pub mem_used_max: u64,
    /// Host memory of the slot table, as far as it was touched.
    pub table_bytes: u64,
    /// All host memory that the disk holds now: `mem_used_total` and `table_bytes`.
    pub total_bytes: u64,
    /// Pages filled with one 64-bit word. They take no object, or one of 8 bytes.
    pub same_pages: u64,
    /// OS pages that compaction gave back, since start.
    pub pages_compacted: u64,
    /// Pages kept as they are because they do not shrink.
    pub huge_pages: u64,
    /// Writes that ended as huge, since start.
    pub huge_pages_since: u64,
    /// Read requests that failed, since start.
    pub failed_reads: u64,
    /// Write requests that failed, since start.
    pub failed_writes: u64,
    /// Requests outside the disk or not in whole sectors, since start.
    pub invalid_io: u64,
    /// Pages freed by discard and write-zeroes, since start.
    pub notify_free: u64,
    /// Page writes refused because the limit was reached, since start.
    pub refused_writes: u64,
    /// Page reads that took the worker's own decompression context.
    pub contexts_own: u64,
    /// Page reads that took another one, because their own was in use.
    pub contexts_borrowed: u64,
    /// Page reads that waited for one. Should stay 0.
    pub contexts_waited: u64,
    /// The most reads and writes a second; 0 is no limit.
    #[serde(default)]
    pub iops_limit: u64,
    /// The most bytes read and written a second; 0 is no limit.
    #[serde(default)]
    pub bandwidth_limit: u64,
    /// Milliseconds' worth of both limits that may be saved up.
    #[serde(default)]
    pub limit_burst_ms: u64,
    /// Virtqueues offered.
    pub num_queues: u16,
    /// Virtqueues that a guest uses now.
    pub queues_running: u64,
    /// Who is connected.
    pub frontend: Option<Frontend>,
    /// Connections served since start, the present one included.
    pub connections_total: u64,
    /// Connections closed at once because another one was alive.
    pub refused_connections: u64,
    /// Connections closed because of what the frontend sent or failed to send.
    pub failed_connections: u64,
    /// What the guests asked.
    pub requests: Requests,
    /// What the daemon has given up.
    pub sandbox: SandboxStatus,
}

/// An algorithm of `--recompress-algorithm`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RecompressAlgorithm {
    /// 1 to 3; the lowest is tried first.
    pub priority: u64,
    /// As the option takes it.
    pub algorithm: String,
}

/// Bytes of compression and decompression contexts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct ContextBytes {
    /// Each queue's compression context and buffer.
    pub worker: u64,
    /// Once for the disk: compression contexts for recompression, and dictionaries.
    pub shared: u64,
    /// Once for the daemon: contexts to decode with.
    pub decompression: u64,
}

/// The answer to `idle`.
#[derive(Debug, Serialize, Deserialize)]
pub struct IdleReport {
    /// The disk's name.
    pub name: String,
    /// Pages that have the mark now.
    pub pages_marked: u64,
}

/// The answer to `recompress`, when all is done.
#[derive(Debug, Serialize, Deserialize)]
pub struct RecompressReport {
    /// The disk's name.
    pub name: String,
    /// Pages that were tried.
    pub pages_tried: u64,
    /// Pages that are stored with less now.
    pub pages_recompressed: u64,
    /// Pages of which no algorithm makes less; they are not tried again until they are written.
    pub pages_incompressible: u64,
    /// Bytes of content that were gained.
    pub bytes_gained: u64,
    /// It ended early: the memory limit left no room for the new beside the old.
    pub limit_reached: bool,
    /// How long it took.
    pub milliseconds: u64,
}

/// What the daemon has given up; see its `--sandbox` option.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SandboxStatus {
    /// `off`, `log` or `kill`: what happens to a thread that makes a system call it should not make.
    pub mode: String,
    /// Whether system calls are looked at.
    pub system_calls: bool,
    /// Of what can be done to files, how much is denied, but for what the daemon needs: `all`, `some` where the kernel
    /// does not know all of it, or `none`.
    pub files: String,
}

/// The process at the other end.
#[derive(Debug, Serialize, Deserialize)]
pub struct Frontend {
    /// When it connected.
    pub pid: i32,
    /// Empty if it could not be read.
    pub command: String,
}

/// Requests and mishaps of all queues since the daemon started.
#[derive(Debug, Default, Serialize, Deserialize)]
#[expect(
    missing_docs,
    reason = "the device's own counters, under the names and meanings of zram_vhost::RequestCounts"
)]
pub struct Requests {
    pub reads: u64,
    pub writes: u64,
    pub flushes: u64,
    pub get_ids: u64,
    pub discards: u64,
    pub write_zeroes: u64,
    pub unsupported: u64,
    pub io_errors: u64,
    pub sectors_read: u64,
    pub sectors_written: u64,
    pub bad_chains: u64,
    pub broken_rings: u64,
    pub panics: u64,
    pub calls: u64,
    pub calls_lost: u64,
}
