//! hog memory MIB | write FILE FIRST PAGES SEED | check FILE FIRST PAGES SEED
//!
//! Fills memory, or pages FIRST.. of a file or disk, with pages whose content follows from their number and the seed,
//! then (`memory`, `check`) reads all back and compares every byte. The pages are of the kinds that take different
//! paths in a compressed store: of 16 pages one is zero, one has one repeated word, one is random, the rest compress
//! to about a third. Except for the zero page no two are equal, so a page in the wrong place is found too.

use std::fs::OpenOptions;
use std::os::unix::fs::FileExt;
use std::process::exit;

const PAGE_SIZE: usize = 4096;
const PAGES_PER_MIB: u64 = 256;
/// Pages per line of progress, and per read or write of a file: 32 MiB and 1 MiB.
const PAGES_PER_REPORT: u64 = 32 * PAGES_PER_MIB;
const PAGES_PER_BATCH: u64 = PAGES_PER_MIB;

type Page = [u8; PAGE_SIZE];

/// splitmix64: good enough to be incompressible, and any state will do as a seed.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }
}

fn fill_page(page: &mut Page, number: u64, seed: u64) {
    let mut random = Random(seed.rotate_left(32) ^ number);
    let words = page.chunks_exact_mut(8);
    match number % 16 {
        3 => page.fill(0),
        7 => {
            // The number itself, spread by an odd factor: different on every page, never the zero page again.
            let word = (number ^ (seed << 40)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
            words.for_each(|w| w.copy_from_slice(&word.to_le_bytes()));
        }
        11 => words.for_each(|w| w.copy_from_slice(&random.next().to_le_bytes())),
        _ => fill_with_phrases(page, number, &mut random),
    }
}

/// 16-byte phrases drawn from 32 of the page's own, and the page's number each 256 bytes.
fn fill_with_phrases(page: &mut Page, number: u64, random: &mut Random) {
    let mut phrases = [[0u8; 16]; 32];
    for phrase in &mut phrases {
        phrase[..8].copy_from_slice(&random.next().to_le_bytes());
        phrase[8..].copy_from_slice(&number.to_le_bytes());
    }
    for part in page.chunks_exact_mut(256) {
        let mut choice = random.next();
        for phrase in part.chunks_exact_mut(16) {
            phrase.copy_from_slice(&phrases[(choice & 31) as usize]);
            choice = choice.rotate_right(4);
        }
        part[..8].copy_from_slice(&number.to_le_bytes());
    }
}

/// Ends the program at the first wrong byte; which one it is says more than how many there are.
fn check_page(page: &Page, number: u64, seed: u64) {
    let mut expected = [0; PAGE_SIZE];
    fill_page(&mut expected, number, seed);
    if let Some(at) = (0..PAGE_SIZE).find(|&at| page[at] != expected[at]) {
        println!(
            "vzram: hog: page {number}, byte {at}: is {:#04x}, was {:#04x}",
            page[at], expected[at]
        );
        exit(1);
    }
}

fn report(what: &str, done: u64, all: u64) {
    if done % PAGES_PER_REPORT == 0 || done == all {
        println!(
            "vzram: hog: {what} {} of {} MiB",
            done / PAGES_PER_MIB,
            all / PAGES_PER_MIB
        );
    }
}

fn hold_in_memory(mib: u64, seed: u64) {
    let pages = mib * PAGES_PER_MIB;
    // Zeroed bytes come untouched from the kernel (pages would be written once more), so each page is first touched below.
    let mut memory = vec![0u8; pages as usize * PAGE_SIZE];
    for (number, page) in (0..).zip(pages_of(&mut memory)) {
        fill_page(page, number, seed);
        report("filled", number + 1, pages);
    }
    for (number, page) in (0..).zip(pages_of(&mut memory)) {
        check_page(page, number, seed);
        report("checked", number + 1, pages);
    }
    println!("vzram: hog: every byte of {mib} MiB is right");
}

/// Calls `each` with every batch of pages: the first one's number and the bytes to be.
fn for_batches(first: u64, pages: u64, mut each: impl FnMut(u64, &mut [u8])) {
    let mut batch = vec![0u8; PAGE_SIZE * PAGES_PER_BATCH as usize];
    for start in (first..first + pages).step_by(PAGES_PER_BATCH as usize) {
        let count = PAGES_PER_BATCH.min(first + pages - start) as usize;
        each(start, &mut batch[..count * PAGE_SIZE]);
    }
}

fn pages_of(bytes: &mut [u8]) -> impl Iterator<Item = &mut Page> {
    bytes
        .chunks_exact_mut(PAGE_SIZE)
        .map(|chunk| chunk.try_into().expect("chunks are pages"))
}

fn write_file(path: &str, first: u64, pages: u64, seed: u64) -> std::io::Result<()> {
    let file = OpenOptions::new().write(true).open(path)?;
    let mut outcome = Ok(());
    for_batches(first, pages, |start, batch| {
        for (number, page) in (start..).zip(pages_of(batch)) {
            fill_page(page, number, seed);
        }
        if outcome.is_ok() {
            outcome = file.write_all_at(batch, start * PAGE_SIZE as u64);
        }
    });
    outcome?;
    file.sync_all()
}

fn check_file(path: &str, first: u64, pages: u64, seed: u64) -> std::io::Result<()> {
    let file = OpenOptions::new().read(true).open(path)?;
    let mut outcome = Ok(());
    for_batches(first, pages, |start, batch| {
        if outcome.is_ok() {
            outcome = file.read_exact_at(batch, start * PAGE_SIZE as u64);
        }
        for (number, page) in (start..).zip(pages_of(batch)).filter(|_| outcome.is_ok()) {
            check_page(page, number, seed);
        }
    });
    outcome
}

fn usage() -> ! {
    println!("usage: hog memory MIB | write FILE FIRST PAGES SEED | check FILE FIRST PAGES SEED");
    exit(2)
}

fn number(text: &str) -> u64 {
    text.parse().unwrap_or_else(|_| usage())
}

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let outcome = match arguments[..] {
        ["memory", mib] => {
            hold_in_memory(number(mib), 0);
            Ok(())
        }
        ["write", file, first, pages, seed] => write_file(file, number(first), number(pages), number(seed)),
        ["check", file, first, pages, seed] => check_file(file, number(first), number(pages), number(seed)),
        _ => usage(),
    };
    if let Err(error) = outcome {
        println!("vzram: hog: {}: {error}", arguments[1]);
        exit(1);
    }
}
