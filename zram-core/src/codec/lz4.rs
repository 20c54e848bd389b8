//! LZ4 block format, by lz4_flex. Decoding needs no context.

use lz4_flex::block::{CompressTable, compress_into_with_table, decompress_into};

use super::{Damaged, OUTPUT_SIZE};
use crate::page::{PAGE_SIZE, Page};

/// The table of recent positions, 8 KiB: 16-bit entries suffice for a page.
pub(super) struct Compressor(CompressTable);

impl Compressor {
    pub(super) fn new() -> Compressor {
        Compressor(CompressTable::default())
    }

    pub(super) fn compress(&mut self, page: &Page, output: &mut [u8; OUTPUT_SIZE]) -> usize {
        compress_into_with_table(&page[..], output, &mut self.0).expect("two pages hold what lz4 makes of any page")
    }
}

pub(super) fn decompress(content: &[u8], page: &mut Page) -> Result<(), Damaged> {
    match decompress_into(content, &mut page[..]) {
        Ok(PAGE_SIZE) => Ok(()),
        _ => Err(Damaged),
    }
}

const _: () = assert!(lz4_flex::block::get_maximum_output_size(PAGE_SIZE) <= OUTPUT_SIZE);
