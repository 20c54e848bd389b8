//! What `set` changes while the disk is served. All values of a request are checked before any is changed.

use std::time::Duration;

use serde_json::{Map, Value};
use zram_core::{DISK_BYTES_MAX, MEM_LIMIT_MIN};
use zram_vhost::{BURST_MAX, RateLimit};

use crate::command::error;
use crate::disk::Disk;
use crate::protocol::{ErrorBody, Settings};

const KEYS: &str = "mem-limit (bytes), iops-limit (requests a second) and bandwidth-limit (bytes a second), each null for \
                    none, limit-burst-ms (0 to 60000) and mem-used-max (0 begins it anew) can be set";

/// Changes all of `values`, and tells what is in force then.
pub(crate) fn set(disk: &Disk, values: Option<&Map<String, Value>>) -> Result<Settings, ErrorBody> {
    let changes = values
        .into_iter()
        .flatten()
        .map(|(key, value)| Change::new(key, value))
        .collect::<Result<Vec<_>, _>>()?;
    if changes.is_empty() {
        return Err(error("bad-value", &format!("nothing to set: {KEYS}")));
    }
    // First what can fail, at the daemon's end; then nothing does.
    disk.change_rate_limit(|limit| changes.iter().for_each(|change| change.apply_to_rate(limit)))
        .map_err(|cause| error("bad-value", &cause.to_string()))?;
    changes.iter().try_for_each(|change| change.apply(disk))?;
    Ok(in_force(disk))
}

/// One valid change of a setting.
enum Change {
    MemLimit(Option<u64>),
    ResetMemUsedMax,
    IopsLimit(Option<u64>),
    BandwidthLimit(Option<u64>),
    LimitBurst(Duration),
}

impl Change {
    fn new(key: &str, value: &Value) -> Result<Change, ErrorBody> {
        let wrong = |allowed: &str| Err(error("bad-value", &format!("{key} {value}: {allowed}")));
        // `Some(None)` is no limit.
        let limit = match value {
            Value::Null => Some(None),
            value => value.as_u64().filter(|&number| number > 0).map(Some),
        };
        match (key, limit) {
            ("mem-limit", Some(None)) => Ok(Change::MemLimit(None)),
            ("mem-limit", Some(Some(bytes))) if (MEM_LIMIT_MIN..=DISK_BYTES_MAX).contains(&bytes) => {
                Ok(Change::MemLimit(Some(bytes)))
            }
            ("mem-limit", _) => wrong("allowed is a number of bytes, 256K to 16T, or none (null)"),
            ("mem-used-max", _) if value.as_u64() == Some(0) => Ok(Change::ResetMemUsedMax),
            ("mem-used-max", _) => wrong("allowed is 0, which begins it anew at what is held now"),
            ("iops-limit", Some(limit)) => Ok(Change::IopsLimit(limit)),
            ("iops-limit", None) => wrong("allowed is a number of requests a second, from 1, or none (null)"),
            ("bandwidth-limit", Some(limit)) => Ok(Change::BandwidthLimit(limit)),
            ("bandwidth-limit", None) => wrong("allowed is a number of bytes a second, from 1, or none (null)"),
            ("limit-burst-ms", _) => match value.as_u64().map(Duration::from_millis) {
                Some(burst) if burst <= BURST_MAX => Ok(Change::LimitBurst(burst)),
                _ => wrong("allowed is 0 to 60000 milliseconds"),
            },
            // As zram's EBUSY, once a disk is initialised.
            ("algorithm" | "recompress-algorithm", _) => Err(error(
                "busy",
                &format!(
                    "{key} is fixed while the disk is there: pages are stored with it; it is an option of the daemon"
                ),
            )),
            ("size", _) => Err(error("unknown-key", "\"size\" is not set: resize changes it")),
            _ => Err(error("unknown-key", &format!("{key:?} cannot be set; {KEYS}"))),
        }
    }

    fn apply_to_rate(&self, limit: &mut RateLimit) {
        match self {
            Change::IopsLimit(iops) => limit.iops = *iops,
            Change::BandwidthLimit(bytes) => limit.bytes_per_second = *bytes,
            Change::LimitBurst(burst) => limit.burst = *burst,
            Change::MemLimit(_) | Change::ResetMemUsedMax => {}
        }
    }

    fn apply(&self, disk: &Disk) -> Result<(), ErrorBody> {
        let zram = disk.zram();
        match self {
            Change::MemLimit(bytes) => {
                zram.set_mem_limit(*bytes)
                    .map_err(|cause| error("bad-value", &cause.to_string()))?;
                log(disk, "mem-limit", *bytes);
            }
            Change::ResetMemUsedMax => zram.reset_mem_used_max(),
            Change::IopsLimit(iops) => log(disk, "iops-limit", *iops),
            Change::BandwidthLimit(bytes) => log(disk, "bandwidth-limit", *bytes),
            Change::LimitBurst(burst) => log(disk, "limit-burst-ms", Some(burst.as_millis() as u64)),
        }
        Ok(())
    }
}

fn log(disk: &Disk, key: &str, value: Option<u64>) {
    let value = value.map_or("none".into(), |value| value.to_string());
    tracing::info!(disk = disk.name(), "{key} is {value} now");
}

fn in_force(disk: &Disk) -> Settings {
    let (stats, rate) = (disk.zram().stats(), disk.rate_limit());
    Settings {
        name: disk.name().into(),
        mem_limit: stats.mem_limit,
        mem_used_total: stats.mem_used_total,
        mem_used_max: stats.mem_used_max,
        iops_limit: rate.iops.unwrap_or(0),
        bandwidth_limit: rate.bytes_per_second.unwrap_or(0),
        limit_burst_ms: rate.burst.as_millis() as u64,
    }
}
