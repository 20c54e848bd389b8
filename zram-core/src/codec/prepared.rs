//! An algorithm made ready: its dictionary read and indexed, once, for all who use it. Immutable and cheap to clone.

use std::sync::Arc;

use super::contexts::{DecompressionContexts, NoMemory};
use super::dictionary::{self, LoadError};
use super::{Algorithm, Damaged, Name, OUTPUT_SIZE, deflate, e842, lz4, lz4hc, lzo, zstd};
use crate::page::{PAGE_SIZE, Page};

/// What [`Algorithm::load`] makes.
#[derive(Clone)]
pub struct PreparedAlgorithm(Arc<Inner>);

struct Inner {
    /// With the dictionary's path from the root.
    algorithm: Algorithm,
    /// CRC-32 of the dictionary's bytes.
    dictionary_crc: Option<u32>,
    codec: Codec,
}

enum Codec {
    Lz4 {
        acceleration: i32,
        dictionary: Option<Arc<lz4::Dictionary>>,
    },
    Lz4hc {
        level: i32,
        dictionary: Option<Arc<lz4hc::Dictionary>>,
    },
    Zstd {
        level: i32,
        dictionary: Option<Arc<zstd::Dictionary>>,
    },
    Deflate {
        level: i32,
        window_bits: i32,
    },
    Lzo,
    LzoRle,
    E842,
}

impl Algorithm {
    /// Reads the dictionary, if there is one, and prepares it.
    pub fn load(&self) -> Result<PreparedAlgorithm, LoadError> {
        let Some(path) = self.dictionary() else {
            return Ok(self.prepare(None)?);
        };
        let path = dictionary::absolute(path)?;
        let bytes = dictionary::read(&path, self.name)?;
        let algorithm = Algorithm {
            dictionary: Some(path.clone()),
            ..self.clone()
        };
        // Of what there is a dictionary for, only zstd's has a form of its own, which can be wrong.
        match algorithm.prepare(Some(&bytes)) {
            Err(NoMemory) if self.name == Name::Zstd && bytes.starts_with(&zstd::DICTIONARY_MAGIC) => {
                Err(LoadError::Damaged(path))
            }
            prepared => Ok(prepared?),
        }
    }

    fn prepare(&self, dictionary: Option<&[u8]>) -> Result<PreparedAlgorithm, NoMemory> {
        let level = self.level;
        let codec = match self.name {
            Name::Lz4 => Codec::Lz4 {
                acceleration: level,
                dictionary: shared(dictionary, lz4::Dictionary::new)?,
            },
            Name::Lz4hc => Codec::Lz4hc {
                level,
                dictionary: shared(dictionary, |bytes| lz4hc::Dictionary::new(bytes, level))?,
            },
            Name::Zstd => Codec::Zstd {
                level,
                dictionary: shared(dictionary, |bytes| zstd::Dictionary::new(bytes, level))?,
            },
            Name::Deflate => Codec::Deflate {
                level,
                window_bits: self.window_bits,
            },
            Name::Lzo => Codec::Lzo,
            Name::LzoRle => Codec::LzoRle,
            Name::E842 => Codec::E842,
        };
        Ok(PreparedAlgorithm(Arc::new(Inner {
            algorithm: self.clone(),
            dictionary_crc: dictionary.map(crc32fast::hash),
            codec,
        })))
    }
}

fn shared<D>(bytes: Option<&[u8]>, make: impl Fn(&[u8]) -> Option<D>) -> Result<Option<Arc<D>>, NoMemory> {
    bytes.map(|bytes| make(bytes).map(Arc::new).ok_or(NoMemory)).transpose()
}

impl Default for PreparedAlgorithm {
    /// lz4.
    fn default() -> PreparedAlgorithm {
        Algorithm::default()
            .prepare(None)
            .expect("nothing to read and nothing to prepare")
    }
}

impl std::fmt::Debug for PreparedAlgorithm {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("PreparedAlgorithm").field(&self.0.algorithm).finish()
    }
}

impl PreparedAlgorithm {
    /// What it was made from.
    pub fn algorithm(&self) -> &Algorithm {
        &self.0.algorithm
    }

    /// By which another process sees that it has the same dictionary.
    pub(super) fn dictionary_crc(&self) -> Option<u32> {
        self.0.dictionary_crc
    }

    /// What the dictionary takes, for all who use it together.
    pub fn dictionary_memory_bytes(&self) -> usize {
        match &self.0.codec {
            Codec::Lz4 { dictionary, .. } => dictionary.as_ref().map_or(0, |d| d.memory_bytes()),
            Codec::Lz4hc { dictionary, .. } => dictionary.as_ref().map_or(0, |d| d.memory_bytes()),
            Codec::Zstd { dictionary, .. } => dictionary.as_ref().map_or(0, |d| d.memory_bytes()),
            Codec::Deflate { .. } | Codec::Lzo | Codec::LzoRle | Codec::E842 => 0,
        }
    }

    /// The same without its dictionary, or with another one.
    pub(super) fn with_dictionary(&self, dictionary: Option<&[u8]>) -> Result<PreparedAlgorithm, NoMemory> {
        self.0.algorithm.prepare(dictionary)
    }

    /// Takes the memory for the contexts that decoding needs.
    pub(super) fn provide_contexts(&self, contexts: &DecompressionContexts) -> Result<(), NoMemory> {
        match self.0.codec {
            Codec::Lz4 { .. } | Codec::Lz4hc { .. } | Codec::Lzo | Codec::LzoRle | Codec::E842 => Ok(()),
            Codec::Zstd { .. } => contexts.provide_zstd(),
            Codec::Deflate { .. } => contexts.provide_deflate(),
        }
    }

    pub(super) fn decompress(
        &self,
        contexts: &DecompressionContexts,
        worker: usize,
        content: &[u8],
        page: &mut Page,
    ) -> Result<(), Damaged> {
        match &self.0.codec {
            Codec::Lz4 { dictionary, .. } => {
                lz4::decompress(content, page, dictionary.as_ref().map(|dictionary| dictionary.bytes()))
            }
            Codec::Lz4hc { dictionary, .. } => {
                lz4::decompress(content, page, dictionary.as_ref().map(|dictionary| dictionary.bytes()))
            }
            Codec::Zstd { dictionary, .. } => contexts.with_zstd(worker, |context| {
                context.decompress(content, page, dictionary.as_deref())
            }),
            Codec::Deflate { window_bits, .. } => {
                contexts.with_deflate(worker, |context| context.decompress(content, page, *window_bits < 0))
            }
            Codec::Lzo => lzo::decompress::<false>(content, page),
            Codec::LzoRle => lzo::decompress::<true>(content, page),
            Codec::E842 => e842::decompress(content, page),
        }
    }
}

/// A compression context and its output buffer of two pages, owned by one worker.
pub struct Stream {
    pub(super) context: Context,
    output: Box<[u8; OUTPUT_SIZE]>,
}

pub(super) enum Context {
    Lz4(lz4::Compressor),
    Lz4hc(lz4hc::Compressor),
    Zstd(zstd::Compressor),
    Deflate(deflate::Compressor),
    Lzo(lzo::Compressor<false>),
    LzoRle(lzo::Compressor<true>),
    E842(e842::Compressor),
}

impl Stream {
    /// Takes all the memory that it will ever use.
    pub fn new(algorithm: &PreparedAlgorithm) -> Result<Stream, NoMemory> {
        let context = match &algorithm.0.codec {
            Codec::Lz4 {
                acceleration,
                dictionary,
            } => lz4::Compressor::new(*acceleration, dictionary.clone()).map(Context::Lz4),
            Codec::Lz4hc { level, dictionary } => {
                lz4hc::Compressor::new(*level, dictionary.clone()).map(Context::Lz4hc)
            }
            Codec::Zstd { level, dictionary } => zstd::Compressor::new(*level, dictionary.clone()).map(Context::Zstd),
            Codec::Deflate { level, window_bits } => {
                deflate::Compressor::new(*level, *window_bits).map(Context::Deflate)
            }
            Codec::Lzo => Some(Context::Lzo(lzo::Compressor::new())),
            Codec::LzoRle => Some(Context::LzoRle(lzo::Compressor::new())),
            Codec::E842 => Some(Context::E842(e842::Compressor::new())),
        };
        Ok(Stream {
            context: context.ok_or(NoMemory)?,
            output: Box::new([0; OUTPUT_SIZE]),
        })
    }

    /// What the codec makes of a page: more than a page, perhaps. It lies in the stream until the next call.
    pub fn compress(&mut self, page: &Page) -> &[u8] {
        let len = self.context.compress(page, &mut self.output);
        &self.output[..len]
    }

    /// What context and output buffer take, exactly. A dictionary is not the stream's.
    pub fn memory_bytes(&self) -> usize {
        self.context.memory_bytes() + size_of_val(&*self.output)
    }
}

impl Context {
    pub(super) fn compress(&mut self, page: &Page, output: &mut [u8; OUTPUT_SIZE]) -> usize {
        match self {
            Context::Lz4(context) => context.compress(page, output),
            Context::Lz4hc(context) => context.compress(page, output),
            Context::Zstd(context) => context.compress(page, output),
            Context::Deflate(context) => context.compress(page, output),
            Context::Lzo(context) => context.compress(page, output),
            Context::LzoRle(context) => context.compress(page, output),
            Context::E842(context) => context.compress(page, output),
        }
    }

    fn memory_bytes(&self) -> usize {
        match self {
            Context::Lz4(context) => context.memory_bytes(),
            Context::Lz4hc(context) => context.memory_bytes(),
            Context::Zstd(context) => context.memory_bytes(),
            Context::Deflate(context) => context.memory_bytes(),
            Context::Lzo(context) => context.memory_bytes(),
            Context::LzoRle(context) => context.memory_bytes(),
            Context::E842(context) => context.memory_bytes(),
        }
    }
}

/// What a dictionary does to some pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DictionaryGain {
    /// Pages looked at: those that are not same-filled.
    pub pages: usize,
    /// Bytes that they take without a dictionary, none more than a page.
    pub bytes_without: u64,
    /// And with it.
    pub bytes_with: u64,
}

/// Compresses pages without and with a dictionary. Meant for pages that it was not trained on: of its own it says too much.
pub fn dictionary_gain<'a>(
    algorithm: &PreparedAlgorithm,
    dictionary: &[u8],
    held_out: impl IntoIterator<Item = &'a Page>,
) -> Result<DictionaryGain, NoMemory> {
    let mut without = Stream::new(&algorithm.with_dictionary(None)?)?;
    let mut with = Stream::new(&algorithm.with_dictionary(Some(dictionary))?)?;
    let mut gain = DictionaryGain {
        pages: 0,
        bytes_without: 0,
        bytes_with: 0,
    };
    let stored = |stream: &mut Stream, page| stream.compress(page).len().min(PAGE_SIZE) as u64;
    for page in held_out.into_iter().filter(|page| page.same_filled().is_none()) {
        gain.pages += 1;
        gain.bytes_without += stored(&mut without, page);
        gain.bytes_with += stored(&mut with, page);
    }
    Ok(gain)
}
