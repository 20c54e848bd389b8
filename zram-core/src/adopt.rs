//! Taking over what a process left: the memory files of a store, of which only what the slot table says counts.
//!
//! The process may have died at any instruction. The table's words are the truth: each was published by one atomic step,
//! after the object behind it was complete. Everything else is rebuilt from them: heaps and holes (`arena/rebuild.rs`),
//! the gauges, what of the table was touched. An object that was stored and not published, or retired and not freed, is
//! in no slot: its place is a hole again. Counts begin at 0, as after a reset of a zram device.
//!
//! The files come from a process that is trusted (or from itself), and are checked all the same: head, size, every word.

use std::io;
use std::num::NonZero;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use crate::arena::{Arena, Layout, LayoutError};
use crate::codec::{Codecs, DecompressionContexts, LoadCodecsError};
use crate::head::{Head, HeadError, Part};
use crate::page::PAGE_SIZE;
use crate::region::Mapping;
use crate::slot::{Slot, SlotIndex};
use crate::table::Table;
use crate::zram::{Contents, DISK_BYTES_MAX, MemLimitError, PARTICIPANTS_MAX, Zram, check_mem_limit, slot_granules};

/// The memory files of a store: memfds, offsets and no pointers in them. They hold guests' data.
#[derive(Debug)]
pub struct Memory {
    /// The slot table.
    pub table: OwnedFd,
    /// The arena.
    pub arena: OwnedFd,
}

/// What the memory files do not say.
#[derive(Clone, Debug, Default)]
pub struct AdoptOptions {
    /// As in [`crate::Options`]. It may be lower than what is held.
    pub mem_limit_bytes: Option<u64>,
    /// The daemon's.
    pub contexts: Arc<DecompressionContexts>,
}

/// Why memory files cannot be taken over. They are as they were.
#[derive(Debug, thiserror::Error)]
pub enum AdoptError {
    /// The slot table's head.
    #[error("this is no slot table: {0}")]
    Table(#[source] HeadError),
    /// The arena's head.
    #[error("this is no arena: {0}")]
    Arena(#[source] HeadError),
    /// Each is whole, but they are not of one store.
    #[error("slot table and arena are not of one disk")]
    NotAPair,
    /// The head has a size that no disk has.
    #[error("a disk of {0} bytes, a table of {1} and an arena of {2} do not fit each other")]
    Size(u64, u64, u64),
    /// The head names a codec, a parameter or a dictionary that cannot be had.
    #[error("what the pages were compressed with is not to be had: {0}")]
    Codecs(#[from] LoadCodecsError),
    /// The limit is too low to store anything.
    #[error(transparent)]
    MemLimit(#[from] MemLimitError),
    /// A word of the table is none that a store writes, or points outside of the arena.
    #[error("slot {0} holds {1:#x}, which is damaged")]
    Slot(u32, u64),
    /// Two slots' objects have bytes in common.
    #[error("two objects have the arena's byte {0} in common")]
    Overlap(u64),
    /// The files cannot be read or mapped.
    #[error("cannot map the memory files")]
    Map(#[from] io::Error),
}

impl Zram {
    /// The memory files, to give to the process that will adopt them. The descriptors are duplicates.
    pub fn memory(&self) -> io::Result<Memory> {
        Ok(Memory {
            table: self.table.mapping().file()?.try_clone()?,
            arena: self.arena.mapping().file()?.try_clone()?,
        })
    }

    /// The disk that another process left in `memory`, which must not be in use any more. One walk through the slot
    /// table, some tens of nanoseconds a page. After an error nothing of the content was changed.
    pub fn adopt(memory: Memory, options: &AdoptOptions) -> Result<Arc<Zram>, AdoptError> {
        check_mem_limit(options.mem_limit_bytes)?;
        let head = Head::decode(Part::Table, &Mapping::read_head(&memory.table)?).map_err(AdoptError::Table)?;
        let arena_head = Head::decode(Part::Arena, &Mapping::read_head(&memory.arena)?).map_err(AdoptError::Arena)?;
        if head.id != arena_head.id {
            return Err(AdoptError::NotAPair);
        }
        let pages = head.disk_bytes / PAGE_SIZE as u64;
        let pages_max = head.content_bytes / size_of::<u64>() as u64;
        let fits = (1..=DISK_BYTES_MAX).contains(&head.disk_bytes)
            && head.disk_bytes.is_multiple_of(PAGE_SIZE as u64)
            && pages <= pages_max
            && head.content_bytes == pages_max * size_of::<u64>() as u64
            && pages_max <= DISK_BYTES_MAX / PAGE_SIZE as u64
            && arena_head.content_bytes == Arena::address_space(pages_max);
        if !fits {
            let sizes = [head.disk_bytes, head.content_bytes, arena_head.content_bytes];
            return Err(AdoptError::Size(sizes[0], sizes[1], sizes[2]));
        }
        let codecs = Codecs::load(&head.algorithms, options.contexts.clone())?;
        let limit = options.mem_limit_bytes;
        let table = Table::adopt(memory.table, pages, pages_max)?;
        let arena = Arena::adopt(memory.arena, arena_head.content_bytes, limit, PARTICIPANTS_MAX)?;
        let contents = rebuild(&table, &arena, &codecs)?;
        let zram = Zram::on(table, arena, codecs, limit);
        zram.begin_with(&contents);
        Ok(Arc::new(zram))
    }

    /// Sets the gauges of a store that nobody uses yet.
    fn begin_with(&self, contents: &Contents) {
        let cells = &self.cells[0].0;
        for (gauge, amount) in [
            (&cells.pages_stored, contents.pages),
            (&cells.same_pages, contents.same_pages),
            (&cells.huge_pages, contents.huge_pages),
            (&cells.compr_data_size, contents.bytes),
            (&cells.granules, contents.granules),
        ] {
            gauge.add(amount as i64);
        }
    }
}

/// Walks through the table: checks each word, adds up what it says, and makes the arena's heaps.
fn rebuild(table: &Table, arena: &Arena, codecs: &Codecs) -> Result<Contents, AdoptError> {
    let mut layout = Layout::default();
    let mut contents = Contents::default();
    for (SlotIndex(index), word) in table.walk(0..table.slots()) {
        if !Slot::is_valid(word) {
            return Err(AdoptError::Slot(index, word));
        }
        let slot = Slot::unpack(word);
        if let Slot::Stored { priority, .. } = slot
            && codecs.algorithm(priority.into()).is_none()
        {
            return Err(AdoptError::Slot(index, word));
        }
        contents.add(slot);
        if let Some((handle, _)) = slot_granules(slot) {
            if !arena.has_segment_of(handle) {
                return Err(AdoptError::Slot(index, word));
            }
            layout.count(handle);
        }
    }
    layout.counted();
    for (_, word) in table.walk(0..table.slots()) {
        if let Some((handle, granules)) = slot_granules(Slot::unpack(word)) {
            layout.place(handle, granules);
        }
    }
    let heaps = std::thread::available_parallelism().map_or(1, NonZero::get);
    arena
        .rebuild(layout, heaps.min(PARTICIPANTS_MAX))?
        .map_err(|error| match error {
            LayoutError::Overlap(handle) | LayoutError::Outside(handle) => AdoptError::Overlap(handle.byte()),
        })?;
    Ok(contents)
}
