//! What all codecs promise, of every codec, at every bound of its parameters, with a dictionary and without.

use std::sync::Arc;

use proptest::prelude::*;

use super::*;
use crate::page::Page;

/// Without dictionaries. The bounds of each level, the defaults, and what lies where a library changes its method.
const ALGORITHMS: [&str; 26] = [
    "lzo",
    "lzo-rle",
    "842",
    "lz4",
    "lz4(level=9)",
    "lz4(level=65537)",
    "lz4hc(level=1)",
    "lz4hc(level=3)",
    "lz4hc",
    "lz4hc(level=10)",
    "lz4hc(level=12)",
    "zstd(level=-5)",
    "zstd",
    "zstd(level=3)",
    "zstd(level=6)",
    "zstd(level=12)",
    "zstd(level=22)",
    "deflate",
    "deflate(level=0)",
    "deflate(level=1,winbits=-9)",
    "deflate(level=9,winbits=-15)",
    "deflate(level=1,winbits=9)",
    "deflate(level=9,winbits=15)",
    "deflate(level=9,winbits=-12)",
    "deflate(level=4,winbits=12)",
    "deflate(level=0,winbits=9)",
];
const POISONS: [u8; 2] = [0x00, 0xa5];

/// Each algorithm alone, and with dictionaries of several kinds: trained, plain, of one byte, as large as it can be.
pub(super) fn algorithms() -> Vec<(String, Codecs)> {
    let mut all = vec![];
    for text in ALGORITHMS {
        let algorithm = text.parse::<Algorithm>().unwrap().load().unwrap();
        let mut add = |what: &str, algorithm: PreparedAlgorithm| {
            let contexts = DecompressionContexts::new(2.try_into().unwrap());
            all.push((
                format!("{text} {what}"),
                Codecs::new(algorithm, Default::default(), contexts).unwrap(),
            ));
        };
        add("alone", algorithm.clone());
        if algorithm.algorithm().name.dictionary_bytes_max().is_some() {
            for (what, dictionary) in dictionaries() {
                add(what, algorithm.with_dictionary(Some(&dictionary)).unwrap());
            }
        }
    }
    all
}

fn dictionaries() -> [(&'static str, Vec<u8>); 4] {
    let pages: Vec<Box<Page>> = (0..300).map(text_page).collect();
    let trained = train(pages.iter().map(|page| &**page), 4096).unwrap();
    let plain: Vec<u8> = pages.iter().take(3).flat_map(|page| page.iter().copied()).collect();
    let largest = pages.iter().flat_map(|page| page.iter().copied());
    [
        ("with a trained dictionary", trained),
        ("with a plain dictionary", plain),
        ("with a dictionary of one byte", vec![b'x']),
        (
            "with the largest dictionary",
            largest.take(DICTIONARY_BYTES_MAX).collect(),
        ),
    ]
}

struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 >> 11
    }

    fn below(&mut self, bound: usize) -> usize {
        self.next() as usize % bound
    }
}

fn filled(mut byte: impl FnMut(usize) -> u8) -> Box<Page> {
    let mut page = Page::zeroed();
    page.iter_mut().enumerate().for_each(|(at, to)| *to = byte(at));
    page
}

/// Records that differ a little from page to page.
pub(super) fn text_page(number: u64) -> Box<Page> {
    let mut random = Random(number.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1);
    let mut page = Page::zeroed();
    let mut at = 0;
    while at < PAGE_SIZE {
        let record = format!(
            "{{\"id\": {}, \"name\": \"user{}\", \"active\": true}}\0\0\0\0",
            number + at as u64,
            random.below(1000)
        );
        let len = record.len().min(PAGE_SIZE - at);
        page[at..at + len].copy_from_slice(&record.as_bytes()[..len]);
        at += len;
    }
    page
}

/// One of each kind that takes a path of its own.
fn kinds() -> Vec<Box<Page>> {
    let mut random = Random(0x9e37_79b9_7f4a_7c15);
    let noise = filled(|_| random.next() as u8);
    let mut one_bit_off = filled(|_| 0x5a);
    one_bit_off[2049] ^= 0x10;
    vec![
        filled(|_| 0),
        filled(|_| 0xff),
        filled(|at| at as u8),
        filled(|at| b"the quick brown fox "[at % 20]),
        filled(|at| if at % 512 < 40 { (at * 7 / 3) as u8 } else { 0 }),
        filled(|at| u8::from(at == PAGE_SIZE - 1)),
        filled(|at| u8::from(at == 0)),
        // Half noise, half the same noise again, so that the one match is as far and as long as can be.
        filled(|at| noise[at % 2048]),
        // Four bits a byte: only entropy coding gains.
        filled(|at| noise[at] & 0x0f),
        one_bit_off,
        text_page(1),
        noise,
    ]
}

/// Runs and repeats of every length, at the start, in the middle and at the end of a page of noise.
fn repeats() -> impl Iterator<Item = Box<Page>> {
    let lengths = (1..=300).chain([511, 512, 513, 1023, 2047, 2048, 2049, 4000, 4080]);
    lengths.flat_map(|len| {
        [1, 2, 3, 4, 7, 8, 16, 300].map(|period| {
            let mut random = Random(len as u64 * 1000 + period as u64);
            let mut page = filled(|_| random.next() as u8);
            let start = match period % 3 {
                0 => 0,
                1 => (PAGE_SIZE - len) / 2,
                _ => PAGE_SIZE - len,
            };
            for at in start + period..(start + period + len).min(PAGE_SIZE) {
                page[at] = page[at - period];
            }
            page
        })
    })
}

/// Decodes between two guard pages, over two different earlier contents, and checks that neither matters.
fn decode(codecs: &Codecs, content: &[u8]) -> Result<Vec<u8>, Damaged> {
    let decoded = POISONS.map(|poison| {
        let mut pages: Box<[Page]> = (0..3).map(|_| (*Page::zeroed()).clone()).collect();
        pages.iter_mut().for_each(|page| page.fill(poison));
        let result = codecs.decompress(0, 0, content, &mut pages[1]);
        assert!(pages[0].iter().all(|&byte| byte == poison), "bytes before the page");
        assert!(pages[2].iter().all(|&byte| byte == poison), "bytes after the page");
        if result.is_err() {
            assert!(
                pages[1].iter().all(|&byte| byte == 0),
                "an error left bytes in the page"
            );
        }
        result.map(|()| pages[1].to_vec())
    });
    match decoded {
        [Err(Damaged), Err(Damaged)] => Err(Damaged),
        [Ok(one), Ok(other)] => {
            assert!(one == other, "earlier content of the buffer is in the page");
            Ok(one)
        }
        _ => panic!("what the buffer held decides whether it decodes"),
    }
}

/// Compresses into a buffer between guard bytes.
fn encode(stream: &mut Stream, page: &Page) -> Vec<u8> {
    const GUARD: usize = 256;
    let mut buffer = vec![0xee; GUARD + OUTPUT_SIZE + GUARD];
    let output = (&mut buffer[GUARD..GUARD + OUTPUT_SIZE]).try_into().unwrap();
    let len = stream.context.compress(page, output);
    let (before, after) = (&buffer[..GUARD], &buffer[GUARD + OUTPUT_SIZE..]);
    assert!(
        before.iter().chain(after).all(|&byte| byte == 0xee),
        "bytes round the output"
    );
    let content = buffer[GUARD..GUARD + len].to_vec();
    assert!(
        stream.compress(page) == content,
        "it depends on what was compressed before"
    );
    content
}

#[test]
fn every_kind_of_page_survives_every_codec() {
    for (name, codecs) in algorithms() {
        let mut stream = codecs.stream().unwrap();
        for (number, page) in kinds().iter().enumerate() {
            let content = encode(&mut stream, page);
            assert!(decode(&codecs, &content) == Ok(page.to_vec()), "{name}, kind {number}");
        }
    }
}

#[test]
fn runs_and_repeats_of_every_length_survive_every_codec() {
    for (name, codecs) in algorithms() {
        // The slow levels take milliseconds a page: fewer of the repeats, still with all periods.
        let slow = ["lz4hc(level=1", "zstd(level=12)", "zstd(level=22)"];
        let step = match slow.iter().any(|slow| name.starts_with(slow)) {
            true => 43,
            false if name.ends_with("alone") => 3,
            false => 11,
        };
        let mut stream = codecs.stream().unwrap();
        let mut back = Page::zeroed();
        for page in repeats().step_by(step) {
            let content = stream.compress(&page);
            codecs.decompress(0, 0, content, &mut back).unwrap();
            assert!(back[..] == page[..], "{name}");
        }
    }
}

#[test]
fn a_truncated_page_is_an_error_or_a_whole_page() {
    for (name, codecs) in algorithms() {
        let mut stream = codecs.stream().unwrap();
        for page in kinds() {
            let content = stream.compress(&page).to_vec();
            let step = 1 + content.len() / 200;
            for cut in (0..content.len()).step_by(step) {
                // zstd's end is known from its length alone: what is left may be a block of its own, if an odd one.
                if let Ok(other) = decode(&codecs, &content[..cut]) {
                    assert!(name.starts_with("zstd"), "{name}, {cut} of {} bytes", content.len());
                    assert!(
                        other[..] != page[..] || cut == 0,
                        "{name}, {cut} of {} bytes",
                        content.len()
                    );
                }
            }
        }
    }
}

#[test]
fn a_flipped_bit_never_lets_the_buffer_through() {
    let mut random = Random(77);
    for (_, codecs) in algorithms() {
        let mut stream = codecs.stream().unwrap();
        for page in kinds() {
            let mut content = stream.compress(&page).to_vec();
            for _ in 0..40 {
                // Most of them near the start, where headers are.
                let reach = if random.below(2) == 0 {
                    content.len().min(16)
                } else {
                    content.len()
                };
                let (at, bit) = (random.below(reach), 1 << random.below(8));
                content[at] ^= bit;
                let _ = decode(&codecs, &content);
                if random.below(3) != 0 {
                    content[at] ^= bit;
                }
            }
        }
    }
}

#[test]
fn a_match_at_distance_0_shows_nothing_of_the_buffer() {
    // A literal, then matches of distance 0, which the LZ4 format forbids; then as many literals as are left.
    for (literals, extra) in [(1, 0), (8, 0), (15, 3), (1, 255)] {
        let mut content = vec![(literals.min(15) << 4) as u8 | if extra > 0 { 15 } else { 4 }];
        content.extend((literals >= 15).then_some(0));
        content.extend(vec![b'x'; literals]);
        content.extend([0, 0]);
        content.extend((extra > 0).then_some((extra as u8).min(254)));
        let matched = if extra > 0 { 19 + extra.min(254) } else { 8 };
        let rest = PAGE_SIZE - literals - matched;
        content.push(0xf0);
        let long = rest - 15;
        content.extend(vec![255; long / 255]);
        content.push((long % 255) as u8);
        content.extend(vec![b'y'; rest]);
        for (_, codecs) in algorithms().iter().filter(|(name, _)| name.starts_with("lz4")) {
            let _ = decode(codecs, &content);
        }
    }
}

#[test]
fn the_wrong_dictionary_or_none_is_an_error_or_a_whole_page() {
    let pages = kinds();
    let [(_, right), (_, wrong), ..] = dictionaries();
    for text in ["lz4", "lz4hc", "zstd", "zstd(level=12)"] {
        let algorithm = text.parse::<Algorithm>().unwrap().load().unwrap();
        let codecs = |dictionary: Option<&[u8]>| {
            let contexts = DecompressionContexts::new(1.try_into().unwrap());
            let algorithm = algorithm.with_dictionary(dictionary).unwrap();
            Codecs::new(algorithm, Default::default(), contexts).unwrap()
        };
        let all = [codecs(Some(&right)), codecs(Some(&wrong)), codecs(None)];
        for made_by in &all {
            let mut stream = made_by.stream().unwrap();
            let mut used = false;
            for page in &pages {
                let content = stream.compress(page).to_vec();
                for read_by in &all {
                    used |= decode(read_by, &content) != Ok(page.to_vec());
                }
            }
            assert!(
                used || std::ptr::eq(made_by, &all[2]),
                "{text}: the dictionary is not used"
            );
        }
    }
}

#[test]
fn a_dictionary_of_such_pages_gains() {
    let pages: Vec<Box<Page>> = (0..600).map(text_page).collect();
    let dictionary = train(pages[..300].iter().map(|page| &**page), 16 << 10).unwrap();
    for text in ["lz4", "lz4hc", "zstd", "zstd(level=9)"] {
        let algorithm = text.parse::<Algorithm>().unwrap().load().unwrap();
        let gain = dictionary_gain(&algorithm, &dictionary, pages[300..].iter().map(|page| &**page)).unwrap();
        assert_eq!(gain.pages, 300);
        assert!(gain.bytes_with < gain.bytes_without, "{text}: {gain:?}");
    }
}

#[test]
fn a_dictionary_is_prepared_once_and_contexts_do_not_grow_with_it() {
    let [.., (_, largest)] = dictionaries();
    for text in ["lz4", "lz4hc", "zstd"] {
        let alone = text.parse::<Algorithm>().unwrap().load().unwrap();
        let with = alone.with_dictionary(Some(&largest)).unwrap();
        assert_eq!(alone.dictionary_memory_bytes(), 0);
        assert!(with.dictionary_memory_bytes() >= largest.len());
        let bytes = |algorithm: &PreparedAlgorithm| {
            let mut stream = Stream::new(algorithm).unwrap();
            let fresh = stream.memory_bytes();
            kinds()
                .iter()
                .for_each(|page| assert!(!stream.compress(page).is_empty()));
            assert_eq!(
                stream.memory_bytes(),
                fresh,
                "{text}: memory taken in the middle of a write"
            );
            fresh
        };
        assert!(bytes(&with) <= bytes(&alone) + (32 << 10), "{text}");
    }
}

#[test]
fn every_priority_decodes_its_own_and_others_are_damaged() {
    let load = |text: &str| text.parse::<Algorithm>().unwrap().load().unwrap();
    let contexts = DecompressionContexts::new(1.try_into().unwrap());
    assert_eq!(contexts.memory_bytes(), 0);
    let secondary = [Some(load("zstd(level=9)")), None, Some(load("deflate"))];
    let codecs = Codecs::new(load("lz4"), secondary, contexts.clone()).unwrap();
    let taken = contexts.memory_bytes();
    assert!(taken > 90_000, "{taken}");
    let page = text_page(9);
    let mut back = Page::zeroed();
    for priority in [1, 3] {
        let content = codecs.try_secondary_stream(priority).unwrap().compress(&page).to_vec();
        codecs.decompress(priority, 0, &content, &mut back).unwrap();
        assert!(back[..] == page[..]);
        for other in [2, 4, usize::MAX] {
            assert_eq!(codecs.decompress(other, 0, &content, &mut back), Err(Damaged));
            assert!(back.iter().all(|&byte| byte == 0));
        }
    }
    assert!(
        [0, 2, 4]
            .iter()
            .all(|&none| codecs.try_secondary_stream(none).is_none())
    );
    let in_use = codecs.try_secondary_stream(1).unwrap();
    assert!(codecs.try_secondary_stream(1).is_none(), "nobody waits for it");
    assert!(codecs.try_secondary_stream(3).is_some(), "and it holds up no other");
    drop(in_use);
    assert!(codecs.try_secondary_stream(1).is_some());
    Codecs::new(load("zstd"), Default::default(), contexts.clone()).unwrap();
    assert_eq!(contexts.memory_bytes(), taken, "the second disk uses what is there");
}

#[test]
fn another_process_gets_the_same_algorithms_or_an_error() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("a dictionary crc32=0");
    let [_, (_, plain), ..] = dictionaries();
    std::fs::write(&path, &plain).unwrap();
    let load = |text: &str| text.parse::<Algorithm>().unwrap().load().unwrap();
    let with = load(&format!("zstd(level=3,dict={})", path.display()));
    let secondary = [None, Some(with), Some(load("deflate"))];
    let codecs = Codecs::new(load("lz4(level=2)"), secondary, Arc::default()).unwrap();
    let text = codecs.to_string();
    let again = Codecs::load(&text, Arc::default()).unwrap();
    assert_eq!(again.to_string(), text);
    assert!(again.algorithm(1).is_none() && again.algorithm(2).is_some());

    let page = text_page(2);
    let content = codecs.try_secondary_stream(2).unwrap().compress(&page).to_vec();
    let mut back = Page::zeroed();
    again.decompress(2, 0, &content, &mut back).unwrap();
    assert!(back[..] == page[..]);

    std::fs::write(&path, &plain[1..]).unwrap();
    let refused = |text: &str| Codecs::load(text, Arc::default()).unwrap_err().to_string();
    assert_eq!(
        refused(&text),
        format!(
            "dictionary '{}' is another one than the pages were compressed with",
            path.display()
        )
    );
    std::fs::remove_file(&path).unwrap();
    assert_eq!(refused(&text), format!("cannot read dictionary '{}'", path.display()));
    for wrong in [
        "",
        "1 lz4",
        "4 lz4",
        "x lz4",
        "lz4",
        "0 lz4 crc32=00000000",
        "0 lz4 crc32=x",
    ] {
        assert_eq!(
            refused(wrong),
            format!("'{wrong}' is not what algorithms are written down as")
        );
    }
}

/// A worker that is preempted in the middle of a page keeps its context. Nobody waits for it while another is idle.
#[test]
fn an_idle_context_is_borrowed_while_holders_are_paused() {
    let codecs = Codecs::alone(&"zstd".parse().unwrap()).unwrap();
    let contexts = DecompressionContexts::new(3.try_into().unwrap());
    let codecs = Codecs::new(
        codecs.algorithm(0).unwrap().clone(),
        Default::default(),
        contexts.clone(),
    )
    .unwrap();
    let page = text_page(3);
    let content = codecs.stream().unwrap().compress(&page).to_vec();
    let read = || {
        let mut back = Page::zeroed();
        codecs.decompress(0, 1, &content, &mut back).unwrap();
        assert!(back[..] == page[..]);
    };
    let uses = |own, borrowed, waited| ContextUses { own, borrowed, waited };
    read();
    assert_eq!(contexts.uses(), uses(1, 0, 0));
    contexts.hold(1, || {
        read();
        assert_eq!(contexts.uses(), uses(2, 1, 0));
        contexts.hold(2, || (0..100).for_each(|_| read()));
        assert_eq!(contexts.uses(), uses(3, 101, 0));
    });
}

#[test]
fn sixteen_workers_with_three_contexts_read_right() {
    let load = |text: &str| text.parse::<Algorithm>().unwrap().load().unwrap();
    let contexts = DecompressionContexts::new(3.try_into().unwrap());
    let disk = |text| Codecs::new(load(text), Default::default(), contexts.clone()).unwrap();
    // Two disks: the contexts are the daemon's.
    let disks = [disk("zstd"), disk("deflate")];
    let pages: Vec<_> = (0..32).map(text_page).collect();
    let contents = disks.each_ref().map(|codecs| {
        let mut stream = codecs.stream().unwrap();
        pages
            .iter()
            .map(|page| stream.compress(page).to_vec())
            .collect::<Vec<_>>()
    });
    let reads = 2000;
    std::thread::scope(|scope| {
        for worker in 0..16 {
            let (disks, pages, contents) = (&disks, &pages, &contents);
            scope.spawn(move || {
                let mut back = Page::zeroed();
                for nth in 0..reads {
                    let (disk, page) = ((worker + nth) % 2, (worker * 7 + nth) % pages.len());
                    disks[disk]
                        .decompress(0, worker, &contents[disk][page], &mut back)
                        .unwrap();
                    assert!(back[..] == pages[page][..]);
                }
            });
        }
        // On few cores workers seldom meet: a holder that is paused now and then makes them.
        for place in 0..3 {
            contexts.hold(place, || std::thread::sleep(std::time::Duration::from_millis(2)));
        }
    });
    let uses = contexts.uses();
    assert_eq!(uses.own + uses.borrowed, 16 * reads as u64 + 3);
    assert!(uses.borrowed > 0, "{uses:?}");
}

proptest! {
    #[test]
    fn noise_never_lets_the_buffer_through(content in prop::collection::vec(any::<u8>(), 0..300)) {
        for text in ["lz4", "zstd", "deflate", "deflate(winbits=9)"] {
            let codecs = Codecs::alone(&text.parse().unwrap()).unwrap();
            let _ = decode(&codecs, &content);
        }
    }
}
