//! zram's store in user space. No virtio and no guest memory here: pages come and go as [`Page`]s.
//!
//! | room | what it promises |
//! | --- | --- |
//! | `zram` | a disk: read, write, discard; a failed write leaves the old content; nobody waits for a holder |
//! | `slot`, `table` | what a page is, in one word; a slot changes by one atomic step |
//! | `epoch` | what a reader found in a slot stays readable until it is done |
//! | `arena` | objects of exact length in segments of host memory, never more than the limit |
//! | `codec` | a page to bytes and back; after an error nothing of an earlier page shows |
//! | `stats` | zram's counters with zram's meanings |
//! | `page`, `region`, `sync` | beneath them all: 4 KiB, mappings, primitives |
//!
//! `unsafe` lives in `region` and `arena`; `zram` keeps their three promises (a word was loaded under its guard; it is
//! freed after its grace period; once).

#[cfg(not(loom))]
mod arena;
#[cfg(loom)]
#[path = "arena/stack.rs"]
mod stack;

#[cfg_attr(loom, expect(dead_code, reason = "the models use only the protocol"))]
mod epoch;
mod sync;

#[cfg(not(loom))]
mod codec;
#[cfg(not(loom))]
mod page;
#[cfg(not(loom))]
mod region;
#[cfg(not(loom))]
mod slot;
#[cfg(not(loom))]
mod stats;
#[cfg(not(loom))]
mod table;
#[cfg(not(loom))]
mod zram;

#[cfg(not(loom))]
pub use arena::SEGMENT_SIZE;
#[cfg(not(loom))]
pub use codec::{Algorithm, ContextUses, ParseAlgorithmError};
#[cfg(not(loom))]
pub use page::{PAGE_SIZE, Page, SECTOR_SIZE, SECTORS_PER_PAGE};
#[cfg(not(loom))]
pub use slot::SlotIndex;
#[cfg(not(loom))]
pub use stats::{IoCounters, Stats};
#[cfg(not(loom))]
pub use zram::{
    CreateError, DISK_BYTES_MAX, MEM_LIMIT_MIN, Options, ReadError, WORKERS_MAX, Worker, WorkerError, WriteError, Zram,
};
