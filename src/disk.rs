//! The disk as the threads of the daemon share it: the store, and the device while it is served. Asking for its numbers
//! never waits for I/O.

use std::io;
use std::sync::{Arc, Mutex, PoisonError};

use zram_core::{UpkeepThread, Zram};
use zram_vhost::{Device, DeviceStatus, RateLimit, RequestCounts, Resized};

use crate::protocol::{ContextBytes, DiskStats, Frontend, RecompressAlgorithm, Requests, SandboxStatus};
use crate::sandbox::{Kind, Sandbox};
use crate::size::human_long;

/// A served disk.
pub struct Disk {
    name: String,
    num_queues: u16,
    read_only: bool,
    zram: Arc<Zram>,
    /// Gives memory back as long as the disk is there.
    _upkeep: UpkeepThread,
    sandbox: SandboxStatus,
    /// Held while a dictionary is made, which takes memory: one at a time.
    pub(crate) training: Mutex<()>,
    // Held for as long as a status takes to read, by control threads and at the end; no thread of the device takes it.
    device: Mutex<Option<Device>>,
}

impl Disk {
    /// A disk over `zram` that is not served yet.
    pub fn new(name: String, num_queues: u16, read_only: bool, zram: Arc<Zram>, sandbox: &Sandbox) -> io::Result<Disk> {
        let entered = sandbox.clone();
        Ok(Disk {
            name,
            num_queues,
            read_only,
            _upkeep: zram.spawn_upkeep_after("zram-upkeep", move || entered.enter(Kind::Upkeep))?,
            zram,
            sandbox: sandbox.status().clone(),
            training: Mutex::new(()),
            device: Mutex::new(None),
        })
    }

    /// For log lines.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// From now on the status is this device's.
    pub fn attach(&self, device: Device) {
        *self.device.lock().unwrap_or_else(PoisonError::into_inner) = Some(device);
    }

    /// Stops serving. Returns within a second.
    pub fn stop(&self) {
        let device = self.device.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(device) = device {
            device.stop();
        }
    }

    /// The store.
    pub fn zram(&self) -> &Arc<Zram> {
        &self.zram
    }

    /// How much the disk may move; no limit when it is not served any more.
    pub fn rate_limit(&self) -> RateLimit {
        let device = self.device.lock().unwrap_or_else(PoisonError::into_inner);
        device.as_ref().map(Device::rate_limit).unwrap_or_default()
    }

    /// Changes how much the disk may move. One change at a time.
    pub fn change_rate_limit(&self, change: impl FnOnce(&mut RateLimit)) -> io::Result<()> {
        let device = self.device.lock().unwrap_or_else(PoisonError::into_inner);
        let before = device.as_ref().map(Device::rate_limit).unwrap_or_default();
        let mut limit = before;
        change(&mut limit);
        // Setting a limit anew would forgive what is owed.
        if limit == before {
            return Ok(());
        }
        match &*device {
            Some(device) => device.set_rate_limit(&limit),
            None => Err(io::Error::other("the disk is not served any more")),
        }
    }

    /// Changes the size, in bytes, and tells the frontend. Holds up nobody but whoever else asks the device something.
    pub fn resize(&self, bytes: u64) -> Result<Resized, String> {
        let max = self.zram.size_bytes_max();
        if bytes > max {
            return Err(format!(
                "it can have {} at most; --size-max says so when the daemon starts",
                human_long(max)
            ));
        }
        let resizer = self
            .device
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .as_ref()
            .map(Device::resizer);
        let resizer = resizer.ok_or("the disk is not served any more")?;
        resizer.resize(bytes).map_err(|error| error.to_string())
    }

    /// All numbers.
    pub fn stats(&self) -> DiskStats {
        let stats = self.zram.stats();
        let contexts = self.zram.context_bytes();
        let device = self.device.lock().unwrap_or_else(PoisonError::into_inner);
        let status = device.as_ref().map(Device::status).unwrap_or_default();
        let rate = device.as_ref().map(Device::rate_limit).unwrap_or_default();
        drop(device);
        let DeviceStatus {
            queues_running,
            frontend,
            connections_total,
            refused_connections,
            failed_connections,
            requests,
        } = status;
        DiskStats {
            name: self.name.clone(),
            disksize: self.zram.size_bytes(),
            disksize_max: self.zram.size_bytes_max(),
            algorithm: self.zram.algorithm().to_string(),
            recompress_algorithms: self
                .zram
                .recompress_algorithms()
                .map(|(priority, algorithm)| RecompressAlgorithm {
                    priority: priority as u64,
                    algorithm: algorithm.to_string(),
                })
                .collect(),
            context_bytes: ContextBytes {
                worker: contexts.worker,
                shared: contexts.shared,
                decompression: contexts.decompression,
            },
            read_only: self.read_only,
            orig_data_size: stats.orig_data_size,
            compr_data_size: stats.compr_data_size,
            mem_used_total: stats.mem_used_total,
            mem_limit: stats.mem_limit,
            mem_used_max: stats.mem_used_max,
            table_bytes: stats.table_bytes,
            total_bytes: stats.mem_used_total + stats.table_bytes,
            same_pages: stats.same_pages,
            pages_compacted: stats.pages_compacted,
            huge_pages: stats.huge_pages,
            huge_pages_since: stats.huge_pages_since,
            failed_reads: stats.failed_reads,
            failed_writes: stats.failed_writes,
            invalid_io: stats.invalid_io,
            notify_free: stats.notify_free,
            refused_writes: stats.refused_writes,
            contexts_own: stats.contexts.own,
            contexts_borrowed: stats.contexts.borrowed,
            contexts_waited: stats.contexts.waited,
            iops_limit: rate.iops.unwrap_or(0),
            bandwidth_limit: rate.bytes_per_second.unwrap_or(0),
            limit_burst_ms: rate.burst.as_millis() as u64,
            num_queues: self.num_queues,
            queues_running: queues_running as u64,
            frontend: frontend.map(|frontend| Frontend {
                pid: frontend.pid,
                command: frontend.command,
            }),
            connections_total,
            refused_connections,
            failed_connections,
            requests: requests_of(requests),
            sandbox: self.sandbox.clone(),
        }
    }
}

fn requests_of(counts: RequestCounts) -> Requests {
    // Taken apart in full, so that a new counter cannot be forgotten here.
    let RequestCounts {
        reads,
        writes,
        flushes,
        get_ids,
        discards,
        write_zeroes,
        unsupported,
        io_errors,
        sectors_read,
        sectors_written,
        bad_chains,
        broken_rings,
        panics,
        calls,
        calls_lost,
    } = counts;
    Requests {
        reads,
        writes,
        flushes,
        get_ids,
        discards,
        write_zeroes,
        unsupported,
        io_errors,
        sectors_read,
        sectors_written,
        bad_chains,
        broken_rings,
        panics,
        calls,
        calls_lost,
    }
}
