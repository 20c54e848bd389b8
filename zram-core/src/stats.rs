//! Counters under zram's own names (Documentation/admin-guide/blockdev/zram.rst, "Stats"), and their text lines.
//!
//! Every worker counts in cells of its own, which nobody else writes, so counting costs no shared cache line; reading
//! adds them up. A gauge is the sum of what workers added and took away: exact when nobody writes, and never below zero.

use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};

use crate::page::PAGE_SIZE;
use crate::sync::CachePadded;

/// What the store holds and has done. Bytes or counts, all since the disk was created.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    /// Pages with content times 4,096, same-filled ones included. Never written or discarded pages are not.
    pub orig_data_size: u64,
    /// Bytes of content stored: a huge page counts 4,096, a same-filled one 0.
    pub compr_data_size: u64,
    /// Host memory that the arena holds, in whole segments. The slot table is not in it: see `table_bytes`.
    pub mem_used_total: u64,
    /// The limit on `mem_used_total`, 0 when there is none.
    pub mem_limit: u64,
    /// The most that `mem_used_total` was since the start, or since it was reset.
    pub mem_used_max: u64,
    /// Pages now filled with one 64-bit word, of any value.
    pub same_pages: u64,
    /// Pages of host memory that moving objects together gained.
    pub pages_compacted: u64,
    /// Pages now kept whole because the codec gained nothing.
    pub huge_pages: u64,
    /// Writes that ended as huge pages.
    pub huge_pages_since: u64,
    /// Read requests that failed.
    pub failed_reads: u64,
    /// Write requests that failed.
    pub failed_writes: u64,
    /// Requests refused for what they asked: beyond the disk, no multiple of a sector, broken.
    pub invalid_io: u64,
    /// Pages that discard and write-zeroes were asked to free, empty ones included.
    pub notify_free: u64,
    /// Page writes refused because the memory limit was reached.
    pub refused_writes: u64,
    /// Host memory behind the slot table.
    pub table_bytes: u64,
    /// Where decompression contexts came from.
    pub contexts: crate::codec::ContextUses,
}

impl Stats {
    /// zram's `mm_stat`: nine columns, one line.
    pub fn mm_stat(&self) -> String {
        line(&[
            self.orig_data_size,
            self.compr_data_size,
            self.mem_used_total,
            self.mem_limit,
            self.mem_used_max,
            self.same_pages,
            self.pages_compacted,
            self.huge_pages,
            self.huge_pages_since,
        ])
    }

    /// zram's `io_stat`: four columns, one line.
    pub fn io_stat(&self) -> String {
        line(&[self.failed_reads, self.failed_writes, self.invalid_io, self.notify_free])
    }
}

/// As the kernel prints them: right-aligned to 8 columns, a space between.
fn line(columns: &[u64]) -> String {
    let columns: Vec<_> = columns.iter().map(|column| format!("{column:>8}")).collect();
    columns.join(" ") + "\n"
}

/// Failures counted by whoever turns requests into page operations, once a request.
#[derive(Debug, Default)]
pub struct IoCounters {
    failed_reads: AtomicU64,
    failed_writes: AtomicU64,
    invalid_io: AtomicU64,
}

impl IoCounters {
    /// A read request failed.
    pub fn count_failed_read(&self) {
        self.failed_reads.fetch_add(1, Ordering::Relaxed);
    }

    /// A write request failed.
    pub fn count_failed_write(&self) {
        self.failed_writes.fetch_add(1, Ordering::Relaxed);
    }

    /// A request was refused for what it asked.
    pub fn count_invalid_io(&self) {
        self.invalid_io.fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn add_to(&self, stats: &mut Stats) {
        stats.failed_reads = self.failed_reads.load(Ordering::Relaxed);
        stats.failed_writes = self.failed_writes.load(Ordering::Relaxed);
        stats.invalid_io = self.invalid_io.load(Ordering::Relaxed);
    }
}

/// One worker's counts. Written by it alone: a load and a store, no read-modify-write.
#[derive(Debug, Default)]
pub(crate) struct Cells {
    pub(crate) pages_stored: Gauge,
    pub(crate) compr_data_size: Gauge,
    pub(crate) same_pages: Gauge,
    pub(crate) huge_pages: Gauge,
    /// What objects take in the arena, headers and rounding included.
    pub(crate) granules: Gauge,
    /// Objects that wait for their grace period.
    pub(crate) retired: Gauge,
    pub(crate) huge_pages_since: Count,
    pub(crate) notify_free: Count,
    pub(crate) refused_writes: Count,
    /// Pages that the cleaner gained.
    pub(crate) pages_compacted: Count,
    /// Changes of slots: how the cleaner sees that something happened.
    pub(crate) changes: Count,
}

/// One worker's share of a gauge: it may be below zero, when it took away what others added.
#[derive(Debug, Default)]
pub(crate) struct Gauge(AtomicI64);

impl Gauge {
    pub(crate) fn add(&self, amount: i64) {
        self.0.store(self.0.load(Ordering::Relaxed) + amount, Ordering::Relaxed);
    }
}

#[derive(Debug, Default)]
pub(crate) struct Count(AtomicU64);

impl Count {
    pub(crate) fn add(&self, amount: u64) {
        self.0.store(self.0.load(Ordering::Relaxed) + amount, Ordering::Relaxed);
    }
}

/// All workers' shares of a gauge.
pub(crate) fn gauge(cells: &[CachePadded<Cells>], of: fn(&Cells) -> &Gauge) -> u64 {
    let sum: i64 = cells.iter().map(|cells| of(&cells.0).0.load(Ordering::Relaxed)).sum();
    sum.max(0) as u64 // a page may be seen to leave before it is seen to come
}

/// All workers' shares of a count.
pub(crate) fn count(cells: &[CachePadded<Cells>], of: fn(&Cells) -> &Count) -> u64 {
    cells.iter().map(|cells| of(&cells.0).0.load(Ordering::Relaxed)).sum()
}

/// Adds all workers' cells up.
pub(crate) fn add_up(cells: &[CachePadded<Cells>], stats: &mut Stats) {
    let gauge = |of| gauge(cells, of);
    let count = |of| count(cells, of);
    stats.orig_data_size = gauge(|cells| &cells.pages_stored) * PAGE_SIZE as u64;
    stats.compr_data_size = gauge(|cells| &cells.compr_data_size);
    stats.same_pages = gauge(|cells| &cells.same_pages);
    stats.huge_pages = gauge(|cells| &cells.huge_pages);
    stats.huge_pages_since = count(|cells| &cells.huge_pages_since);
    stats.notify_free = count(|cells| &cells.notify_free);
    stats.refused_writes = count(|cells| &cells.refused_writes);
    stats.pages_compacted = count(|cells| &cells.pages_compacted);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_lines_are_as_zram_prints_them() {
        let stats = Stats {
            orig_data_size: 1_073_741_824,
            compr_data_size: 123,
            mem_used_total: 65_536,
            huge_pages_since: 7,
            failed_writes: 2,
            ..Stats::default()
        };
        assert_eq!(
            stats.mm_stat(),
            "1073741824      123    65536        0        0        0        0        0        7\n"
        );
        assert_eq!(stats.io_stat(), "       0        2        0        0\n");
    }

    #[test]
    fn a_gauge_seen_between_two_workers_does_not_wrap() {
        let cells = [CachePadded(Cells::default()), CachePadded(Cells::default())];
        cells[1].0.same_pages.add(-1);
        let mut stats = Stats::default();
        add_up(&cells, &mut stats);
        assert_eq!(stats.same_pages, 0);
    }
}
