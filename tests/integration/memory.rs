//! What the host gets back, and when: measured as the daemon tells it and as the kernel has it.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::time::Duration;

use crate::raw::{Guest, PAGE};
use crate::raw::{Request, range};
use crate::support::{Backend, Dice, wait_for};

/// More than a worker gives back on its way out.
const PAGES: u64 = 6144;
const SECTORS: u64 = PAGES * 8;
const AT_ONCE: u64 = 32;
/// What lies in front of the arena in its file.
const HEAD: u64 = 4096;

/// Fills the disk's first 24 MiB with what does not compress.
fn fill(guest: &mut Guest) -> crate::raw::Queue {
    let mut queue = guest.queue(0, 128);
    let mut dice = Dice::new();
    for page in (0..PAGES).step_by(AT_ONCE as usize) {
        queue.write(page * 8, &dice.bytes(AT_ONCE as usize * PAGE));
    }
    queue
}

fn mem_used_total(backend: &Backend) -> u64 {
    backend.stats()["mem_used_total"].as_u64().unwrap()
}

/// The daemon's memory files of this name, as the kernel has them.
fn memory_files(backend: &Backend, name: &str) -> Vec<fs::Metadata> {
    let fds = fs::read_dir(format!("/proc/{}/fd", backend.pid()));
    fds.expect("root can look, for the daemon is not dumpable")
        .map(|entry| entry.unwrap().path())
        .filter(|path| fs::read_link(path).is_ok_and(|target| target.to_string_lossy().contains(name)))
        .map(|path| fs::metadata(path).unwrap())
        .collect()
}

/// Bytes that the kernel has behind the arena's memory file, its head not counted.
fn arena_bytes(backend: &Backend) -> u64 {
    memory_files(backend, "zram-arena")[0].blocks() * 512 - HEAD
}

/// Bytes of the arena's mapping that are in the daemon's resident set.
fn arena_rss(backend: &Backend) -> u64 {
    let smaps = fs::read_to_string(format!("/proc/{}/smaps", backend.pid())).unwrap();
    let mut lines = smaps.lines().skip_while(|line| !line.contains("zram-arena"));
    let rss = lines.find_map(|line| line.strip_prefix("Rss:")).unwrap();
    rss.trim().strip_suffix(" kB").unwrap().parse::<u64>().unwrap() * 1024
}

#[test]
fn the_limit_of_file_sizes_is_compared_with_the_longest_file() {
    for (size, bytes) in [("4K", 4 << 10), ("64M", 64 << 20), ("1T", 1 << 40)] {
        let backend = Backend::daemon(size, &["--size-max", size]);
        backend.stats(); // its sockets stand before its memory does; who is answered knows that all does
        let files = memory_files(&backend, "memfd:zram-");
        let longest = files.iter().map(fs::Metadata::len).max().unwrap();
        assert_eq!(longest, zram_core::Zram::memory_file_bytes(bytes), "{size}");
    }
}

fn assert_comes_back(backend: &Backend) {
    // A second is the promise; the machine may be busy.
    wait_for("all memory is back", Duration::from_secs(5), || {
        (mem_used_total(backend) == 0).then_some(())
    });
    assert_eq!(arena_bytes(backend), 0);
}

#[test]
fn what_the_daemon_says_it_holds_is_what_the_kernel_has() {
    let backend = Backend::daemon("64M", &[]);
    let mut guest = Guest::new(backend.connect());
    let _queue = fill(&mut guest);
    let (told, held) = (mem_used_total(&backend), arena_bytes(&backend));
    assert!(told >= PAGES * PAGE as u64, "{told}");
    assert_eq!((held, arena_rss(&backend)), (told, told));
}

#[test]
fn memory_comes_back_while_the_guest_is_idle() {
    let backend = Backend::daemon("64M", &[]);
    let mut guest = Guest::new(backend.connect());
    let mut queue = fill(&mut guest);
    assert_eq!(queue.run(&Request::discard(&[range(0, SECTORS as u32)])).status, 0);
    assert_comes_back(&backend);
}

#[test]
fn memory_comes_back_when_the_guest_leaves_right_after_a_discard() {
    let backend = Backend::daemon("64M", &[]);
    let mut guest = Guest::new(backend.connect());
    let mut queue = fill(&mut guest);
    assert_eq!(queue.run(&Request::discard(&[range(0, SECTORS as u32)])).status, 0);
    drop((queue, guest));
    assert_comes_back(&backend);
}

/// vzramctl's answer, as JSON.
fn ctl(backend: &Backend, words: &[&str]) -> serde_json::Value {
    let control = backend.control();
    let options = ["--json", "--control", control.to_str().unwrap()];
    let output = crate::program::vzramctl([&options, words].concat());
    assert!(output.status.success(), "{output:?}");
    serde_json::from_slice(&output.stdout).unwrap()
}

#[test]
fn a_limit_that_is_raised_while_a_guest_is_at_it_lets_it_go_on() {
    let backend = Backend::daemon("64M", &["--mem-limit", "4M"]);
    let mut guest = Guest::new(backend.connect());
    let mut queue = guest.queue(0, 128);
    let noise = Dice::new().bytes(PAGE);
    let refused = (0..2048).find(|page| queue.run(&Request::write(page * 8, &noise)).status != 0);
    let page = refused.expect("4 MiB of 8 MiB of noise do not fit");
    assert_eq!(ctl(&backend, &["set", "disk", "mem-limit=16M"])["mem_limit"], 16 << 20);
    for page in page..2048 {
        queue.write(page * 8, &noise);
    }
    // Lowered below what is held, it takes nothing away, and new pages are refused at once.
    let answer = ctl(&backend, &["set", "disk", "mem-limit=4M"]);
    assert!(answer["mem_used_total"].as_u64().unwrap() >= 8 << 20, "{answer}");
    assert_eq!(queue.run(&Request::write(4096 * 8, &noise)).status, 1);
    assert_eq!(queue.read(2047 * 8, PAGE), noise);
    assert_eq!(ctl(&backend, &["set", "disk", "mem-limit=none"])["mem_limit"], 0);
    queue.write(4096 * 8, &noise);
}

#[test]
fn compaction_leaves_little_room_between_objects_and_all_content() {
    let backend = Backend::daemon("64M", &[]);
    let mut guest = Guest::new(backend.connect());
    let mut queue = guest.queue(0, 128);
    let mut dice = Dice::new();
    // Objects of many lengths, a fifth of which stay.
    let contents: Vec<Vec<u8>> = (0..4096u64)
        .map(|page| {
            let mut content = dice.bytes(PAGE);
            content[dice.below(PAGE as u64) as usize..].fill(0);
            queue.write(page * 8, &content);
            content
        })
        .collect();
    let stays = |page: usize| page.is_multiple_of(5);
    for page in (0..contents.len()).filter(|&page| !stays(page)) {
        assert_eq!(queue.run(&Request::discard(&[range(page as u64 * 8, 8)])).status, 0);
    }
    let answer = ctl(&backend, &["compact", "disk"]);
    let stats = backend.stats();
    let (held, stored) = (mem_used_total(&backend), stats["compr_data_size"].as_u64().unwrap());
    assert!(held * 10 <= stored * 12, "{held} bytes for {stored}: {answer}");
    // The daemon may have done part of it by itself before.
    assert!(stats["pages_compacted"].as_u64().unwrap() > 0, "{stats}");
    assert!(
        answer["mem_used_total"].as_u64() <= answer["mem_used_before"].as_u64(),
        "{answer}"
    );
    for (page, content) in contents.iter().enumerate().filter(|&(page, _)| stays(page)) {
        assert_eq!(&queue.read(page as u64 * 8, PAGE), content, "page {page}");
    }
}

/// A write that the limit refuses is an I/O error, leaves what was there, is counted, and said once for all of them.
#[test]
fn at_the_limit_writes_fail_and_one_line_says_so() {
    let backend = Backend::daemon("64M", &["--mem-limit", "1M"]);
    let mut guest = Guest::new(backend.connect());
    let mut queue = guest.queue(0, 128);
    let mut dice = Dice::new();
    let old = dice.bytes(PAGE);
    queue.write(0, &old);
    let statuses: Vec<_> = (0..600)
        .map(|page| queue.run(&Request::write(page % 500 * 8, &dice.bytes(PAGE))).status)
        .collect();
    let refused = statuses.iter().filter(|&&status| status == 1).count() as u64;
    assert!(refused > 100, "{refused} of 600 were refused");
    assert!(statuses.iter().all(|&status| status <= 1));
    let stats = backend.stats();
    assert_eq!(stats["refused_writes"].as_u64(), Some(refused));
    assert_eq!(stats["failed_writes"].as_u64(), Some(refused));
    assert!(stats["mem_used_max"].as_u64().unwrap() <= 1 << 20);
    let said = backend.stderr().matches("the memory limit is reached").count();
    assert_eq!(said, 1, "{}", backend.stderr());
    // As much in the place of as much goes on.
    let last = dice.bytes(PAGE);
    queue.write(0, &last);
    assert_eq!(queue.read(0, PAGE), last);
}
