//! 842, the format of the compression engine in IBM's POWER processors, as zram's `842` has it.
//!
//! A page is 512 blocks of 8 bytes. A block is a 5-bit code and what the code asks for, most significant bits first:
//!
//! ```text
//! 0..24    two halves: the code is 5 * kind of the first + kind of the second
//! 25       I8
//! 27 n:6   the block before, n + 1 times
//! 28       eight zeroes
//! 30       the end: CRC-32 of the page, then zero bits up to a multiple of 8 bytes
//!
//! kind of half    0: D2 D2    1: D2 I2    2: I2 D2    3: I2 I2    4: I4
//! ```
//!
//! `Dn` is n bytes as they are. `In` is the place of n bytes that came before this block, aligned to n, counted in n
//! from where its window began last: 8 bits and 512 bytes for I2, 9 and 2048 for I4, 8 and 2048 for I8. Code 29, less
//! than a block at the end, is of no use to a page. Literature: Blaner et al., "IBM POWER7+ processor on-chip
//! accelerators", IBM Journal of Research and Development 57(6), 2013.

use super::{Damaged, OUTPUT_SIZE};
use crate::page::{PAGE_SIZE, Page};

const BLOCK_SIZE: usize = 8;

const CODE_BITS: u32 = 5;
const CODE_I8: u64 = 25;
const CODE_REPEAT: u64 = 27;
const CODE_ZEROES: u64 = 28;
const CODE_END: u64 = 30;
const KINDS: u64 = 5;
const KIND_I4: u64 = 4;

const REPEAT_BITS: u32 = 6;
const REPEAT_MAX: u64 = 1 << REPEAT_BITS;
const CRC_BITS: u32 = 32;

/// References to `SIZE` bytes.
struct Reference<const SIZE: usize>;

impl<const SIZE: usize> Reference<SIZE> {
    const BITS: u32 = if SIZE == 4 { 9 } else { 8 };
    const WINDOW: usize = SIZE << Self::BITS;

    /// How a block at `block` names the place `at`, or `None` when it cannot.
    #[inline(always)]
    fn index(block: usize, at: usize) -> Option<u64> {
        // Before the block by 1 byte at least and a window at most.
        (block.wrapping_sub(at).wrapping_sub(1) < Self::WINDOW).then_some((at % Self::WINDOW / SIZE) as u64)
    }

    /// The inverse of `index`.
    #[inline(always)]
    fn place(block: usize, index: u64) -> Option<usize> {
        // As far before the block as the index is from the block's own, going round the window: never 0.
        let back = (block.wrapping_sub(index as usize * SIZE).wrapping_sub(1) % Self::WINDOW) + 1;
        block.checked_sub(back)
    }
}

/// Where strings of `SIZE` bytes were last seen, by hash. What an earlier page left in a place does no harm, nor does it
/// change the result: every string of this page before the block has gone into its place, but for those of repeated
/// blocks, whose likes have. So a place not written for this page leads to no equal string before the block.
struct Seen<const SIZE: usize, const PLACES: usize>(Box<[u16; PLACES]>);

impl<const SIZE: usize, const PLACES: usize> Seen<SIZE, PLACES> {
    fn new() -> Self {
        const { assert!(PLACES.is_power_of_two()) };
        Seen(Box::new([0; PLACES]))
    }

    fn memory_bytes(&self) -> usize {
        size_of_val(&*self.0)
    }

    /// The reference for the string at `at` in the block at `block`, if it came before; from now on it did.
    #[inline(always)]
    fn find(&mut self, page: &[u8; PAGE_SIZE], block: usize, at: usize) -> Option<u64> {
        let string = load::<SIZE>(page, at);
        let hash = string.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> (u64::BITS - PLACES.trailing_zeros());
        let place = &mut self.0[hash as usize & (PLACES - 1)];
        let candidate = usize::from(*place);
        *place = at as u16;
        if load::<SIZE>(page, candidate) != string {
            return None;
        }
        Reference::<SIZE>::index(block, candidate)
    }
}

/// `SIZE` bytes as a big-endian number. `at` is a multiple of `SIZE`; the mask then changes nothing and spares the
/// bounds check.
#[inline(always)]
fn load<const SIZE: usize>(page: &[u8; PAGE_SIZE], at: usize) -> u64 {
    let at = at & (PAGE_SIZE - SIZE);
    let mut bytes = [0; 8];
    bytes[8 - SIZE..].copy_from_slice(&page[at..at + SIZE]);
    u64::from_be_bytes(bytes)
}

/// 8 KiB.
pub(super) struct Compressor {
    seen8: Seen<8, 1024>,
    seen4: Seen<4, 2048>,
    seen2: Seen<2, 1024>,
}

impl Compressor {
    pub(super) fn new() -> Self {
        Compressor {
            seen8: Seen::new(),
            seen4: Seen::new(),
            seen2: Seen::new(),
        }
    }

    pub(super) fn memory_bytes(&self) -> usize {
        self.seen8.memory_bytes() + self.seen4.memory_bytes() + self.seen2.memory_bytes()
    }

    pub(super) fn compress(&mut self, page: &Page, output: &mut [u8; OUTPUT_SIZE]) -> usize {
        let page = &**page;
        let mut writer = BitWriter {
            output,
            len: 0,
            bits: 0,
            count: 0,
        };
        let mut last = None;
        let mut repeats = 0;
        for at in (0..PAGE_SIZE).step_by(BLOCK_SIZE) {
            let block = load::<BLOCK_SIZE>(page, at);
            if last == Some(block) {
                repeats += 1;
                if repeats == REPEAT_MAX {
                    writer.repeats(&mut repeats);
                }
                continue;
            }
            last = Some(block);
            writer.repeats(&mut repeats);
            self.block(page, at, block, &mut writer);
        }
        writer.repeats(&mut repeats);
        writer.put(CODE_END, CODE_BITS);
        writer.put(u64::from(crc(page)), CRC_BITS);
        writer.end()
    }

    fn block(&mut self, page: &[u8; PAGE_SIZE], at: usize, block: u64, writer: &mut BitWriter) {
        let whole = self.seen8.find(page, at, at);
        let (first, second) = (self.half(page, at, at), self.half(page, at, at + 4));
        if block == 0 {
            writer.put(CODE_ZEROES, CODE_BITS);
        } else if let Some(index) = whole {
            writer.put(
                CODE_I8 << Reference::<8>::BITS | index,
                CODE_BITS + Reference::<8>::BITS,
            );
        } else {
            writer.put(KINDS * first.kind + second.kind, CODE_BITS);
            writer.put(first.bits, first.count);
            writer.put(second.bits, second.count);
        }
    }

    /// The shortest way to write half of a block.
    #[inline(always)]
    fn half(&mut self, page: &[u8; PAGE_SIZE], block: usize, at: usize) -> Half {
        let whole = self.seen4.find(page, block, at);
        let first = self.seen2.find(page, block, at);
        let second = self.seen2.find(page, block, at + 2);
        if let Some(index) = whole {
            return Half {
                kind: KIND_I4,
                bits: index,
                count: Reference::<4>::BITS,
            };
        }
        let kind = u64::from(first.is_some()) << 1 | u64::from(second.is_some());
        let bits = |found: Option<u64>, at| match found {
            Some(index) => (index, Reference::<2>::BITS),
            None => (load::<2>(page, at), 16),
        };
        let ((first, first_count), (second, second_count)) = (bits(first, at), bits(second, at + 2));
        Half {
            kind,
            bits: first << second_count | second,
            count: first_count + second_count,
        }
    }
}

struct Half {
    kind: u64,
    bits: u64,
    count: u32,
}

struct BitWriter<'a> {
    output: &'a mut [u8; OUTPUT_SIZE],
    len: usize,
    /// The lowest `count`, fewer than 32, are not in the output yet.
    bits: u64,
    count: u32,
}

impl BitWriter<'_> {
    /// Up to 32 bits.
    #[inline(always)]
    fn put(&mut self, bits: u64, count: u32) {
        self.bits = self.bits << count | bits;
        self.count += count;
        if self.count >= 32 {
            self.count -= 32;
            self.output[self.len..][..4].copy_from_slice(&((self.bits >> self.count) as u32).to_be_bytes());
            self.len += 4;
        }
    }

    fn repeats(&mut self, repeats: &mut u64) {
        if *repeats > 0 {
            self.put(CODE_REPEAT << REPEAT_BITS | (*repeats - 1), CODE_BITS + REPEAT_BITS);
            *repeats = 0;
        }
    }

    fn end(mut self) -> usize {
        self.put(0, 31);
        let len = self.len.next_multiple_of(BLOCK_SIZE);
        self.output[self.len..len].fill(0);
        len
    }
}

pub(super) fn decompress(content: &[u8], page: &mut Page) -> Result<(), Damaged> {
    let (words, rest) = content.as_chunks::<8>();
    if !rest.is_empty() {
        return Err(Damaged);
    }
    let mut reader = BitReader { words, at: 0 };
    let page = &mut **page;
    let mut at = 0_usize;
    loop {
        let code = reader.take(CODE_BITS)?;
        let (block, count) = match code {
            CODE_REPEAT => {
                let last = at.checked_sub(BLOCK_SIZE).ok_or(Damaged)?;
                (load::<BLOCK_SIZE>(page, last), reader.take(REPEAT_BITS)? + 1)
            }
            CODE_ZEROES => (0, 1),
            CODE_END => {
                let same = at == PAGE_SIZE && reader.take(CRC_BITS)? == u64::from(crc(page));
                return if same && reader.is_at_end() {
                    Ok(())
                } else {
                    Err(Damaged)
                };
            }
            CODE_I8 => (referred::<8>(&mut reader, page, at)?, 1),
            0..CODE_I8 => {
                let first = half(&mut reader, page, at, code / KINDS)?;
                (first << 32 | half(&mut reader, page, at, code % KINDS)?, 1)
            }
            _ => return Err(Damaged),
        };
        let end = at + count as usize * BLOCK_SIZE;
        let room = page.get_mut(at..end).ok_or(Damaged)?;
        for place in room.as_chunks_mut::<BLOCK_SIZE>().0 {
            *place = block.to_be_bytes();
        }
        at = end;
    }
}

#[inline(always)]
fn half(reader: &mut BitReader, page: &[u8; PAGE_SIZE], block: usize, kind: u64) -> Result<u64, Damaged> {
    Ok(match kind {
        0 => reader.take(32)?,
        1 => reader.take(16)? << 16 | referred::<2>(reader, page, block)?,
        2 => referred::<2>(reader, page, block)? << 16 | reader.take(16)?,
        3 => referred::<2>(reader, page, block)? << 16 | referred::<2>(reader, page, block)?,
        _ => referred::<4>(reader, page, block)?,
    })
}

#[inline(always)]
fn referred<const SIZE: usize>(reader: &mut BitReader, page: &[u8; PAGE_SIZE], block: usize) -> Result<u64, Damaged> {
    let index = reader.take(Reference::<SIZE>::BITS)?;
    let place = Reference::<SIZE>::place(block, index).ok_or(Damaged)?;
    Ok(load::<SIZE>(page, place))
}

struct BitReader<'a> {
    words: &'a [[u8; 8]],
    /// In bits.
    at: usize,
}

impl BitReader<'_> {
    /// Up to 32 bits.
    #[inline(always)]
    fn take(&mut self, count: u32) -> Result<u64, Damaged> {
        let word = |index| Some(u64::from_be_bytes(*self.words.get(index)?));
        let (index, shift) = (self.at / 64, (self.at % 64) as u32);
        let mut bits = word(index).ok_or(Damaged)? << shift;
        if shift + count > 64 {
            bits |= word(index + 1).ok_or(Damaged)? >> (64 - shift);
        }
        self.at += count as usize;
        Ok(bits >> (64 - count))
    }

    /// Less than 8 bytes remain, all bits 0.
    fn is_at_end(&self) -> bool {
        let rest = match self.at % 64 {
            0 => 0,
            used => u64::from_be_bytes(self.words[self.at / 64]) << used,
        };
        rest == 0 && self.at.div_ceil(64) == self.words.len()
    }
}

/// CRC-32 with polynomial 0x04c11db7, most significant bit first, begun with 0 and not inverted.
fn crc(page: &[u8; PAGE_SIZE]) -> u32 {
    page.as_chunks::<8>().0.iter().fold(0, |crc, chunk| {
        let word = u64::from_be_bytes(*chunk) ^ u64::from(crc) << 32;
        let bytes = word.to_be_bytes();
        (0..8).fold(0, |sum, at| sum ^ CRC_TABLES[7 - at][usize::from(bytes[at])])
    })
}

/// `CRC_TABLES[n][byte]` is the CRC of a byte with n zero bytes after it.
static CRC_TABLES: [[u32; 256]; 8] = {
    let mut tables = [[0; 256]; 8];
    let mut byte = 0;
    while byte < 256 {
        let mut crc = (byte as u32) << 24;
        let mut table = 0;
        while table < 8 {
            let mut bit = 0;
            while bit < 8 {
                crc = crc << 1 ^ if crc >> 31 == 1 { 0x04c1_1db7 } else { 0 };
                bit += 1;
            }
            tables[table][byte] = crc;
            table += 1;
        }
        byte += 1;
    }
    tables
};

#[cfg(test)]
mod tests {
    use super::*;

    /// A stream written out by hand: numbers with their bits, in the order of the format.
    fn stream(parts: &[(u64, u32)]) -> Vec<u8> {
        let bits: Vec<u64> = parts
            .iter()
            .flat_map(|&(number, count)| (0..count).rev().map(move |bit| number >> bit & 1))
            .collect();
        let mut bytes: Vec<u8> = bits
            .chunks(8)
            .map(|chunk| (0..8).fold(0, |byte, at| byte << 1 | *chunk.get(at).unwrap_or(&0) as u8))
            .collect();
        bytes.resize(bytes.len().next_multiple_of(8), 0);
        bytes
    }

    /// Bit by bit, as the definition has it.
    fn plain_crc(bytes: &[u8]) -> u32 {
        let bits = bytes
            .iter()
            .flat_map(|byte| (0..8).rev().map(move |bit| u32::from(byte >> bit & 1)));
        bits.fold(0, |crc, bit| {
            crc << 1 ^ if crc >> 31 ^ bit == 1 { 0x04c1_1db7 } else { 0 }
        })
    }

    /// What follows after `parts`: zeroes up to a page, then the end.
    fn finished(parts: &[(u64, u32)], expected: &[u8]) -> (Vec<u8>, Box<Page>) {
        let mut page = Page::zeroed();
        page[..expected.len()].copy_from_slice(expected);
        let mut parts = parts.to_vec();
        parts.extend((expected.len()..PAGE_SIZE).step_by(8).map(|_| (28, 5)));
        parts.extend([(30, 5), (u64::from(plain_crc(&page[..])), 32)]);
        (stream(&parts), page)
    }

    #[track_caller]
    fn decodes_to(parts: &[(u64, u32)], expected: &[u8]) {
        let (content, page) = finished(parts, expected);
        let mut back = Page::zeroed();
        back.fill(0xa5);
        assert_eq!(decompress(&content, &mut back), Ok(()));
        assert_eq!(back[..], page[..]);
    }

    #[track_caller]
    fn is_damaged(parts: &[(u64, u32)], len: usize) {
        let (content, _) = finished(parts, &vec![0; len]);
        assert_eq!(decompress(&content, &mut Page::zeroed()), Err(Damaged));
    }

    const ABCDEFGH: (u64, u32) = (0x6162_6364_6566_6768, 64);

    #[test]
    fn each_code_decodes_as_its_description_says() {
        let first = [(0, 5), ABCDEFGH];
        let after = |parts: &[(u64, u32)], expected: &[u8]| {
            decodes_to(&[&first, parts].concat(), &[b"abcdefgh", expected].concat());
        };
        decodes_to(&first, b"abcdefgh");
        // D4 D2 I2; D4 I2 D2; D4 I2 I2; D4 I4: numbers as the tables of the literature have them.
        let (wxyz, wx, yz) = ((0x7778_797a, 32), (0x7778, 16), (0x797a, 16));
        after(&[(1, 5), wxyz, wx, (3, 8)], b"wxyzwxgh");
        after(&[(2, 5), wxyz, (1, 8), wx], b"wxyzcdwx");
        after(&[(3, 5), wxyz, (0, 8), (2, 8)], b"wxyzabef");
        after(&[(4, 5), wxyz, (1, 9)], b"wxyzefgh");
        after(&[(5, 5), wx, (1, 8), wxyz], b"wxcdwxyz");
        after(&[(6, 5), wx, (1, 8), yz, (0, 8)], b"wxcdyzab");
        after(&[(7, 5), wx, (1, 8), (0, 8), yz], b"wxcdabyz");
        after(&[(8, 5), wx, (1, 8), (0, 8), (2, 8)], b"wxcdabef");
        after(&[(9, 5), wx, (1, 8), (1, 9)], b"wxcdefgh");
        after(&[(10, 5), (1, 8), wx, wxyz], b"cdwxwxyz");
        after(&[(11, 5), (1, 8), wxyz, (3, 8)], b"cdwxyzgh");
        after(&[(12, 5), (1, 8), wx, (3, 8), yz], b"cdwxghyz");
        after(&[(13, 5), (1, 8), wx, (3, 8), (0, 8)], b"cdwxghab");
        after(&[(14, 5), (1, 8), wx, (0, 9)], b"cdwxabcd");
        after(&[(15, 5), (1, 8), (3, 8), wxyz], b"cdghwxyz");
        after(&[(16, 5), (1, 8), (3, 8), wx, (0, 8)], b"cdghwxab");
        after(&[(17, 5), (1, 8), (3, 8), (0, 8), wx], b"cdghabwx");
        after(&[(18, 5), (1, 8), (3, 8), (0, 8), (2, 8)], b"cdghabef");
        after(&[(19, 5), (1, 8), (3, 8), (1, 9)], b"cdghefgh");
        after(&[(20, 5), (1, 9), wxyz], b"efghwxyz");
        after(&[(21, 5), (1, 9), wx, (3, 8)], b"efghwxgh");
        after(&[(22, 5), (1, 9), (3, 8), wx], b"efghghwx");
        after(&[(23, 5), (1, 9), (3, 8), (0, 8)], b"efghghab");
        after(&[(24, 5), (1, 9), (0, 9)], b"efghabcd");
        after(&[(25, 5), (0, 8)], b"abcdefgh");
        after(&[(27, 5), (2, 6)], b"abcdefghabcdefghabcdefgh");
        after(&[(28, 5)], b"\0\0\0\0\0\0\0\0");
    }

    #[test]
    fn an_index_counts_from_where_its_window_began_last() {
        // 0 zeroes, then at 512 the window of I2 begins anew: index 1 is place 2 still, and at 520 it is 514.
        let mut parts = vec![(0, 5), ABCDEFGH];
        parts.extend([(28, 5); 63]);
        let mut expected = b"abcdefgh".to_vec();
        expected.resize(512, 0);
        parts.extend([(3, 5), (0x7778_797a, 32), (0, 8), (1, 8)]);
        expected.extend(b"wxyzabcd");
        parts.extend([(3, 5), (0x7778_797a, 32), (0, 8), (1, 8)]);
        expected.extend(b"wxyzwxyz");
        decodes_to(&parts, &expected);
    }

    #[test]
    fn what_refers_to_nothing_is_damaged() {
        is_damaged(&[(27, 5), (0, 6)], 8);
        is_damaged(&[(25, 5), (0, 8)], 8);
        // Its own block.
        is_damaged(&[(28, 5), (25, 5), (1, 8)], 16);
        is_damaged(&[(28, 5), (24, 5), (0, 9), (2, 9)], 16);
        is_damaged(&[(28, 5), (18, 5), (0, 8), (0, 8), (0, 8), (4, 8)], 16);
        for code in [26, 29, 31] {
            is_damaged(&[(code, 5)], 8);
        }
    }

    #[test]
    fn a_page_too_short_or_too_long_is_damaged() {
        let ends = |blocks: usize, bits: &[(u64, u32)]| {
            let parts = [vec![(28, 5); blocks], bits.to_vec()].concat();
            decompress(&stream(&parts), &mut Page::zeroed())
        };
        assert_eq!(ends(512, &[(30, 5), (0, 32)]), Ok(()));
        assert_eq!(ends(511, &[(30, 5), (0, 32)]), Err(Damaged));
        assert_eq!(ends(513, &[(30, 5), (0, 32)]), Err(Damaged));
        assert_eq!(ends(500, &[(27, 5), (12, 6), (30, 5), (0, 32)]), Err(Damaged));
        // A wrong sum, padding that is not zero, more than padding.
        assert_eq!(ends(512, &[(30, 5), (1, 32)]), Err(Damaged));
        assert_eq!(ends(512, &[(30, 5), (0, 32), (1, 27)]), Err(Damaged));
        assert_eq!(ends(512, &[(30, 5), (0, 32), (0, 27), (0, 64)]), Err(Damaged));
    }

    #[test]
    fn the_encoder_takes_the_shortest_form() {
        let mut page = Page::zeroed();
        page[..32].copy_from_slice(b"abcdefghefghcd!!abcdefghabcdefgh");
        let parts = [
            (0, 5),
            ABCDEFGH,
            (22, 5),
            (1, 9),
            (1, 8),
            (0x2121, 16),
            (25, 5),
            (0, 8),
            (27, 5),
            (0, 6),
        ];
        let tail = [vec![(28, 5)], [(27, 5), (63, 6)].repeat(7), vec![(27, 5), (58, 6)]].concat();
        let end = [(30, 5), (u64::from(plain_crc(&page[..])), 32)];
        let mut output = [0; OUTPUT_SIZE];
        let len = Compressor::new().compress(&page, &mut output);
        assert_eq!(output[..len], stream(&[&parts[..], &tail, &end].concat()));
    }

    /// 4 + 1 + 507 blocks are the page above: 1 + 7 * 64 + 59 of them are zeroes.
    const _: () = assert!(4 + 1 + 7 * 64 + 59 == PAGE_SIZE / BLOCK_SIZE);

    #[test]
    fn the_sum_is_that_of_its_definition() {
        let mut page = Page::zeroed();
        page.iter_mut()
            .enumerate()
            .for_each(|(at, byte)| *byte = (at * at / 7) as u8);
        assert_eq!(crc(&page), plain_crc(&page[..]));
        // The catalogue's check value of this polynomial (CRC-32/CKSUM), whose output alone is inverted.
        assert_eq!(!plain_crc(b"123456789"), 0x765e_7680);
    }
}
