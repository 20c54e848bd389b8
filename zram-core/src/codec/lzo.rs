//! The LZO1X streams of zram's `lzo` and `lzo-rle`, from the kernel's Documentation/staging/lzo.rst.
//!
//! A stream is a row of instructions, each a match (bytes to repeat from `distance` back) with up to three literals
//! after it, or four and more literals alone. `S` is how many literals follow, `D` distance, `L` length; a length whose
//! bits are all 0 goes on in further bytes (see [`Writer::length`]):
//!
//! ```text
//! 17 + N            only as the first byte: N literals, 1 to 238
//! 0000LLLL          after a match without literals: 3 + L literals
//! 0000DDSS H        after 1 to 3 literals: 2 bytes from (H << 2) + D + 1; after more: 3 bytes from 2048 further back
//! 01LDDDSS H        3 + L bytes from (H << 3) + D + 1
//! 1LLDDDSS H        5 + L bytes, likewise
//! 001LLLLL SD DD    2 + L bytes from D + 1, a little-endian word of 14 bits D and, lowest, 2 bits S
//! 00010001 0 0      the end
//! 00011LLL SD DD X  lzo-rle, all bits of D 1: (X << 3) + L + 4 zeroes
//! ```
//!
//! A stream of lzo-rle begins with 17, 1. What remains of 0001xxxx are matches from beyond 16 KiB: a page has none.

use super::{Damaged, OUTPUT_SIZE};
use crate::page::{PAGE_SIZE, Page};

const VERSION_RLE: [u8; 2] = [17, 1];
const END: [u8; 3] = [0b0001_0001, 0, 0];
/// The first byte of a stream holds as many literals.
const FIRST_BASE: usize = 17;
const FIRST_MAX: usize = 255 - FIRST_BASE;

/// The short match instruction reaches as far.
const SHORT_DISTANCE_MAX: usize = 2048;
const SHORT_MATCH_MAX: usize = 8;

const ZERO_RUN_BASE: usize = 4;
const ZERO_RUN_MAX: usize = 0x7ff + ZERO_RUN_BASE;
/// A match from short distance says 8 bytes in 2, a run takes 4.
const ZERO_RUN_WORTH: usize = 9;

/// Matches are found by their first four bytes.
const MATCH_MIN: usize = 4;
const LAST_START: usize = PAGE_SIZE - MATCH_MIN;
/// 2^13 positions of 2 bytes: 16 KiB.
const HASH_BITS: u32 = 13;
/// Behind the page, so that a load or copy of this many bytes may begin at any of its bytes.
const PADDING: usize = 16;

type Padded = [u8; PAGE_SIZE + PADDING];

/// With `RLE` that of lzo-rle. 20 KiB.
pub(super) struct Compressor<const RLE: bool> {
    /// Where a string of this hash was last seen. 0 is no special value: the first string of the page is a candidate
    /// for every other one.
    positions: Box<[u16; 1 << HASH_BITS]>,
    page: Box<Padded>,
}

impl<const RLE: bool> Compressor<RLE> {
    pub(super) fn new() -> Self {
        Compressor {
            positions: Box::new([0; 1 << HASH_BITS]),
            page: Box::new([0; PAGE_SIZE + PADDING]),
        }
    }

    pub(super) fn memory_bytes(&self) -> usize {
        size_of_val(&*self.positions) + size_of_val(&*self.page)
    }

    pub(super) fn compress(&mut self, page: &Page, output: &mut [u8; OUTPUT_SIZE]) -> usize {
        self.page[..PAGE_SIZE].copy_from_slice(&page[..]);
        // The same page gives the same bytes, whatever came before it.
        self.positions.fill(0);
        let page = &*self.page;
        let mut writer = Writer::new(page, output, if RLE { &VERSION_RLE } else { &[] });
        // Bytes before `anchor` are written.
        let (mut anchor, mut at) = (0, 1);
        while at <= LAST_START {
            let string = load_u32(page, at);
            if RLE && string == 0 {
                // The first instruction can only be literals.
                let (start, end) = zero_run(page, anchor.max(1), at);
                if end - start >= ZERO_RUN_WORTH {
                    writer.literals(anchor, start);
                    writer.zeroes(end - start);
                    (anchor, at) = (end, end);
                    continue;
                }
            }
            let place = &mut self.positions[hash(string)];
            let candidate = usize::from(*place);
            *place = at as u16;
            if load_u32(page, candidate) != string {
                // The longer nothing is found, the less there is to find.
                at += 1 + ((at - anchor) >> 5);
                continue;
            }
            let end = match_end(page, candidate, at);
            let (mut start, distance) = (at, at - candidate);
            while start > anchor && start > distance && page[start - 1] == page[start - 1 - distance] {
                start -= 1;
            }
            writer.literals(anchor, start);
            writer.repeat(distance, end - start);
            (anchor, at) = (end, end);
        }
        writer.literals(anchor, PAGE_SIZE);
        writer.end()
    }
}

fn hash(string: u32) -> usize {
    (string.wrapping_mul(0x9e37_79b1) >> (u32::BITS - HASH_BITS)) as usize
}

// The masks change no position that lies in the page; they spare the bounds check.

fn load_u32(page: &Padded, at: usize) -> u32 {
    let at = at & (PAGE_SIZE - 1);
    u32::from_le_bytes(page[at..at + 4].try_into().expect("4 bytes"))
}

fn load_u64(page: &Padded, at: usize) -> u64 {
    let at = at & (PAGE_SIZE - 1);
    u64::from_le_bytes(page[at..at + 8].try_into().expect("8 bytes"))
}

/// Where the bytes at `at` cease to be those at `candidate`, the first [`MATCH_MIN`] being known to be.
fn match_end(page: &Padded, candidate: usize, at: usize) -> usize {
    let (mut end, distance) = (at + MATCH_MIN, at - candidate);
    while end < PAGE_SIZE {
        let difference = load_u64(page, end) ^ load_u64(page, end - distance);
        if difference != 0 {
            return (end + difference.trailing_zeros() as usize / 8).min(PAGE_SIZE);
        }
        end += 8;
    }
    PAGE_SIZE
}

/// The zeroes around the four at `at`, back to `bound` at most.
fn zero_run(page: &Padded, bound: usize, at: usize) -> (usize, usize) {
    let (mut start, mut end) = (at, at + MATCH_MIN);
    while start > bound && page[start - 1] == 0 {
        start -= 1;
    }
    while end < PAGE_SIZE {
        let word = load_u64(page, end);
        if word != 0 {
            return (start, (end + word.trailing_zeros() as usize / 8).min(PAGE_SIZE));
        }
        end += 8;
    }
    (start, PAGE_SIZE)
}

struct Writer<'a> {
    page: &'a Padded,
    output: &'a mut [u8; OUTPUT_SIZE],
    len: usize,
    /// Where the last match keeps how many literals follow. `None` before the first instruction.
    literal_count_at: Option<usize>,
}

impl Writer<'_> {
    fn new<'a>(page: &'a Padded, output: &'a mut [u8; OUTPUT_SIZE], header: &[u8]) -> Writer<'a> {
        output[..header.len()].copy_from_slice(header);
        Writer {
            page,
            output,
            len: header.len(),
            literal_count_at: None,
        }
    }

    fn byte(&mut self, byte: usize) {
        self.output[self.len] = byte as u8;
        self.len += 1;
    }

    /// What of a length does not fit its bits: each 0 stands for 255, the rest is in the last byte, which is never 0.
    fn length(&mut self, mut rest: usize) {
        while rest > 255 {
            self.byte(0);
            rest -= 255;
        }
        self.byte(rest);
    }

    fn literals(&mut self, start: usize, end: usize) {
        let count = end - start;
        match (count, self.literal_count_at) {
            (0, _) => return,
            (1..=FIRST_MAX, None) => self.byte(FIRST_BASE + count),
            (1..=3, Some(at)) => self.output[at] |= count as u8,
            (4..=18, _) => self.byte(count - 3),
            _ => {
                self.byte(0);
                self.length(count - 18);
            }
        }
        let mut done = 0;
        while done < count {
            let at = (start + done) & (PAGE_SIZE - 1);
            let (from, to) = (&self.page[at..at + 16], &mut self.output[self.len + done..][..16]);
            to.copy_from_slice(from);
            done += 16;
        }
        self.len += count;
    }

    /// A match.
    fn repeat(&mut self, distance: usize, len: usize) {
        let d = distance - 1;
        if len <= SHORT_MATCH_MAX && distance <= SHORT_DISTANCE_MAX {
            self.byte((len - 1) << 5 | (d & 7) << 2);
            self.byte(d >> 3);
        } else {
            if len <= 33 {
                self.byte(0b0010_0000 | (len - 2));
            } else {
                self.byte(0b0010_0000);
                self.length(len - 33);
            }
            self.byte((d << 2) & 0xff);
            self.byte(d >> 6);
        }
        self.literal_count_at = Some(self.len - 2);
    }

    fn zeroes(&mut self, mut count: usize) {
        while count > 0 {
            // What is left over is not too short for a run of its own.
            let run = match count {
                0..=ZERO_RUN_MAX => count,
                _ => ZERO_RUN_MAX.min(count - ZERO_RUN_BASE),
            };
            let n = run - ZERO_RUN_BASE;
            self.byte(0b0001_1000 | (n & 7));
            self.byte(0b1111_1100);
            self.byte(0xff);
            self.byte(n >> 3);
            self.literal_count_at = Some(self.len - 3);
            count -= run;
        }
    }

    fn end(mut self) -> usize {
        END.into_iter().for_each(|byte| self.byte(usize::from(byte)));
        self.len
    }
}

/// Decodes what [`Compressor`] of the same `RLE` made, and every other stream of a page in that format.
pub(super) fn decompress<const RLE: bool>(content: &[u8], page: &mut Page) -> Result<(), Damaged> {
    let input = if RLE {
        content.strip_prefix(&VERSION_RLE).ok_or(Damaged)?
    } else {
        content
    };
    let mut reader = Reader {
        input,
        at: 0,
        page,
        end: 0,
    };
    // How many literals came before the instruction. What it means depends on whether it is 0, up to 3, or more.
    let mut literals = 0;
    if let [first, ..] = input
        && usize::from(*first) > FIRST_BASE
    {
        let count = usize::from(*first) - FIRST_BASE;
        reader.at = 1;
        reader.literals(count)?;
        literals = count;
    }
    loop {
        // Even the last instruction has three bytes.
        let Some(&[code, low, high]) = reader.input[reader.at..].first_chunk() else {
            return Err(Damaged);
        };
        let [code, low, high] = [code, low, high].map(usize::from);
        if code >= 64 {
            reader.at += 2;
            reader.repeat_short((low << 3) + (code >> 2 & 7) + 1, (code >> 5) + 1)?;
            literals = code & 3;
        } else if code >= 32 {
            reader.at += 1;
            let len = 2 + reader.length(code & 31, 31)?;
            let word = reader.word()?;
            reader.repeat((word >> 2) + 1, len)?;
            literals = word & 3;
        } else if code >= 16 {
            if RLE && code >= 24 && low >= 0xfc && high == 0xff {
                reader.at += 3;
                let n = reader.byte()? << 3 | code & 7;
                reader.zeroes(n + ZERO_RUN_BASE)?;
                literals = low & 3;
            } else {
                return reader.end();
            }
        } else if literals == 0 {
            reader.at += 1;
            literals = 3 + reader.length(code, 15)?;
            reader.literals(literals)?;
            continue;
        } else {
            reader.at += 2;
            let distance = (low << 2) + (code >> 2) + 1;
            if literals < 4 {
                reader.repeat(distance, 2)?;
            } else {
                reader.repeat(distance + SHORT_DISTANCE_MAX, 3)?;
            }
            literals = code & 3;
        }
        reader.few_literals(literals)?;
    }
}

struct Reader<'a> {
    input: &'a [u8],
    /// Never beyond the input's end.
    at: usize,
    page: &'a mut [u8; PAGE_SIZE],
    /// Bytes of the page before this one are decoded; those behind may be scratched.
    end: usize,
}

impl Reader<'_> {
    fn byte(&mut self) -> Result<usize, Damaged> {
        let byte = *self.input.get(self.at).ok_or(Damaged)?;
        self.at += 1;
        Ok(usize::from(byte))
    }

    fn word(&mut self) -> Result<usize, Damaged> {
        let word = self.input[self.at..].first_chunk().ok_or(Damaged)?;
        self.at += 2;
        Ok(usize::from(u16::from_le_bytes(*word)))
    }

    /// The rest of a length, see [`Writer::length`].
    fn length(&mut self, bits: usize, bits_max: usize) -> Result<usize, Damaged> {
        if bits != 0 {
            return Ok(bits);
        }
        let mut len = bits_max;
        loop {
            match self.byte()? {
                0 => len += 255,
                rest => return Ok(len + rest),
            }
        }
    }

    /// Up to three.
    #[inline(always)]
    fn few_literals(&mut self, count: usize) -> Result<(), Damaged> {
        match (
            self.input[self.at..].first_chunk::<4>(),
            self.page[self.end..].first_chunk_mut::<4>(),
        ) {
            (Some(from), Some(to)) => {
                *to = *from;
                self.at += count;
                self.end += count;
                Ok(())
            }
            _ => self.literals(count),
        }
    }

    fn literals(&mut self, count: usize) -> Result<(), Damaged> {
        if let Some(from) = self.input[self.at..].first_chunk::<16>()
            && let Some(to) = self.page[self.end..].first_chunk_mut::<16>()
            && count <= 16
        {
            *to = *from;
        } else {
            let from = self.input[self.at..].get(..count).ok_or(Damaged)?;
            self.page[self.end..]
                .get_mut(..count)
                .ok_or(Damaged)?
                .copy_from_slice(from);
        }
        self.at += count;
        self.end += count;
        Ok(())
    }

    /// A match of up to eight bytes.
    #[inline(always)]
    fn repeat_short(&mut self, distance: usize, len: usize) -> Result<(), Damaged> {
        if distance >= 8
            && let Some(from) = self.end.checked_sub(distance)
            && self.end <= PAGE_SIZE - 8
        {
            self.page.copy_within(from..from + 8, self.end);
            self.end += len;
            return Ok(());
        }
        self.repeat(distance, len)
    }

    fn repeat(&mut self, distance: usize, len: usize) -> Result<(), Damaged> {
        let (from, start) = (self.end.checked_sub(distance).ok_or(Damaged)?, self.end);
        if len > PAGE_SIZE - start {
            return Err(Damaged);
        }
        self.end += len;
        if distance >= 16 && self.end <= PAGE_SIZE - 16 {
            let mut done = 0;
            while done < len {
                self.page.copy_within(from + done..from + done + 16, start + done);
                done += 16;
            }
        } else if distance == 1 {
            let byte = self.page[from];
            self.page[start..self.end].fill(byte);
        } else {
            for at in start..self.end {
                self.page[at] = self.page[at - distance];
            }
        }
        Ok(())
    }

    fn zeroes(&mut self, count: usize) -> Result<(), Damaged> {
        self.page[self.end..].get_mut(..count).ok_or(Damaged)?.fill(0);
        self.end += count;
        Ok(())
    }

    /// The end instruction is next or none is.
    fn end(&self) -> Result<(), Damaged> {
        if self.input[self.at..] == END && self.end == PAGE_SIZE {
            Ok(())
        } else {
            Err(Damaged)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::fuzzing::tests::{page_of, pages};
    use super::*;
    use liblzo::Liblzo;

    /// The stream that goes on with `expected`'s last byte up to a page.
    fn finished(instructions: &[u8], expected: &[u8]) -> (Vec<u8>, Box<Page>) {
        let page = page_of(|at| *expected.get(at).or(expected.last()).unwrap());
        let rest = PAGE_SIZE - expected.len() - 33;
        let zeroes = (rest - 1) / 255;
        let last = (rest - 255 * zeroes) as u8;
        let content = [instructions, &[0x20], &vec![0; zeroes], &[last, 0, 0], &[0x11, 0, 0]].concat();
        (content, page)
    }

    #[track_caller]
    fn decodes_to(instructions: &[&[u8]], expected: &[&[u8]]) {
        let (content, page) = finished(&instructions.concat(), &expected.concat());
        let mut back = Page::zeroed();
        back.fill(0xa5);
        assert_eq!(decompress::<false>(&content, &mut back), Ok(()));
        assert_eq!(back[..], page[..]);
        // liblzo reads the format's description as we do.
        assert_eq!(Liblzo::load().decompress(&content).as_deref(), Some(&page[..]));
        let content = [&VERSION_RLE, &content[..]].concat();
        assert_eq!(decompress::<true>(&content, &mut back), Ok(()));
        assert_eq!(back[..], page[..]);
    }

    fn letters(count: usize) -> Vec<u8> {
        (0..count).map(|at| b'a' + (at * at / 3 % 26) as u8).collect()
    }

    #[test]
    fn each_instruction_decodes_as_its_description_says() {
        // The first byte.
        decodes_to(&[&[18], b"a"], &[b"a"]);
        decodes_to(&[&[20], b"abc"], &[b"abc"]);
        decodes_to(&[&[21], b"abcd"], &[b"abcd"]);
        decodes_to(&[&[255], &letters(238)], &[&letters(238)]);
        // Four and more literals.
        decodes_to(&[&[0b0000_0001], b"abcd"], &[b"abcd"]);
        decodes_to(&[&[0b0000_1111], &letters(18)], &[&letters(18)]);
        decodes_to(&[&[0, 1], &letters(19)], &[&letters(19)]);
        decodes_to(&[&[0, 255], &letters(273)], &[&letters(273)]);
        decodes_to(&[&[0, 0, 1], &letters(274)], &[&letters(274)]);
        // 0000DDSS after 1 to 3 literals, twice; and after more.
        decodes_to(
            &[&[20], b"abc", &[0b0000_1001, 0], b"x", &[0b0000_0100, 0]],
            &[b"abc", b"ab", b"x", b"bx"],
        );
        let many = letters(2100);
        decodes_to(
            &[&[0, 0, 0, 0, 0, 0, 0, 0, 0, 42], &many, &[0b0000_0111, 2], b"xyz"],
            &[&many, &many[2100 - 2058..][..3], b"xyz"],
        );
        // 01LDDDSS, 1LLDDDSS.
        decodes_to(&[&[21], b"abcd", &[0b0100_1110, 0], b"xy"], &[b"abcd", b"abc", b"xy"]);
        decodes_to(&[&[21], b"abcd", &[0b0110_1000, 0]], &[b"abcd", b"bcdb"]);
        decodes_to(&[&[21], b"abcd", &[0b1000_0000, 0]], &[b"abcd", b"ddddd"]);
        decodes_to(
            &[&[26], b"abcdefghi", &[0b1110_0011, 1], b"xyz"],
            &[b"abcdefghi", b"abcdefgh", b"xyz"],
        );
        let far = &many[2100 - 2048..];
        decodes_to(
            &[&[0, 0, 0, 0, 0, 0, 0, 0, 0, 42], &many, &[0b1111_1100, 255]],
            &[&many, &far[..8]],
        );
        // 001LLLLL.
        decodes_to(
            &[&[21], b"abcd", &[0b0010_0001, 0b0000_0110, 0], b"xy"],
            &[b"abcd", b"cdc", b"xy"],
        );
        let (a33, a34) = (vec![b'a'; 33], vec![b'a'; 34]);
        decodes_to(&[&[18], b"a", &[0b0011_1111, 0, 0]], &[b"a", &a33]);
        decodes_to(&[&[18], b"a", &[0b0010_0000, 1, 1, 0], b"x"], &[b"a", &a34, b"x"]);
        let a289 = vec![b'a'; 33 + 255 + 1];
        decodes_to(&[&[18], b"a", &[0b0010_0000, 0, 1, 0, 0]], &[b"a", &a289]);
        let far = &many[2100 - 2081..];
        decodes_to(
            &[&[0, 0, 0, 0, 0, 0, 0, 0, 0, 42], &many, &[0b0011_1110, 0x80, 0x20]],
            &[&many, &far[..32]],
        );
    }

    #[test]
    fn a_run_of_zeroes_is_in_version_1_only() {
        let run = |instructions: &[u8], expected: &[u8]| {
            let (content, page) = finished(instructions, expected);
            let mut back = Page::zeroed();
            back.fill(0xa5);
            assert_eq!(
                decompress::<true>(&[&VERSION_RLE, &content[..]].concat(), &mut back),
                Ok(())
            );
            assert_eq!(back[..], page[..]);
            assert_eq!(decompress::<false>(&content, &mut back), Err(Damaged));
        };
        run(&[18, b'a', 0b0001_1000, 0xfc, 0xff, 0], b"a\0\0\0\0");
        let xyz = [18, b'a', 0b0001_1101, 0xff, 0xff, 3, b'x', b'y', b'z'];
        run(&xyz, &[b"a", &[0; 33][..], b"xyz"].concat());
        run(
            &[18, b'a', 0b0001_1111, 0xfc, 0xff, 255],
            &[b"a", &[0; 2051][..]].concat(),
        );
    }

    #[test]
    fn a_stream_of_the_other_name_is_damaged() {
        let (content, _) = finished(&[18, b'a'], b"a");
        let mut page = Page::zeroed();
        assert_eq!(decompress::<true>(&content, &mut page), Err(Damaged));
        assert_eq!(
            decompress::<false>(&[&VERSION_RLE, &content[..]].concat(), &mut page),
            Err(Damaged)
        );
        let version_2 = [&[17, 2], &content[..]].concat();
        assert_eq!(decompress::<true>(&version_2, &mut page), Err(Damaged));
    }

    #[test]
    fn what_points_outside_the_page_is_damaged() {
        let damaged = |instructions: &[u8], expected: &[u8]| {
            let (content, _) = finished(instructions, expected);
            assert_eq!(decompress::<false>(&content, &mut Page::zeroed()), Err(Damaged));
        };
        // Before its begin, by each kind of match.
        damaged(&[18, b'a', 0b0000_0100, 0], b"aaa");
        damaged(&[21, 1, 2, 3, 4, 0b0000_0000, 0], &[0; 7]);
        damaged(&[21, 1, 2, 3, 4, 0b0101_0000, 0], &[0; 7]);
        damaged(&[21, 1, 2, 3, 4, 0b0010_0001, 4 << 2, 0], &[0; 7]);
        damaged(&[21, 1, 2, 3, 4, 0b0001_0010, 4, 0], &[0; 8]);
        // One byte too few or too many.
        damaged(&[18, b'a'], b"aa");
        let (mut content, _) = finished(&[18, b'a'], b"a");
        let at = content.iter().position(|&byte| byte == 0x11).unwrap() - 3;
        content[at] += 1;
        assert_eq!(decompress::<false>(&content, &mut Page::zeroed()), Err(Damaged));
    }

    #[test]
    fn the_encoder_writes_what_it_should() {
        fn encoded<const RLE: bool>(page: &Page) -> Vec<u8> {
            let mut output = [0; OUTPUT_SIZE];
            let len = Compressor::<RLE>::new().compress(page, &mut output);
            output[..len].to_vec()
        }
        let zeroes = Page::zeroed();
        // 1 literal, 4095 zeroes: 33 + 15 * 255 + 237; 2051 + 2044.
        let matched = [&[18, 0, 0x20], &[0; 15][..], &[237, 0, 0], &END].concat();
        assert_eq!(encoded::<false>(&zeroes), matched);
        let runs = [17, 1, 18, 0, 0x1f, 0xfc, 0xff, 0xff, 0x18, 0xfc, 0xff, 0xff, 0x11, 0, 0];
        assert_eq!(encoded::<true>(&zeroes), runs);
        // 5 literals, a match of 4087 that ends one byte before a run too short to be one.
        let mut page = page_of(|at| b"abcde"[at % 5]);
        page[4092..].fill(0);
        let matched = [
            &[22][..],
            b"abcde",
            &[0x20],
            &[0; 15],
            &[229, 4 << 2, 0, 1, 0, 0, 0, 0],
            &END,
        ]
        .concat();
        assert_eq!(encoded::<false>(&page), matched);
        assert_eq!(encoded::<true>(&page), [&VERSION_RLE, &matched[..]].concat());
    }

    #[test]
    fn liblzo_decodes_our_streams() {
        let liblzo = Liblzo::load();
        let mut compressor = Compressor::<false>::new();
        for page in pages() {
            let mut output = [0; OUTPUT_SIZE];
            let len = compressor.compress(&page, &mut output);
            assert_eq!(liblzo.decompress(&output[..len]).as_deref(), Some(&page[..]));
        }
    }

    #[test]
    fn we_decode_the_streams_of_liblzo() {
        let liblzo = Liblzo::load();
        for page in pages() {
            let mut back = Page::zeroed();
            assert_eq!(decompress::<false>(&liblzo.compress(&page), &mut back), Ok(()));
            assert_eq!(back[..], page[..]);
        }
    }

    /// liblzo takes any copy from 16 KiB back for the end; we only the one that every encoder writes.
    #[test]
    fn we_judge_a_flipped_bit_as_liblzo_does() {
        let liblzo = Liblzo::load();
        let mut accepted = 0;
        for page in pages() {
            let mut content = liblzo.compress(&page);
            for bit in 0..8 * content.len().min(500) {
                content[bit / 8] ^= 1 << (bit % 8);
                let mut back = Page::zeroed();
                let ours = decompress::<false>(&content, &mut back).ok().map(|()| back.to_vec());
                let theirs = liblzo.decompress(&content).filter(|_| content.ends_with(&END));
                assert!(ours == theirs, "bit {bit}: {} {}", ours.is_some(), theirs.is_some());
                accepted += usize::from(ours.is_some());
                content[bit / 8] ^= 1 << (bit % 8);
            }
        }
        assert!(accepted > 100);
    }

    /// Debian's liblzo2, another hand's encoder and decoder of version 0.
    mod liblzo {
        use std::ffi::{c_int, c_void};
        use std::ptr::null_mut;

        use super::*;

        type Function = unsafe extern "C" fn(*const u8, usize, *mut u8, *mut usize, *mut c_void) -> c_int;

        pub struct Liblzo {
            compress: libloading::Symbol<'static, Function>,
            decompress: libloading::Symbol<'static, Function>,
        }

        impl Liblzo {
            pub fn load() -> Liblzo {
                // SAFETY: the library's initialisers are those of Debian's package, which need nothing of us.
                let library = unsafe { libloading::Library::new("liblzo2.so.2") };
                let library: &_ = Box::leak(Box::new(library.expect("install liblzo2-2: scripts/install-deps test")));
                // SAFETY: lzo/lzo1x.h declares both functions so; lzo_uint is as wide as usize on 64 bits.
                let get = |name: &str| unsafe { library.get(name.as_bytes()).expect(name) };
                Liblzo {
                    compress: get("lzo1x_1_compress"),
                    decompress: get("lzo1x_decompress_safe"),
                }
            }

            pub fn compress(&self, page: &Page) -> Vec<u8> {
                let (mut output, mut len) = (vec![0; OUTPUT_SIZE], OUTPUT_SIZE);
                let mut work = vec![0_u64; 1 << 14];
                // SAFETY: a page is read, two pages hold what lzo makes of it (its limit is len + len / 16 + 67), the
                // work memory is what the header asks for: 16384 pointers.
                let status = unsafe {
                    (self.compress)(
                        page.as_ptr(),
                        PAGE_SIZE,
                        output.as_mut_ptr(),
                        &mut len,
                        work.as_mut_ptr().cast(),
                    )
                };
                assert_eq!(status, 0);
                output.truncate(len);
                output
            }

            /// `None` unless it is a page.
            pub fn decompress(&self, content: &[u8]) -> Option<Vec<u8>> {
                let (mut page, mut len) = (vec![0; PAGE_SIZE], PAGE_SIZE);
                // SAFETY: both lengths are those of their buffers, and this function checks them.
                let status = unsafe {
                    (self.decompress)(content.as_ptr(), content.len(), page.as_mut_ptr(), &mut len, null_mut())
                };
                (status == 0 && len == PAGE_SIZE).then_some(page)
            }
        }
    }
}
