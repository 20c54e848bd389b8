//! What lz4 and lz4hc call of liblz4 1.10 (lz4.h, lz4hc.h), which lz4-sys builds and links and of which it declares less.

use std::ffi::{c_int, c_void};

// The library is linked through this crate.
use lz4_sys as _;

unsafe extern "C" {
    pub(super) fn LZ4_sizeofState() -> c_int;
    pub(super) fn LZ4_initStream(state: *mut c_void, bytes: usize) -> *mut c_void;
    pub(super) fn LZ4_compress_fast_extState_fastReset(
        state: *mut c_void,
        from: *const u8,
        to: *mut u8,
        from_bytes: c_int,
        to_bytes: c_int,
        acceleration: c_int,
    ) -> c_int;
    pub(super) fn LZ4_loadDictSlow(state: *mut c_void, dictionary: *const u8, bytes: c_int) -> c_int;
    pub(super) fn LZ4_resetStream_fast(state: *mut c_void);
    pub(super) fn LZ4_attach_dictionary(state: *mut c_void, dictionary: *const c_void);
    pub(super) fn LZ4_compress_fast_continue(
        state: *mut c_void,
        from: *const u8,
        to: *mut u8,
        from_bytes: c_int,
        to_bytes: c_int,
        acceleration: c_int,
    ) -> c_int;

    pub(super) fn LZ4_decompress_safe(from: *const u8, to: *mut u8, from_bytes: c_int, to_bytes: c_int) -> c_int;
    pub(super) fn LZ4_decompress_safe_usingDict(
        from: *const u8,
        to: *mut u8,
        from_bytes: c_int,
        to_bytes: c_int,
        dictionary: *const u8,
        dictionary_bytes: c_int,
    ) -> c_int;

    pub(super) fn LZ4_sizeofStateHC() -> c_int;
    pub(super) fn LZ4_initStreamHC(state: *mut c_void, bytes: usize) -> *mut c_void;
    pub(super) fn LZ4_resetStreamHC_fast(state: *mut c_void, level: c_int);
    pub(super) fn LZ4_loadDictHC(state: *mut c_void, dictionary: *const u8, bytes: c_int) -> c_int;
    pub(super) fn LZ4_attach_HC_dictionary(state: *mut c_void, dictionary: *const c_void);
    pub(super) fn LZ4_compress_HC_extStateHC_fastReset(
        state: *mut c_void,
        from: *const u8,
        to: *mut u8,
        from_bytes: c_int,
        to_bytes: c_int,
        level: c_int,
    ) -> c_int;
    pub(super) fn LZ4_compress_HC_continue(
        state: *mut c_void,
        from: *const u8,
        to: *mut u8,
        from_bytes: c_int,
        to_bytes: c_int,
    ) -> c_int;
}

/// Memory for one of liblz4's states, aligned as they ask (to 8 bytes), all zeroes.
pub(super) struct State(Box<[u64]>);

impl State {
    /// `None` when the host has no memory for it.
    pub(super) fn new(bytes: c_int) -> Option<State> {
        let words = (bytes as usize).div_ceil(size_of::<u64>());
        let mut memory = vec![];
        memory.try_reserve_exact(words).ok()?;
        memory.resize(words, 0);
        Some(State(memory.into_boxed_slice()))
    }

    pub(super) fn bytes(&self) -> usize {
        size_of_val(&*self.0)
    }

    pub(super) fn as_ptr(&self) -> *const c_void {
        self.0.as_ptr().cast()
    }

    pub(super) fn as_mut_ptr(&mut self) -> *mut c_void {
        self.0.as_mut_ptr().cast()
    }
}
