//! The fuzz target of the codecs with contexts, levels and dictionaries, as a plain function, so that saved inputs run as
//! ordinary tests too: zstd, deflate, lz4hc, and lz4 where it is not the plain one of `fuzzing.rs`.
//!
//! The first byte of an input chooses an algorithm; the rest is a page to be compressed and read back, and the same bytes
//! are content to be decoded. Contexts and dictionaries are made once a thread: that nothing of one input is seen by the
//! next is a part of what is tested.

use std::cell::RefCell;

use super::{Algorithm, Codecs, Damaged, DecompressionContexts, Stream};
use crate::page::{PAGE_SIZE, Page};

/// Level bounds, and what lies where a library changes its method.
const ALGORITHMS: [&str; 16] = [
    "zstd(level=-5)",
    "zstd",
    "zstd(level=3)",
    "zstd(level=6)",
    "zstd(level=13)",
    "zstd(level=22)",
    "deflate(level=0)",
    "deflate(level=1,winbits=-9)",
    "deflate",
    "deflate(level=9,winbits=15)",
    "deflate(level=4,winbits=9)",
    "lz4hc(level=1)",
    "lz4hc",
    "lz4hc(level=12)",
    "lz4(level=2)",
    "lz4(level=65537)",
];

struct Subject {
    name: String,
    codecs: Codecs,
    stream: Stream,
}

/// What pages have in common: words, and numbers between them.
fn dictionary() -> Vec<u8> {
    (0..400u32)
        .flat_map(|number| format!("page {:05} of the guest: 0x{:08x}; ", number * 37, number * 0x9e37).into_bytes())
        .collect()
}

fn subjects() -> Vec<Subject> {
    let contexts = DecompressionContexts::new(1.try_into().expect("not 0"));
    let dictionary = dictionary();
    let mut subjects = vec![];
    for text in ALGORITHMS {
        let alone = text.parse::<Algorithm>().expect("an algorithm").load().expect("memory");
        let takes_one = alone.algorithm().name.dictionary_bytes_max().is_some();
        let with = takes_one.then(|| alone.with_dictionary(Some(&dictionary)).expect("memory"));
        for (with, algorithm) in [("", Some(alone)), (" with a dictionary", with)] {
            let Some(algorithm) = algorithm else { continue };
            subjects.push(Subject {
                name: format!("{text}{with}"),
                stream: Stream::new(&algorithm).expect("memory"),
                codecs: Codecs::new(algorithm, Default::default(), contexts.clone()).expect("memory"),
            });
        }
    }
    subjects
}

thread_local! {
    static SUBJECTS: RefCell<Vec<Subject>> = RefCell::new(subjects());
}

/// One input: any bytes.
pub fn contexts(input: &[u8]) {
    let Some((choice, bytes)) = input.split_first() else {
        return;
    };
    SUBJECTS.with_borrow_mut(|subjects| {
        let count = subjects.len();
        let subject = &mut subjects[usize::from(*choice) % count];
        subject.check_decode(bytes);
        subject.check_roundtrip(bytes);
    });
}

impl Subject {
    /// Between two guard pages, over a buffer full of `poison`.
    fn decoded(&self, content: &[u8], poison: u8) -> Result<Box<Page>, Damaged> {
        let mut pages: Box<[Page]> = (0..3).map(|_| (*Page::zeroed()).clone()).collect();
        pages.iter_mut().for_each(|page| page.fill(poison));
        let result = self.codecs.decompress(0, 0, content, &mut pages[1]);
        let is_whole = |page: &Page| page.iter().all(|&byte| byte == poison);
        assert!(
            is_whole(&pages[0]) && is_whole(&pages[2]),
            "{}: bytes round the page",
            self.name
        );
        if result.is_err() {
            assert!(
                pages[1].iter().all(|&byte| byte == 0),
                "{}: an error left bytes",
                self.name
            );
        }
        result.map(|()| Box::new(pages[1].clone()))
    }

    fn check_decode(&self, content: &[u8]) {
        let [zero, poisoned] = [0x00, 0xa5].map(|poison| self.decoded(content, poison));
        let same = match (zero, poisoned) {
            (Ok(zero), Ok(poisoned)) => zero[..] == poisoned[..],
            (zero, poisoned) => zero.is_err() && poisoned.is_err(),
        };
        assert!(same, "{} shows what the buffer held", self.name);
    }

    fn check_roundtrip(&mut self, bytes: &[u8]) {
        let mut page = Page::zeroed();
        let len = bytes.len().min(PAGE_SIZE);
        page[..len].copy_from_slice(&bytes[..len]);
        let content = self.stream.compress(&page).to_vec();
        let back = self.decoded(&content, 0xa5);
        assert!(
            back.is_ok_and(|back| back[..] == page[..]),
            "{} is not itself again",
            self.name
        );
        // A damaged one: shorter by its last byte, and with the input's length as a bit to flip.
        self.check_decode(content.get(..content.len().saturating_sub(1)).unwrap_or_default());
        let mut flipped = content;
        if let Some(byte) = flipped.get_mut(bytes.len() / 8) {
            *byte ^= 1 << (bytes.len() % 8);
        }
        self.check_decode(&flipped);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn saved_inputs_do_no_harm() {
        super::super::fuzzing::tests::saved_inputs_of("contexts", contexts);
    }

    #[test]
    fn every_algorithm_can_be_chosen_and_reads_what_another_context_wrote() {
        let count = SUBJECTS.with_borrow(Vec::len);
        assert!(count <= 256, "one byte chooses");
        for choice in 0..count {
            let mut input = vec![choice as u8];
            input.extend(dictionary().iter().take(PAGE_SIZE - choice));
            contexts(&input);
        }
    }
}
