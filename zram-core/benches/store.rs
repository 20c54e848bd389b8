//! The store without its codec, and what it costs to start one: where time and memory go beside compression.
//!
//! `cargo bench -p zram-core --bench store -- [FILE]`
//!
//! FILE holds 4 KiB pages; without one, pages made here. Prints, each as a median of five:
//!
//! - heap work: what a write does beside the codec (allocate, copy in, publish, free the old object, epoch), at 90 % of
//!   the memory limit after every slot was overwritten five times, beside what lz4 takes for the same pages;
//! - workers: writes and reads a second of one, two and ten workers, each pinned to nothing;
//! - recompression of a whole disk from lz4 to zstd while a worker reads and checks pages at random: gain, rate, the
//!   reader's p99 without and with it, and the longest that `stats` took meanwhile;
//! - start: creating a disk of 1 TiB, and taking over a disk, in slots a second of one thread.
#![allow(clippy::unwrap_used)] // a bench: an error is a failure

use std::hint::black_box;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use zram_core::{
    AdoptOptions, Algorithm, Codecs, DecompressionContexts, IdleMark, Options, PAGE_SIZE, Page, RecompressOptions,
    RecompressType, SlotIndex, Zram,
};

const ROUNDS: usize = 5;
const BATCH: usize = 16;

fn main() {
    let file = std::env::args().skip(1).find(|argument| argument != "--bench");
    let pages = match file {
        Some(file) => {
            let bytes = std::fs::read(&file).unwrap();
            bytes.as_chunks::<PAGE_SIZE>().0.iter().map(to_page).collect()
        }
        None => made_pages(),
    };
    let pages: Vec<_> = pages.into_iter().filter(|page| page.same_filled().is_none()).collect();
    heap_work(&pages);
    workers(&pages);
    recompression(&pages);
    contexts(&pages);
    start(&pages);
}

fn to_page(bytes: &[u8; PAGE_SIZE]) -> Box<Page> {
    let mut page = Page::zeroed();
    page.copy_from_slice(bytes);
    page
}

struct Random(u64);

impl Random {
    fn below(&mut self, bound: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (self.0 >> 33) as usize % bound
    }
}

/// A third of text, of numbers and of noise in each page, in parts of changing length.
fn made_pages() -> Vec<Box<Page>> {
    let mut random = Random(1);
    (0..16_384)
        .map(|_| {
            let mut page = Page::zeroed();
            let noise = 300 + random.below(1200);
            page[..noise].fill_with(|| random.below(256) as u8);
            for (at, byte) in page[noise..].iter_mut().enumerate() {
                *byte = b"the quick brown fox jumps over the lazy dog "[at % 44];
            }
            page
        })
        .collect()
}

fn create(slots: usize, mem_limit_bytes: Option<u64>) -> Arc<Zram> {
    create_with(slots, mem_limit_bytes, Codecs::alone(&Algorithm::default()).unwrap())
}

fn create_with(slots: usize, mem_limit_bytes: Option<u64>, codecs: Arc<Codecs>) -> Arc<Zram> {
    Zram::create(&Options {
        name: "bench".into(),
        size_bytes: (slots * PAGE_SIZE) as u64,
        size_bytes_max: None,
        mem_limit_bytes,
        codecs,
    })
    .unwrap()
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

fn heap_work(pages: &[Box<Page>]) {
    let codecs = Codecs::alone(&Algorithm::default()).unwrap();
    let mut codec = codecs.stream().unwrap();
    let encode: Vec<f64> = (0..ROUNDS)
        .map(|_| {
            let start = Instant::now();
            pages.iter().for_each(|page| {
                black_box(codec.compress(page).len());
            });
            micros(start.elapsed()) / pages.len() as f64
        })
        .collect();
    let encoded: Vec<_> = pages.iter().map(|page| codec.compress(page).to_vec()).collect();
    let stored: usize = encoded.iter().map(|content| content.len().min(PAGE_SIZE)).sum();
    let zram = create(pages.len(), Some(stored as u64 * 10 / 9));
    let upkeep = zram.spawn_upkeep("zram-upkeep").unwrap();
    let mut worker = zram.worker().unwrap();
    let mut random = Random(7);
    let mut replace = |slot: usize, page: usize| {
        let content = &encoded[page];
        let whole = content.len() >= PAGE_SIZE;
        worker.write_encoded(SlotIndex(slot as u32), if whole { &pages[page][..] } else { content })
    };
    let mut refused = 0_u32;
    (0..pages.len()).for_each(|slot| refused += u32::from(!replace(slot, slot)));
    for _ in 0..5 * pages.len() {
        refused += u32::from(!replace(random.below(pages.len()), random.below(pages.len())));
    }
    let mut batches = vec![];
    for _ in 0..ROUNDS * pages.len() / BATCH {
        let places: [_; BATCH] = std::array::from_fn(|_| (random.below(pages.len()), random.below(pages.len())));
        let start = Instant::now();
        for (slot, page) in places {
            refused += u32::from(!replace(slot, page));
        }
        batches.push(micros(start.elapsed()) / BATCH as f64);
    }
    let used = zram.stats().mem_used_total as f64 / zram.stats().mem_limit as f64;
    drop(upkeep);
    batches.sort_by(f64::total_cmp);
    let at = |share: f64| batches[(batches.len() as f64 * share) as usize];
    let encode = median(encode);
    println!(
        "heap work at {:.0} % of the limit: {:.2} us a write (p99 {:.2}, p99.9 {:.2}, batches of {BATCH}), {:.1} % of lz4's {encode:.2} us; {refused} refused",
        used * 100.0,
        at(0.5),
        at(0.99),
        at(0.999),
        at(0.5) / encode * 100.0,
    );
}

fn micros(time: Duration) -> f64 {
    time.as_secs_f64() * 1e6
}

/// Operations a second of `count` workers together.
fn throughput(zram: &Arc<Zram>, count: usize, pages: &[Box<Page>], writes: bool) -> f64 {
    let (is_over, done) = (AtomicBool::new(false), AtomicU64::new(0));
    let time = Duration::from_millis(500);
    std::thread::scope(|scope| {
        for me in 0..count {
            let (is_over, done) = (&is_over, &done);
            scope.spawn(move || {
                let (mut worker, mut random) = (zram.worker().unwrap(), Random(me as u64 + 1));
                let (mut buffer, mut count) = (Page::zeroed(), 0);
                while !is_over.load(Ordering::Relaxed) {
                    for _ in 0..BATCH {
                        let slot = random.below(pages.len());
                        if writes {
                            let page = &pages[random.below(pages.len())];
                            worker.write_page(SlotIndex(slot as u32), page).unwrap();
                        } else {
                            worker.read_page(SlotIndex(slot as u32), &mut buffer).unwrap();
                        }
                    }
                    worker.end_batch();
                    count += BATCH as u64;
                }
                done.fetch_add(count, Ordering::Relaxed);
            });
        }
        std::thread::sleep(time);
        is_over.store(true, Ordering::Relaxed);
    });
    done.into_inner() as f64 / time.as_secs_f64()
}

fn workers(pages: &[Box<Page>]) {
    let zram = create(pages.len(), None);
    let upkeep = zram.spawn_upkeep("zram-upkeep").unwrap();
    let mut worker = zram.worker().unwrap();
    for (slot, page) in pages.iter().enumerate() {
        worker.write_page(SlotIndex(slot as u32), page).unwrap();
    }
    drop(worker);
    for (what, writes) in [("writes", true), ("reads", false)] {
        let mut of = [const { vec![] }; 3];
        for _ in 0..ROUNDS {
            for (results, count) in of.iter_mut().zip([1, 2, 10]) {
                results.push(throughput(&zram, count, pages, writes));
            }
        }
        let [one, two, ten] = of.map(median);
        println!(
            "{what} a second: {one:.0} one worker, {two:.0} two ({:.2} times one), {ten:.0} ten ({:.2} of two)",
            two / one,
            ten / two
        );
    }
    drop(upkeep);
}

/// Reads pages of the first half at random until it is over and checks them: the times of each, in microseconds, sorted.
fn read_until(zram: &Arc<Zram>, pages: &[Box<Page>], is_over: &AtomicBool) -> Vec<f64> {
    let (mut worker, mut random, mut buffer) = (zram.worker().unwrap(), Random(11), Page::zeroed());
    let mut times = vec![];
    while !is_over.load(Ordering::Relaxed) {
        let slot = random.below(pages.len() / 2);
        let start = Instant::now();
        worker.read_page(SlotIndex(slot as u32), &mut buffer).unwrap();
        times.push(micros(start.elapsed()));
        assert!(buffer[..] == pages[slot][..], "slot {slot} is wrong");
    }
    times.sort_by(f64::total_cmp);
    times
}

fn recompression(pages: &[Box<Page>]) {
    let load = |text: &str| text.parse::<Algorithm>().unwrap().load().unwrap();
    let (mut quiet_p99, mut busy_p99, mut rates, mut gain, mut longest) = (vec![], vec![], vec![], 0.0, 0.0_f64);
    for _ in 0..ROUNDS {
        let contexts = DecompressionContexts::new(DecompressionContexts::count_for(3));
        let codecs = Codecs::new(load("lz4"), [Some(load("zstd")), None, None], contexts).unwrap();
        let zram = create_with(pages.len(), None, Arc::new(codecs));
        let mut worker = zram.worker().unwrap();
        for (slot, page) in pages.iter().enumerate() {
            worker.write_page(SlotIndex(slot as u32), page).unwrap();
        }
        // The second half is idle; the first is read all the while, and stays as fast to decode as it was.
        zram.mark_idle(IdleMark::All);
        let mut buffer = Page::zeroed();
        for slot in 0..pages.len() / 2 {
            worker.read_page(SlotIndex(slot as u32), &mut buffer).unwrap();
        }
        let p99 = |times: &[f64]| times[times.len() * 99 / 100];
        let is_over = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let reader = scope.spawn(|| read_until(&zram, pages, &is_over));
            std::thread::sleep(Duration::from_millis(500));
            is_over.store(true, Ordering::Relaxed);
            quiet_p99.push(p99(&reader.join().unwrap()));
        });
        let before = zram.stats();
        let is_over = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let reader = scope.spawn(|| read_until(&zram, pages, &is_over));
            let statist = scope.spawn(|| {
                let mut longest = 0.0_f64;
                while !is_over.load(Ordering::Relaxed) {
                    let start = Instant::now();
                    black_box(zram.stats());
                    longest = longest.max(micros(start.elapsed()));
                    std::thread::sleep(Duration::from_millis(5));
                }
                longest
            });
            let start = Instant::now();
            let idle = RecompressOptions {
                kind: RecompressType::Idle,
                ..RecompressOptions::default()
            };
            let done = zram.recompress(&idle).unwrap();
            rates.push(done.pages_tried as f64 / start.elapsed().as_secs_f64());
            is_over.store(true, Ordering::Relaxed);
            busy_p99.push(p99(&reader.join().unwrap()));
            longest = longest.max(statist.join().unwrap());
        });
        gain = 1.0 - zram.stats().compr_data_size as f64 / before.compr_data_size as f64;
    }
    let (quiet, busy) = (median(quiet_p99), median(busy_p99));
    println!(
        "recompression of idle pages: {:.1} % less content in all, {:.0} pages a second; reads' p99 {quiet:.2} us without, {busy:.2} with \
         ({:.2} times); stats took {longest:.0} us at most",
        gain * 100.0,
        median(rates),
        busy / quiet
    );
}

/// Readers of pages that need a context to decode, with as many contexts as a daemon has by default.
fn contexts(pages: &[Box<Page>]) {
    let zstd = "zstd".parse::<Algorithm>().unwrap();
    for readers in [2, 10] {
        let zram = create_with(pages.len(), None, Codecs::alone(&zstd).unwrap());
        let mut worker = zram.worker().unwrap();
        for (slot, page) in pages.iter().enumerate() {
            worker.write_page(SlotIndex(slot as u32), page).unwrap();
        }
        let is_over = AtomicBool::new(false);
        let reads: usize = std::thread::scope(|scope| {
            let readers: Vec<_> = (0..readers)
                .map(|_| scope.spawn(|| read_until(&zram, pages, &is_over).len()))
                .collect();
            std::thread::sleep(Duration::from_secs(1));
            is_over.store(true, Ordering::Relaxed);
            readers.into_iter().map(|reader| reader.join().unwrap()).sum()
        });
        let uses = zram.stats().contexts;
        println!(
            "{readers} readers of zstd, {} contexts: {reads} reads a second; {} own, {} borrowed, {} waited",
            zram.codecs().contexts().count(),
            uses.own,
            uses.borrowed,
            uses.waited
        );
    }
}

fn start(pages: &[Box<Page>]) {
    let created: Vec<_> = (0..ROUNDS)
        .map(|_| {
            let start = Instant::now();
            let zram = create(1 << 28, None);
            let time = micros(start.elapsed()) / 1000.0;
            drop(zram);
            time
        })
        .collect();
    println!("a disk of 1 TiB: {:.2} ms to create", median(created));

    // Many slots, small objects, in random order, as after a long life.
    const SLOTS: usize = 2 << 20;
    let zram = create(SLOTS, None);
    let (mut worker, mut random) = (zram.worker().unwrap(), Random(3));
    for round in 0..2 {
        for n in 0..SLOTS {
            let slot = if round == 0 { n } else { random.below(SLOTS) };
            let content = &pages[random.below(pages.len())][..64 + random.below(400)];
            assert!(worker.write_encoded(SlotIndex(slot as u32), content));
        }
    }
    drop(worker);
    let memory = zram.memory().unwrap();
    drop(zram);
    let adopted: Vec<_> = (0..ROUNDS)
        .map(|_| {
            let (table, arena) = (memory.table.try_clone().unwrap(), memory.arena.try_clone().unwrap());
            let start = Instant::now();
            let zram = Zram::adopt(zram_core::Memory { table, arena }, &AdoptOptions::default()).unwrap();
            let time = start.elapsed();
            drop(zram);
            SLOTS as f64 / time.as_secs_f64() / 1e6
        })
        .collect();
    println!("taking over: {:.1} million slots a second", median(adopted));
}
