//! What the host must grant, looked at before anything is built.

use std::fs;

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use crate::size::human_long;

/// Lifts the soft limit of open descriptors to the hard one. A frontend sends up to three for each queue and one for each
/// memory region, and the usual soft limit of 1024 is there for the sake of select(2) alone.
pub fn raise_descriptor_limit() {
    raise(Resource::Nofile);
}

/// A memfd counts as a file, so RLIMIT_FSIZE bounds it: past it, growing one fails or kills the process with SIGXFSZ.
///
/// `file_bytes` is the least that the store's files need; the error is a sentence.
pub fn check_file_size_limit(file_bytes: u64) -> Result<(), String> {
    raise(Resource::Fsize);
    match getrlimit(Resource::Fsize).current {
        Some(limit) if limit < file_bytes => Err(format!(
            "the limit of file sizes (RLIMIT_FSIZE, ulimit -f) is {}, and the store of this disk needs {}, for memory \
             that is shared counts as a file; raise it (LimitFSIZE=infinity in a systemd unit)",
            human_long(limit),
            human_long(file_bytes)
        )),
        _ => Ok(()),
    }
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

/// Bytes of memory that the host could give to programs without swapping, as it reckons itself. `None` if it does not say.
pub fn memory_available() -> Option<u64> {
    let meminfo = fs::read_to_string("/proc/meminfo").ok()?;
    let line = meminfo.lines().find(|line| line.starts_with("MemAvailable:"))?;
    line.split_whitespace().nth(1)?.parse::<u64>().ok().map(|kib| kib << 10)
}
