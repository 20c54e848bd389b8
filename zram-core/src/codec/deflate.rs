//! DEFLATE (RFC 1951), raw or in zlib's wrapping (RFC 1950): encoded by zlib, decoded by libdeflate.
//!
//! Each does what it is best at on 4 KiB (figures: docs/benchmarks.md). zlib takes zram's parameters as they are, and its
//! context is the smallest by far: 30 KiB, where libdeflate's encoder has 198 to 653 and zlib-rs' 161. libdeflate decodes
//! in half of zlib's time.

use std::cell::Cell;
use std::ffi::{c_int, c_uint, c_void};
use std::ptr::{NonNull, null_mut};
use std::sync::atomic::{AtomicUsize, Ordering};

use libdeflate_sys::{
    libdeflate_alloc_decompressor_ex, libdeflate_decompressor, libdeflate_deflate_decompress,
    libdeflate_free_decompressor, libdeflate_options, libdeflate_result_LIBDEFLATE_SUCCESS, libdeflate_zlib_decompress,
};
use libz_sys::{Z_DEFAULT_STRATEGY, Z_DEFLATED, Z_FINISH, Z_OK, Z_STREAM_END};
use libz_sys::{deflate, deflateEnd, deflateInit2_, deflateReset, z_stream, zlibVersion};

use super::{Damaged, OUTPUT_SIZE};
use crate::page::{PAGE_SIZE, Page};

/// What zlib takes -1 for.
pub(super) const LEVEL_DEFAULT: i32 = 6;
pub(super) const WINDOW_BITS_MIN: u32 = 9;
/// A page fills 12; more only take memory.
pub(super) const WINDOW_BITS_MAX: u32 = 15;
/// zram's: raw, a window of 2 KiB. At level 6 it stores less than one of 4 KiB: nearer matches cost fewer bits.
pub(super) const WINDOW_BITS_DEFAULT: i32 = -11;
/// zram's is 8; on a page 5 stores 0.02 % more, in a quarter of the memory.
const MEM_LEVEL: c_int = 5;

pub(super) struct Compressor {
    /// zlib's state points back at it, so it stays where it is.
    stream: Box<z_stream>,
    /// What the stream has taken. Its allocator counts it.
    allocated: Box<AtomicUsize>,
}

// SAFETY: the stream is a state in memory of its own, bound to no thread.
unsafe impl Send for Compressor {}

impl Compressor {
    /// `None` when the host has no memory for it.
    pub(super) fn new(level: i32, window_bits: i32) -> Option<Compressor> {
        let allocated = Box::new(AtomicUsize::new(0));
        let mut stream = Box::new(z_stream {
            next_in: null_mut(),
            avail_in: 0,
            total_in: 0,
            next_out: null_mut(),
            avail_out: 0,
            total_out: 0,
            msg: null_mut(),
            state: null_mut(),
            zalloc: allocate_for_zlib,
            zfree: free_for_zlib,
            opaque: (&raw const *allocated).cast_mut().cast(),
            data_type: 0,
            adler: 0,
            reserved: 0,
        });
        // SAFETY: a stream with an allocator, and the version and size that this zlib's declarations are of.
        let result = unsafe {
            deflateInit2_(
                &raw mut *stream,
                level,
                Z_DEFLATED,
                window_bits,
                MEM_LEVEL,
                Z_DEFAULT_STRATEGY,
                zlibVersion(),
                size_of::<z_stream>() as c_int,
            )
        };
        (result == Z_OK).then_some(Compressor { stream, allocated })
    }

    pub(super) fn memory_bytes(&self) -> usize {
        // Relaxed: only the owner's own calls change it.
        self.allocated.load(Ordering::Relaxed) + size_of_val(&*self.stream)
    }

    pub(super) fn compress(&mut self, page: &Page, output: &mut [u8; OUTPUT_SIZE]) -> usize {
        let stream = &mut *self.stream;
        stream.next_in = page.as_ptr().cast_mut();
        stream.avail_in = PAGE_SIZE as c_uint;
        stream.next_out = output.as_mut_ptr();
        stream.avail_out = OUTPUT_SIZE as c_uint;
        // SAFETY: an initialised stream, whose input zlib only reads, with the lengths of both. The reset, which sets
        // the totals to 0, leaves both as they are.
        let result = unsafe {
            deflateReset(stream);
            deflate(stream, Z_FINISH)
        };
        assert!(result == Z_STREAM_END, "two pages hold what deflate makes of any page");
        OUTPUT_SIZE - stream.avail_out as usize
    }
}

impl Drop for Compressor {
    fn drop(&mut self) {
        // SAFETY: an initialised stream, which nobody uses after this.
        unsafe { deflateEnd(&raw mut *self.stream) };
    }
}

unsafe extern "C" fn allocate_for_zlib(allocated: *mut c_void, items: c_uint, size: c_uint) -> *mut c_void {
    let bytes = items as usize * size as usize;
    // SAFETY: the counter outlives its stream.
    unsafe { &*allocated.cast::<AtomicUsize>() }.fetch_add(bytes, Ordering::Relaxed);
    // SAFETY: always safe. zlib sets to zero what it reads before it wrote it.
    unsafe { libc::malloc(bytes) }
}

unsafe extern "C" fn free_for_zlib(_: *mut c_void, memory: *mut c_void) {
    // SAFETY: zlib frees what it allocated, once.
    unsafe { libc::free(memory) };
}

/// Tables for Huffman codes, 11 KiB; no window, since the page is there as a whole.
pub(super) struct Decompressor {
    context: NonNull<libdeflate_decompressor>,
    bytes: usize,
}

// SAFETY: the context is memory of its own, bound to no thread.
unsafe impl Send for Decompressor {}

thread_local! {
    /// Bytes that libdeflate took on this thread: its allocator is told nothing of whom it serves.
    static LIBDEFLATE_BYTES: Cell<usize> = const { Cell::new(0) };
}

impl Decompressor {
    /// `None` when the host has no memory for it.
    pub(super) fn new() -> Option<Decompressor> {
        let options = libdeflate_options {
            sizeof_options: size_of::<libdeflate_options>(),
            malloc_func: Some(allocate_for_libdeflate),
            free_func: Some(libc::free),
        };
        let before = LIBDEFLATE_BYTES.get();
        // SAFETY: options of this version, with an allocator.
        let context = NonNull::new(unsafe { libdeflate_alloc_decompressor_ex(&options) })?;
        let bytes = LIBDEFLATE_BYTES.get() - before;
        Some(Decompressor { context, bytes })
    }

    pub(super) fn memory_bytes(&self) -> usize {
        self.bytes
    }

    /// `raw`: without zlib's header and checksum.
    pub(super) fn decompress(&mut self, content: &[u8], page: &mut Page, raw: bool) -> Result<(), Damaged> {
        let decode = if raw {
            libdeflate_deflate_decompress
        } else {
            libdeflate_zlib_decompress
        };
        // SAFETY: content to read and a page to write, of these lengths. Without a place for the decoded length,
        // anything but a whole page is an error.
        let result = unsafe {
            decode(
                self.context.as_ptr(),
                content.as_ptr().cast(),
                content.len(),
                page.as_mut_ptr().cast(),
                PAGE_SIZE,
                null_mut(),
            )
        };
        if result == libdeflate_result_LIBDEFLATE_SUCCESS {
            Ok(())
        } else {
            Err(Damaged)
        }
    }
}

impl Drop for Decompressor {
    fn drop(&mut self) {
        // SAFETY: allocated, and nobody uses it after this.
        unsafe { libdeflate_free_decompressor(self.context.as_ptr()) };
    }
}

unsafe extern "C" fn allocate_for_libdeflate(bytes: usize) -> *mut c_void {
    LIBDEFLATE_BYTES.set(LIBDEFLATE_BYTES.get() + bytes);
    // SAFETY: always safe.
    unsafe { libc::malloc(bytes) }
}

/// zlib's `deflateBound` for memLevel 5 and the smallest window: a block of stored bytes for each 128 literals at worst.
const _: () = assert!(PAGE_SIZE + PAGE_SIZE / 8 + 64 <= OUTPUT_SIZE);
