//! The head in front of slot table and arena: what a process that adopts them has to know before it looks at anything
//! else. One OS page, little-endian, the rest of it zeroes:
//!
//! ```text
//!   0  magic, 8 bytes           32  bytes of the disk, u64
//!   8  version, u32             40  bytes behind this head, u64
//!  12  CRC-32 of the page       48  bytes of a segment, u32
//!      with this field as 0     52  bytes of a granule, u32
//!  16  id of the store, u128    56  length of the text behind it, u32; the algorithms as text
//! ```
//!
//! It is written before anything else of the file, and of it only the bytes of the disk change, in the table's: in one
//! call, so that a kill leaves one or the other. The arena's are those of the beginning. Table and arena of one store have
//! the same id. There are offsets in both files and no pointers, so any process can map them anywhere.

use crate::region::OS_PAGE_SIZE;
use crate::slot::GRANULE_SIZE;

const VERSION: u32 = 1;
const CRC_AT: usize = 12;
const TEXT_LEN_AT: usize = 56;
const TEXT_AT: usize = 60;
/// Bytes that the algorithms' text may take.
pub(crate) const TEXT_MAX: usize = OS_PAGE_SIZE - TEXT_AT;

/// Which of the two files it stands in front of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Part {
    Table,
    Arena,
}

impl Part {
    fn magic(self) -> [u8; 8] {
        *match self {
            Part::Table => b"vzramTBL",
            Part::Arena => b"vzramARN",
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Head {
    pub(crate) id: u128,
    pub(crate) disk_bytes: u64,
    /// Bytes behind the head.
    pub(crate) content_bytes: u64,
    pub(crate) algorithms: String,
}

/// Why a head cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum HeadError {
    /// Not written by this program, or the table given for the arena.
    #[error("it does not begin as one")]
    Magic,
    /// Written by a version whose layout this one does not know.
    #[error("its layout is version {0}, this program knows {VERSION}")]
    Version(u32),
    /// The checksum does not fit.
    #[error("its head is damaged")]
    Damaged,
    /// Written with other constants.
    #[error(
        "its segments are of {segment} bytes and its granules of {granule}, not {} and {GRANULE_SIZE}",
        crate::SEGMENT_SIZE
    )]
    Units {
        /// Bytes of a segment.
        segment: u32,
        /// Bytes of a granule.
        granule: u32,
    },
}

impl Head {
    pub(crate) fn encode(&self, part: Part) -> [u8; OS_PAGE_SIZE] {
        let text = self.algorithms.as_bytes();
        assert!(text.len() <= TEXT_MAX, "algorithms of {} bytes", text.len());
        let mut page = [0; OS_PAGE_SIZE];
        let mut put = |at: usize, bytes: &[u8]| page[at..at + bytes.len()].copy_from_slice(bytes);
        put(0, &part.magic());
        put(8, &VERSION.to_le_bytes());
        put(16, &self.id.to_le_bytes());
        put(32, &self.disk_bytes.to_le_bytes());
        put(40, &self.content_bytes.to_le_bytes());
        put(48, &(crate::SEGMENT_SIZE as u32).to_le_bytes());
        put(52, &(GRANULE_SIZE as u32).to_le_bytes());
        put(TEXT_LEN_AT, &(text.len() as u32).to_le_bytes());
        put(TEXT_AT, text);
        let crc = crc32fast::hash(&page);
        page[CRC_AT..CRC_AT + 4].copy_from_slice(&crc.to_le_bytes());
        page
    }

    pub(crate) fn decode(part: Part, page: &[u8; OS_PAGE_SIZE]) -> Result<Head, HeadError> {
        if page[..8] != part.magic() {
            return Err(HeadError::Magic);
        }
        let version = u32_at(page, 8);
        if version != VERSION {
            return Err(HeadError::Version(version));
        }
        let mut without_crc = *page;
        without_crc[CRC_AT..CRC_AT + 4].fill(0);
        if crc32fast::hash(&without_crc) != u32_at(page, CRC_AT) {
            return Err(HeadError::Damaged);
        }
        let (segment, granule) = (u32_at(page, 48), u32_at(page, 52));
        if (segment as usize, granule as usize) != (crate::SEGMENT_SIZE, GRANULE_SIZE) {
            return Err(HeadError::Units { segment, granule });
        }
        let text = page[TEXT_AT..]
            .get(..u32_at(page, TEXT_LEN_AT) as usize)
            .ok_or(HeadError::Damaged)?;
        Ok(Head {
            id: u128::from_le_bytes(array_at(page, 16)),
            disk_bytes: u64::from_le_bytes(array_at(page, 32)),
            content_bytes: u64::from_le_bytes(array_at(page, 40)),
            algorithms: String::from_utf8(text.to_vec()).map_err(|_| HeadError::Damaged)?,
        })
    }
}

fn u32_at(page: &[u8; OS_PAGE_SIZE], at: usize) -> u32 {
    u32::from_le_bytes(array_at(page, at))
}

fn array_at<const N: usize>(page: &[u8; OS_PAGE_SIZE], at: usize) -> [u8; N] {
    *page[at..].first_chunk().expect("a field lies in the page")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn head() -> Head {
        Head {
            id: 0x0123_4567_89ab_cdef_0011_2233_4455_6677,
            disk_bytes: 1 << 40,
            content_bytes: 1 << 31,
            algorithms: "zstd(level=3)".into(),
        }
    }

    #[test]
    fn what_is_written_is_read() {
        for part in [Part::Table, Part::Arena] {
            assert_eq!(Head::decode(part, &head().encode(part)), Ok(head()));
        }
        let longest = Head {
            algorithms: "a".repeat(TEXT_MAX),
            ..head()
        };
        assert_eq!(
            Head::decode(Part::Table, &longest.encode(Part::Table)),
            Ok(longest.clone())
        );
    }

    #[test]
    fn every_changed_bit_is_found() {
        let good = head().encode(Part::Arena);
        for at in 0..OS_PAGE_SIZE {
            for bit in 0..8 {
                let mut page = good;
                page[at] ^= 1 << bit;
                assert!(Head::decode(Part::Arena, &page).is_err(), "byte {at}, bit {bit}");
            }
        }
    }

    #[test]
    fn table_and_arena_are_not_mistaken_for_each_other() {
        let table = head().encode(Part::Table);
        assert_eq!(Head::decode(Part::Arena, &table), Err(HeadError::Magic));
        assert_eq!(Head::decode(Part::Arena, &[0; OS_PAGE_SIZE]), Err(HeadError::Magic));
    }

    #[test]
    fn another_version_is_named() {
        let mut page = head().encode(Part::Table);
        page[8] = 2;
        assert_eq!(
            Head::decode(Part::Table, &page).unwrap_err().to_string(),
            "its layout is version 2, this program knows 1"
        );
    }
}
