//! What the host must grant, looked at before anything is built.

use std::fs;

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use crate::size::human_long;

/// Lifts the soft limit of open descriptors to the hard one. A frontend sends up to three for each queue and one for each
/// memory region, and the usual soft limit of 1024 is there for the sake of select(2) alone.
pub fn raise_descriptor_limit() {
    raise(Resource::Nofile);
}

/// Lifts the soft limit of file sizes to the hard one: a memfd counts as a file.
pub fn raise_file_size_limit() {
    raise(Resource::Fsize);
}

/// What to tell when the store's files cannot have their size because of RLIMIT_FSIZE, which an error alone does not name.
pub fn file_size_limit_advice() -> String {
    let limit = getrlimit(Resource::Fsize).current.map_or("not set".into(), human_long);
    format!(
        "the limit of file sizes (RLIMIT_FSIZE, ulimit -f) is {limit}, less than this disk needs, for shared memory counts \
         as a file; raise it (LimitFSIZE=infinity in a systemd unit)"
    )
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
