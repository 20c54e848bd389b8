//! zram's store in user space. No virtio and no guest memory here: pages come and go as [`Page`]s.
//!
//! | room | what it promises |
//! | --- | --- |
//! | `zram`, `worker` | a disk: read, write, discard; a failed write leaves the old content; nobody waits for a holder |
//! | `clean`, `upkeep` | what is done beside requests: moving objects together, giving memory back; never in the way |
//! | `adopt`, `head` | another process takes over what one left, with all that was published |
//! | `slot`, `table` | what a page is, in one word; a slot changes by one atomic step |
//! | `epoch` | what a reader found in a slot stays readable until it is done |
//! | `arena` | objects of exact length in segments of host memory, never more than the limit |
//! | `codec` | a page to bytes and back; after an error nothing of an earlier page shows |
//! | `stats` | zram's counters with zram's meanings |
//! | `page`, `region`, `sync` | beneath them all: 4 KiB, mappings, primitives |
//!
//! `unsafe` lives in `region` and `arena`; `zram`, `worker` and `clean` keep their three promises (a word was loaded under its guard; it is
//! freed after its grace period; once).

#[cfg(not(loom))]
mod adopt;
#[cfg(not(loom))]
mod arena;
#[cfg(not(loom))]
mod clean;
#[cfg(loom)]
#[path = "arena/stack.rs"]
mod stack;

#[cfg_attr(loom, expect(dead_code, reason = "the models use only the protocol"))]
mod epoch;
mod sync;

#[cfg(not(loom))]
mod codec;
#[cfg(not(loom))]
mod head;
#[cfg(not(loom))]
mod page;
#[cfg(not(loom))]
mod pause;
#[cfg(all(test, not(loom)))]
mod pause_tests;
#[cfg(not(loom))]
mod region;
#[cfg(not(loom))]
mod slot;
#[cfg(not(loom))]
mod stats;
#[cfg(not(loom))]
mod table;
#[cfg(not(loom))]
mod upkeep;
#[cfg(not(loom))]
mod worker;
#[cfg(not(loom))]
mod zram;

#[cfg(not(loom))]
pub use adopt::{AdoptError, AdoptOptions, Memory};
#[cfg(not(loom))]
pub use arena::{ArenaReport, HeapReport, HoleClass, LIVE_SHARES, SEGMENT_SIZE};
#[cfg(not(loom))]
pub use clean::Compacted;
#[cfg(not(loom))]
pub use codec::{Algorithm, ContextUses, ParseAlgorithmError};
#[cfg(not(loom))]
pub use head::HeadError;
#[cfg(not(loom))]
pub use page::{PAGE_SIZE, Page, SECTOR_SIZE, SECTORS_PER_PAGE};
#[cfg(not(loom))]
pub use slot::SlotIndex;
#[cfg(not(loom))]
pub use stats::{IoCounters, Stats};
#[cfg(not(loom))]
pub use upkeep::{Upkeep, UpkeepThread};
#[cfg(not(loom))]
pub use worker::{ReadError, Worker, WriteError};
#[cfg(not(loom))]
pub use zram::{CreateError, DISK_BYTES_MAX, MEM_LIMIT_MIN, MemLimitError, Options, WORKERS_MAX, WorkerError, Zram};

/// The codecs alone, for the bench that sets the store beside them.
#[cfg(not(loom))]
#[doc(hidden)]
pub mod bench {
    use crate::codec::{Algorithm, Decompressors, Stream};
    use crate::page::Page;

    /// A compression stream and a decompression context.
    pub struct Codec(Stream, Decompressors);

    impl Codec {
        /// # Panics
        /// If there is no memory for the contexts.
        pub fn new(algorithm: Algorithm) -> Codec {
            let stream = Stream::new(algorithm).expect("memory for a context");
            Codec(stream, Decompressors::new(algorithm, 1).expect("memory for a context"))
        }

        /// What the codec makes of a page.
        pub fn compress(&mut self, page: &Page) -> &[u8] {
            self.0.compress(page)
        }

        /// # Panics
        /// If `content` was not made by [`Codec::compress`].
        pub fn decompress(&self, content: &[u8], page: &mut Page) {
            self.1.decompress(0, content, page).expect("content is a page");
        }
    }
}
