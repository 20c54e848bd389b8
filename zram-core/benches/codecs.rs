//! What each codec does with a page and what it takes for that, without the store.
//!
//! `cargo bench -p zram-core --bench codecs -- [--algorithm NAME]... [--pages N] [--rounds N] [--dict BYTES] FILE...`
//!
//! FILE holds 4 KiB pages. N of them, evenly spread, same-filled ones left out, are compressed and decoded by each
//! algorithm. With `--dict` those that take a dictionary are shown once more with one of so many bytes, trained on every
//! other one of the pages that were not picked: it never saw those that are measured. Medians of the rounds, microseconds
//! a page; context bytes are a worker's (with 8 KiB of output buffer), one decompression context's, and the dictionary's.
#![allow(clippy::unwrap_used)] // a bench: an error is a failure

use std::hint::black_box;
use std::time::Instant;

use zram_core::{Algorithm, Codecs, DecompressionContexts, PAGE_SIZE, Page, Stream, train};

const ALGORITHMS: [&str; 20] = [
    "lzo",
    "lzo-rle",
    "842",
    "lz4",
    "lz4(level=4)",
    "lz4hc(level=3)",
    "lz4hc",
    "lz4hc(level=12)",
    "zstd(level=-5)",
    "zstd(level=-1)",
    "zstd",
    "zstd(level=3)",
    "zstd(level=6)",
    "zstd(level=9)",
    "zstd(level=12)",
    "zstd(level=19)",
    "deflate(level=1)",
    "deflate",
    "deflate(level=6,winbits=-12)",
    "deflate(level=9)",
];
/// Pages to train on: more only take longer.
const TRAINED_MAX: usize = 4000;

struct Arguments {
    algorithms: Vec<String>,
    pages: usize,
    rounds: usize,
    dictionary_bytes: usize,
    files: Vec<String>,
}

fn main() {
    let arguments = arguments();
    for file in &arguments.files {
        let bytes = std::fs::read(file).unwrap();
        let pages = bytes.as_chunks::<PAGE_SIZE>().0.iter().map(to_page);
        let pages: Vec<_> = pages.filter(|page| page.same_filled().is_none()).collect();
        let step = pages.len().div_ceil(arguments.pages).max(1);
        let (picked, others): (Vec<_>, Vec<_>) = pages.into_iter().enumerate().partition(|(at, _)| at % step == 0);
        let picked: Vec<_> = picked.into_iter().map(|(_, page)| page).collect();
        println!(
            "{}: {} pages\n{:<30} {:>7} {:>9} {:>9} {:>9} {:>8} {:>8}",
            file.rsplit('/').next().unwrap(),
            picked.len(),
            "algorithm",
            "ratio",
            "encode",
            "decode",
            "stream B",
            "pool B",
            "dict B"
        );
        let spread = others.len().div_ceil(TRAINED_MAX).max(2);
        let trained_on = others.iter().step_by(spread).map(|(_, page)| &**page);
        let dictionary = (arguments.dictionary_bytes != 0).then(|| {
            let path = std::env::temp_dir().join(format!("vzram-bench-{}.dict", std::process::id()));
            std::fs::write(&path, train(trained_on, arguments.dictionary_bytes).unwrap()).unwrap();
            path
        });
        for text in &arguments.algorithms {
            bench(text, &picked, arguments.rounds);
            if let Some(path) = &dictionary {
                let with = match text.strip_suffix(')') {
                    Some(open) => format!("{open},dict={})", path.display()),
                    None => format!("{text}(dict={})", path.display()),
                };
                // Those that take none say so.
                if with.parse::<Algorithm>().is_ok() {
                    bench(&with, &picked, arguments.rounds);
                }
            }
        }
        dictionary.map(std::fs::remove_file).transpose().unwrap();
    }
}

fn arguments() -> Arguments {
    let mut read = Arguments {
        algorithms: vec![],
        pages: 4000,
        rounds: 5,
        dictionary_bytes: 0,
        files: vec![],
    };
    let mut arguments = std::env::args().skip(1);
    while let Some(argument) = arguments.next() {
        let mut value = || arguments.next().unwrap_or_else(|| panic!("{argument} VALUE"));
        match argument.as_str() {
            "--bench" => {} // cargo's own
            "--algorithm" => read.algorithms.push(value()),
            "--pages" => read.pages = value().parse().expect("--pages N"),
            "--rounds" => read.rounds = value().parse().expect("--rounds N"),
            "--dict" => read.dictionary_bytes = value().parse().expect("--dict BYTES"),
            _ => read.files.push(argument),
        }
    }
    if read.algorithms.is_empty() {
        read.algorithms = ALGORITHMS.map(String::from).to_vec();
    }
    assert!(!read.files.is_empty(), "no FILE");
    read
}

fn to_page(bytes: &[u8; PAGE_SIZE]) -> Box<Page> {
    let mut page = Page::zeroed();
    page.copy_from_slice(bytes);
    page
}

fn bench(text: &str, pages: &[Box<Page>], rounds: usize) {
    let algorithm = text.parse::<Algorithm>().unwrap().load().unwrap();
    let contexts = DecompressionContexts::new(1.try_into().unwrap());
    let codecs = Codecs::new(algorithm.clone(), Default::default(), contexts.clone()).unwrap();
    let mut stream = Stream::new(&algorithm).unwrap();
    let mut back = Page::zeroed();
    let mut encoded = vec![];
    for page in pages {
        let content = stream.compress(page);
        codecs.decompress(0, 0, content, &mut back).unwrap();
        assert!(back[..] == page[..]);
        encoded.push(content.to_vec());
    }
    let stored: usize = encoded.iter().map(|content| content.len().min(PAGE_SIZE)).sum();
    let [mut encode, mut decode] = [const { vec![] }; 2];
    for _ in 0..rounds {
        encode.push(time(pages, |page| {
            black_box(stream.compress(page).len());
        }));
        decode.push(time(&encoded, |content| {
            codecs.decompress(0, 0, content, &mut back).unwrap();
        }));
    }
    // The dictionary's path says nothing.
    let name = match text.split_once("dict=") {
        Some((before, _)) => format!("{before}dict)"),
        None => text.to_owned(),
    };
    println!(
        "{:<30} {:>7.3} {:>9.2} {:>9.2} {:>9} {:>8} {:>8}",
        name,
        (pages.len() * PAGE_SIZE) as f64 / stored as f64,
        median(encode),
        median(decode),
        stream.memory_bytes(),
        contexts.memory_bytes(),
        algorithm.dictionary_memory_bytes(),
    );
}

fn time<T>(items: &[T], mut each: impl FnMut(&T)) -> f64 {
    let start = Instant::now();
    items.iter().for_each(&mut each);
    start.elapsed().as_secs_f64() * 1e6 / items.len() as f64
}

fn median(mut times: Vec<f64>) -> f64 {
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}
