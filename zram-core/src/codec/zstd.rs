//! Zstandard, by libzstd: frames without magic number, checksum, content size and dictionary id, so that a page costs
//! no byte which its slot knows already (RFC 8878, section 3.1.1; the magicless format is libzstd's).

use zstd_safe::{CCtx, CParameter, DCtx, DParameter, FrameFormat};

use super::{Damaged, OUTPUT_SIZE};
use crate::page::{PAGE_SIZE, Page};

pub(super) const LEVEL_MIN: i32 = -5;
pub(super) const LEVEL_MAX: i32 = 22;
/// On 4 KiB, level 3 stores 1 % less than 1 and takes a tenth longer; memory of a context is a fifth more.
pub(super) const LEVEL_DEFAULT: i32 = 1;
/// What libzstd takes level 0 for.
pub(super) const LEVEL_OF_ZERO: i32 = 3;

pub(super) struct Compressor(CCtx<'static>);

impl Compressor {
    pub(super) fn new(level: i32) -> Option<Compressor> {
        let mut context = CCtx::try_create()?;
        let parameters = [
            CParameter::CompressionLevel(level),
            CParameter::Format(FrameFormat::Magicless),
            CParameter::ContentSizeFlag(false),
            CParameter::ChecksumFlag(false),
            CParameter::DictIdFlag(false),
        ];
        for parameter in parameters {
            context
                .set_parameter(parameter)
                .expect("libzstd takes these parameters in these ranges");
        }
        let mut compressor = Compressor(context);
        // The workspace is taken at the first use: at start, not in the middle of a guest's write.
        compressor.try_compress(&Page::zeroed(), &mut [0; OUTPUT_SIZE])?;
        Some(compressor)
    }

    pub(super) fn compress(&mut self, page: &Page, output: &mut [u8; OUTPUT_SIZE]) -> usize {
        self.try_compress(page, output)
            .expect("the workspace is there, and two pages hold what zstd makes of any page")
    }

    fn try_compress(&mut self, page: &Page, output: &mut [u8; OUTPUT_SIZE]) -> Option<usize> {
        self.0.compress2(&mut output[..], &page[..]).ok()
    }
}

pub(super) struct Decompressor(DCtx<'static>);

impl Decompressor {
    pub(super) fn new() -> Option<Decompressor> {
        let mut context = DCtx::try_create()?;
        context
            .set_parameter(DParameter::Format(FrameFormat::Magicless))
            .expect("libzstd knows the format");
        Some(Decompressor(context))
    }

    pub(super) fn decompress(&mut self, content: &[u8], page: &mut Page) -> Result<(), Damaged> {
        match self.0.decompress(&mut page[..], content) {
            Ok(PAGE_SIZE) => Ok(()),
            _ => Err(Damaged),
        }
    }
}
