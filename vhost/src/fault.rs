//! Guest memory that vanishes: a SIGBUS becomes the loss of one region instead of the end of the process.
//!
//! A frontend owns the file behind its guest's memory. If it cuts the file, or the host has no page for it, touching the
//! mapping raises SIGBUS. Then the handler maps fresh zeroes over the whole region that was touched, marks it as lost, and
//! lets the access go on; whoever copied looks at the mark afterwards, and the queue breaks. Over the whole region, because
//! part of a mapping of huge pages cannot be replaced, and because one signal is then all that a region costs.
//!
//! This is the one file of the crate with `unsafe`: a handler has to be installed, and memory mapped, by hand. Invariants:
//! 1. The handler touches atomics and makes one system call. It takes no lock and allocates nothing.
//! 2. An entry is in the list from before its mapping is first touched until after it is last touched, and before it is
//!    unmapped. So an address that faults belongs to the entry that has it, and to nothing newer.
//! 3. A SIGBUS anywhere else is what it was: the end of the process.
#![allow(unsafe_code)]

use std::ffi::{c_int, c_void};
use std::io;
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use rustix::mm::{Advice, MapFlags, ProtFlags};
use vm_memory::MmapRegion;

/// Regions of all devices of the process together.
const ENTRIES_MAX: usize = 8192;

struct Entry {
    /// Address of the mapping; 0 if the entry is free.
    start: AtomicUsize,
    bytes: AtomicUsize,
    lost: AtomicBool,
}

impl Entry {
    const fn free() -> Entry {
        Entry {
            start: AtomicUsize::new(0),
            bytes: AtomicUsize::new(0),
            lost: AtomicBool::new(false),
        }
    }
}

static ENTRIES: [Entry; ENTRIES_MAX] = [const { Entry::free() }; ENTRIES_MAX];

/// No entry from this index on was ever used.
static ENTRIES_USED: AtomicUsize = AtomicUsize::new(0);

/// Regions lost since the process started: who has seen this number need not look at each mark.
static LOSSES: AtomicUsize = AtomicUsize::new(0);

/// Taken by whoever claims an entry, never by the handler.
static CLAIM: Mutex<()> = Mutex::new(());

/// How many regions were lost so far.
#[inline]
pub(crate) fn losses() -> usize {
    // No order: the number comes after the mark, and who misses it sees it the next time.
    LOSSES.load(Ordering::Relaxed)
}

/// A mapping of a frontend's file whose loss can be survived, and which core dumps leave out.
#[derive(Debug)]
pub(crate) struct Mapping {
    // In this order: dropped before the mapping (invariant 2).
    mark: Mark,
    map: Arc<MmapRegion>,
}

impl Mapping {
    /// Takes care of `map`, which nobody touches yet. Fails if there are too many, or if the handler cannot be installed.
    pub fn new(map: Arc<MmapRegion>) -> io::Result<Mapping> {
        install()?;
        // SAFETY: the advice changes nothing about the memory except that dumps do without it; the range is `map`'s.
        let advised = unsafe { rustix::mm::madvise(map.as_ptr().cast(), map.size(), Advice::LinuxDontDump) };
        advised?;
        let mark = Mark::claim(map.as_ptr() as usize, map.size())?;
        Ok(Mapping { mark, map })
    }

    #[inline]
    pub fn memory(&self) -> &MmapRegion {
        &self.map
    }

    /// Whether the memory is gone, and what was read from it since may be zeroes.
    #[inline]
    pub fn is_lost(&self) -> bool {
        // Relaxed: the handler ran on this thread, if it is this thread's access that is asked about.
        ENTRIES
            .get(self.mark.0)
            .is_none_or(|entry| entry.lost.load(Ordering::Relaxed))
    }
}

/// Index of a claimed entry.
#[derive(Debug)]
struct Mark(usize);

impl Mark {
    fn claim(start: usize, bytes: usize) -> io::Result<Mark> {
        let _claim = CLAIM.lock().unwrap_or_else(PoisonError::into_inner);
        let free = ENTRIES
            .iter()
            .position(|entry| entry.start.load(Ordering::Relaxed) == 0);
        let Some((index, entry)) = free.and_then(|index| Some((index, ENTRIES.get(index)?))) else {
            return Err(io::Error::other("too many memory regions in this process"));
        };
        entry.bytes.store(bytes, Ordering::Relaxed);
        entry.lost.store(false, Ordering::Relaxed);
        entry.start.store(start, Ordering::Release); // pairs with the handler's load
        ENTRIES_USED.fetch_max(index + 1, Ordering::Release);
        Ok(Mark(index))
    }
}

impl Drop for Mark {
    fn drop(&mut self) {
        if let Some(entry) = ENTRIES.get(self.0) {
            entry.start.store(0, Ordering::Release);
        }
    }
}

/// Installs the handler, once for the process. Threads that map memory may not be allowed to.
pub(crate) fn install() -> io::Result<()> {
    static INSTALLED: OnceLock<Result<(), i32>> = OnceLock::new();
    let installed = INSTALLED.get_or_init(|| {
        vmm_sys_util::signal::register_signal_handler(libc::SIGBUS, on_sigbus).map_err(|error| error.errno())
    });
    installed.map_err(io::Error::from_raw_os_error)
}

extern "C" fn on_sigbus(signal: c_int, info: *mut libc::siginfo_t, _context: *mut c_void) {
    // SAFETY: the kernel gives a handler installed with SA_SIGINFO a valid siginfo, and for SIGBUS its address field.
    let (code, addr) = unsafe { ((*info).si_code, (*info).si_addr() as usize) };
    // Positive if it is the kernel that reports a fault; what others send has no address.
    let is_fault = code > 0;
    if is_fault && replace(addr) {
        return;
    }
    // SAFETY: both calls are async-signal-safe. The access is made again on return, and then ends the process; a signal
    // that somebody sent has to be sent again.
    unsafe {
        libc::signal(signal, libc::SIG_DFL);
        if !is_fault {
            libc::raise(signal);
        }
    }
}

/// Maps zeroes over the region that has `addr`. False if there is none.
fn replace(addr: usize) -> bool {
    let used = ENTRIES_USED.load(Ordering::Acquire).min(ENTRIES_MAX);
    for entry in ENTRIES.iter().take(used) {
        let start = entry.start.load(Ordering::Acquire);
        let bytes = entry.bytes.load(Ordering::Relaxed);
        if start == 0 || addr.wrapping_sub(start) >= bytes {
            continue;
        }
        // SAFETY: by invariant 2 the range is a live mapping of guest memory, of which no Rust reference exists, and whose
        // content may change at any time. Two threads may do this at once; the second only maps zeroes over zeroes.
        let replaced = unsafe {
            rustix::mm::mmap_anonymous(
                ptr::without_provenance_mut(start),
                bytes,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::PRIVATE | MapFlags::FIXED | MapFlags::NORESERVE,
            )
        };
        if replaced.is_err() {
            return false;
        }
        if !entry.lost.swap(true, Ordering::Relaxed) {
            LOSSES.fetch_add(1, Ordering::Relaxed);
        }
        return true;
    }
    false
}

#[cfg(test)]
mod tests {
    use std::fs::File;

    use vm_memory::{Bytes, FileOffset, VolatileMemory};

    use super::*;

    fn mapping(bytes: usize) -> (Mapping, File) {
        let fd = rustix::fs::memfd_create("guest", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&fd, bytes as u64).unwrap();
        let file = File::from(fd);
        let map = MmapRegion::from_file(FileOffset::new(file.try_clone().unwrap(), 0), bytes).unwrap();
        (Mapping::new(Arc::new(map)).unwrap(), file)
    }

    #[test]
    fn a_cut_file_is_a_lost_region_of_zeroes_and_nothing_more() {
        let (other, _kept) = mapping(0x4000);
        let (lost, file) = mapping(0x4000);
        let memory = |mapping: &Mapping| mapping.memory().as_volatile_slice().read_obj::<u64>(0x3000).unwrap();
        for mapping in [&lost, &other] {
            mapping.memory().as_volatile_slice().write_obj(7u64, 0x3000).unwrap();
        }
        let before = losses();
        file.set_len(0).unwrap();
        assert!(!lost.is_lost(), "not touched yet");
        assert_eq!(memory(&lost), 0);
        assert!(lost.is_lost() && losses() > before);
        lost.memory().as_volatile_slice().write_obj(9u64, 0).unwrap();
        assert_eq!((memory(&other), other.is_lost()), (7, false));
    }

    #[test]
    fn places_in_the_list_are_used_again() {
        for _ in 0..2 * ENTRIES_MAX {
            drop(Mark::claim(1 << 60, 1).unwrap());
        }
    }

    /// In a process of its own, which it ends.
    #[test]
    fn any_other_bus_error_still_ends_the_process() {
        use std::os::unix::process::ExitStatusExt;
        const CHILD: &str = "ZRAM_VHOST_TEST_BUS_ERROR";
        if std::env::var_os(CHILD).is_some() {
            let (mapping, file) = mapping(0x1000);
            // A fault outside the list: the mapping without its mark.
            let Mapping { mark, map } = mapping;
            drop(mark);
            file.set_len(0).unwrap();
            let _ = map.as_volatile_slice().read_obj::<u64>(0);
            unreachable!("read what is not there");
        }
        let test = "fault::tests::any_other_bus_error_still_ends_the_process";
        let child = std::process::Command::new(std::env::current_exe().unwrap())
            .args(["--exact", test])
            .env(CHILD, "1")
            .output()
            .unwrap();
        assert_eq!(child.status.signal(), Some(libc::SIGBUS), "{child:?}");
    }
}
