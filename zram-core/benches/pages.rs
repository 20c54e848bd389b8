//! What a page costs: the codec's own loop, then the store around it, on the same pages in turn.
//!
//! `cargo bench -p zram-core --bench pages -- [--algorithm NAME] [--rounds N] [FILE...]`
//!
//! FILE holds 4 KiB pages (memory of live programs, say); without one, pages made here. Prints medians of the rounds in
//! microseconds a page, and what the store holds (arena and slot table) over what it stores: after a fill, after five
//! rounds of overwriting, both a second later, and two seconds after 70 % of the pages were discarded at random. The
//! store's own thread is at work, as in the daemon.
#![allow(clippy::unwrap_used)] // a bench: an error is a failure

use std::hint::black_box;
use std::sync::Arc;
use std::time::{Duration, Instant};

use zram_core::{Algorithm, Codecs, Options, PAGE_SIZE, Page, SlotIndex, Worker, Zram};

fn main() {
    let (mut algorithm, mut rounds, mut files) = ("lz4".to_owned(), 5, vec![]);
    let mut arguments = std::env::args().skip(1);
    while let Some(argument) = arguments.next() {
        match argument.as_str() {
            "--bench" => {} // cargo's own
            "--algorithm" => algorithm = arguments.next().expect("--algorithm NAME"),
            "--rounds" => rounds = arguments.next().expect("--rounds N").parse().expect("--rounds N"),
            _ => files.push(argument),
        }
    }
    let algorithm: Algorithm = algorithm.parse().unwrap();
    let codecs = Codecs::alone(&algorithm).unwrap();
    println!("us a page, medians of {rounds} rounds, {algorithm}, pages without the same-filled ones");
    println!(
        "{:<18} {:>7} {:>8} {:>8} {:>8} {:>8}",
        "corpus", "pages", "encode", "write", "decode", "read"
    );
    if files.is_empty() {
        bench("made here", made_pages(), &codecs, rounds);
    }
    for file in files {
        let bytes = std::fs::read(&file).unwrap();
        let name = file.rsplit('/').next().unwrap();
        bench(
            name,
            bytes.as_chunks::<PAGE_SIZE>().0.iter().map(to_page).collect(),
            &codecs,
            rounds,
        );
    }
}

fn to_page(bytes: &[u8; PAGE_SIZE]) -> Box<Page> {
    let mut page = Page::zeroed();
    page.copy_from_slice(bytes);
    page
}

/// Pages of text-like records: some zeroes, some numbers, some words.
fn made_pages() -> Vec<Box<Page>> {
    let mut seed = 1_u64;
    let mut random = || {
        seed = seed
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        seed >> 33
    };
    let record = |n: u64, key: u64| {
        format!(
            "{{\"id\": {n}, \"name\": \"user{}\", \"tag\": \"{:x}\"}}\0\0\0\0",
            key % 10_000,
            key
        )
    };
    (0..8192)
        .map(|n| {
            let mut page = Page::zeroed();
            let mut at = 0;
            while at < PAGE_SIZE {
                let bytes = record(n, random()).into_bytes();
                let len = bytes.len().min(PAGE_SIZE - at);
                page[at..at + len].copy_from_slice(&bytes[..len]);
                at += len + random() as usize % 32;
            }
            page
        })
        .collect()
}

fn bench(name: &str, all: Vec<Box<Page>>, codecs: &Arc<Codecs>, rounds: usize) {
    let pages: Vec<_> = all
        .iter()
        .filter(|page| page.same_filled().is_none())
        .cloned()
        .collect();
    let mut stream = codecs.stream().unwrap();
    let mut encoded = vec![];
    let mut buffer = Page::zeroed();
    let [mut encode, mut write, mut decode, mut read] = [const { vec![] }; 4];
    for _ in 0..rounds {
        encoded.clear();
        encode.push(time(&pages, |_, page| {
            black_box(stream.compress(page).len());
        }));
        pages
            .iter()
            .for_each(|page| encoded.push(stream.compress(page).to_vec()));
        let (zram, mut worker) = store(pages.len(), codecs);
        write.push(time(&pages, |n, page| write_page(&mut worker, n, page)));
        decode.push(time(&encoded, |_, content| {
            codecs.decompress(0, 0, content, &mut buffer).unwrap()
        }));
        read.push(time(&pages, |n, _| {
            worker.read_page(SlotIndex(n as u32), &mut buffer).unwrap()
        }));
        drop(zram);
    }
    let [encode, write, decode, read] = [encode, write, decode, read].map(median);
    println!(
        "{name:<18} {:>7} {encode:>8.2} {write:>8.2} {decode:>8.2} {read:>8.2}",
        pages.len()
    );

    let (zram, mut worker) = store(all.len(), codecs);
    let upkeep = zram.spawn_upkeep("zram-upkeep").unwrap();
    (0..all.len()).for_each(|n| write_page(&mut worker, n, &all[n]));
    worker.end_batch();
    let held = |after: Duration| {
        std::thread::sleep(after);
        let stats = zram.stats();
        (stats.mem_used_total + stats.table_bytes) as f64 / stats.compr_data_size as f64
    };
    let (filled, stats) = (held(SETTLE), zram.stats());
    let mut random = 0x2545_f491_4f6c_dd1d_u64;
    let mut next = || {
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (random >> 33) as usize
    };
    for _ in 0..5 * all.len() {
        let (slot, page) = (next() % all.len(), next() % all.len());
        write_page(&mut worker, slot, &all[page]);
    }
    worker.end_batch();
    let (at_once, overwritten, compacted) = (held(Duration::ZERO), held(SETTLE), zram.stats().pages_compacted);
    for slot in (0..all.len() as u64).filter(|_| next() % 10 < 7) {
        worker.discard(slot..slot + 1);
        if slot % 32 == 0 {
            worker.end_batch();
        }
    }
    worker.end_batch();
    println!(
        "{name:<18} ratio {:.2}, held/stored: {filled:.4} filled, {at_once:.4} and {overwritten:.4} overwritten, \
         {:.4} discarded; {compacted} pages compacted before",
        stats.orig_data_size as f64 / stats.compr_data_size as f64,
        held(2 * SETTLE)
    );
    drop(upkeep);
}

/// How long the store's thread may take to do what there is to do.
const SETTLE: Duration = Duration::from_secs(1);

fn store(pages: usize, codecs: &Arc<Codecs>) -> (Arc<Zram>, Worker) {
    let size_bytes = (pages * PAGE_SIZE) as u64;
    let zram = Zram::create(&Options {
        name: "bench".into(),
        size_bytes,
        size_bytes_max: None,
        mem_limit_bytes: None,
        codecs: codecs.clone(),
    })
    .unwrap();
    let worker = zram.worker().unwrap();
    (zram, worker)
}

/// As the device does it: a batch ends after some requests.
fn write_page(worker: &mut Worker, slot: usize, page: &Page) {
    worker.write_page(SlotIndex(slot as u32), page).unwrap();
    if slot % 32 == 31 {
        worker.end_batch();
    }
}

fn time<T>(items: &[T], mut each: impl FnMut(usize, &T)) -> f64 {
    let start = Instant::now();
    items.iter().enumerate().for_each(|(n, item)| each(n, item));
    start.elapsed().as_secs_f64() * 1e6 / items.len() as f64
}

fn median(mut times: Vec<f64>) -> f64 {
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}
