//! Bodies of the fuzz targets, as plain functions, so that saved inputs run as ordinary tests too, and the tests that
//! every codec without decoding context has to pass: a new one is one line in [`codecs`].

use super::{Damaged, OUTPUT_SIZE, e842, lz4, lzo};
use crate::page::{PAGE_SIZE, Page};

struct Codec {
    name: &'static str,
    compress: Compress,
    decompress: Decompress,
}

type Compress = Box<dyn FnMut(&Page, &mut [u8; OUTPUT_SIZE]) -> usize>;
type Decompress = fn(&[u8], &mut Page) -> Result<(), Damaged>;

macro_rules! codec {
    ($name:literal, $compressor:expr, $decompress:expr) => {{
        let mut compressor = $compressor;
        Codec {
            name: $name,
            compress: Box::new(move |page, output| compressor.compress(page, output)),
            decompress: $decompress,
        }
    }};
}

fn lz4_compressor() -> lz4::Compressor {
    lz4::Compressor::new(lz4::LEVEL_DEFAULT, None).expect("memory for a context")
}

fn codecs() -> Vec<Codec> {
    vec![
        codec!("842", e842::Compressor::new(), e842::decompress),
        codec!("lz4", lz4_compressor(), |content, page| lz4::decompress(
            content, page, None
        )),
        codec!("lzo", lzo::Compressor::<false>::new(), lzo::decompress::<false>),
        codec!("lzo-rle", lzo::Compressor::<true>::new(), lzo::decompress::<true>),
    ]
}

/// Any bytes through each decoder: an error, or a page that does not depend on what the buffer held.
pub fn decode(input: &[u8]) {
    codecs().iter().for_each(|codec| codec.check_decode(input));
}

/// Any page through each codec and back.
pub fn roundtrip(input: &[u8]) {
    let mut page = Page::zeroed();
    let len = input.len().min(PAGE_SIZE);
    page[..len].copy_from_slice(&input[..len]);
    for mut codec in codecs() {
        codec.check_roundtrip(&page);
    }
}

impl Codec {
    fn decoded(&self, content: &[u8], poison: u8) -> Option<Box<Page>> {
        let mut page = Page::zeroed();
        page.fill(poison);
        (self.decompress)(content, &mut page).ok().map(|()| page)
    }

    fn check_decode(&self, content: &[u8]) {
        let [zero, poisoned] = [0x00, 0xa5].map(|poison| self.decoded(content, poison));
        let same = match (zero, poisoned) {
            (Some(zero), Some(poisoned)) => zero[..] == poisoned[..],
            (zero, poisoned) => zero.is_none() && poisoned.is_none(),
        };
        assert!(same, "{} shows what the buffer held", self.name);
    }

    /// What the codec makes of the page.
    fn check_roundtrip(&mut self, page: &Page) -> Vec<u8> {
        let mut output = [0; OUTPUT_SIZE];
        let len = (self.compress)(page, &mut output);
        let back = self.decoded(&output[..len], 0xa5);
        assert!(
            back.is_some_and(|back| back[..] == page[..]),
            "{} is not itself again",
            self.name
        );
        output[..len].to_vec()
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use proptest::prelude::*;

    pub(in crate::codec) fn page_of(mut byte: impl FnMut(usize) -> u8) -> Box<Page> {
        let mut page = Page::zeroed();
        page.iter_mut().enumerate().for_each(|(at, place)| *place = byte(at));
        page
    }

    fn noise() -> impl FnMut() -> u8 {
        let mut state = 0x9e37_79b9_7f4a_7c15_u64;
        move || {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            state as u8
        }
    }

    /// One of each kind of content.
    pub(in crate::codec) fn pages() -> Vec<Box<Page>> {
        let (mut first, mut second, mut third) = (noise(), noise(), noise());
        vec![
            page_of(|_| 0),
            page_of(|_| 0xff),
            page_of(|at| at as u8),
            page_of(|at| b"the quick brown fox "[at % 20]),
            page_of(|_| first()),
            page_of(|at| u8::from(at == PAGE_SIZE - 1)),
            page_of(|at| u8::from(at == 0)),
            page_of(|at| if at % 512 < 40 { (at * 7 / 3) as u8 } else { 0 }),
            // Matches and literals of all small lengths.
            page_of(|at| {
                if at % 29 < at % 7 + 1 {
                    second()
                } else {
                    (at % 13) as u8
                }
            }),
            page_of(|_| third() & 3),
            page_of(|at| (at / 8) as u8 * u8::from(at % 8 == 7)),
        ]
    }

    #[test]
    fn every_kind_of_page_survives() {
        for mut codec in codecs() {
            for page in pages() {
                codec.check_roundtrip(&page);
            }
        }
    }

    #[test]
    fn a_string_of_any_length_is_repeated_at_any_place() {
        let mut noise = noise();
        for mut codec in codecs() {
            for len in (0..=40).chain([255, 256, 257, 264, 265, 519, 520, 2047, 2048, 2049, 2056]) {
                for distance in [len.max(1), len + 1, len + 5, 2048, 2049, 2060] {
                    let mut page = page_of(|_| noise());
                    let start = (distance + len * 7 % 64).min(PAGE_SIZE - len);
                    for at in start.max(distance)..start + len {
                        page[at] = page[at - distance];
                    }
                    codec.check_roundtrip(&page);
                    page[start + len / 2] ^= 1;
                    codec.check_roundtrip(&page);
                }
            }
        }
    }

    #[test]
    fn a_period_of_any_length_survives() {
        for mut codec in codecs() {
            for period in (1..=70).chain([2047, 2048, 2049, 4000]) {
                let mut page = page_of(|at| ((at % period * 0x9e37) >> 7) as u8);
                codec.check_roundtrip(&page);
                page[3000 + period % 10] ^= 0x10;
                codec.check_roundtrip(&page);
            }
        }
    }

    #[test]
    fn zeroes_of_any_length_at_any_place_survive() {
        for mut codec in codecs() {
            let mut check = |start: usize, len: usize| {
                let mut noise = noise();
                let zeroes = start..start + len;
                codec.check_roundtrip(&page_of(|at| if zeroes.contains(&at) { 0 } else { noise() | 1 }));
            };
            for start in (0..70).chain(PAGE_SIZE - 40..PAGE_SIZE) {
                for len in [1, 3, 4, 8, 9, 10, 40] {
                    check(start, len.min(PAGE_SIZE - start));
                }
            }
            for start in [0, 1, 7, 20] {
                (0..300)
                    .chain(2030..2070)
                    .chain(4080 - start..=PAGE_SIZE - start)
                    .for_each(|len| check(start, len));
            }
            for start in (0..PAGE_SIZE).step_by(113) {
                for len in [8, 9, 2051, 2052, 4096] {
                    check(start, len.min(PAGE_SIZE - start));
                }
            }
        }
    }

    /// A page is read to its end and no further: its end comes right after what a match could go on with.
    #[test]
    fn a_match_ends_with_the_page() {
        let mut noise = noise();
        for mut codec in codecs() {
            for len in 1..64 {
                let mut page = page_of(|_| noise());
                page.copy_within(1000..1000 + len, PAGE_SIZE - len);
                codec.check_roundtrip(&page);
                page[PAGE_SIZE - len..].fill(0);
                codec.check_roundtrip(&page);
            }
        }
    }

    #[test]
    fn the_same_page_gives_the_same_bytes_whatever_came_before() {
        let mut used = codecs();
        for page in pages() {
            for (used, mut new) in used.iter_mut().zip(codecs()) {
                assert_eq!(used.check_roundtrip(&page), new.check_roundtrip(&page), "{}", used.name);
            }
        }
    }

    #[test]
    fn no_truncation_and_no_flipped_bit_lets_the_buffer_through() {
        for mut codec in codecs() {
            for page in pages() {
                let mut content = codec.check_roundtrip(&page);
                for cut in (0..content.len()).step_by(content.len() / 300 + 1) {
                    assert!(
                        codec.decoded(&content[..cut], 0).is_none(),
                        "{}, {cut} bytes",
                        codec.name
                    );
                }
                for bit in (0..8 * content.len()).step_by(content.len() / 100 + 1) {
                    content[bit / 8] ^= 1 << (bit % 8);
                    codec.check_decode(&content);
                    content[bit / 8] ^= 1 << (bit % 8);
                }
                content.push(0);
                assert!(codec.decoded(&content, 0).is_none(), "{}, a byte too many", codec.name);
            }
        }
    }

    proptest! {
        #[test]
        fn noise_never_lets_the_buffer_through(content in prop::collection::vec(any::<u8>(), 0..300)) {
            decode(&content);
        }

        #[test]
        fn pieces_of_pages_survive(
            pieces in prop::collection::vec((0usize..11, 0..PAGE_SIZE, 1usize..200), 1..60)
        ) {
            let pages = pages();
            let bytes = pieces.iter().flat_map(|&(page, at, len)| pages[page][at..].iter().copied().take(len));
            roundtrip(&bytes.collect::<Vec<_>>());
        }
    }

    #[track_caller]
    pub(in crate::codec) fn saved_inputs_of(target: &str, body: fn(&[u8])) {
        let corpus = format!("{}/fuzz/corpus/{target}", env!("CARGO_MANIFEST_DIR"));
        let mut count = 0;
        for entry in std::fs::read_dir(corpus).unwrap() {
            body(&std::fs::read(entry.unwrap().path()).unwrap());
            count += 1;
        }
        assert!(count > 0, "no saved inputs");
    }

    #[test]
    fn saved_inputs_do_no_harm() {
        saved_inputs_of("decode", decode);
        saved_inputs_of("roundtrip", roundtrip);
    }
}
