//! Pages of a disk as a sample, to train a dictionary with. Each is pinned while it is decoded and copied, and no other
//! thread waits for that; nothing is marked as used.

use crate::page::Page;
use crate::slot::Slot;
use crate::zram::{WorkerError, Zram};

impl Zram {
    /// Up to `count` of the pages that are stored and not same-filled, at equal distances over the disk. Those that are
    /// freed meanwhile or do not decode are left out.
    pub fn sample_pages(&self, count: usize) -> Result<Vec<Box<Page>>, WorkerError> {
        let id = self.epochs.join().ok_or(WorkerError::TooMany)?;
        let stored = || {
            let all = self.table.walk(0..self.table.slots());
            all.filter(|&(_, word)| is_stored(word)).map(|(index, _)| index)
        };
        let stride = stored().count().div_ceil(count.max(1)).max(1);
        let pages = stored().step_by(stride).take(count);
        let pages = pages.filter_map(|index| {
            let guard = self.epochs.pin(id);
            let word = self.table.load(index);
            let mut page = Page::zeroed();
            let decoded = is_stored(word) && self.decode(id, word, &mut page, &guard).is_ok();
            decoded.then_some(page)
        });
        let pages = pages.collect();
        self.epochs.leave(id);
        Ok(pages)
    }
}

fn is_stored(word: u64) -> bool {
    matches!(Slot::unpack(word), Slot::Stored { .. })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::codec::{Algorithm, Codecs};
    use crate::idle::IdleMark;
    use crate::slot::SlotIndex;
    use crate::zram::Options;

    #[test]
    fn a_sample_is_spread_over_the_disk_and_uses_no_page() {
        let zram = Zram::create(&Options {
            name: "sampled".into(),
            size_bytes: 16 << 20,
            size_bytes_max: None,
            mem_limit_bytes: None,
            codecs: Codecs::alone(&Algorithm::default()).unwrap(),
        })
        .unwrap();
        assert!(zram.sample_pages(10).unwrap().is_empty());
        let mut worker = zram.worker().unwrap();
        let mut page = Page::zeroed();
        for slot in 0..1000_u32 {
            page.fill(7); // every other page is same-filled
            if slot % 2 == 0 {
                page[100..104].copy_from_slice(&slot.to_ne_bytes());
            }
            worker.write_page(SlotIndex(slot), &page).unwrap();
        }
        worker.end_batch();
        assert_eq!(zram.mark_idle(IdleMark::All), 500);
        let slots = |count| -> Vec<u32> {
            let pages = zram.sample_pages(count).unwrap();
            let slot = |page: &Page| u32::from_ne_bytes(page[100..104].try_into().unwrap());
            pages.iter().map(|page| slot(page)).collect()
        };
        assert_eq!(slots(5), [0, 200, 400, 600, 800]);
        assert_eq!(slots(5000), (0..1000).step_by(2).collect::<Vec<_>>());
        assert!(slots(0).is_empty());
        // Marks are as they were, and the participant has left.
        let idle = zram.table.walk(0..1000).filter(|&(_, word)| crate::slot::is_idle(word));
        assert_eq!(idle.count(), 500);
        for _ in 0..200 {
            slots(1);
        }
        zram.check_consistency();
    }
}
