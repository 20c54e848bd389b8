//! The decompression contexts of the whole daemon: how many pages can be decoded at a time by codecs that need a context,
//! of all disks together.
//!
//! A place holds one context of each codec that some disk uses. Their memory is taken when the first disk that needs the
//! codec is made, not in the middle of a read, and stays as long as the daemon.

use std::num::NonZero;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use super::pool::{ContextUses, Pool};
use super::{Damaged, deflate, zstd};

/// See the module. Shared by all disks through an [`Arc`].
pub struct DecompressionContexts {
    pool: Pool<Contexts>,
    /// Held while a codec's contexts are made. What is made is never unmade.
    provided: Mutex<Provided>,
    bytes: AtomicU64,
}

#[derive(Default)]
struct Contexts {
    zstd: Option<zstd::Decompressor>,
    deflate: Option<deflate::Decompressor>,
}

#[derive(Default)]
struct Provided {
    zstd: bool,
    deflate: bool,
}

/// The host does not give the memory for contexts or dictionaries.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("no memory for compression contexts")]
pub struct NoMemory;

impl std::fmt::Debug for DecompressionContexts {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("DecompressionContexts")
            .field("count", &self.count())
            .finish_non_exhaustive()
    }
}

impl Default for DecompressionContexts {
    /// Enough for any number of workers.
    fn default() -> DecompressionContexts {
        DecompressionContexts::with_places(DecompressionContexts::count_for(usize::MAX))
    }
}

impl DecompressionContexts {
    /// `count` places, without memory for contexts so far.
    pub fn new(count: NonZero<usize>) -> Arc<DecompressionContexts> {
        Arc::new(DecompressionContexts::with_places(count))
    }

    fn with_places(count: NonZero<usize>) -> DecompressionContexts {
        DecompressionContexts {
            pool: Pool::new((0..count.get()).map(|_| Contexts::default())),
            provided: Mutex::default(),
            bytes: AtomicU64::new(0),
        }
    }

    /// How many are enough for so many workers: one for each page that can be decoded at a time, and one for a worker that
    /// was preempted while decoding.
    pub fn count_for(workers: usize) -> NonZero<usize> {
        let cores = std::thread::available_parallelism().map_or(1, NonZero::get);
        NonZero::<usize>::MIN.saturating_add(workers.min(cores))
    }

    /// Pages that can be decoded at a time.
    pub fn count(&self) -> usize {
        self.pool.len()
    }

    /// Where workers got their contexts from.
    pub fn uses(&self) -> ContextUses {
        self.pool.uses()
    }

    /// What all contexts take, exactly.
    pub fn memory_bytes(&self) -> u64 {
        // Relaxed: a gauge, which orders nothing.
        self.bytes.load(Ordering::Relaxed)
    }

    pub(super) fn provide_zstd(&self) -> Result<(), NoMemory> {
        self.provide(
            |provided| &mut provided.zstd,
            zstd::Decompressor::new,
            zstd::Decompressor::memory_bytes,
            |contexts| &mut contexts.zstd,
        )
    }

    pub(super) fn provide_deflate(&self) -> Result<(), NoMemory> {
        self.provide(
            |provided| &mut provided.deflate,
            deflate::Decompressor::new,
            deflate::Decompressor::memory_bytes,
            |contexts| &mut contexts.deflate,
        )
    }

    /// All or nothing: everything is allocated before a place is touched, so that no holder of one waits for it.
    fn provide<T>(
        &self,
        flag: impl Fn(&mut Provided) -> &mut bool,
        make: impl Fn() -> Option<T>,
        memory_bytes: impl Fn(&T) -> usize,
        field: impl Fn(&mut Contexts) -> &mut Option<T>,
    ) -> Result<(), NoMemory> {
        let mut provided = self.provided.lock().unwrap_or_else(PoisonError::into_inner);
        if *flag(&mut provided) {
            return Ok(());
        }
        let made: Option<Vec<T>> = (0..self.count()).map(|_| make()).collect();
        let made = made.ok_or(NoMemory)?;
        let bytes: usize = made.iter().map(memory_bytes).sum();
        let mut made = made.into_iter();
        self.pool.for_each(|contexts| *field(contexts) = made.next());
        self.bytes.fetch_add(bytes as u64, Ordering::Relaxed);
        *flag(&mut provided) = true;
        Ok(())
    }

    pub(super) fn with_zstd(
        &self,
        worker: usize,
        decode: impl FnOnce(&mut zstd::Decompressor) -> Result<(), Damaged>,
    ) -> Result<(), Damaged> {
        self.pool
            .with(worker, |contexts| decode(contexts.zstd.as_mut().expect(PROVIDED)))
    }

    pub(super) fn with_deflate(
        &self,
        worker: usize,
        decode: impl FnOnce(&mut deflate::Decompressor) -> Result<(), Damaged>,
    ) -> Result<(), Damaged> {
        self.pool
            .with(worker, |contexts| decode(contexts.deflate.as_mut().expect(PROVIDED)))
    }

    /// Holds a place for as long as `held` runs: for tests of what others do meanwhile.
    #[cfg(test)]
    pub(super) fn hold<R>(&self, worker: usize, held: impl FnOnce() -> R) -> R {
        self.pool.with(worker, |_| held())
    }
}

const PROVIDED: &str = "a codec's contexts are there before anything is stored with it";
