//! What the host must grant, looked at before it is needed. What it does not is told in one line: what there is, what is
//! needed, and what can be done.

use std::{fs, io};

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use rustix::thread::{CapabilitySet, capabilities};
use zram_core::Zram;

use crate::config::Config;
use crate::size::human_long;

/// Lifts the soft limit of open descriptors to the hard one. A frontend sends up to three for each queue and one for each
/// memory region, and the usual soft limit of 1024 is there for the sake of select(2) alone.
pub fn raise_descriptor_limit() {
    raise(Resource::Nofile);
}

/// The largest size that the disk can be given. A memfd counts as a file, and one that grows past the limit of file sizes
/// is worth a signal to the kernel. Where the limit is lower than `--size-max` by default, the disk cannot grow.
pub fn largest_size(config: &Config) -> Result<u64, String> {
    raise(Resource::Fsize);
    let limit = getrlimit(Resource::Fsize).current.unwrap_or(u64::MAX);
    let need = |size_bytes| Zram::memory_file_bytes(size_bytes);
    if need(config.size_bytes_max) <= limit {
        return Ok(config.size_bytes_max);
    }
    if !config.size_max_is_asked && need(config.size_bytes) <= limit {
        return Ok(config.size_bytes);
    }
    let (size, option) = match config.size_max_is_asked {
        true => (config.size_bytes_max, "--size-max"),
        false => (config.size_bytes, "this disk"),
    };
    Err(format!(
        "the limit of file sizes (RLIMIT_FSIZE, ulimit -f) is {}, and {option} needs {}, for shared memory counts as a \
         file, used or not: raise it (LimitFSIZE=infinity in a systemd unit)",
        human_long(limit),
        human_long(need(size))
    ))
}

/// Keeps slot table and arena out of the host's swap.
pub fn lock_memory(zram: &Zram) -> Result<(), String> {
    raise(Resource::Memlock);
    let need = zram.address_space_bytes();
    let limit = getrlimit(Resource::Memlock).current;
    if let Some(limit) = limit.filter(|&limit| limit < need && !may_lock_all()) {
        return Err(memory_lock_advice(limit, need));
    }
    zram.lock_memory().map_err(|error| match (error.kind(), limit) {
        // The capability may be one that only a container takes for real.
        (io::ErrorKind::OutOfMemory | io::ErrorKind::PermissionDenied, Some(limit)) if limit < need => {
            memory_lock_advice(limit, need)
        }
        _ => format!("memory cannot be locked: {error}; leave --memory-lock out"),
    })
}

fn memory_lock_advice(limit: u64, need: u64) -> String {
    format!(
        "the limit of locked memory (RLIMIT_MEMLOCK, ulimit -l) is {}, and --memory-lock needs {}, for all address space of \
         the disk counts, used or not: raise it (LimitMEMLOCK=infinity in a systemd unit), give the daemon CAP_IPC_LOCK, or \
         leave --memory-lock out",
        human_long(limit),
        human_long(need)
    )
}

fn may_lock_all() -> bool {
    capabilities(None).is_ok_and(|sets| sets.effective.contains(CapabilitySet::IPC_LOCK))
}

fn raise(resource: Resource) {
    let limit = getrlimit(resource);
    // Cannot fail: nobody needs a privilege to lift the soft limit to the hard one. If it does, the old limit stands.
    let _ = setrlimit(
        resource,
        Rlimit {
            current: limit.maximum,
            maximum: limit.maximum,
        },
    );
}

/// One line if the disk may take more memory than the host has now.
pub fn memory_warning(config: &Config) -> Option<String> {
    memory_warning_at(config, memory_available()?)
}

fn memory_warning_at(config: &Config, available: u64) -> Option<String> {
    let (option, advice) = match config.mem_limit_bytes {
        Some(_) => ("--mem-limit", "lower it"),
        None => ("--size without --mem-limit", "set --mem-limit"),
    };
    let may_take = config.mem_limit_bytes.unwrap_or(u64::MAX).min(config.size_bytes);
    (may_take > available).then(|| {
        format!(
            "warning: {option} lets this disk take {}, and the host has {} available now; when guests fill the disk the \
             host will swap or kill: {advice} to what it can spare",
            human_long(may_take),
            human_long(available)
        )
    })
}

/// Bytes of memory that the host could give to programs without swapping, as it reckons itself. `None` if it does not say.
fn memory_available() -> Option<u64> {
    let meminfo = fs::read_to_string("/proc/meminfo").ok()?;
    let line = meminfo.lines().find(|line| line.starts_with("MemAvailable:"))?;
    line.split_whitespace().nth(1)?.parse::<u64>().ok().map(|kib| kib << 10)
}

#[cfg(test)]
mod tests {
    use std::ffi::OsString;

    use super::*;
    use crate::config::{Invocation, parse};

    #[test]
    fn a_disk_that_may_take_more_than_there_is_is_told_of() {
        let told = |sizes: &[&str], available: u64| {
            let line = ["vhost-user-zram", "--socket-path", "/run/z"]
                .iter()
                .chain(sizes)
                .map(OsString::from);
            let Invocation::Serve(config) = parse(line) else {
                panic!("{sizes:?}")
            };
            memory_warning_at(&config, available).unwrap_or_default()
        };
        let gib = 1 << 30;
        assert_eq!(told(&["--size", "4G", "--mem-limit", "1G"], gib), "");
        assert_eq!(told(&["--size", "1G"], gib), "");
        assert_eq!(
            told(&["--size", "1G", "--mem-limit", "2G"], gib),
            "",
            "it cannot get so large"
        );
        let limit = told(&["--size", "4G", "--mem-limit", "2G"], gib);
        assert!(
            limit.contains("--mem-limit lets this disk take 2 GiB, and the host has 1 GiB"),
            "{limit}"
        );
        assert!(limit.contains("lower it"), "{limit}");
        let size = told(&["--size", "4G"], gib);
        assert!(
            size.contains("--size without --mem-limit lets this disk take 4 GiB"),
            "{size}"
        );
        assert!(size.contains("set --mem-limit"), "{size}");
        assert!(memory_available().is_some_and(|bytes| bytes > 1 << 20));
    }
}
