//! Zstandard, by libzstd. A page is one frame of one block, and only the block's content is kept: magic number, frame
//! header and block header (RFC 8878, sections 3.1.1.1 and 3.1.1.2) are the same for every page, or follow from the
//! content's length, so 5 bytes and more a page are put back when it is decoded.
//!
//! | length | what it is |
//! | --- | --- |
//! | 1 | the byte that fills the page (an RLE block) |
//! | 2..4095 | the content of a compressed block |
//! | 4096 | the page itself (a raw block) |

use std::sync::Arc;

use zstd_safe::{CCtx, CDict, CParameter, DCtx, DDict, DParameter, FrameFormat};

use super::{Damaged, OUTPUT_SIZE};
use crate::page::{PAGE_SIZE, Page};

pub(super) const LEVEL_MIN: i32 = -5;
pub(super) const LEVEL_MAX: i32 = 22;
/// On 4 KiB, level 3 stores 1 % less than 1 and takes a tenth longer; memory of a context is a quarter more.
pub(super) const LEVEL_DEFAULT: i32 = 1;
/// What libzstd takes level 0 for.
pub(super) const LEVEL_OF_ZERO: i32 = 3;
/// Far more than pays for pages of 4 KiB: 16 to 112 KiB do.
pub(super) const DICTIONARY_BYTES_MAX: usize = 1 << 20;

/// A frame header, magicless: descriptor (single segment, size in two bytes, no checksum, no dictionary id) and the size
/// of the content, less 256. So libzstd refuses what is not a page.
const FRAME_HEADER: [u8; 3] = {
    let size = (PAGE_SIZE - 256).to_le_bytes();
    [0b0110_0000, size[0], size[1]]
};
const BLOCK_HEADER_SIZE: usize = 3;
const HEADERS_SIZE: usize = FRAME_HEADER.len() + BLOCK_HEADER_SIZE;
/// With it begins a dictionary that has entropy tables (RFC 8878, section 5); any other file is plain content.
pub(super) const DICTIONARY_MAGIC: [u8; 4] = [0x37, 0xa4, 0x30, 0xec];
const MAGIC: [u8; 4] = [0x28, 0xb5, 0x2f, 0xfd];

/// A dictionary as both directions want it. Nothing changes in it once it is made.
pub(super) struct Dictionary {
    compression: CDict<'static>,
    decompression: DDict<'static>,
}

impl Dictionary {
    /// `None` when there is no memory for it, or it begins as a dictionary of libzstd's and is none.
    pub(super) fn new(bytes: &[u8], level: i32) -> Option<Dictionary> {
        Some(Dictionary {
            compression: CDict::try_create(bytes, level)?,
            decompression: DDict::try_create(bytes)?,
        })
    }

    pub(super) fn memory_bytes(&self) -> usize {
        self.compression.sizeof() + self.decompression.sizeof()
    }
}

pub(super) struct Compressor {
    context: CCtx<'static>,
    dictionary: Option<Arc<Dictionary>>,
}

impl Compressor {
    /// `None` when the host has no memory for it.
    pub(super) fn new(level: i32, dictionary: Option<Arc<Dictionary>>) -> Option<Compressor> {
        let mut context = CCtx::try_create()?;
        // An entry for each position of a page. libzstd's own tables have twice as many or more, which stores 0.13 % less
        // of programs' code and nothing less of live programs' memory; a context takes 56 KiB instead of 72 at level 1.
        let table_log = PAGE_SIZE.ilog2();
        let parameters = [
            CParameter::CompressionLevel(level),
            CParameter::WindowLog(PAGE_SIZE.ilog2()),
            CParameter::HashLog(table_log),
            CParameter::ChainLog(table_log),
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
        let mut compressor = Compressor { context, dictionary };
        // The workspace is taken at the first use: at start, not in the middle of a guest's write.
        compressor.frame(&Page::zeroed(), &mut [0; OUTPUT_SIZE])?;
        Some(compressor)
    }

    pub(super) fn memory_bytes(&self) -> usize {
        self.context.sizeof()
    }

    pub(super) fn compress(&mut self, page: &Page, output: &mut [u8; OUTPUT_SIZE]) -> usize {
        let len = self
            .frame(page, output)
            .expect("the workspace is there, and two pages hold what zstd makes of any page");
        match block_content(&output[..len], self.dictionary.is_some()) {
            Some(content) => {
                let len = content.len();
                output.copy_within(content, 0);
                len
            }
            None => {
                output[..PAGE_SIZE].copy_from_slice(&page[..]);
                PAGE_SIZE
            }
        }
    }

    /// A whole frame: with a magic number when there is a dictionary, since libzstd then heeds no parameters.
    fn frame(&mut self, page: &Page, output: &mut [u8; OUTPUT_SIZE]) -> Option<usize> {
        match &self.dictionary {
            None => self.context.compress2(&mut output[..], &page[..]),
            Some(dictionary) => self
                .context
                .compress_using_cdict(&mut output[..], &page[..], &dictionary.compression),
        }
        .ok()
    }
}

/// Where in a frame the content of its one block is; `None` when there are several blocks or a raw one.
pub(super) fn block_content(frame: &[u8], magic: bool) -> Option<std::ops::Range<usize>> {
    let start = if magic { MAGIC.len() } else { 0 };
    let descriptor = *frame.get(start)?;
    let single_segment = descriptor & 0x20 != 0;
    let dictionary_id = [0, 1, 2, 4][usize::from(descriptor & 3)];
    let content_size = [usize::from(single_segment), 2, 4, 8][usize::from(descriptor >> 6)];
    let block = start + 1 + usize::from(!single_segment) + dictionary_id + content_size;
    let content = block + BLOCK_HEADER_SIZE;
    let &[a, b, c] = frame.get(block..content)? else {
        return None;
    };
    let header = u32::from_le_bytes([a, b, c, 0]);
    let (last, kind, size) = (header & 1 == 1, header >> 1 & 3, (header >> 3) as usize);
    let end = match kind {
        BLOCK_RLE if size == PAGE_SIZE => content + 1,
        BLOCK_COMPRESSED => content + size,
        _ => return None,
    };
    (last && end == frame.len()).then_some(content..end)
}

const BLOCK_RLE: u32 = 1;
const BLOCK_COMPRESSED: u32 = 2;

/// What stands before a page's content in a magicless frame.
pub(super) fn headers(content_len: usize) -> [u8; HEADERS_SIZE] {
    let (kind, size) = match content_len {
        1 => (BLOCK_RLE, PAGE_SIZE),
        len => (BLOCK_COMPRESSED, len),
    };
    let [descriptor, size_low, size_high] = FRAME_HEADER;
    let block = (1 | kind << 1 | (size as u32) << 3).to_le_bytes();
    [descriptor, size_low, size_high, block[0], block[1], block[2]]
}

/// A context of 94 KiB, most of it libzstd's own buffer for literals, and the frame that is put together again.
pub(super) struct Decompressor {
    context: DCtx<'static>,
    frame: Box<[u8; HEADERS_SIZE + PAGE_SIZE]>,
}

impl Decompressor {
    /// `None` when the host has no memory for it.
    pub(super) fn new() -> Option<Decompressor> {
        let mut context = DCtx::try_create()?;
        context
            .set_parameter(DParameter::Format(FrameFormat::Magicless))
            .expect("libzstd knows the format");
        Some(Decompressor {
            context,
            frame: Box::new([0; HEADERS_SIZE + PAGE_SIZE]),
        })
    }

    pub(super) fn memory_bytes(&self) -> usize {
        self.context.sizeof() + size_of_val(&*self.frame)
    }

    pub(super) fn decompress(
        &mut self,
        content: &[u8],
        page: &mut Page,
        dictionary: Option<&Dictionary>,
    ) -> Result<(), Damaged> {
        match content.len() {
            1..PAGE_SIZE => {}
            PAGE_SIZE => {
                page.copy_from_slice(content);
                return Ok(());
            }
            _ => return Err(Damaged),
        }
        let (head, body) = self.frame.split_at_mut(HEADERS_SIZE);
        head.copy_from_slice(&headers(content.len()));
        body[..content.len()].copy_from_slice(content);
        let frame = &self.frame[..HEADERS_SIZE + content.len()];
        let decoded = match dictionary {
            None => self.context.decompress(&mut page[..], frame),
            Some(dictionary) => self
                .context
                .decompress_using_ddict(&mut page[..], frame, &dictionary.decompression),
        };
        if decoded == Ok(PAGE_SIZE) { Ok(()) } else { Err(Damaged) }
    }
}
