//! Mappings: host memory that is reserved as address space at start and costs nothing until it is touched.
//!
//! Slot table and arena lie in memfds, each behind one OS page for its head, so that they can outlive the process; what
//! can be rebuilt from them lies in anonymous memory. All mappings are kept out of core dumps: they hold guests' data.
//! This file is the only one that maps; it hands out atomics (safe) and raw addresses (the arena's business).

use std::io;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, AtomicU64};

use rustix::fs::{
    FallocateFlags, MemfdFlags, SealFlags, SeekFrom, fallocate, fcntl_add_seals, fcntl_get_seals, fstat, ftruncate,
    memfd_create, seek,
};
use rustix::io::{Errno, pread, pwrite};
use rustix::mm::{Advice, MapFlags, MlockFlags, ProtFlags, madvise, mlock_with, mmap, mmap_anonymous, munmap};

/// Bytes in an OS page: the grain in which the host gives and takes memory.
pub(crate) const OS_PAGE_SIZE: usize = 4096;

/// Bytes in front of a memfd's content.
const HEAD_SIZE: u64 = OS_PAGE_SIZE as u64;
/// A memfd that is made shorter under a mapping kills who touches it.
const SEALS: SealFlags = SealFlags::SHRINK;

/// Has the caches fetch `len` bytes, which need not be mapped.
#[cfg(target_arch = "x86_64")]
pub(crate) fn prefetch(start: *const u8, len: usize) {
    use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
    const CACHE_LINE_BYTES: usize = 64;
    for line in (0..len).step_by(CACHE_LINE_BYTES) {
        // SAFETY: a prefetch gives nothing and cannot fault, whatever the address.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(start.wrapping_add(line).cast()) };
    }
}

/// There is no stable way to say it elsewhere.
#[cfg(not(target_arch = "x86_64"))]
pub(crate) fn prefetch(_: *const u8, _: usize) {}

/// Length of the memfd behind a mapping of `len` bytes.
pub(crate) fn file_len(len: usize) -> u64 {
    HEAD_SIZE + len as u64
}

/// A mapping of `len` bytes, zeroes at first, readable and writable, unmapped on drop.
#[derive(Debug)]
pub(crate) struct Mapping {
    base: NonNull<u8>,
    len: usize,
    memfd: Option<OwnedFd>,
}

// SAFETY: a Mapping is an address range that belongs to it alone until drop; it gives out atomics, or raw addresses for
// whose use the caller answers.
unsafe impl Send for Mapping {}
// SAFETY: as above; no method changes the struct itself.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Shared memory behind a memfd called `name` in `/proc/PID/maps`, with `head` in front.
    pub(crate) fn memfd(name: &str, len: usize, head: &[u8; OS_PAGE_SIZE]) -> io::Result<Mapping> {
        let len = len.next_multiple_of(OS_PAGE_SIZE);
        let memfd = memfd_create(name, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
        ftruncate(&memfd, file_len(len))?;
        fcntl_add_seals(&memfd, SEALS)?;
        if pwrite(&memfd, head, 0)? != head.len() {
            return Err(io::ErrorKind::WriteZero.into());
        }
        Mapping::shared(memfd, len)
    }

    /// What [`Mapping::memfd`] made, perhaps in another process: `len` bytes behind the head.
    pub(crate) fn adopt(memfd: OwnedFd, len: usize) -> io::Result<Mapping> {
        let len = len.next_multiple_of(OS_PAGE_SIZE);
        if !fcntl_get_seals(&memfd).is_ok_and(|seals| seals.contains(SEALS)) {
            return Err(io::Error::other("the memory is not sealed against shrinking"));
        }
        if fstat(&memfd)?.st_size as u64 != file_len(len) {
            return Err(io::Error::other("the memory is not as long as its head says"));
        }
        Mapping::shared(memfd, len)
    }

    /// The head in front of what `memfd` holds.
    pub(crate) fn read_head(memfd: &OwnedFd) -> io::Result<[u8; OS_PAGE_SIZE]> {
        let mut head = [0; OS_PAGE_SIZE];
        match pread(memfd, &mut head, 0)? {
            OS_PAGE_SIZE => Ok(head),
            _ => Err(io::ErrorKind::UnexpectedEof.into()),
        }
    }

    /// Writes another head, in one call, of which a kill leaves nothing half done.
    pub(crate) fn write_head(&self, head: &[u8; OS_PAGE_SIZE]) -> io::Result<()> {
        match pwrite(self.file()?, head, 0)? {
            OS_PAGE_SIZE => Ok(()),
            _ => Err(io::ErrorKind::WriteZero.into()),
        }
    }

    fn shared(memfd: OwnedFd, len: usize) -> io::Result<Mapping> {
        let (protection, flags) = (
            ProtFlags::READ | ProtFlags::WRITE,
            MapFlags::SHARED | MapFlags::NORESERVE,
        );
        // SAFETY: a new mapping at an address of the kernel's choice touches nothing that exists; the memfd is sealed
        // against being made shorter, so no access within `len` can fault for its length.
        let base = unsafe { mmap(std::ptr::null_mut(), len, protection, flags, &memfd, HEAD_SIZE) }?;
        Mapping::new(base, len, Some(memfd))
    }

    /// Private memory of this process.
    pub(crate) fn anonymous(len: usize) -> io::Result<Mapping> {
        let len = len.next_multiple_of(OS_PAGE_SIZE);
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
        // SAFETY: a new mapping at an address of the kernel's choice touches nothing that exists.
        let base = unsafe { mmap_anonymous(std::ptr::null_mut(), len, ProtFlags::READ | ProtFlags::WRITE, flags) }?;
        Mapping::new(base, len, None)
    }

    fn new(base: *mut std::ffi::c_void, len: usize, memfd: Option<OwnedFd>) -> io::Result<Mapping> {
        let base = NonNull::new(base.cast::<u8>()).ok_or(io::ErrorKind::OutOfMemory)?;
        let mapping = Mapping { base, len, memfd };
        // SAFETY: the range is the whole of our own mapping, and this advice changes no content.
        unsafe { madvise(base.as_ptr().cast(), len, Advice::LinuxDontDump) }?;
        // Memory is counted and given back in OS pages; a huge page would bring more than was asked for. Kernels without
        // huge pages refuse the advice, and need none.
        // SAFETY: as above.
        let _ = unsafe { madvise(base.as_ptr().cast(), len, Advice::LinuxNoHugepage) };
        Ok(mapping)
    }

    /// The mapping as 64-bit words.
    pub(crate) fn words(&self) -> &[AtomicU64] {
        // SAFETY: the base is aligned to an OS page, any content is a valid word, and whoever uses `words` on a mapping
        // touches it in no other way.
        unsafe { std::slice::from_raw_parts(self.base.as_ptr().cast(), self.len / size_of::<AtomicU64>()) }
    }

    /// The mapping as 32-bit words.
    pub(crate) fn half_words(&self) -> &[AtomicU32] {
        // SAFETY: as for `words`.
        unsafe { std::slice::from_raw_parts(self.base.as_ptr().cast(), self.len / size_of::<AtomicU32>()) }
    }

    /// The address of byte `offset`; `len` bytes from it lie in the mapping.
    pub(crate) fn address(&self, offset: usize, len: usize) -> NonNull<u8> {
        assert!(
            len <= self.len && offset <= self.len - len,
            "{offset} + {len} is past the mapping's {}",
            self.len
        );
        // SAFETY: the assertion keeps the result inside the mapping.
        unsafe { self.base.add(offset) }
    }

    /// Takes host memory for a range of OS pages now, instead of at their first use: in one call for all, and with an
    /// error where the first use would kill the process. Kernels before 5.14 cannot, and take it at the first use.
    pub(crate) fn populate(&self, offset: usize, len: usize) -> io::Result<()> {
        let start = self.address(offset, len);
        // SAFETY: the range lies in our own mapping, and this advice changes no content.
        match unsafe { madvise(start.as_ptr().cast(), len, Advice::LinuxPopulateWrite) } {
            Ok(()) | Err(Errno::INVAL) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    /// Gives the host back what lies behind a range of OS pages of a memfd; it reads as zeroes afterwards.
    ///
    /// # Safety
    /// Nobody has a reference to any byte of the range, other than as an atomic.
    pub(crate) unsafe fn punch_hole(&self, offset: usize, len: usize) -> io::Result<()> {
        let mode = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        Ok(fallocate(self.file()?, mode, HEAD_SIZE + offset as u64, len as u64)?)
    }

    /// Keeps what the mapping holds, now and later, out of the host's swap. The limit for it (RLIMIT_MEMLOCK) has to
    /// cover the whole length, though only what is used takes memory.
    pub(crate) fn lock(&self) -> io::Result<()> {
        // SAFETY: the range is the whole of our own mapping; locking changes no content.
        Ok(unsafe { mlock_with(self.base.as_ptr().cast(), self.len, MlockFlags::ONFAULT) }?)
    }

    /// Bytes of address space.
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// The ranges behind which a memfd has memory, in order.
    pub(crate) fn populated_ranges(&self) -> io::Result<Vec<Range<usize>>> {
        let memfd = self.file()?;
        let mut ranges = vec![];
        let mut at = HEAD_SIZE;
        loop {
            let start = match seek(memfd, SeekFrom::Data(at)) {
                Ok(start) => start,
                Err(Errno::NXIO) => return Ok(ranges), // nothing from here on
                Err(error) => return Err(error.into()),
            };
            at = seek(memfd, SeekFrom::Hole(start))?;
            ranges.push((start - HEAD_SIZE) as usize..(at - HEAD_SIZE) as usize);
        }
    }

    /// The file behind the mapping.
    pub(crate) fn file(&self) -> io::Result<&OwnedFd> {
        self.memfd.as_ref().ok_or(io::ErrorKind::Unsupported.into())
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the range is our own mapping, and nothing borrowed from it outlives it. It fails only on a range that
        // is no mapping, which would be our own fault and harms nobody here.
        let _ = unsafe { munmap(self.base.as_ptr().cast(), self.len) };
    }
}
