//! Dictionaries from live disks and from files, made by vzramctl.

use std::fs;
use std::path::Path;
use std::process::Output;

use serde_json::Value;
use tempfile::tempdir;

use crate::program::{Daemon, control, only_line, text, vzramctl};
use crate::raw::Guest;
use crate::support::{Backend, Dice};

/// Noise with pieces in it that all pages have in common.
fn pages(count: usize) -> Vec<Vec<u8>> {
    let mut dice = Dice::seeded(7);
    let pieces: Vec<Vec<u8>> = (0..8).map(|_| dice.bytes(512)).collect();
    let page = |_| {
        let mut page = dice.bytes(4096);
        for place in page.chunks_mut(1024) {
            place[..512].copy_from_slice(&pieces[dice.below(8) as usize]);
        }
        page
    };
    (0..count).map(page).collect()
}

fn train(directory: &Path, from: &[u8], more: &[&str]) -> Output {
    let (file, output) = (directory.join("pages"), directory.join("made.dict"));
    fs::write(&file, from).unwrap();
    let words = [
        "train-dict",
        "--from",
        file.to_str().unwrap(),
        "--output",
        output.to_str().unwrap(),
    ];
    vzramctl([&words[..], more].concat())
}

#[test]
fn a_dictionary_of_a_live_disk_gains_on_pages_held_out_and_can_be_used() {
    let backend = Backend::daemon("16M", &[]);
    let mut guest = Guest::new(backend.connect());
    let mut queue = guest.queue(0, 16);
    for (number, page) in (0..).zip(&pages(800)) {
        queue.write(number * 8, page);
    }
    let directory = tempdir().unwrap();
    let path = directory.path().join("swap.dict");
    let socket = backend.control();
    let words = [
        "--control",
        socket.to_str().unwrap(),
        "train-dict",
        "disk",
        "--output",
        path.to_str().unwrap(),
    ];
    let output = vzramctl(words);
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    let said = text(&output.stdout);
    assert!(
        said.contains("from 600 pages; on 200 others it gains\n  lz4: "),
        "{said}"
    );
    assert!(
        said.contains("\n  zstd(level=1): ") || said.contains("\n  zstd(level=3): "),
        "{said}"
    );
    assert_eq!(said.matches(" % (").count(), 2, "{said}");
    let made = fs::read(&path).unwrap();
    assert!((1024..=16384).contains(&made.len()), "{}", made.len());
    assert_eq!(
        fs::read_dir(directory.path()).unwrap().count(),
        1,
        "nothing else is left behind"
    );

    // Not over a file that is there, unless told to.
    let again = vzramctl(words);
    assert_eq!(again.status.code(), Some(1));
    assert!(only_line(&again).contains("is there already; --force replaces it"));
    assert_eq!(fs::read(&path).unwrap(), made);
    let forced = vzramctl([&words[..], &["--force", "--size", "1K", "--json"]].concat());
    let report: Value = serde_json::from_slice(&forced.stdout).unwrap();
    assert_eq!(
        report["dictionary"].as_str().unwrap().len(),
        2 * fs::read(&path).unwrap().len()
    );
    assert_eq!(fs::read(&path).unwrap().len(), 1024);
    assert_eq!(report["algorithm"], "lz4");
    assert_eq!(report["gains"][0]["algorithm"], "lz4");

    let other = tempdir().unwrap();
    let algorithm = format!("zstd(dict={})", path.display());
    let _daemon = Daemon::start(other.path(), &["--algorithm", &algorithm]);
    assert!(control(other.path()).exists());
}

#[test]
fn the_largest_dictionary_comes_through_the_socket() {
    let backend = Backend::daemon("16M", &[]);
    let mut guest = Guest::new(backend.connect());
    let mut queue = guest.queue(0, 16);
    for (number, page) in (0..).zip(&pages(1000)) {
        queue.write(number * 8, page);
    }
    let directory = tempdir().unwrap();
    let path = directory.path().join("large.dict");
    let socket = backend.control();
    let words = [
        "--control",
        socket.to_str().unwrap(),
        "train-dict",
        "disk",
        "--size=64K",
        "--output",
    ];
    let output = vzramctl([&words[..], &[path.to_str().unwrap()]].concat());
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    assert_eq!(fs::read(&path).unwrap().len(), 65536);
}

#[test]
fn a_file_of_pages_needs_no_daemon_and_no_gain_is_told() {
    let directory = tempdir().unwrap();
    let output = train(directory.path(), &pages(400).concat(), &["--algorithm", "deflate"]);
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    let said = text(&output.stdout);
    assert!(
        said.contains("from 300 pages; on 100 others it gains\n  zstd("),
        "{said}"
    );
    assert_eq!(said.lines().count(), 2, "deflate takes none: {said}");
    // Noise has nothing in common.
    let noise = Dice::seeded(3).bytes(400 * 4096);
    let output = train(directory.path(), &noise, &["--force"]);
    if output.status.code() == Some(0) {
        assert_eq!(
            text(&output.stdout).matches(": do not use it for this").count(),
            2,
            "{}",
            text(&output.stdout)
        );
    } else {
        assert!(
            only_line(&output).contains("too little in common"),
            "{}",
            only_line(&output)
        );
    }
}

#[test]
fn what_cannot_be_trained_is_told_in_one_line_and_leaves_no_file() {
    let directory = tempdir().unwrap();
    let path = |name: &str| directory.path().join(name).display().to_string();
    for (from, part) in [
        (&[1_u8; 4095][..], "no file of pages of 4096 bytes"),
        (&[], "no file of pages of 4096 bytes"),
        (&[7; 40960], "0 pages that are not same-filled are too few"),
    ] {
        let output = train(directory.path(), from, &[]);
        assert_eq!(output.status.code(), Some(1), "{part}");
        assert!(only_line(&output).contains(part), "{}", only_line(&output));
        assert!(!directory.path().join("made.dict").exists());
    }
    let (missing, out) = (path("missing"), path("out"));
    for (words, code, part) in [
        (&["train-dict"][..], 2, "--output"),
        (&["train-dict", "--output", &out], 2, "DISK"),
        (&["train-dict", "disk", "--output", &out], 2, "--control PATH is needed"),
        (&["train-dict", "--from", &missing, "--output", &out], 1, "No such file"),
        (
            &["train-dict", "--from", &missing, "--output", &out, "--size", "65K"],
            2,
            "256 to 64K",
        ),
        (
            &["train-dict", "--from", &missing, "--output", &out, "--algorithm", "zip"],
            2,
            "unknown algorithm 'zip'",
        ),
        (
            &["train-dict", "--from", &missing, "--output", "/dev/null", "--force"],
            1,
            "no regular file",
        ),
    ] {
        let output = vzramctl(words);
        assert_eq!(output.status.code(), Some(code), "{words:?}: {}", text(&output.stderr));
        assert!(only_line(&output).contains(part), "{words:?}: {}", only_line(&output));
    }
    assert!(!directory.path().join("out").exists());
}
