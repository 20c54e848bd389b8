//! LZ4 block format, searched for longer, by liblz4. Decoding is lz4's.
//!
//! A dictionary's index depends on the level: it is made for one.

use std::ffi::c_int;
use std::sync::Arc;

use super::liblz4::{
    LZ4_attach_HC_dictionary, LZ4_compress_HC_continue, LZ4_compress_HC_extStateHC_fastReset, LZ4_initStreamHC,
    LZ4_loadDictHC, LZ4_resetStreamHC_fast, LZ4_sizeofStateHC, State,
};
use super::{OUTPUT_SIZE, lz4};
use crate::page::{PAGE_SIZE, Page};

/// liblz4 takes 1 for 2.
pub(super) const LEVEL_MIN: i32 = 1;
/// `LZ4HC_CLEVEL_MAX`. In the kernel, whose lz4 is an older one, it is 16.
pub(super) const LEVEL_MAX: i32 = 12;
/// `LZ4HC_CLEVEL_DEFAULT`, as in the kernel.
pub(super) const LEVEL_DEFAULT: i32 = 9;

const PAGE_BYTES: c_int = PAGE_SIZE as c_int;
const OUTPUT_BYTES: c_int = OUTPUT_SIZE as c_int;

/// A dictionary's bytes and their index. Nothing changes in it once it is made.
pub(super) struct Dictionary {
    index: State,
    /// `index` points into them.
    bytes: Box<[u8]>,
}

impl Dictionary {
    /// `None` when there is no memory for the index.
    ///
    /// # Panics
    /// If there are more bytes than lz4's [`lz4::DICTIONARY_BYTES_MAX`].
    pub(super) fn new(bytes: &[u8], level: i32) -> Option<Dictionary> {
        assert!(bytes.len() <= lz4::DICTIONARY_BYTES_MAX);
        let mut index = new_state()?;
        let bytes: Box<[u8]> = bytes.into();
        // SAFETY: an initialised state, and bytes that stay where they are as long as it.
        unsafe {
            LZ4_resetStreamHC_fast(index.as_mut_ptr(), level);
            LZ4_loadDictHC(index.as_mut_ptr(), bytes.as_ptr(), bytes.len() as c_int);
        }
        Some(Dictionary { index, bytes })
    }

    pub(super) fn memory_bytes(&self) -> usize {
        self.index.bytes() + self.bytes.len()
    }

    pub(super) fn bytes(&self) -> &[u8] {
        &self.bytes
    }
}

/// Tables for 64 KiB of history, whatever the page: 256 KiB.
pub(super) struct Compressor {
    state: State,
    level: c_int,
    dictionary: Option<Arc<Dictionary>>,
}

impl Compressor {
    /// `None` when the host has no memory for it.
    pub(super) fn new(level: i32, dictionary: Option<Arc<Dictionary>>) -> Option<Compressor> {
        Some(Compressor {
            state: new_state()?,
            level,
            dictionary,
        })
    }

    pub(super) fn memory_bytes(&self) -> usize {
        self.state.bytes()
    }

    pub(super) fn compress(&mut self, page: &Page, output: &mut [u8; OUTPUT_SIZE]) -> usize {
        let state = self.state.as_mut_ptr();
        let (from, to) = (page.as_ptr(), output.as_mut_ptr());
        let len = match &self.dictionary {
            // SAFETY: an initialised state, a page to read and an output to write, of these lengths.
            None => unsafe {
                LZ4_compress_HC_extStateHC_fastReset(state, from, to, PAGE_BYTES, OUTPUT_BYTES, self.level)
            },
            // SAFETY: as above; the dictionary is not changed by anybody, and lives at least as long as this state, which
            // forgets it at the next reset.
            Some(dictionary) => unsafe {
                LZ4_resetStreamHC_fast(state, self.level);
                LZ4_attach_HC_dictionary(state, dictionary.index.as_ptr());
                LZ4_compress_HC_continue(state, from, to, PAGE_BYTES, OUTPUT_BYTES)
            },
        };
        assert!(len > 0, "two pages hold what lz4hc makes of any page");
        len as usize
    }
}

fn new_state() -> Option<State> {
    // SAFETY: only tells a number.
    let mut state = State::new(unsafe { LZ4_sizeofStateHC() })?;
    // SAFETY: memory of this size, aligned as it asks.
    let initialised = unsafe { LZ4_initStreamHC(state.as_mut_ptr(), state.bytes()) };
    assert!(
        !initialised.is_null(),
        "the state has the size and alignment it asks for"
    );
    Some(state)
}
