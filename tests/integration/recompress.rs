//! Idle marks and recompression as the operator uses them: on a disk that a guest has filled.

use serde_json::Value;

use crate::program::{text, vzramctl};
use crate::raw::{Guest, PAGE};
use crate::support::{Backend, Dice, PATIENCE, wait_for};

const PAGES: u64 = 256;

/// Pages that lz4 makes half of, and zstd a quarter.
fn content(dice: &mut Dice) -> Vec<u8> {
    let mut page = dice.bytes(PAGE);
    page[..PAGE / 2]
        .iter_mut()
        .for_each(|byte| *byte = b"0123456789abcdef"[usize::from(*byte) % 16]);
    page[PAGE / 2..].fill(7);
    page
}

fn ctl(backend: &Backend, words: &[&str]) -> (Option<i32>, String, String) {
    let control = backend.control();
    let output = vzramctl([&["--control", control.to_str().unwrap()], words].concat());
    let (told, failed) = (text(&output.stdout).to_string(), text(&output.stderr).to_string());
    (output.status.code(), told, failed)
}

fn json(backend: &Backend, words: &[&str]) -> Value {
    let (code, told, failed) = ctl(backend, &[words, &["--json"]].concat());
    assert_eq!((code, failed.as_str()), (Some(0), ""), "{words:?}");
    serde_json::from_str(&told).unwrap()
}

#[test]
fn idle_pages_are_recompressed_and_read_back() {
    let backend = Backend::daemon("16M", &["--recompress-algorithm", "2:zstd(level=5)"]);
    let mut guest = Guest::new(backend.connect());
    let (mut queue, mut dice) = (guest.queue(0, 128), Dice::new());
    let pages: Vec<_> = (0..PAGES).map(|_| content(&mut dice)).collect();
    pages.iter().zip(0..).for_each(|(page, at)| queue.write(at * 8, page));
    let stats = backend.stats();
    assert_eq!(
        stats["recompress_algorithms"],
        serde_json::json!([{"priority": 2, "algorithm": "zstd(level=5)"}])
    );
    for bytes in ["worker", "shared", "decompression"] {
        assert!(
            stats["context_bytes"][bytes].as_u64().unwrap() > 4096,
            "{bytes}: {stats}"
        );
    }

    let disk = stats["name"].as_str().unwrap().to_owned();
    let run = |words: &[&str]| json(&backend, &[&words[..1], &[disk.as_str()], &words[1..]].concat());
    assert_eq!(run(&["recompress", "type=idle"])["pages_tried"], 0);
    assert_eq!(run(&["idle", "1h"])["pages_marked"], 0, "too young");
    assert_eq!(run(&["idle", "all"])["pages_marked"], PAGES);
    assert_eq!(queue.read(0, PAGE), pages[0]);
    let done = run(&["recompress", "type=idle", "max-pages=100", "algorithm=zstd"]);
    assert_eq!(
        (&done["pages_tried"], &done["pages_recompressed"]),
        (&100.into(), &100.into())
    );
    let done = run(&["recompress", "type=idle"]);
    assert_eq!(done["pages_tried"], PAGES - 101, "all but the one that was read");
    let after = backend.stats();
    let bytes = |stats: &Value| stats["compr_data_size"].as_u64().unwrap();
    assert!(
        bytes(&after) * 10 < bytes(&stats) * 8,
        "{} of {}",
        bytes(&after),
        bytes(&stats)
    );
    for (page, at) in pages.iter().zip(0..) {
        assert_eq!(&queue.read(at * 8, PAGE), page, "page {at}");
    }
    // And those that were moved together with others just when they were tried.
    let tried = run(&["recompress"])["pages_tried"].as_u64().unwrap();
    assert!((1..5).contains(&tried), "the page that was read, and {tried} in all");
    wait_for("all are recompressed", PATIENCE, || {
        (run(&["recompress"])["pages_tried"] == 0).then_some(())
    });
}

#[test]
fn mistakes_are_named_and_change_nothing() {
    let backend = Backend::daemon(
        "16M",
        &[
            "--recompress-algorithm",
            "zstd",
            "--recompress-algorithm",
            "zstd(level=9)",
        ],
    );
    for (words, part) in [
        (
            &["recompress", "disk", "type=cold"][..],
            "type \"cold\": allowed is all, idle, huge or huge_idle",
        ),
        (&["recompress", "disk", "threshold=0"], "threshold=0 is not in 1..4096"),
        (
            &["recompress", "disk", "threshold=many"],
            "threshold \"many\": allowed is 1 to 4095 bytes",
        ),
        (
            &["recompress", "disk", "priority=3"],
            "no algorithm for recompression with priority 3",
        ),
        (
            &["recompress", "disk", "algorithm=lz4hc"],
            "the disk has no such algorithm",
        ),
        (
            &["recompress", "disk", "algorithm=zstd"],
            "it may be that of priority 1 or 2: say priority",
        ),
        (
            &["recompress", "disk", "algorithm=zstd(level=9)", "priority=2"],
            "priority and algorithm say the same",
        ),
        (
            &["idle", "disk", "286661"],
            "age 286661: allowed is 0 to 286660 seconds",
        ),
        (&["idle", "disk", "4d"], "allowed is 0 to 286660 seconds"),
        (
            &["recompress", "disk", "level=3"],
            "\"level\" is no value of recompress",
        ),
    ] {
        let (code, told, failed) = ctl(&backend, words);
        assert_eq!((code, told.as_str()), (Some(1), ""), "{words:?}");
        assert!(failed.contains(part), "{words:?}: {failed}");
        assert_eq!(failed.lines().count(), 1);
    }
    for words in [
        &["idle", "disk", "x"][..],
        &["idle", "disk"],
        &["recompress", "disk", "type"],
        &["recompress"],
    ] {
        let (code, _, failed) = ctl(&backend, words);
        assert_eq!(code, Some(2), "{words:?}: {failed}");
        assert_eq!(failed.lines().count(), 1, "{failed}");
    }
    let without = Backend::daemon("16M", &[]);
    let (code, _, failed) = ctl(&without, &["recompress", "disk"]);
    assert_eq!(code, Some(1));
    assert!(
        failed.contains("the disk has no algorithm for recompression"),
        "{failed}"
    );
}
