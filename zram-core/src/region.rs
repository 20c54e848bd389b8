//! Mappings: host memory that is reserved as address space at start and costs nothing until it is touched.
//!
//! Slot table and arena lie in memfds, so that they can outlive the process; what can be rebuilt from them lies in
//! anonymous memory. All mappings are kept out of core dumps: they hold guests' data. This file is the only one that
//! maps; it hands out atomics (safe) and raw addresses (the arena's business).

use std::io;
use std::os::fd::OwnedFd;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, AtomicU64};

use rustix::fs::{FallocateFlags, MemfdFlags, fallocate, ftruncate, memfd_create};
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, mmap_anonymous, munmap};

/// Bytes in an OS page: the grain in which the host gives and takes memory.
pub(crate) const OS_PAGE_SIZE: usize = 4096;

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
    /// Shared memory behind a memfd called `name` in `/proc/PID/maps`.
    pub(crate) fn memfd(name: &str, len: usize) -> io::Result<Mapping> {
        let len = len.next_multiple_of(OS_PAGE_SIZE);
        let memfd = memfd_create(name, MemfdFlags::CLOEXEC)?;
        ftruncate(&memfd, len as u64)?;
        let flags = MapFlags::SHARED | MapFlags::NORESERVE;
        // SAFETY: a new mapping at an address of the kernel's choice touches nothing that exists; the memfd is ours and
        // is never made shorter, so no access within `len` can fault.
        let base = unsafe {
            mmap(
                std::ptr::null_mut(),
                len,
                ProtFlags::READ | ProtFlags::WRITE,
                flags,
                &memfd,
                0,
            )
        }?;
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

    /// Gives the host back what lies behind a range of OS pages of a memfd; it reads as zeroes afterwards.
    ///
    /// # Safety
    /// Nobody has a reference to any byte of the range.
    pub(crate) unsafe fn punch_hole(&self, offset: usize, len: usize) -> io::Result<()> {
        let Some(memfd) = &self.memfd else {
            return Err(io::ErrorKind::Unsupported.into());
        };
        let mode = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        Ok(fallocate(memfd, mode, offset as u64, len as u64)?)
    }

    /// The file behind the mapping, when it has one.
    #[cfg(test)]
    pub(crate) fn file(&self) -> Option<&OwnedFd> {
        self.memfd.as_ref()
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the range is our own mapping, and nothing borrowed from it outlives it. It fails only on a range that
        // is no mapping, which would be our own fault and harms nobody here.
        let _ = unsafe { munmap(self.base.as_ptr().cast(), self.len) };
    }
}
