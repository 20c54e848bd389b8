//! A dictionary from pages, with what it gains on pages that it was not made from. The daemon does it for a live disk on a
//! control client's thread, and `vzramctl` for a file of pages.

use zram_core::{
    Algorithm, DICTIONARY_BYTES_MAX, NoMemory, PAGE_SIZE, Page, PreparedAlgorithm, TrainError, dictionary_gain, train,
};

use crate::protocol::{DictionaryGain, DictionaryReport};

/// One page of so many is held out, to measure with.
const HELD_OUT: usize = 4;
/// So many bytes of pages make a byte of a dictionary: what zstd's authors advise, and those held out.
const SAMPLE_RATIO: usize = 128;
const SAMPLE_PAGES_MIN: usize = 1024;

/// How many pages a dictionary is worth: at most 8 MiB of them.
pub fn sample_pages(dictionary_bytes: usize) -> usize {
    let bytes = dictionary_bytes.min(DICTIONARY_BYTES_MAX) * SAMPLE_RATIO;
    (bytes / PAGE_SIZE).max(SAMPLE_PAGES_MIN)
}

/// Why there is no dictionary.
#[derive(Debug)]
pub enum TrainingError {
    /// Of these pages none can be made.
    Train(TrainError),
    /// The host does not give the memory to measure.
    NoMemory(NoMemory),
}

impl std::fmt::Display for TrainingError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            TrainingError::Train(error) => error.fmt(f),
            TrainingError::NoMemory(error) => error.fmt(f),
        }
    }
}

/// Takes seconds. `name` is of the disk or the file; gains are measured for `algorithm`, if it takes a dictionary, and
/// zstd.
pub fn dictionary(
    name: &str,
    pages: &[Box<Page>],
    algorithm: &Algorithm,
    dictionary_bytes: usize,
) -> Result<DictionaryReport, TrainingError> {
    let of = |is_held_out: bool| {
        let pages = pages.iter().enumerate();
        pages.filter_map(move |(index, page)| ((index % HELD_OUT == HELD_OUT - 1) == is_held_out).then_some(&**page))
    };
    let made = train(of(false), dictionary_bytes).map_err(TrainingError::Train)?;
    let mut gains = Vec::new();
    for algorithm in [Some(algorithm.without_dictionary()), "zstd".parse().ok()]
        .into_iter()
        .flatten()
    {
        let is_new = gains
            .iter()
            .all(|gain: &DictionaryGain| gain.algorithm != algorithm.to_string());
        if algorithm.takes_dictionary() && is_new {
            let prepared: PreparedAlgorithm = algorithm.load().map_err(|_| TrainingError::NoMemory(NoMemory))?;
            let gain = dictionary_gain(&prepared, &made, of(true)).map_err(TrainingError::NoMemory)?;
            gains.push(DictionaryGain {
                algorithm: algorithm.to_string(),
                bytes_without: gain.bytes_without,
                bytes_with: gain.bytes_with,
            });
        }
    }
    Ok(DictionaryReport {
        name: name.into(),
        algorithm: algorithm.to_string(),
        pages_trained: of(false).count() as u64,
        pages_held_out: of(true).count() as u64,
        gains,
        dictionary: to_hex(&made),
    })
}

/// Two digits a byte.
fn to_hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// What [`DictionaryReport::dictionary`] says; `None` if it is no such text, or longer than a dictionary is.
pub fn from_hex(text: &str) -> Option<Vec<u8>> {
    if text.is_empty() || text.len() > 2 * DICTIONARY_BYTES_MAX || !text.bytes().all(|byte| byte.is_ascii_hexdigit()) {
        return None;
    }
    let digits = text.as_bytes().chunks(2).map(|pair| std::str::from_utf8(pair).ok());
    digits
        .map(|pair| pair.filter(|pair| pair.len() == 2))
        .map(|pair| u8::from_str_radix(pair?, 16).ok())
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dictionaries_survive_their_way_as_text() {
        let bytes: Vec<u8> = (0..=255).collect();
        assert_eq!(from_hex(&to_hex(&bytes)), Some(bytes));
        for wrong in ["", "0", "0g", "abc", "+1", " 1", "é"] {
            assert_eq!(from_hex(wrong), None, "{wrong}");
        }
        assert_eq!(from_hex(&"0".repeat(2 * DICTIONARY_BYTES_MAX + 2)), None);
    }
}
