//! The algorithms of one disk, by priority: 0 compresses what the guest writes, 1 to 3 compress it again. Whatever they
//! made, all of it can be read at any time by any worker.

use std::fmt;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, TryLockError};

use super::contexts::{DecompressionContexts, NoMemory};
use super::{Algorithm, Damaged, LoadError, ParseAlgorithmError, PreparedAlgorithm, Stream};
use crate::page::Page;

/// Algorithms that a disk can have, `ZRAM_MAX_COMPS`.
pub const PRIORITIES: usize = 4;

/// See the module. Fixed from the first write on: what is stored is read with it.
pub struct Codecs {
    primary: PreparedAlgorithm,
    secondary: [Option<Secondary>; PRIORITIES - 1],
    contexts: Arc<DecompressionContexts>,
}

struct Secondary {
    algorithm: PreparedAlgorithm,
    /// One, whatever the number of workers: recompression runs once at a time.
    stream: Mutex<Stream>,
    /// What it takes, which is the same as long as it lives.
    stream_bytes: usize,
}

impl fmt::Debug for Codecs {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let algorithms = (0..PRIORITIES).map(|priority| self.algorithm(priority));
        f.debug_list().entries(algorithms).finish()
    }
}

/// A line for each: priority, algorithm, and what the dictionary is known by. What [`Codecs::load`] reads.
impl fmt::Display for Codecs {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for priority in 0..PRIORITIES {
            let Some(prepared) = self.algorithm(priority) else {
                continue;
            };
            write!(f, "{priority} {}", prepared.algorithm())?;
            match prepared.dictionary_crc() {
                Some(crc) => writeln!(f, "{CRC_MARK}{crc:08x}")?,
                None => writeln!(f)?,
            }
        }
        Ok(())
    }
}

const CRC_MARK: &str = " crc32=";

/// Why the algorithms of a disk that another process left cannot be had.
#[derive(Debug, thiserror::Error)]
pub enum LoadCodecsError {
    /// It is no such text.
    #[error("'{0}' is not what algorithms are written down as")]
    Form(String),
    /// An algorithm that this program does not have.
    #[error(transparent)]
    Parse(#[from] ParseAlgorithmError),
    /// Its dictionary cannot be had.
    #[error(transparent)]
    Load(#[from] LoadError),
    /// There is a dictionary at the path, but pages would decode to something else with it.
    #[error("dictionary '{}' is another one than the pages were compressed with", .0.display())]
    OtherDictionary(PathBuf),
    /// The host does not give the memory.
    #[error(transparent)]
    NoMemory(#[from] NoMemory),
}

impl Codecs {
    /// `secondary` are the algorithms of priority 1 to 3. Takes the memory of a compression context for each of these, and
    /// of the decompression contexts that are needed and not there yet.
    pub fn new(
        primary: PreparedAlgorithm,
        secondary: [Option<PreparedAlgorithm>; PRIORITIES - 1],
        contexts: Arc<DecompressionContexts>,
    ) -> Result<Codecs, NoMemory> {
        for algorithm in std::iter::once(&primary).chain(secondary.iter().flatten()) {
            algorithm.provide_contexts(&contexts)?;
        }
        let mut all = [const { None }; PRIORITIES - 1];
        for (place, algorithm) in all.iter_mut().zip(secondary) {
            *place = match algorithm {
                None => None,
                Some(algorithm) => {
                    let stream = Stream::new(&algorithm)?;
                    Some(Secondary {
                        stream_bytes: stream.memory_bytes(),
                        stream: Mutex::new(stream),
                        algorithm,
                    })
                }
            };
        }
        Ok(Codecs {
            primary,
            secondary: all,
            contexts,
        })
    }

    /// One algorithm, with decompression contexts of its own: for a program with one disk.
    pub fn alone(algorithm: &Algorithm) -> Result<Arc<Codecs>, LoadError> {
        let primary = algorithm.load()?;
        Ok(Arc::new(Codecs::new(primary, Default::default(), Arc::default())?))
    }

    /// The algorithms that were written down as text, with their dictionaries if these are still the same.
    pub fn load(text: &str, contexts: Arc<DecompressionContexts>) -> Result<Arc<Codecs>, LoadCodecsError> {
        let mut algorithms = [const { None }; PRIORITIES];
        for line in text.lines() {
            let form = || LoadCodecsError::Form(line.into());
            let (priority, algorithm) = line.split_once(' ').ok_or_else(form)?;
            let (algorithm, crc) = match algorithm.rsplit_once(CRC_MARK) {
                Some((algorithm, crc)) => (algorithm, Some(u32::from_str_radix(crc, 16).map_err(|_| form())?)),
                None => (algorithm, None),
            };
            let place = priority
                .parse()
                .ok()
                .and_then(|priority: usize| algorithms.get_mut(priority));
            let prepared = algorithm.parse::<Algorithm>()?.load()?;
            if prepared.dictionary_crc() != crc {
                let path = prepared.algorithm().dictionary().ok_or_else(form)?;
                return Err(LoadCodecsError::OtherDictionary(path.into()));
            }
            *place.ok_or_else(form)? = Some(prepared);
        }
        let [primary, secondary @ ..] = algorithms;
        let primary = primary.ok_or_else(|| LoadCodecsError::Form(text.into()))?;
        Ok(Arc::new(Codecs::new(primary, secondary, contexts)?))
    }

    /// The algorithm of a priority.
    pub fn algorithm(&self, priority: usize) -> Option<&PreparedAlgorithm> {
        match priority {
            0 => Some(&self.primary),
            _ => self.secondary(priority).map(|secondary| &secondary.algorithm),
        }
    }

    /// Where decompression contexts come from.
    pub fn contexts(&self) -> &Arc<DecompressionContexts> {
        &self.contexts
    }

    /// A compression context of the primary algorithm, for one worker.
    pub fn stream(&self) -> Result<Stream, NoMemory> {
        Stream::new(&self.primary)
    }

    /// The compression context of a secondary algorithm, if there is one and nobody uses it.
    pub fn try_secondary_stream(&self, priority: usize) -> Option<MutexGuard<'_, Stream>> {
        match self.secondary(priority)?.stream.try_lock() {
            Ok(stream) => Some(stream),
            // A stream is reset for each page.
            Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }

    /// What the compression contexts of secondary algorithms and all dictionaries take.
    pub fn memory_bytes(&self) -> usize {
        let streams = self.secondary.iter().flatten().map(|secondary| secondary.stream_bytes);
        let algorithms = (0..PRIORITIES).filter_map(|priority| self.algorithm(priority));
        streams.sum::<usize>()
            + algorithms
                .map(PreparedAlgorithm::dictionary_memory_bytes)
                .sum::<usize>()
    }

    /// Decodes what the algorithm of a priority made. On an error the page is all zeroes.
    pub fn decompress(&self, priority: usize, worker: usize, content: &[u8], page: &mut Page) -> Result<(), Damaged> {
        let decoded = match self.algorithm(priority) {
            Some(algorithm) => algorithm.decompress(&self.contexts, worker, content, page),
            None => Err(Damaged),
        };
        if decoded.is_err() {
            page.fill(0);
        }
        decoded
    }

    fn secondary(&self, priority: usize) -> Option<&Secondary> {
        self.secondary.get(priority.checked_sub(1)?)?.as_ref()
    }
}
