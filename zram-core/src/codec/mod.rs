//! Codecs: one page to bytes and back. It knows no slots and no arena.
//!
//! Three kinds of state, three owners:
//!
//! - [`Algorithm`]: parameters, immutable, shared by all;
//! - [`Stream`]: a compression context and its output buffer, owned by one worker;
//! - [`Decompressors`]: contexts for codecs that need one to decode, shared. A worker tries its own place first, then
//!   borrows any idle one, and waits only when all are in use. lz4 decodes without a context.
//!
//! Decoding promises: exactly 4,096 bytes or an error. After an error the page holds nothing of what it held before.

mod lz4;
mod zstd;

use std::fmt;
use std::str::FromStr;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::page::{PAGE_SIZE, Page};
use crate::sync::CachePadded;

/// Room for the worst that a codec makes of a page: zram too gives its codecs two pages, since some expand.
const OUTPUT_SIZE: usize = 2 * PAGE_SIZE;

/// A codec with its parameters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Algorithm {
    /// LZ4 block format.
    Lz4,
    /// Zstandard: frames without magic number, checksum and content size.
    Zstd {
        /// -5 to 22; 0 is not used, [`FromStr`] turns it into zstd's own default, 3.
        level: i32,
    },
}

/// Why a text names no [`Algorithm`].
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ParseAlgorithmError {
    /// No codec has this name.
    #[error("unknown algorithm '{0}': it is one of lz4, zstd")]
    UnknownName(String),
    /// The text is not NAME or NAME(key=value,...), with each key once.
    #[error("'{0}' is not NAME or NAME(key=value,...)")]
    Form(String),
    /// The codec has no such parameter.
    #[error("{algorithm} has no parameter '{key}': it takes {known}")]
    UnknownKey {
        /// The codec.
        algorithm: &'static str,
        /// What was given.
        key: String,
        /// What it takes.
        known: &'static str,
    },
    /// A parameter's value is no number or outside its range.
    #[error("{algorithm}: {key}={value} is not in {min}..{max}")]
    Range {
        /// The codec.
        algorithm: &'static str,
        /// The parameter.
        key: &'static str,
        /// What was given.
        value: String,
        /// The least it can be.
        min: i32,
        /// The most it can be.
        max: i32,
    },
}

impl FromStr for Algorithm {
    type Err = ParseAlgorithmError;

    /// `NAME` or `NAME(key=value,...)`, as zram-generator writes it.
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let form = || ParseAlgorithmError::Form(text.into());
        let (name, parameters) = match text.split_once('(') {
            None => (text, None),
            Some((name, rest)) => (name, Some(rest.strip_suffix(')').ok_or_else(form)?)),
        };
        let mut algorithm = match name {
            "lz4" => Algorithm::Lz4,
            "zstd" => Algorithm::Zstd {
                level: zstd::LEVEL_DEFAULT,
            },
            _ => return Err(ParseAlgorithmError::UnknownName(name.into())),
        };
        let mut keys = vec![];
        for parameter in parameters.iter().flat_map(|parameters| parameters.split(',')) {
            let (key, value) = parameter.split_once('=').ok_or_else(form)?;
            if keys.contains(&key.trim()) {
                return Err(form());
            }
            keys.push(key.trim());
            algorithm.set(key.trim(), value.trim())?;
        }
        Ok(algorithm)
    }
}

impl fmt::Display for Algorithm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Algorithm::Lz4 => f.pad("lz4"),
            Algorithm::Zstd { level } => f.pad(&format!("zstd(level={level})")),
        }
    }
}

impl Algorithm {
    fn set(&mut self, key: &str, value: &str) -> Result<(), ParseAlgorithmError> {
        let unknown = |algorithm, known| ParseAlgorithmError::UnknownKey {
            algorithm,
            key: key.into(),
            known,
        };
        match self {
            Algorithm::Lz4 => Err(unknown("lz4", "none")),
            Algorithm::Zstd { level } if key == "level" => {
                let (min, max) = (zstd::LEVEL_MIN, zstd::LEVEL_MAX);
                let in_range = value.parse().ok().filter(|given| (min..=max).contains(given));
                let range = || ParseAlgorithmError::Range {
                    algorithm: "zstd",
                    key: "level",
                    value: value.into(),
                    min,
                    max,
                };
                *level = match in_range.ok_or_else(range)? {
                    0 => zstd::LEVEL_OF_ZERO,
                    level => level,
                };
                Ok(())
            }
            Algorithm::Zstd { .. } => Err(unknown("zstd", "level")),
        }
    }
}

/// A page that its codec cannot decode: not our bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Damaged;

/// A worker's compression context and output buffer. 8 KiB and the context: lz4 8 KiB, zstd 1 74 KiB.
pub(crate) struct Stream {
    context: Context,
    output: Box<[u8; OUTPUT_SIZE]>,
}

enum Context {
    Lz4(lz4::Compressor),
    Zstd(zstd::Compressor),
}

impl Stream {
    /// `None` when the host has no memory for the context.
    pub(crate) fn new(algorithm: Algorithm) -> Option<Stream> {
        let context = match algorithm {
            Algorithm::Lz4 => Context::Lz4(lz4::Compressor::new()),
            Algorithm::Zstd { level } => Context::Zstd(zstd::Compressor::new(level)?),
        };
        Some(Stream {
            context,
            output: Box::new([0; OUTPUT_SIZE]),
        })
    }

    /// What the codec makes of a page: more than a page, perhaps. It lies in the stream until the next call.
    pub(crate) fn compress(&mut self, page: &Page) -> &[u8] {
        let len = match &mut self.context {
            Context::Lz4(context) => context.compress(page, &mut self.output),
            Context::Zstd(context) => context.compress(page, &mut self.output),
        };
        &self.output[..len]
    }
}

/// How often a decompression context was taken from where.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ContextUses {
    /// The worker's own place was idle.
    pub own: u64,
    /// It was not, but another was.
    pub borrowed: u64,
    /// All were in use, so the worker waited. Should stay 0.
    pub waited: u64,
}

/// Decodes for all workers.
pub(crate) struct Decompressors {
    algorithm: Algorithm,
    /// Contexts of a codec that needs one. Locked for one page each time; only the last resort waits.
    contexts: Box<[CachePadded<Mutex<zstd::Decompressor>>]>,
    own: CachePadded<AtomicU64>,
    borrowed: AtomicU64,
    waited: AtomicU64,
}

impl Decompressors {
    /// `contexts` is how many pages can be decoded at a time by a codec with contexts. `None`: no memory for them.
    pub(crate) fn new(algorithm: Algorithm, contexts: usize) -> Option<Decompressors> {
        let count = match algorithm {
            Algorithm::Lz4 => 0,
            Algorithm::Zstd { .. } => contexts,
        };
        let contexts = (0..count).map(|_| Some(CachePadded(Mutex::new(zstd::Decompressor::new()?))));
        Some(Decompressors {
            algorithm,
            contexts: contexts.collect::<Option<_>>()?,
            own: CachePadded(AtomicU64::new(0)),
            borrowed: AtomicU64::new(0),
            waited: AtomicU64::new(0),
        })
    }

    /// Decodes what [`Stream::compress`] made. On an error the page is all zeroes.
    pub(crate) fn decompress(&self, worker: usize, content: &[u8], page: &mut Page) -> Result<(), Damaged> {
        let decoded = match self.algorithm {
            Algorithm::Lz4 => lz4::decompress(content, page),
            Algorithm::Zstd { .. } => self.with_context(worker, |context| context.decompress(content, page)),
        };
        if decoded.is_err() {
            page.fill(0);
        }
        decoded
    }

    pub(crate) fn uses(&self) -> ContextUses {
        let load = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        ContextUses {
            own: load(&self.own.0),
            borrowed: load(&self.borrowed),
            waited: load(&self.waited),
        }
    }

    fn with_context<R>(&self, worker: usize, decode: impl FnOnce(&mut zstd::Decompressor) -> R) -> R {
        let count = self.contexts.len();
        let place = |nth: usize| &self.contexts[(worker + nth) % count].0;
        for nth in 0..count {
            if let Ok(mut context) = place(nth).try_lock() {
                let counter = if nth == 0 { &self.own.0 } else { &self.borrowed };
                counter.fetch_add(1, Ordering::Relaxed);
                return decode(&mut context);
            }
        }
        self.waited.fetch_add(1, Ordering::Relaxed);
        // A context is reset at each use, so one that was left in the middle of a page is as good as any.
        decode(&mut place(0).lock().unwrap_or_else(|poisoned| poisoned.into_inner()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    pub(super) const ALGORITHMS: [&str; 5] = ["lz4", "zstd(level=-5)", "zstd", "zstd(level=12)", "zstd(level=22)"];

    fn pages() -> Vec<Box<Page>> {
        let mut pages = vec![];
        let mut random = 0x9e37_79b9_7f4a_7c15_u64;
        let mut next = || {
            random ^= random << 13;
            random ^= random >> 7;
            random ^= random << 17;
            random as u8
        };
        let kinds: [&mut dyn FnMut(usize) -> u8; 6] = [
            &mut |_| 0,
            &mut |at| at as u8,
            &mut |at| b"the quick brown fox "[at % 20],
            &mut |_| next(),
            &mut |at| if at % 512 < 40 { (at * 7 / 3) as u8 } else { 0 },
            &mut |at| u8::from(at == PAGE_SIZE - 1),
        ];
        for kind in kinds {
            let mut page = Page::zeroed();
            page.iter_mut().enumerate().for_each(|(at, byte)| *byte = kind(at));
            pages.push(page);
        }
        pages
    }

    fn both(algorithm: &str) -> (Stream, Decompressors) {
        let algorithm = algorithm.parse().unwrap();
        (
            Stream::new(algorithm).unwrap(),
            Decompressors::new(algorithm, 2).unwrap(),
        )
    }

    #[test]
    fn every_kind_of_page_survives_every_codec() {
        for algorithm in ALGORITHMS {
            let (mut stream, decompressors) = both(algorithm);
            for page in pages() {
                let content = stream.compress(&page).to_vec();
                let mut back = Page::zeroed();
                decompressors.decompress(0, &content, &mut back).unwrap();
                assert!(back[..] == page[..], "{algorithm}");
            }
        }
    }

    #[test]
    fn a_damaged_object_shows_nothing_of_what_the_buffer_held() {
        const POISON: u8 = 0xa5;
        for algorithm in ALGORITHMS {
            let (mut stream, decompressors) = both(algorithm);
            for page in pages() {
                let content = stream.compress(&page).to_vec();
                for cut in 0..content.len() {
                    let mut back = Page::zeroed();
                    back.fill(POISON);
                    let decoded = decompressors.decompress(0, &content[..cut], &mut back);
                    assert_eq!(decoded, Err(Damaged), "{algorithm}, {cut} of {} bytes", content.len());
                    assert!(
                        back.iter().all(|&byte| byte == 0),
                        "{algorithm}, {cut} of {} bytes",
                        content.len()
                    );
                }
            }
        }
    }

    proptest! {
        /// A flipped bit decodes to an error or to a whole page, and the same page whatever the buffer held before.
        #[test]
        fn a_flipped_bit_never_lets_the_buffer_through(which in 0usize..6, at: prop::sample::Index, bit in 0u32..8) {
            for algorithm in ALGORITHMS {
                let (mut stream, decompressors) = both(algorithm);
                let mut content = stream.compress(&pages()[which]).to_vec();
                let at = at.index(content.len());
                content[at] ^= 1 << bit;
                let decoded = [0x00, 0xa5].map(|poison| {
                    let mut back = Page::zeroed();
                    back.fill(poison);
                    let result = decompressors.decompress(0, &content, &mut back);
                    (result, back.to_vec())
                });
                prop_assert!(decoded[0] == decoded[1], "{} depends on the buffer", algorithm);
            }
        }

        #[test]
        fn noise_never_lets_the_buffer_through(content in prop::collection::vec(any::<u8>(), 1..300)) {
            for algorithm in ["lz4", "zstd"] {
                let (_, decompressors) = both(algorithm);
                let decoded = [0x00, 0xa5].map(|poison| {
                    let mut back = Page::zeroed();
                    back.fill(poison);
                    let result = decompressors.decompress(0, &content, &mut back);
                    (result, back.to_vec())
                });
                prop_assert!(decoded[0] == decoded[1], "{} depends on the buffer", algorithm);
            }
        }
    }

    #[test]
    fn an_idle_context_is_borrowed_before_anybody_waits() {
        let decompressors = Decompressors::new(Algorithm::Zstd { level: 1 }, 3).unwrap();
        let (mut stream, page) = (Stream::new(Algorithm::Zstd { level: 1 }).unwrap(), &pages()[2]);
        let content = stream.compress(page).to_vec();
        let mut back = Page::zeroed();
        decompressors.decompress(1, &content, &mut back).unwrap();
        let _paused_holders = (
            decompressors.contexts[1].0.lock().unwrap(),
            decompressors.contexts[2].0.lock().unwrap(),
        );
        decompressors.decompress(1, &content, &mut back).unwrap();
        assert_eq!(
            decompressors.uses(),
            ContextUses {
                own: 1,
                borrowed: 1,
                waited: 0
            }
        );
    }

    #[test]
    fn names_and_parameters_are_read_and_printed_alike() {
        for text in ["lz4", "zstd(level=-5)", "zstd(level=22)"] {
            assert_eq!(text.parse::<Algorithm>().unwrap().to_string(), text);
        }
        assert_eq!("zstd".parse(), Ok(Algorithm::Zstd { level: 1 }));
        assert_eq!("zstd(level=0)".parse(), Ok(Algorithm::Zstd { level: 3 }));
    }

    #[test]
    fn a_wrong_parameter_is_named_with_its_range() {
        let error = |text: &str| text.parse::<Algorithm>().unwrap_err().to_string();
        assert_eq!(error("zstd(level=23)"), "zstd: level=23 is not in -5..22");
        assert_eq!(error("zstd(level=x)"), "zstd: level=x is not in -5..22");
        assert_eq!(error("lz4(level=1)"), "lz4 has no parameter 'level': it takes none");
        assert_eq!(error("zstd(foo=1)"), "zstd has no parameter 'foo': it takes level");
        assert_eq!(error("lzma"), "unknown algorithm 'lzma': it is one of lz4, zstd");
        assert_eq!(
            error("zstd(level=1"),
            "'zstd(level=1' is not NAME or NAME(key=value,...)"
        );
        for text in ["zstd()", "zstd(level=1,)", "zstd(level=1,level=2)"] {
            assert_eq!(error(text), format!("'{text}' is not NAME or NAME(key=value,...)"));
        }
        assert_eq!(error("zstd(level)"), "'zstd(level)' is not NAME or NAME(key=value,...)");
    }
}
