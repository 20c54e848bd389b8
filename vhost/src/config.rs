//! What the owner of a device decides, checked once at start.
//!
//! [`Disk`] is the same for every connection and is shared by the control thread and all workers. Of it only the capacity
//! and the rate limit change while the device lives.

use std::fmt;
use std::io;
use std::str::FromStr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crate::limit::{BURST_MAX, Limiter, RateLimit};
use zram_core::{PAGE_SIZE, SECTOR_SIZE, Zram};

/// Virtqueues of one device. QEMU refuses a backend with fewer queues than the guest has vCPUs.
pub const QUEUES_MAX: u16 = 64;

/// The largest ring that virtio allows (virtio 1.3 section 2.7).
pub const QUEUE_SIZE_MAX: u16 = 32768;

/// Ring size accepted by default: QEMU's own maximum.
pub const QUEUE_SIZE_DEFAULT: u16 = 1024;

/// The longest time for which an empty ring may be looked at.
pub const POLL_MAX: Duration = Duration::from_millis(1);

/// The disk's serial number as GET_ID answers it: 1 to 20 bytes, padded with NUL, not terminated when full.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Serial([u8; Serial::BYTES]);

impl Serial {
    /// VIRTIO_BLK_ID_BYTES.
    pub const BYTES: usize = 20;

    pub(crate) fn as_bytes(&self) -> &[u8; Serial::BYTES] {
        &self.0
    }
}

impl FromStr for Serial {
    type Err = SerialError;

    fn from_str(text: &str) -> Result<Self, SerialError> {
        // Guests put the serial into device paths; one of them, Windows' scsi driver, fails on an empty one.
        if text.is_empty() || text.len() > Serial::BYTES || !text.bytes().all(|byte| byte.is_ascii_graphic()) {
            return Err(SerialError);
        }
        let mut bytes = [0; Serial::BYTES];
        for (to, from) in bytes.iter_mut().zip(text.bytes()) {
            *to = from;
        }
        Ok(Serial(bytes))
    }
}

impl fmt::Debug for Serial {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Serial({})", self.0.escape_ascii())
    }
}

/// A text that cannot be a serial number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("a serial is 1 to 20 printable ASCII characters without spaces")]
pub struct SerialError;

/// A kind of thread that a device has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ThreadKind {
    /// Accepts frontends and speaks with them; starts the workers.
    Control,
    /// Serves the virtqueue of this index.
    Worker(u16),
}

/// What each thread of a device does first; nothing by default.
#[derive(Clone, Default)]
pub struct ThreadStart(Option<Arc<dyn Fn(ThreadKind) + Send + Sync>>);

impl ThreadStart {
    /// Calls `first` on each thread, before it does anything else.
    pub fn new(first: impl Fn(ThreadKind) + Send + Sync + 'static) -> ThreadStart {
        ThreadStart(Some(Arc::new(first)))
    }

    pub(crate) fn run(&self, kind: ThreadKind) {
        if let Some(first) = &self.0 {
            first(kind);
        }
    }
}

impl fmt::Debug for ThreadStart {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ThreadStart")
    }
}

/// What a device is to be.
#[derive(Debug, Clone)]
pub struct DeviceConfig {
    /// The disk's name, for threads and log lines.
    pub name: String,
    /// Virtqueues offered: 1 to [`QUEUES_MAX`]. One that the guest does not enable costs no thread.
    pub num_queues: u16,
    /// Largest ring accepted, in descriptors: a power of two, 2 to [`QUEUE_SIZE_MAX`].
    pub queue_size_max: u16,
    /// Offer VIRTIO_BLK_F_RO, and refuse what would change the content.
    pub read_only: bool,
    /// What GET_ID answers.
    pub serial: Serial,
    /// 4096, or 512 for firmware and tools that know nothing else.
    pub logical_block_size: u32,
    /// Offer VIRTIO_BLK_F_FLUSH (a flush does nothing: a RAM disk keeps nothing by flushing).
    pub flush: bool,
    /// For who gives up rights that threads do not need.
    pub thread_start: ThreadStart,
    /// The longest that a worker looks at its empty ring before it sleeps, at most [`POLL_MAX`]; 0 is not at all.
    pub poll_max: Duration,
    /// Refuse guest memory whose file is not sealed against shrinking. Otherwise a frontend that cuts it loses its disk.
    pub require_sealed_memory: bool,
    /// At first; [`crate::Device::set_rate_limit`] changes it.
    pub rate_limit: RateLimit,
}

/// A device's facts.
pub(crate) struct Disk {
    pub config: DeviceConfig,
    pub zram: Arc<Zram>,
    capacity_sectors: AtomicU64,
    pub limiter: Limiter,
}

impl Disk {
    pub fn new(zram: Arc<Zram>, config: DeviceConfig) -> io::Result<Disk> {
        check(&config)?;
        let capacity_sectors = zram.size_bytes() / SECTOR_SIZE as u64;
        assert_eq!(zram.size_bytes() % PAGE_SIZE as u64, 0, "the core holds whole pages");
        Ok(Disk {
            limiter: Limiter::new(&config.rate_limit),
            config,
            zram,
            capacity_sectors: AtomicU64::new(capacity_sectors),
        })
    }

    pub fn name(&self) -> &str {
        &self.config.name
    }

    /// In sectors of 512 bytes, a multiple of the sectors of a page. SeqCst, with the beginning of a batch
    /// ([`crate::counters::Turns`]): who changes it and then sees no batch knows that the next ones go by the change.
    pub fn capacity_sectors(&self) -> u64 {
        self.capacity_sectors.load(Ordering::SeqCst)
    }

    pub fn set_capacity_sectors(&self, sectors: u64) {
        self.capacity_sectors.store(sectors, Ordering::SeqCst);
    }
}

fn check(config: &DeviceConfig) -> io::Result<()> {
    let wrong = |what: String| Err(io::Error::new(io::ErrorKind::InvalidInput, what));
    let DeviceConfig {
        num_queues,
        queue_size_max,
        logical_block_size,
        ..
    } = *config;
    if !(1..=QUEUES_MAX).contains(&num_queues) {
        return wrong(format!("{num_queues} queues: must be 1 to {QUEUES_MAX}"));
    }
    if !(2..=QUEUE_SIZE_MAX).contains(&queue_size_max) || !queue_size_max.is_power_of_two() {
        return wrong(format!(
            "queue size {queue_size_max}: must be a power of two, 2 to {QUEUE_SIZE_MAX}"
        ));
    }
    if logical_block_size != 512 && logical_block_size != 4096 {
        return wrong(format!("logical block size {logical_block_size}: must be 512 or 4096"));
    }
    if !config.rate_limit.is_valid() {
        return wrong(format!(
            "{:?}: limits must not be 0, the burst at most {BURST_MAX:?}",
            config.rate_limit
        ));
    }
    if config.poll_max > POLL_MAX {
        return wrong(format!(
            "polling for {:?}: must be at most {POLL_MAX:?}",
            config.poll_max
        ));
    }
    Ok(())
}

#[cfg(test)]
pub(crate) mod tests {
    use crate::limit::RateLimit;
    use zram_core::{Algorithm, Codecs, Options};

    use super::*;

    pub(crate) fn config() -> DeviceConfig {
        DeviceConfig {
            name: "test".to_string(),
            num_queues: QUEUES_MAX,
            queue_size_max: QUEUE_SIZE_DEFAULT,
            read_only: false,
            serial: "serial-0".parse().unwrap(),
            logical_block_size: 4096,
            flush: false,
            thread_start: ThreadStart::default(),
            poll_max: Duration::ZERO,
            require_sealed_memory: false,
            rate_limit: RateLimit::default(),
        }
    }

    pub(crate) fn zram(size_bytes: u64, mem_limit_bytes: Option<u64>) -> Arc<Zram> {
        let options = Options {
            name: "test".to_string(),
            size_bytes,
            size_bytes_max: None,
            mem_limit_bytes,
            codecs: Codecs::alone(&Algorithm::default()).unwrap(),
        };
        Zram::create(&options).unwrap()
    }

    pub(crate) fn disk(size_bytes: u64, change: impl FnOnce(&mut DeviceConfig)) -> Disk {
        let mut config = config();
        change(&mut config);
        Disk::new(zram(size_bytes, None), config).unwrap()
    }

    #[test]
    fn a_serial_is_padded_and_bounded() {
        assert_eq!(
            *"abc".parse::<Serial>().unwrap().as_bytes(),
            *b"abc\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0"
        );
        assert!("x".repeat(20).parse::<Serial>().is_ok());
        for wrong in ["", "a b", "\u{e4}", &"x".repeat(21)] {
            assert_eq!(wrong.parse::<Serial>(), Err(SerialError), "{wrong:?}");
        }
    }

    #[test]
    fn a_wrong_config_is_refused_with_the_range() {
        let refused = |change: fn(&mut DeviceConfig)| {
            let mut config = config();
            change(&mut config);
            check(&config).unwrap_err().to_string()
        };
        assert!(refused(|config| config.num_queues = 0).contains("1 to 64"));
        assert!(refused(|config| config.num_queues = 65).contains("1 to 64"));
        assert!(refused(|config| config.queue_size_max = 1).contains("power of two"));
        assert!(refused(|config| config.queue_size_max = 100).contains("power of two"));
        assert!(refused(|config| config.logical_block_size = 1024).contains("512 or 4096"));
        assert!(refused(|config| config.poll_max = Duration::from_secs(1)).contains("at most 1ms"));
    }
}
