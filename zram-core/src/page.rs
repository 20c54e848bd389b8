//! A page of disk content in our own memory, and the test whether one word fills it.
//!
//! "Page" is 4 KiB of disk content; the host's pages are "OS pages". Guest bytes are copied into a [`Page`] once,
//! before anything looks at them: a guest may change its memory at any moment, a `Page` does not change.

use std::ops::{Deref, DerefMut};

/// Bytes in a page, the unit of the store.
pub const PAGE_SIZE: usize = 4096;
/// Bytes in a sector, virtio's unit (virtio 1.3, section 5.2.4).
pub const SECTOR_SIZE: usize = 512;
/// Sectors in a page.
pub const SECTORS_PER_PAGE: usize = PAGE_SIZE / SECTOR_SIZE;

const WORD_SIZE: usize = size_of::<u64>();

/// 4 KiB of disk content in private memory, aligned to itself.
#[derive(Clone)]
#[repr(C, align(4096))]
pub struct Page([u8; PAGE_SIZE]);

impl Page {
    /// A page of zeroes on the heap.
    pub fn zeroed() -> Box<Page> {
        Box::new(Page([0; PAGE_SIZE]))
    }

    /// The word that fills the page, when all its 512 words are equal.
    pub fn same_filled(&self) -> Option<u64> {
        // A page equals itself shifted by a word exactly when all words are equal: one memcmp, which stops at the first
        // difference, almost always at once.
        let (first, _) = self.0.split_first_chunk::<WORD_SIZE>()?;
        (self.0[..PAGE_SIZE - WORD_SIZE] == self.0[WORD_SIZE..]).then(|| u64::from_ne_bytes(*first))
    }

    /// Fills the page with one word.
    pub fn fill_with_word(&mut self, word: u64) {
        if word == 0 {
            self.0.fill(0);
            return;
        }
        for chunk in self.0.as_chunks_mut::<WORD_SIZE>().0 {
            *chunk = word.to_ne_bytes();
        }
    }
}

impl Deref for Page {
    type Target = [u8; PAGE_SIZE];
    fn deref(&self) -> &Self::Target {
        &self.0
    }
}

impl DerefMut for Page {
    fn deref_mut(&mut self) -> &mut Self::Target {
        &mut self.0
    }
}

impl std::fmt::Debug for Page {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Page").field(&&self.0[..16]).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_of_one_word_is_same_filled() {
        let mut page = Page::zeroed();
        for word in [0, 1, u64::MAX, 0x0123_4567_89ab_cdef] {
            page.fill_with_word(word);
            assert_eq!(page.same_filled(), Some(word));
        }
    }

    #[test]
    fn one_differing_byte_anywhere_is_seen() {
        for at in 0..PAGE_SIZE {
            let mut page = Page::zeroed();
            page.fill_with_word(0x5a5a_5a5a_5a5a_5a5a);
            page[at] ^= 1;
            assert_eq!(page.same_filled(), None, "byte {at}");
        }
    }

    #[test]
    fn a_period_of_other_than_eight_bytes_is_not_same_filled() {
        let mut page = Page::zeroed();
        for (at, byte) in page.iter_mut().enumerate() {
            *byte = (at % 16) as u8;
        }
        assert_eq!(page.same_filled(), None);
    }
}
