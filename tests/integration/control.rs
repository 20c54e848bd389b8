//! The control socket, and vzramctl at its other end.

use std::io::{BufRead, BufReader, ErrorKind, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::Signal;
use serde_json::{Value, json};
use tempfile::tempdir;
use vhost_user_zram::control;
use vhost_user_zram::disk::Disk;
use vhost_user_zram::sandbox::{Mode, Sandbox};
use zram_core::{Algorithm, Codecs, Options, Page, SlotIndex, Zram};

use crate::program::{Daemon, PATIENCE, control as control_path, only_line, text, vzramctl, wait_for};

/// A client of the control socket.
struct Client(BufReader<UnixStream>);

impl Client {
    fn connect(directory: &Path) -> Client {
        let stream = UnixStream::connect(control_path(directory)).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        Client(BufReader::new(stream))
    }

    fn send(&mut self, bytes: &[u8]) {
        self.0.get_mut().write_all(bytes).unwrap();
    }

    fn receive(&mut self) -> Value {
        let mut line = String::new();
        self.0.read_line(&mut line).unwrap();
        assert!(line.ends_with('\n'), "a whole line, not {line:?}");
        serde_json::from_str(&line).unwrap()
    }

    fn ask(&mut self, line: &str) -> Value {
        self.send(format!("{line}\n").as_bytes());
        self.receive()
    }
}

/// The daemon's answer to `stats`.
pub fn stats(directory: &Path) -> Value {
    Client::connect(directory).ask(r#"{"command":"stats"}"#)
}

#[test]
fn every_question_has_its_answer() {
    let directory = tempdir().unwrap();
    let _daemon = Daemon::start(
        directory.path(),
        &["--mem-limit", "8M", "--num-queues", "3", "--algorithm", "zstd(level=3)"],
    );
    let mut client = Client::connect(directory.path());
    let version = client.ask(r#"{"command":"version"}"#);
    assert_eq!(version, json!({"version": env!("CARGO_PKG_VERSION"), "protocol": 1}));
    assert_eq!(client.ask(r#"{"command":"version","disk":"disk"}"#), version);
    let stats = client.ask(r#" { "command" : "stats" } "#);
    for (key, value) in [
        ("name", json!("disk")),
        ("disksize", json!(16 << 20)),
        ("algorithm", json!("zstd(level=3)")),
        ("mem_limit", json!(8 << 20)),
        ("num_queues", json!(3)),
        ("queues_running", json!(0)),
        ("frontend", json!(null)),
        ("read_only", json!(false)),
    ] {
        assert_eq!(stats[key], value, "{key}");
    }
    let numbers = |line: &Value| -> Vec<u64> {
        line.as_str()
            .unwrap()
            .split_whitespace()
            .map(|number| number.parse().unwrap())
            .collect()
    };
    let of = |keys: &[&str]| -> Vec<u64> { keys.iter().map(|key| stats[key].as_u64().unwrap()).collect() };
    let mm_stat = client.ask(r#"{"command":"mm-stat"}"#);
    assert_eq!(
        numbers(&mm_stat["mm_stat"]),
        of(&[
            "orig_data_size",
            "compr_data_size",
            "mem_used_total",
            "mem_limit",
            "mem_used_max",
            "same_pages",
            "pages_compacted",
            "huge_pages",
            "huge_pages_since",
        ])
    );
    let io_stat = client.ask(r#"{"command":"io-stat"}"#);
    assert_eq!(
        numbers(&io_stat["io_stat"]),
        of(&["failed_reads", "failed_writes", "invalid_io", "notify_free"])
    );
}

#[test]
fn what_is_wrong_is_answered_and_the_connection_goes_on() {
    let directory = tempdir().unwrap();
    let _daemon = Daemon::start(directory.path(), &[]);
    let mut client = Client::connect(directory.path());
    let long = "x".repeat(4097);
    let longer = "x".repeat(100_000);
    for (line, kind) in [
        ("", "bad-request"),
        ("stats", "bad-request"),
        ("{", "bad-request"),
        ("[]", "bad-request"),
        (r#"{"command":7}"#, "bad-request"),
        (r#"{"command":"stats","more":1}"#, "bad-request"),
        ("{\"command\":\"st\u{0}ats\"}", "bad-request"),
        (r#"{"command":"stats","values":{}}"#, "bad-request"),
        (r#"{"command":"set"}"#, "bad-request"),
        (r#"{"command":"set","values":[]}"#, "bad-request"),
        (r#"{"command":"train-dict"}"#, "no-dictionary"),
        (r#"{"command":"train-dict","values":{"size":255}}"#, "bad-value"),
        (r#"{"command":"train-dict","values":{"size":65537}}"#, "bad-value"),
        (r#"{"command":"train-dict","values":{"output":"x"}}"#, "unknown-key"),
        (r#"{"command":"stats","disk":"other"}"#, "unknown-disk"),
        (r#"{"command":"reset"}"#, "unknown-command"),
        (r#"{"command":""}"#, "unknown-command"),
        (&long, "line-too-long"),
        (&longer, "line-too-long"),
    ] {
        let answer = client.ask(line);
        assert_eq!(answer["error"]["kind"], kind, "{line}");
        assert!(answer["error"]["message"].as_str().unwrap().len() > 10);
        assert_eq!(client.ask(r#"{"command":"version"}"#)["protocol"], 1, "after {line}");
    }
    client.send(b"{\"command\":\"st\xff\"}\n");
    assert_eq!(client.receive()["error"]["kind"], "bad-request");
    // Requests may come many at once or in pieces.
    client.send(b"{\"command\":\"version\"}\n{\"command\":\"io-stat\"}\n{\"comm");
    assert_eq!(client.receive()["protocol"], 1);
    assert!(client.receive()["io_stat"].is_string());
    client.send(b"and\":\"version\"}\n");
    assert_eq!(client.receive()["protocol"], 1);
    // The last line need not end.
    client.send(b"{\"command\":\"version\"}");
    client.0.get_ref().shutdown(std::net::Shutdown::Write).unwrap();
    assert_eq!(client.receive()["protocol"], 1);
    assert_eq!(client.0.read_line(&mut String::new()).unwrap(), 0);
}

#[test]
fn a_line_without_end_closes_its_connection_only() {
    let directory = tempdir().unwrap();
    let _daemon = Daemon::start(directory.path(), &[]);
    let mut endless = UnixStream::connect(control_path(directory.path())).unwrap();
    endless.set_write_timeout(Some(PATIENCE)).unwrap();
    let block = [b'x'; 65536];
    let sent = (0..64).take_while(|_| endless.write_all(&block).is_ok()).count();
    assert!(sent < 64, "4 MiB were taken");
    assert_eq!(stats(directory.path())["name"], "disk");
}

#[test]
fn slow_clients_hold_up_nobody() {
    let directory = tempdir().unwrap();
    let mut daemon = Daemon::start(directory.path(), &[]);
    // One says nothing, one says half a line, one asks and asks and never reads.
    let _silent = Client::connect(directory.path());
    let mut halting = Client::connect(directory.path());
    halting.send(b"{\"comm");
    let mut deaf = UnixStream::connect(control_path(directory.path())).unwrap();
    deaf.set_nonblocking(true).unwrap();
    let request = b"{\"command\":\"stats\"}\n".repeat(1000);
    wait_for("the deaf client's pipes are full", || match deaf.write(&request) {
        Err(error) if error.kind() == ErrorKind::WouldBlock => Some(()),
        result => result.map(|_| None).unwrap(),
    });
    let start = Instant::now();
    for _ in 0..10 {
        assert_eq!(stats(directory.path())["name"], "disk");
    }
    assert!(start.elapsed() < Duration::from_secs(1), "{:?}", start.elapsed());
    let (status, took) = daemon.end(Signal::TERM);
    assert_eq!(status.code(), Some(0));
    assert!(took < Duration::from_secs(1), "{took:?}");
}

#[test]
fn too_many_clients_are_turned_away_until_some_leave() {
    let directory = tempdir().unwrap();
    let _daemon = Daemon::start(directory.path(), &[]);
    let mut clients: Vec<Client> = (0..32).map(|_| Client::connect(directory.path())).collect();
    for client in &mut clients {
        assert_eq!(client.ask(r#"{"command":"version"}"#)["protocol"], 1);
    }
    assert_eq!(
        Client::connect(directory.path()).receive()["error"]["kind"],
        "too-many-clients"
    );
    // Often enough that the daemon hangs up before vzramctl has asked: it must hear the refusal all the same.
    for _ in 0..50 {
        let refused = ctl(directory.path(), &[]);
        assert_eq!(refused.status.code(), Some(1));
        assert!(
            only_line(&refused).contains("at most 32 clients"),
            "{}",
            only_line(&refused)
        );
    }
    drop(clients);
    wait_for("a free place", || {
        (vzramctl(["--control".as_ref(), control_path(directory.path()).as_os_str()])
            .status
            .code()
            == Some(0))
        .then_some(())
    });
}

#[test]
fn a_setting_that_is_wrong_changes_nothing() {
    let directory = tempdir().unwrap();
    let _daemon = Daemon::start(directory.path(), &["--mem-limit", "8M"]);
    let mut client = Client::connect(directory.path());
    for (values, kind, part) in [
        (r#"{}"#, "bad-value", "mem-limit"),
        (r#"{"mem-limti":1048576}"#, "unknown-key", "mem-limti"),
        (r#"{"mem_limit":1048576}"#, "unknown-key", "mem-limit"),
        (r#"{"mem-limit":0}"#, "bad-value", "256K to 16T, or none"),
        (r#"{"mem-limit":262143}"#, "bad-value", "262143"),
        (r#"{"mem-limit":17592186044417}"#, "bad-value", "256K to 16T"),
        (r#"{"mem-limit":-1}"#, "bad-value", "-1"),
        (r#"{"mem-limit":1e6}"#, "bad-value", "256K to 16T"),
        (r#"{"mem-limit":18446744073709551616}"#, "bad-value", "256K to 16T"),
        (r#"{"mem-limit":"1G"}"#, "bad-value", "number of bytes"),
        (r#"{"mem-limit":true}"#, "bad-value", "number of bytes"),
        (r#"{"mem-limit":[1048576]}"#, "bad-value", "number of bytes"),
        (r#"{"mem-used-max":1}"#, "bad-value", "allowed is 0"),
        (r#"{"mem-used-max":null}"#, "bad-value", "allowed is 0"),
        (
            r#"{"mem-limit":1048576,"mem-used-max":7}"#,
            "bad-value",
            "mem-used-max 7",
        ),
        (r#"{"mem-limit":1048576,"zz":1}"#, "unknown-key", "zz"),
    ] {
        let answer = client.ask(&format!("{{\"command\":\"set\",\"values\":{values}}}"));
        assert_eq!(answer["error"]["kind"], kind, "{values}: {answer}");
        let message = answer["error"]["message"].as_str().unwrap();
        assert!(message.contains(part), "{values}: no {part:?} in: {message}");
        assert_eq!(stats(directory.path())["mem_limit"], 8 << 20, "{values}");
    }
}

#[test]
fn settings_change_while_the_disk_is_served() {
    let directory = tempdir().unwrap();
    let disk = filled_disk(directory.path());
    let held = disk.stats().mem_used_total;
    let said = |values: &[&str]| {
        let output = ctl(directory.path(), &[&["set", "filled"], values].concat());
        assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
        text(&output.stdout)
    };
    let human = vhost_user_zram::size::human(held);
    assert_eq!(
        said(&["mem-limit=2GiB"]),
        format!(
            "filled: mem-limit=2G mem-used-max={human}, holds {human}\n\
             filled: iops-limit=none bandwidth-limit=none\n"
        )
    );
    assert_eq!(disk.stats().mem_limit, 2 << 30);
    assert!(said(&["mem-limit=256k"]).contains("more than the limit: new pages are refused"));
    assert_eq!(disk.stats().mem_limit, 256 << 10);
    assert!(said(&["mem-limit=none", "mem-used-max=0"]).starts_with("filled: mem-limit=none "));
    assert_eq!(disk.stats().mem_limit, 0);
    // zram's mem_used_max: the most since it was set back.
    disk.zram().worker().unwrap().discard(0..16384);
    wait_for("memory comes back", || {
        (disk.stats().mem_used_total < held).then_some(())
    });
    assert_eq!(disk.stats().mem_used_max, held);
    let json: Value = serde_json::from_str(&said(&["mem-used-max=0", "--json"])).unwrap();
    assert!(json["mem_used_max"].as_u64().unwrap() < held, "{json}");
    assert_eq!((&json["name"], &json["mem_limit"]), (&json!("filled"), &json!(0)));
}

#[test]
fn what_vzramctl_cannot_set_is_told_in_one_line() {
    let directory = tempdir().unwrap();
    let _daemon = Daemon::start(directory.path(), &[]);
    for (words, code, part) in [
        (&["set"][..], 2, "DISK"),
        (&["set", "disk"], 2, "KEY=VALUE"),
        (&["set", "disk", "mem-limit"], 2, "KEY=VALUE, such as mem-limit=1G"),
        (&["set", "disk", "mem-limit=1GB"], 2, "K, M, G, T"),
        (&["set", "disk", "mem-limit="], 2, "a size is a whole number"),
        (&["set", "disk", "mem-limit=1K"], 1, "mem-limit 1024: allowed is"),
        (&["set", "disk", "speed=1K"], 1, "\"speed\" cannot be set; mem-limit"),
        (
            &["set", "dusk", "mem-limit=1M"],
            1,
            "\"dusk\" is not here; the disk here is \"disk\"",
        ),
        (&["compact"], 2, "DISK"),
        (&["compact", "dusk"], 1, "dusk"),
        (
            &["recompress", "disk", "type=idle", "type=all"],
            2,
            "type is given twice",
        ),
        (
            &["set", "disk", "mem-limit=1M", "mem-limit=2M"],
            2,
            "mem-limit is given twice",
        ),
        (&["contexts", "dusk"], 1, "dusk"),
        (&["arena"], 2, "DISK"),
        (&["arena", "dusk"], 1, "dusk"),
    ] {
        let output = ctl(directory.path(), words);
        assert_eq!(output.status.code(), Some(code), "{words:?}");
        assert!(only_line(&output).contains(part), "{words:?}: {}", only_line(&output));
        assert_eq!(text(&output.stdout), "", "{words:?}");
    }
    assert_eq!(stats(directory.path())["mem_limit"], 0);
}

#[test]
fn a_disk_is_found_by_its_name_among_several() {
    let (one, two) = (tempdir().unwrap(), tempdir().unwrap());
    let _first = Daemon::start(one.path(), &["--serial", "first"]);
    let _second = Daemon::start(two.path(), &["--serial", "second"]);
    let paths = [control_path(one.path()), control_path(two.path())].map(|path| path.to_str().unwrap().to_string());
    let run = |words: &[&str]| vzramctl([&["--control", &paths[0], "--control", &paths[1]], words].concat());
    let output = run(&["set", "second", "mem-limit=1M"]);
    assert_eq!(output.status.code(), Some(0));
    assert_eq!(
        text(&output.stdout)
            .lines()
            .filter(|line| line.starts_with("second: "))
            .count(),
        2
    );
    assert_eq!(text(&output.stderr), "");
    assert_eq!(
        (&stats(one.path())["mem_limit"], &stats(two.path())["mem_limit"]),
        (&json!(0), &json!(1 << 20))
    );
    let output = run(&["arena", "third"]);
    assert_eq!(output.status.code(), Some(1));
    let said = text(&output.stderr);
    assert!(
        said.contains("the disk here is \"first\"") && said.contains("the disk here is \"second\""),
        "{said}"
    );
}

#[test]
fn the_arena_is_shown_as_text_and_as_json() {
    let directory = tempdir().unwrap();
    let disk = filled_disk(directory.path());
    let json: Value = serde_json::from_slice(&ctl(directory.path(), &["arena", "filled", "--json"]).stdout).unwrap();
    let number = |value: &Value| value.as_u64().unwrap();
    let segment = number(&json["segment_bytes"]);
    let sum = |list: &str, key: &str| -> u64 {
        json[list]
            .as_array()
            .unwrap()
            .iter()
            .map(|each| number(&each[key]))
            .sum()
    };
    let in_use = number(&json["segments_in_use"]);
    let held = in_use + number(&json["segments_empty"]);
    assert_eq!(held * segment, disk.stats().mem_used_total);
    assert_eq!(
        json["live_shares"].as_array().unwrap().iter().map(number).sum::<u64>(),
        in_use
    );
    assert_eq!(sum("heaps", "segments"), in_use);
    assert_eq!(
        sum("heaps", "live_bytes") + sum("heaps", "hole_bytes"),
        in_use * segment
    );
    assert_eq!(sum("holes", "bytes"), sum("heaps", "hole_bytes"));
    assert!(sum("heaps", "live_bytes") >= disk.stats().compr_data_size);
    assert_eq!(json["busy_heaps"], 0);
    let picture = text(&ctl(directory.path(), &["arena", "filled"]).stdout);
    assert!(picture.starts_with("filled\n"), "{picture}");
    for part in [
        &format!("{in_use} segments of 64K in use"),
        "LIVE SHARE",
        "HOLES FROM",
        "HEAP",
        "###",
    ] {
        assert!(picture.contains(part), "no {part:?} in:\n{picture}");
    }
    assert!(picture.lines().all(|line| line.len() <= 80), "{picture}");
}

/// A control socket that answers each connection's first line with `answer`, as a daemon of another make might.
fn impostor(directory: &Path, answer: &'static str) {
    let listener = UnixListener::bind(control_path(directory)).unwrap();
    thread::spawn(move || {
        for mut stream in listener.incoming().flatten() {
            let _ = BufReader::new(&stream).read_line(&mut String::new());
            let _ = stream.write_all(answer.as_bytes());
        }
    });
}

/// A disk in the middle of its life.
const BUSY: &str = concat!(
    r#"{"name":"build-cache","disksize":4294967296,"algorithm":"zstd(level=3)","recompress_algorithms":[],"context_bytes":{"worker":81944,"shared":492848,"decompression":300234},"read_only":false,"#,
    r#""orig_data_size":1363148801,"compr_data_size":419430402,"mem_used_total":432013313,"mem_limit":1073741824,"#,
    r#""mem_used_max":432013314,"table_bytes":3145728,"total_bytes":435159041,"same_pages":5,"pages_compacted":6,"#,
    r#""huge_pages":7,"huge_pages_since":8,"failed_reads":9,"failed_writes":10,"invalid_io":11,"notify_free":12,"#,
    r#""refused_writes":13,"contexts_own":14,"contexts_borrowed":15,"contexts_waited":16,"num_queues":64,"queues_running":4,"frontend":{"pid":1234567,"command":"qemu-system-x86"},"#,
    r#""connections_total":1,"refused_connections":0,"failed_connections":0,"requests":{"reads":1,"writes":2,"#,
    r#""flushes":0,"get_ids":0,"discards":0,"write_zeroes":0,"unsupported":0,"io_errors":0,"sectors_read":0,"#,
    r#""sectors_written":0,"bad_chains":0,"broken_rings":0,"panics":0,"calls":0,"calls_lost":0},"sandbox":{"mode":"kill","system_calls":true,"files":"all"},"new_field":1}"#,
    "\n"
);

fn ctl(directory: &Path, more: &[&str]) -> std::process::Output {
    let path = control_path(directory);
    vzramctl([&["--control", path.to_str().unwrap()], more].concat())
}

#[test]
fn the_table_fits_80_columns_and_says_what_it_should() {
    let directory = tempdir().unwrap();
    impostor(directory.path(), BUSY);
    let output = ctl(directory.path(), &[]);
    assert_eq!(output.status.code(), Some(0));
    assert_eq!(
        text(&output.stdout),
        "NAME        SIZE DATA COMPR RATIO TOTAL LIMIT ALGORITHM         VMM\n\
         build-cache   4G 1.3G  400M  3.25  415M    1G zstd(level=3) 1234567\n"
    );
}

#[test]
fn the_widest_table_fits_80_columns() {
    let directory = tempdir().unwrap();
    let mut disk: Value = serde_json::from_str(BUSY).unwrap();
    disk["name"] = "n".repeat(20).into();
    for key in ["disksize", "orig_data_size", "total_bytes", "mem_limit"] {
        disk[key] = ((1023u64 << 20) + (1 << 10)).into();
    }
    let algorithms = [
        ("zstd(level=22)", "zstd(level=22)"),
        ("lz4hc(level=12)", "lz4hc(level=12)"),
        ("deflate(level=9)", "deflate(level.."),
        ("zstd(level=3,dict=/a/b)", "zstd(level=3,.."),
        ("lz4", "lz4"),
    ];
    let sizes = [1u64, 1 << 15, 1 << 20, 1 << 23, 1023 << 20];
    for (compressed, (algorithm, shown)) in sizes.into_iter().zip(algorithms) {
        disk["compr_data_size"] = compressed.into();
        disk["algorithm"] = algorithm.into();
        let directory = directory.path().join(compressed.to_string());
        std::fs::create_dir(&directory).unwrap();
        impostor(&directory, Box::leak(format!("{disk}\n").into_boxed_str()));
        let table = text(&ctl(&directory, &[]).stdout);
        assert_eq!(table.lines().count(), 2);
        assert!(table.lines().all(|line| line.len() <= 80), "{table}");
        assert!(table.contains(&format!(" {shown} ")), "{table}");
        assert!(text(&ctl(&directory, &["--bytes"]).stdout).contains(algorithm));
    }
}

#[test]
fn the_memory_of_contexts_is_shown() {
    let directory = tempdir().unwrap();
    impostor(directory.path(), BUSY);
    assert_eq!(
        text(&ctl(directory.path(), &["contexts", "build-cache"]).stdout),
        "build-cache
  compression   320K  4 queues run, 80K each
  shared        481K  0 algorithms for recompression, and all dictionaries
  decompression 293K  shared by all queues
  all           1.1M  beside what TOTAL counts
  page reads that took their own decompression context: 14
  another, for theirs was in use: 15
  none at first, and waited, which should stay 0: 16
"
    );
    assert!(text(&ctl(directory.path(), &["contexts", "build-cache", "-b"]).stdout).contains(" 327776  4 queues"));
    assert_eq!(
        text(&ctl(directory.path(), &["contexts", "build-cache", "--json"]).stdout),
        BUSY
    );
}

/// The table as (column, value) pairs.
fn cells(table: &str) -> Vec<(String, String)> {
    let mut lines = table.lines().map(|line| line.split_whitespace().map(str::to_string));
    let pairs = lines.next().unwrap().zip(lines.next().unwrap()).collect();
    assert!(lines.next().is_none(), "one disk");
    pairs
}

fn assert_table_is_json(table: &str, stats: &Value) {
    let cells = cells(table);
    let number = |key: &str| stats[key].as_u64().unwrap();
    let ratio = match number("compr_data_size") {
        0 => "-".to_string(),
        compressed => format!("{:.2}", number("orig_data_size") as f64 / compressed as f64),
    };
    let expected = [
        ("NAME", stats["name"].as_str().unwrap().to_string()),
        ("SIZE", number("disksize").to_string()),
        ("DATA", number("orig_data_size").to_string()),
        ("COMPR", number("compr_data_size").to_string()),
        ("RATIO", ratio),
        ("TOTAL", number("total_bytes").to_string()),
        ("LIMIT", number("mem_limit").to_string()),
        ("ALGORITHM", stats["algorithm"].as_str().unwrap().to_string()),
        (
            "VMM",
            stats["frontend"]["pid"]
                .as_i64()
                .map_or("-".into(), |pid| pid.to_string()),
        ),
    ];
    let expected: Vec<(String, String)> = expected
        .into_iter()
        .map(|(key, value)| (key.to_string(), value))
        .collect();
    assert_eq!(cells, expected);
}

#[test]
fn the_table_in_bytes_and_the_json_are_the_same_numbers() {
    let directory = tempdir().unwrap();
    impostor(directory.path(), BUSY);
    let json = text(&ctl(directory.path(), &["--json"]).stdout);
    assert_eq!(json, BUSY, "as it came");
    let table = text(&ctl(directory.path(), &["--bytes"]).stdout);
    assert_table_is_json(&table, &serde_json::from_str(&json).unwrap());
}

/// A disk in this process that holds something of every kind, with its control socket.
fn filled_disk(directory: &Path) -> Arc<Disk> {
    let zram = Zram::create(&Options {
        name: "filled".into(),
        size_bytes: 64 << 20,
        size_bytes_max: None,
        mem_limit_bytes: Some(1 << 20),
        codecs: Codecs::alone(&Algorithm::default()).unwrap(),
    })
    .unwrap();
    let mut worker = zram.worker().unwrap();
    let mut page = Page::zeroed();
    // Text shrinks, one byte over and over is same-filled, and noise fills the rest up to the limit.
    let mut noise = 1u64;
    for slot in 0..600 {
        for (index, byte) in page.iter_mut().enumerate() {
            noise = noise
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            *byte = match slot {
                0..100 => b"all work and no play "[index % 21],
                100..200 => 7,
                _ => (noise >> 56) as u8,
            };
        }
        let _ = worker.write_page(SlotIndex(slot), &page);
    }
    worker.discard(0..10);
    worker.end_batch();
    let no_sandbox = Sandbox::prepare(Mode::Off, &[]).unwrap();
    let disk = Disk::new("filled".into(), 64, false, zram.clone(), &no_sandbox).unwrap();
    let disk = Arc::new(disk);
    let listener = UnixListener::bind(control_path(directory)).unwrap();
    control::serve(listener, disk.clone(), no_sandbox).unwrap();
    disk
}

#[test]
fn a_disk_with_data_shows_the_same_numbers_everywhere() {
    let directory = tempdir().unwrap();
    let disk = filled_disk(directory.path());
    let table = text(&ctl(directory.path(), &["--bytes"]).stdout);
    let json = text(&ctl(directory.path(), &["--json"]).stdout);
    let stats: Value = serde_json::from_str(&json).unwrap();
    assert_table_is_json(&table, &stats);
    assert_eq!(
        text(&ctl(directory.path(), &["mm-stat"]).stdout),
        disk.zram().stats().mm_stat()
    );
    for key in [
        "orig_data_size",
        "compr_data_size",
        "mem_used_total",
        "table_bytes",
        "refused_writes",
        "huge_pages",
    ] {
        assert_ne!(stats[key], 0, "{key}");
    }
    assert_eq!(stats["same_pages"], 100);
    assert_eq!(stats["notify_free"], 10);
    let number = |key: &str| stats[key].as_u64().unwrap();
    assert_eq!(number("total_bytes"), number("mem_used_total") + number("table_bytes"));
    assert!(number("mem_used_max") <= number("mem_limit"));
}

#[test]
fn a_new_disk_has_a_table_too() {
    let directory = tempdir().unwrap();
    let _daemon = Daemon::start(directory.path(), &[]);
    let table = text(&ctl(directory.path(), &["-b"]).stdout);
    let json = text(&ctl(directory.path(), &["--json"]).stdout);
    assert_table_is_json(&table, &serde_json::from_str(&json).unwrap());
    let human = cells(&text(&ctl(directory.path(), &[]).stdout));
    for (column, value) in [
        ("SIZE", "16M"),
        ("DATA", "0B"),
        ("RATIO", "-"),
        ("LIMIT", "-"),
        ("VMM", "-"),
    ] {
        assert!(
            human.contains(&(column.to_string(), value.to_string())),
            "{column}: {human:?}"
        );
    }
}

#[test]
fn stat_lines_are_printed_as_they_are() {
    let directory = tempdir().unwrap();
    let _daemon = Daemon::start(directory.path(), &[]);
    let mut client = Client::connect(directory.path());
    for (command, key, columns) in [("mm-stat", "mm_stat", 9), ("io-stat", "io_stat", 4)] {
        let answer = client.ask(&format!("{{\"command\":\"{command}\"}}"));
        let output = ctl(directory.path(), &[command]);
        assert_eq!(text(&output.stdout), answer[key].as_str().unwrap());
        assert_eq!(text(&output.stdout).split_whitespace().count(), columns);
        let json: Value = serde_json::from_slice(&ctl(directory.path(), &[command, "--json"]).stdout).unwrap();
        assert_eq!(json, answer);
    }
}

#[test]
fn several_disks_are_several_rows() {
    let (one, two) = (tempdir().unwrap(), tempdir().unwrap());
    let _first = Daemon::start(one.path(), &["--serial", "first"]);
    let _second = Daemon::start(two.path(), &["--serial", "second"]);
    let paths = [control_path(one.path()), control_path(two.path())].map(|path| path.to_str().unwrap().to_string());
    let output = vzramctl(["--control", &paths[0], "--control", &paths[1]]);
    let table = text(&output.stdout);
    assert_eq!(table.lines().count(), 3);
    assert!(
        table.lines().nth(1).unwrap().starts_with("first ") && table.lines().nth(2).unwrap().starts_with("second ")
    );
    // One that is missing does not hide the others.
    let output = vzramctl(["--control", "/no-such-socket", "--control", &paths[1]]);
    assert_eq!(output.status.code(), Some(6));
    assert!(text(&output.stdout).contains("second"));
    assert!(only_line(&output).contains("/no-such-socket"));
}

#[test]
fn exit_codes_say_what_went_wrong_in_one_line() {
    let missing = tempdir().unwrap();
    let dead = tempdir().unwrap();
    drop(UnixListener::bind(control_path(dead.path())).unwrap());
    let mute = tempdir().unwrap();
    impostor(mute.path(), "");
    let refusing = tempdir().unwrap();
    impostor(
        refusing.path(),
        "{\"error\":{\"kind\":\"x\",\"message\":\"not today\"}}\n",
    );
    let babbling = tempdir().unwrap();
    impostor(babbling.path(), "{\"name\":7}\n");
    for (directory, code, part) in [
        (&missing, 6, "no daemon can be reached"),
        (&dead, 6, "no daemon can be reached"),
        (&mute, 6, "closed"),
        (&refusing, 1, "not today"),
        (&babbling, 1, "makes no sense"),
    ] {
        let output = ctl(directory.path(), &[]);
        assert_eq!(output.status.code(), Some(code), "{part}");
        assert!(
            only_line(&output).starts_with("vzramctl: ") && only_line(&output).contains(part),
            "{}",
            only_line(&output)
        );
        assert_eq!(text(&output.stdout), "");
    }
    for wrong in [
        &[][..],
        &["--control"],
        &["bogus"],
        &["--bogus"],
        &["--control", "x", "--bytes", "mm-stat", "y"],
    ] {
        let output = vzramctl(wrong);
        assert_eq!(output.status.code(), Some(2), "{wrong:?}");
        only_line(&output);
    }
}

#[test]
fn a_daemon_that_does_not_answer_is_unreachable() {
    let directory = tempdir().unwrap();
    let daemon = Daemon::start(directory.path(), &[]);
    daemon.signal(Signal::STOP);
    let output = ctl(directory.path(), &[]);
    assert_eq!(output.status.code(), Some(6));
    assert!(
        only_line(&output).contains("no answer within 5 seconds"),
        "{}",
        only_line(&output)
    );
}

#[test]
fn a_log_that_nobody_reads_holds_nothing_up() {
    let dir = tempfile::tempdir().unwrap();
    let (socket, control) = (dir.path().join("d.sock"), dir.path().join("d.ctl"));
    let (reader, mut writer) = std::io::pipe().unwrap();
    let child = std::process::Command::new(crate::program::DAEMON)
        .args(["--size", "16M", "--log-level", "debug", "--socket-path"])
        .arg(&socket)
        .arg("--control-path")
        .arg(&control)
        .stdout(std::process::Stdio::null())
        .stderr(writer.try_clone().unwrap())
        .spawn()
        .unwrap();
    let mut child = Killed(child);
    crate::program::wait_for("the daemon listens", || UnixStream::connect(&control).ok());
    rustix::fs::fcntl_setfl(&writer, rustix::fs::OFlags::NONBLOCK).unwrap();
    while writer.write(&[b'x'; 4096]).is_ok() {}
    rustix::fs::fcntl_setfl(&writer, rustix::fs::OFlags::empty()).unwrap();
    for _ in 0..20 {
        drop(UnixStream::connect(&socket).unwrap()); // each is logged
    }
    assert!(
        crate::program::vzramctl([std::ffi::OsStr::new("--control"), control.as_os_str()])
            .status
            .success()
    );
    let pid = rustix::process::Pid::from_child(&child.0);
    rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
    let status = crate::program::wait_for("the daemon ends", || child.0.try_wait().unwrap());
    assert!(status.success(), "{status}");
    drop(reader);
}

/// Kills the child when the test fails before its end.
struct Killed(std::process::Child);

impl Drop for Killed {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Rows of requests, right, nearly right and wrong: each line is answered by one object on one line, what is refused
/// changes nothing, and the disk keeps what it holds.
#[test]
fn whatever_is_asked_is_answered_in_one_line_and_what_is_refused_changes_nothing() {
    let directory = tempdir().unwrap();
    let disk = filled_disk(directory.path());
    let mut dice = crate::support::Dice::new();
    let settings = |disk: &Disk| {
        let stats = disk.stats();
        (
            stats.mem_limit,
            stats.disksize,
            stats.iops_limit,
            stats.bandwidth_limit,
            stats.orig_data_size,
        )
    };
    let commands = [
        "version",
        "stats",
        "mm-stat",
        "io-stat",
        "arena",
        "compact",
        "set",
        "resize",
        "idle",
        "recompress",
        "train-dict",
        "reset",
        "",
    ];
    let keys = [
        "mem-limit",
        "mem-used-max",
        "iops-limit",
        "limit-burst-ms",
        "size",
        "age",
        "type",
        "threshold",
        "max-pages",
        "priority",
        "algorithm",
        "level",
        "",
    ];
    let values = [
        "0",
        "1",
        "null",
        "true",
        "-1",
        "1e3",
        "4096",
        "262144",
        "67108864",
        "18446744073709551616",
        "\"all\"",
        "\"1G\"",
        "[1]",
        "{}",
        "\"\\ud800\"",
    ];
    let mut refused = 0;
    for _ in 0..3000 {
        let mut line = format!("{{\"command\":\"{}\"", dice.pick(&commands));
        if dice.chance(3) {
            line += &format!(",\"disk\":\"{}\"", dice.pick(&["filled", "other", ""]));
        }
        if !dice.chance(3) {
            let pairs: Vec<String> = (0..dice.below(3))
                .map(|_| format!("\"{}\":{}", dice.pick(&keys), dice.pick(&values)))
                .collect();
            line += &format!(",\"values\":{{{}}}", pairs.join(","));
        }
        line += "}";
        let mut line = line.into_bytes();
        if dice.chance(6) {
            let at = dice.below(line.len() as u64) as usize;
            line[at] = dice.next() as u8;
        }
        let before = settings(&disk);
        let answer = vhost_user_zram::command::answer(&line, &disk);
        let said = String::from_utf8_lossy(&line);
        assert_eq!(answer.iter().filter(|&&byte| byte == b'\n').count(), 1, "{said}");
        assert_eq!(answer.last(), Some(&b'\n'), "{said}");
        let answer: Value = serde_json::from_slice(&answer).unwrap();
        assert!(answer.is_object(), "{said}");
        if answer.get("error").is_some() {
            refused += 1;
            assert_eq!(settings(&disk), before, "{said}");
        }
        assert_eq!(settings(&disk).4, before.4, "{said}: the content");
    }
    assert!((500..2900).contains(&refused), "{refused}");
}
