//! zram's store in user space. No virtio and no guest memory here: pages come and go as [`Page`]s.
//!
//! | room | what it promises |
//! | --- | --- |
//! | `zram`, `worker` | a disk: read, write, discard; a failed write leaves the old content; nobody waits for a holder |
//! | `clean`, `upkeep` | what is done beside requests: moving objects together, giving memory back; never in the way |
//! | `recompress` | what was stored quickly is stored again with less; the old object serves until the new one is there |
//! | `idle` | when a page was last used: to ten seconds at first, to a day in the end |
//! | `resize` | another size in use: nothing moves, and a kill leaves the old size or the new |
//! | `adopt`, `head` | another process takes over what one left, with all that was published |
//! | `slot`, `table` | what a page is, in one word; a slot changes by one atomic step |
//! | `epoch` | what a reader found in a slot stays readable until it is done |
//! | `arena` | objects of exact length in segments of host memory, never more than the limit |
//! | `codec` | a page to bytes and back; after an error nothing of an earlier page shows |
//! | `stats` | zram's counters with zram's meanings |
//! | `page`, `region`, `sync` | beneath them all: 4 KiB, mappings, primitives |
//!
//! `unsafe` lives in `region`, `arena`, a line of `table` and the files of `codec` that call C; `zram`, `worker`, `clean` and `recompress`
//! keep the three promises of the first two (a word was loaded under its guard; it is freed after its grace period; once).

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
#[cfg(loom)]
#[cfg_attr(loom, expect(dead_code, reason = "the models use only the protocol"))]
#[path = "codec/pool.rs"]
mod pool;
mod sync;

#[cfg(not(loom))]
mod codec;
#[cfg(all(test, not(loom)))]
mod flag_tests;
#[cfg(not(loom))]
mod head;
#[cfg(not(loom))]
mod idle;
#[cfg(not(loom))]
mod page;
#[cfg(not(loom))]
mod pause;
#[cfg(all(test, not(loom)))]
mod pause_tests;
#[cfg(not(loom))]
mod recompress;
#[cfg(not(loom))]
mod region;
#[cfg(not(loom))]
mod resize;
#[cfg(not(loom))]
mod sample;
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
pub use codec::{
    Algorithm, Codecs, ContextUses, DICTIONARY_BYTES_MAX, DICTIONARY_BYTES_MIN, Damaged, DecompressionContexts,
    DictionaryGain, LoadCodecsError, LoadError, NoMemory, PRIORITIES, ParseAlgorithmError, PreparedAlgorithm, Stream,
    TrainError, dictionary_gain, train,
};
#[cfg(not(loom))]
pub use head::HeadError;
#[cfg(not(loom))]
pub use idle::{IDLE_AGE_MAX, IdleMark};
#[cfg(not(loom))]
pub use page::{PAGE_SIZE, Page, SECTOR_SIZE, SECTORS_PER_PAGE};
#[cfg(not(loom))]
pub use recompress::{RecompressError, RecompressOptions, RecompressType, Recompressed};
#[cfg(not(loom))]
pub use resize::ResizeError;
#[cfg(not(loom))]
pub use slot::SlotIndex;
#[cfg(not(loom))]
pub use stats::{IoCounters, Stats};
#[cfg(not(loom))]
pub use upkeep::{Upkeep, UpkeepThread};
#[cfg(not(loom))]
pub use worker::{ReadError, Worker, WriteError};
#[cfg(not(loom))]
pub use zram::{
    ContextBytes, CreateError, DISK_BYTES_MAX, MEM_LIMIT_MIN, MemLimitError, Options, WORKERS_MAX, WorkerError, Zram,
};

/// What `zram-core/fuzz` runs.
#[cfg(all(any(test, fuzzing), not(loom)))]
#[doc(hidden)]
pub mod fuzzing {
    pub use crate::codec::fuzzing::{decode, roundtrip};
    pub use crate::codec::fuzzing_contexts::contexts;
}
