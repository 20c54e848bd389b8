//! Codecs: one page to bytes and back. It knows no slots and no arena.
//!
//! | what | who has it |
//! | --- | --- |
//! | [`Algorithm`]: a codec's name and parameters, as text has them | configuration |
//! | [`PreparedAlgorithm`]: the same with its dictionary read and indexed; immutable | shared by all who use it |
//! | [`Stream`]: a compression context and its output buffer | one worker; of a secondary algorithm, one disk |
//! | [`DecompressionContexts`]: for codecs that need a context to decode | the daemon |
//! | [`Codecs`]: a disk's algorithms by priority | the disk |
//!
//! Decoding promises: exactly 4,096 bytes or an error. After an error the page holds nothing of what it held before.
//!
//! `unsafe` is in the files that call C: `lz4`, `lz4hc`, `deflate`. zstd's calls are zstd-safe's.

mod algorithm;
mod codecs;
mod contexts;
mod deflate;
mod dictionary;
mod e842;
#[cfg(any(test, fuzzing))]
pub(crate) mod fuzzing;
#[cfg(any(test, fuzzing))]
pub(crate) mod fuzzing_contexts;
mod liblz4;
mod lz4;
mod lz4hc;
mod lzo;
#[cfg(test)]
mod oracle;
mod pool;
mod prepared;
#[cfg(test)]
mod tests;
mod zstd;

pub use algorithm::{Algorithm, ParseAlgorithmError};
pub use codecs::{Codecs, LoadCodecsError, PRIORITIES};
pub use contexts::{DecompressionContexts, NoMemory};
pub use dictionary::{DICTIONARY_BYTES_MAX, DICTIONARY_BYTES_MIN, LoadError, TrainError, train};
pub use pool::ContextUses;
pub use prepared::{DictionaryGain, PreparedAlgorithm, Stream, dictionary_gain};

use algorithm::Name;

use crate::page::PAGE_SIZE;

/// Room for the worst that a codec makes of a page: zram too gives its codecs two pages, since some expand.
const OUTPUT_SIZE: usize = 2 * PAGE_SIZE;

/// A page that its codec cannot decode: not our bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the page does not decode")]
pub struct Damaged;
