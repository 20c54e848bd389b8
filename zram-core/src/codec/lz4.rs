//! LZ4 block format. Decoding needs no context, with a dictionary or without, and serves lz4hc too: it is one format.
//!
//! Two libraries: lz4_flex compresses at the level that nearly everybody uses, as fast as liblz4 with half of its memory
//! (its table has 16-bit places, which a page needs no more of). liblz4 compresses at other levels and with dictionaries,
//! which lz4_flex cannot, and decodes: it takes a fifth less time (docs/benchmarks.md).
//!
//! A dictionary is the 64 KiB that stand before a page, as it were: matches may reach into it. It is indexed once; each
//! page's context is attached to that index, which is only read, and nothing of it is copied.

use std::ffi::c_int;
use std::sync::Arc;

use lz4_flex::block::{CompressTable, compress_into_with_table};

use super::liblz4::{
    LZ4_attach_dictionary, LZ4_compress_fast_continue, LZ4_compress_fast_extState_fastReset, LZ4_decompress_safe,
    LZ4_decompress_safe_usingDict, LZ4_initStream, LZ4_loadDictSlow, LZ4_resetStream_fast, LZ4_sizeofState, State,
};
use super::{Damaged, OUTPUT_SIZE};
use crate::page::{PAGE_SIZE, Page};

/// zram's level of lz4 is liblz4's acceleration: 1 stores least, more is a little faster and stores more.
pub(super) const LEVEL_MIN: i32 = 1;
/// `LZ4_ACCELERATION_MAX`.
pub(super) const LEVEL_MAX: i32 = 65_537;
pub(super) const LEVEL_DEFAULT: i32 = 1;
/// How far back a match can reach, `LZ4_DISTANCE_MAX` and one.
pub(super) const DICTIONARY_BYTES_MAX: usize = 64 << 10;

const PAGE_BYTES: c_int = PAGE_SIZE as c_int;
const OUTPUT_BYTES: c_int = OUTPUT_SIZE as c_int;

/// lz4_flex's table for inputs below 64 KiB: 4,096 places of 16 bits.
const PLAIN_TABLE_BYTES: usize = 8 << 10;

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
    /// If there are more bytes than [`DICTIONARY_BYTES_MAX`].
    pub(super) fn new(bytes: &[u8]) -> Option<Dictionary> {
        assert!(bytes.len() <= DICTIONARY_BYTES_MAX);
        let mut index = new_state()?;
        let bytes: Box<[u8]> = bytes.into();
        // SAFETY: an initialised state, and bytes that stay where they are as long as it.
        unsafe { LZ4_loadDictSlow(index.as_mut_ptr(), bytes.as_ptr(), bytes.len() as c_int) };
        Some(Dictionary { index, bytes })
    }

    pub(super) fn memory_bytes(&self) -> usize {
        self.index.bytes() + self.bytes.len()
    }

    pub(super) fn bytes(&self) -> &[u8] {
        &self.bytes
    }
}

/// The table of recent positions.
pub(super) enum Compressor {
    /// 8 KiB.
    Plain(Box<CompressTable>),
    /// 16 KiB.
    Tuned {
        state: State,
        acceleration: c_int,
        dictionary: Option<Arc<Dictionary>>,
    },
}

impl Compressor {
    /// `None` when the host has no memory for it.
    pub(super) fn new(acceleration: i32, dictionary: Option<Arc<Dictionary>>) -> Option<Compressor> {
        if acceleration == LEVEL_DEFAULT && dictionary.is_none() {
            return Some(Compressor::Plain(Box::default()));
        }
        Some(Compressor::Tuned {
            state: new_state()?,
            acceleration,
            dictionary,
        })
    }

    pub(super) fn memory_bytes(&self) -> usize {
        match self {
            Compressor::Plain(_) => PLAIN_TABLE_BYTES,
            Compressor::Tuned { state, .. } => state.bytes(),
        }
    }

    pub(super) fn compress(&mut self, page: &Page, output: &mut [u8; OUTPUT_SIZE]) -> usize {
        let (state, acceleration, dictionary) = match self {
            Compressor::Plain(table) => {
                return compress_into_with_table(&page[..], output, table)
                    .expect("two pages hold what lz4 makes of any page");
            }
            Compressor::Tuned {
                state,
                acceleration,
                dictionary,
            } => (state.as_mut_ptr(), *acceleration, dictionary),
        };
        let (from, to) = (page.as_ptr(), output.as_mut_ptr());
        let len = match dictionary {
            // SAFETY: an initialised state, a page to read and an output to write, of these lengths.
            None => unsafe {
                LZ4_compress_fast_extState_fastReset(state, from, to, PAGE_BYTES, OUTPUT_BYTES, acceleration)
            },
            // SAFETY: as above; the dictionary is not changed by anybody, and lives at least as long as this state, which
            // forgets it at the next reset.
            Some(dictionary) => unsafe {
                LZ4_resetStream_fast(state);
                LZ4_attach_dictionary(state, dictionary.index.as_ptr());
                LZ4_compress_fast_continue(state, from, to, PAGE_BYTES, OUTPUT_BYTES, acceleration)
            },
        };
        assert!(len > 0, "two pages hold what lz4 makes of any page");
        len as usize
    }
}

fn new_state() -> Option<State> {
    // SAFETY: only tells a number.
    let mut state = State::new(unsafe { LZ4_sizeofState() })?;
    // SAFETY: memory of this size, aligned as it asks.
    let initialised = unsafe { LZ4_initStream(state.as_mut_ptr(), state.bytes()) };
    assert!(
        !initialised.is_null(),
        "the state has the size and alignment it asks for"
    );
    Some(state)
}

/// Decodes what [`Compressor`] or lz4hc's made with the same dictionary.
pub(super) fn decompress(content: &[u8], page: &mut Page, dictionary: Option<&[u8]>) -> Result<(), Damaged> {
    let len = c_int::try_from(content.len()).map_err(|_| Damaged)?;
    let (from, to) = (content.as_ptr(), page.as_mut_ptr());
    let decoded = match dictionary {
        // SAFETY: content to read and a page to write, of these lengths. liblz4 checks every length and offset in
        // what it reads against them.
        None => unsafe { LZ4_decompress_safe(from, to, len, PAGE_BYTES) },
        // SAFETY: as above, and a dictionary to read.
        Some(bytes) => unsafe {
            LZ4_decompress_safe_usingDict(from, to, len, PAGE_BYTES, bytes.as_ptr(), bytes.len() as c_int)
        },
    };
    if decoded == PAGE_BYTES { Ok(()) } else { Err(Damaged) }
}

/// `LZ4_COMPRESSBOUND`.
const _: () = assert!(PAGE_SIZE + PAGE_SIZE / 255 + 16 <= OUTPUT_SIZE);
const _: () = assert!(lz4_flex::block::get_maximum_output_size(PAGE_SIZE) <= OUTPUT_SIZE);
