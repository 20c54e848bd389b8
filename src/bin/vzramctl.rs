//! `vzramctl`: asks a `vhost-user-zram` for its numbers and shows them as `zramctl` would; changes settings while it runs.
#![forbid(unsafe_code)]

use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use clap::error::ErrorKind;
use clap::{Parser, Subcommand};
use comfy_table::{CellAlignment, Table, presets};
use serde::de::DeserializeOwned;
use serde_json::Value;
use vhost_user_zram::config::one_line;
use vhost_user_zram::dictionary_file;
use vhost_user_zram::picture;
use vhost_user_zram::protocol::{
    Arena, CompactReport, DictionaryReport, DiskStats, IdleReport, IoStat, MmStat, RecompressReport, Refusal, Request,
    ResizeReport, Settings,
};
use vhost_user_zram::size::{self, human};
use vhost_user_zram::training::from_hex;
use zram_core::{Algorithm, DICTIONARY_BYTES_MAX, DICTIONARY_BYTES_MIN, DISK_BYTES_MAX};

/// A daemon answers in microseconds; one that takes this long is stuck or stopped.
const PATIENCE: Duration = Duration::from_secs(5);
/// Compaction walks through the whole slot table, with pauses.
const PATIENCE_COMPACT: Duration = Duration::from_secs(600);
/// Recompression takes some 50 microseconds a page, 4 hours for a TiB.
const PATIENCE_RECOMPRESS: Duration = Duration::from_secs(24 * 3600);
/// Far more than any answer has.
const ANSWER_BYTES_MAX: u64 = 1 << 20;

/// Shows what the disks of vhost-user-zram hold and cost, and changes their settings
#[derive(Parser)]
#[command(name = "vzramctl", version, max_term_width = 80, after_help = SHORT_HELP, after_long_help = LONG_HELP)]
struct Arguments {
    /// Control socket of a daemon (its --control-path). May be given several times
    #[arg(long, value_name = "PATH", global = true)]
    control: Vec<PathBuf>,

    /// Print the daemon's answer as it came: one JSON object a line
    #[arg(long, global = true)]
    json: bool,

    /// Print sizes in bytes: the same numbers as --json
    #[arg(short, long, global = true)]
    bytes: bool,

    #[command(subcommand)]
    command: Option<Command>,
}

impl Arguments {
    fn needs_no_daemon(&self) -> bool {
        matches!(self.command, Some(Command::TrainDict { from: Some(_), .. }))
    }
}

#[derive(Subcommand, Clone)]
enum Command {
    /// Change settings of a disk, at once and until its daemon ends
    ///
    /// mem-limit=SIZE: the most host memory the disk's data may take, 256K to 16T, or none. In bytes, or with a unit: K,
    /// M, G, T or KiB, MiB, GiB, TiB, powers of 1024. A limit below what the disk holds takes nothing away: new pages are
    /// refused until it holds less.
    ///
    /// iops-limit=N, bandwidth-limit=SIZE: the most reads and writes, and the most bytes of them, a second, from 1, or
    /// none. limit-burst-ms=N: how much of both may be saved up, in milliseconds' worth, 0 to 60000.
    ///
    /// mem-used-max=0: begin the maximum of mm-stat anew at what is held now.
    ///
    /// If one of several settings is wrong, none is changed.
    Set {
        /// The disk's name, as in column NAME
        #[arg(value_name = "DISK")]
        disk: String,
        /// mem-limit=SIZE, iops-limit=N, bandwidth-limit=SIZE, limit-burst-ms=N or mem-used-max=0
        #[arg(value_name = "KEY=VALUE", required = true, value_parser = assignment)]
        values: Vec<Assignment>,
    },
    /// Make a disk larger or smaller while it is used
    ///
    /// SIZE is written like --size of the daemon; up to its --size-max. A disk gets smaller only if nothing but zeroes lies
    /// behind the new end: have the guest shrink what is on it and discard the rest (blkdiscard, fstrim). A guest under QEMU
    /// is told; where the VMM cannot be told that is said, and the guest sees the size when the VMM connects again.
    Resize {
        /// The disk's name, as in column NAME
        #[arg(value_name = "DISK")]
        disk: String,
        /// The new size, as in 8G
        #[arg(value_name = "SIZE", value_parser = disk_size)]
        size: u64,
    },
    /// Move a disk's objects together and give the host what that frees
    ///
    /// It is done when the command ends, after milliseconds to seconds, and holds up no guest. A disk does this by itself
    /// where it pays; here it goes as far as can be.
    Compact {
        /// The disk's name, as in column NAME
        #[arg(value_name = "DISK")]
        disk: String,
    },
    /// Mark a disk's pages as idle, until they are read or written
    ///
    /// AGE marks those that nobody read or wrote for so long, and takes the mark from the others: a number of seconds, or
    /// with a unit, s, m, h or d. Ages are known to ten seconds at first, to hours in the end, up to 79 hours, and
    /// taken for less rather than for more.
    Idle {
        /// The disk's name, as in column NAME
        #[arg(value_name = "DISK")]
        disk: String,
        /// all, or an age such as 90, 10m or 2h
        #[arg(value_name = "all|AGE", value_parser = age)]
        age: Age,
    },
    /// Compress a disk's pages again, with the algorithms of --recompress-algorithm
    ///
    /// The largest come first. Each page is tried with the algorithms above the one that made it, and kept as it is where
    /// none needs less room: then it is not tried again until it is written. It is done when the command ends, and holds
    /// up no guest: half of the time it rests.
    ///
    /// type=all, idle, huge or huge_idle: which pages; all without it. threshold=BYTES: only pages that take so much, and
    /// only results below it. max-pages=N: try no more. priority=N or algorithm=NAME: only this algorithm.
    Recompress {
        /// The disk's name, as in column NAME
        #[arg(value_name = "DISK")]
        disk: String,
        /// type=, threshold=, max-pages=, priority= or algorithm=
        #[arg(value_name = "KEY=VALUE", value_parser = recompress_value)]
        values: Vec<Assignment>,
    },
    /// Show how the memory of a disk's objects is used
    ///
    /// Objects lie in segments. Listed are the segments by the share of them that objects take, the holes between objects
    /// by their length (up to twice the one shown), and the heaps that own the segments, those with most holes first.
    Arena {
        /// The disk's name, as in column NAME
        #[arg(value_name = "DISK")]
        disk: String,
    },
    /// Make a dictionary from a disk's pages, or from a file of pages, for dict= of an algorithm
    ///
    /// Some thousand pages, spread over all, make it; a quarter of them is held out, and what the dictionary gains there
    /// is printed, for the disk's algorithm and for zstd. It is written in any case; where it gains nothing, that is said,
    /// and it is best left alone. Takes seconds, and holds up no guest. A disk's algorithm is fixed when its daemon starts:
    /// start it with --algorithm 'zstd(dict=PATH)', and keep the file as long as the disk.
    TrainDict {
        /// The disk's name, as in column NAME
        #[arg(value_name = "DISK", required_unless_present = "from", conflicts_with = "from")]
        disk: Option<String>,
        /// A file of pages of 4096 bytes to make it from; no daemon is asked
        #[arg(long, value_name = "FILE")]
        from: Option<PathBuf>,
        /// With --from: what else the gain is printed for
        #[arg(long, value_name = "NAME", default_value = "lz4", conflicts_with = "disk")]
        algorithm: Algorithm,
        /// The most bytes of the dictionary, 256 to 64K
        #[arg(long, value_name = "SIZE", default_value = "16K", value_parser = dictionary_size)]
        size: u64,
        /// The file that it is written to
        #[arg(long, value_name = "PATH")]
        output: PathBuf,
        /// Replace that file if it is there
        ///
        /// A disk that was compressed with it cannot be taken over by another daemon then.
        #[arg(long)]
        force: bool,
    },
    /// Show the memory of a disk's compression contexts, which TOTAL does not count
    ///
    /// Each queue that runs has a compression context, and each algorithm for recompression one. Decompression contexts
    /// and dictionaries are shared by all queues. --bytes and --json have exact numbers.
    Contexts {
        /// The disk's name, as in column NAME
        #[arg(value_name = "DISK")]
        disk: String,
    },
    /// Print zram's mm_stat line
    ///
    /// orig_data_size, compr_data_size, mem_used_total, mem_limit, mem_used_max, same_pages, pages_compacted, huge_pages,
    /// huge_pages_since: as in Linux' documentation of zram. Sizes are in bytes, pages of 4 KiB are counted.
    MmStat,
    /// Print zram's io_stat line
    ///
    /// failed_reads, failed_writes, invalid_io, notify_free: as in Linux' documentation of zram.
    IoStat,
}

impl Command {
    /// The disk that is meant.
    fn disk(&self) -> Option<&str> {
        match self {
            Command::Set { disk, .. }
            | Command::Resize { disk, .. }
            | Command::Compact { disk }
            | Command::Idle { disk, .. }
            | Command::Recompress { disk, .. }
            | Command::Contexts { disk }
            | Command::Arena { disk } => Some(disk),
            Command::TrainDict { disk, .. } => disk.as_deref(),
            Command::MmStat | Command::IoStat => None,
        }
    }
}

/// A setting and its new value, as the daemon takes it.
type Assignment = (String, Value);

fn assignment(text: &str) -> Result<Assignment, String> {
    let (key, value) = text
        .split_once('=')
        .ok_or("a setting is KEY=VALUE, such as mem-limit=1G")?;
    let value = match (value, key) {
        ("none", _) => Value::Null,
        (count, "iops-limit" | "limit-burst-ms") => {
            let count = count.parse::<u64>();
            count.map_err(|_| format!("{key} is a whole number"))?.into()
        }
        (size, "mem-limit" | "mem-used-max" | "bandwidth-limit") => size::parse(size)?.into(),
        // The daemon knows why not.
        (other, _) => other.into(),
    };
    Ok((key.into(), value))
}

/// Seconds; `None` is all pages.
#[derive(Clone, Copy)]
struct Age(Option<u64>);

fn disk_size(text: &str) -> Result<u64, String> {
    let size = size::parse(text)?;
    (1..=DISK_BYTES_MAX)
        .contains(&size)
        .then_some(size)
        .ok_or_else(|| "allowed is 1 byte to 16T".into())
}

fn dictionary_size(text: &str) -> Result<u64, String> {
    let range = DICTIONARY_BYTES_MIN as u64..=DICTIONARY_BYTES_MAX as u64;
    let size = size::parse(text)?;
    range
        .contains(&size)
        .then_some(size)
        .ok_or_else(|| "allowed is 256 to 64K".into())
}

fn age(text: &str) -> Result<Age, String> {
    if text == "all" {
        return Ok(Age(None));
    }
    let (number, seconds) = match text.chars().last() {
        Some('s') => (&text[..text.len() - 1], 1),
        Some('m') => (&text[..text.len() - 1], 60),
        Some('h') => (&text[..text.len() - 1], 3600),
        Some('d') => (&text[..text.len() - 1], 86_400),
        _ => (text, 1),
    };
    let number = number
        .parse::<u64>()
        .ok()
        .and_then(|number| number.checked_mul(seconds));
    number
        .map(|seconds| Age(Some(seconds)))
        .ok_or_else(|| "allowed is all, or an age such as 90, 10m or 2h".into())
}

fn recompress_value(text: &str) -> Result<Assignment, String> {
    let (key, value) = text.split_once('=').ok_or("a value is KEY=VALUE, such as type=idle")?;
    // Numbers go as numbers; what is wrong with them the daemon says.
    let number = ["threshold", "max-pages", "priority"].contains(&key);
    let value = match value.parse::<u64>() {
        Ok(value) if number => value.into(),
        _ => value.into(),
    };
    Ok((key.into(), value))
}

const SHORT_HELP: &str = "See --help for what the columns mean.";

const LONG_HELP: &str = "\
Columns:
  NAME       the disk's name: --serial, or the socket's file name
  SIZE       size as the guest sees it
  DATA       what is stored, uncompressed: pages in use times 4 KiB. A guest
             that frees memory does not tell at once, so it may use less
  COMPR      the same data as it is kept, compressed
  RATIO      DATA / COMPR, more is better; \"-\" when COMPR is 0
  TOTAL      host memory the disk holds now: what holds COMPR, with the room
             between its pieces, and the slot table
  LIMIT      the most TOTAL may be, the slot table not counted; \"-\" when there
             is no limit, 0 with --bytes
  ALGORITHM  how data is compressed; cut at 15 characters, with --bytes whole
  VMM        process id of the connected frontend; \"-\" when none

Sizes are rounded to powers of 1024: 1.5G is 1.5 GiB. The names in --json are
orig_data_size for DATA, compr_data_size for COMPR, total_bytes for TOTAL and
mem_limit for LIMIT; it has more. Numbers are read while guests go on writing.

Exit codes:
  0  done
  1  the daemon refused, or its answer makes no sense
  2  the command line is wrong
  6  a daemon cannot be reached, or does not answer within 5 seconds
     (compact, idle, train-dict: 10 minutes, recompress: a day)";

const EXIT_FAILURE: u8 = 1;
const EXIT_USAGE: u8 = 2;
const EXIT_UNREACHABLE: u8 = 6;

fn main() -> ExitCode {
    match Arguments::try_parse() {
        Ok(arguments) if arguments.control.is_empty() && !arguments.needs_no_daemon() => {
            complain("--control PATH is needed: the --control-path of a daemon");
            ExitCode::from(EXIT_USAGE)
        }
        Ok(arguments) => run(&arguments),
        Err(error) if matches!(error.kind(), ErrorKind::DisplayHelp | ErrorKind::DisplayVersion) => {
            print(&error.to_string());
            ExitCode::SUCCESS
        }
        Err(error) => {
            complain(&one_line(&error));
            ExitCode::from(EXIT_USAGE)
        }
    }
}

/// A key that is given more than once: which of its values is meant?
fn given_twice(command: &Command) -> Option<&str> {
    let (Command::Set { values, .. } | Command::Recompress { values, .. }) = command else {
        return None;
    };
    let twice = (1..values.len()).find(|&index| values[..index].iter().any(|(key, _)| *key == values[index].0));
    twice.map(|index| values[index].0.as_str())
}

/// Asks every daemon, shows what came, and ends with the code of the first that failed.
fn run(arguments: &Arguments) -> ExitCode {
    let mut exit_code = 0;
    let mut fail = |failure: &Failure| {
        complain(&failure.message);
        exit_code = if exit_code == 0 { failure.exit_code } else { exit_code };
    };
    if let Some(key) = arguments.command.as_ref().and_then(given_twice) {
        complain(&format!("{key} is given twice"));
        return ExitCode::from(EXIT_USAGE);
    }
    let output = match &arguments.command {
        Some(Command::TrainDict { output, force, .. }) => Some((output, *force)),
        _ => None,
    };
    if let Some(failure) = output.and_then(|(path, force)| dictionary_file::check(path, force).err()) {
        complain(&failure);
        return ExitCode::from(EXIT_FAILURE);
    }
    let mut answers = Vec::new();
    if let Some(Command::TrainDict {
        from: Some(from),
        algorithm,
        size,
        ..
    }) = &arguments.command
    {
        match dictionary_file::train(from, algorithm, *size as usize) {
            Ok(report) => answers.push(format!("{}\n", serde_json::json!(report))),
            Err(message) => fail(&Failure::new(EXIT_FAILURE, message)),
        }
    }
    let mut others = Vec::new();
    let asked = if arguments.needs_no_daemon() {
        &[][..]
    } else {
        &arguments.control
    };
    for path in asked {
        match ask(path, arguments.command.as_ref()) {
            Ok(answer) => answers.push(answer),
            Err(failure) if failure.is_other_disk => others.push(failure),
            Err(failure) => fail(&failure),
        }
    }
    // A disk that is asked for by name is behind one of the sockets, and not behind all others.
    if answers.is_empty() {
        others.iter().for_each(&mut fail);
    }
    if let (Some((path, force)), Some(answer)) = (output, answers.first()) {
        let written = read::<DictionaryReport>(answer)
            .and_then(|report| from_hex(&report.dictionary).ok_or_else(|| Failure::senseless(&"no dictionary")))
            .and_then(|bytes| {
                dictionary_file::write(path, &bytes, force).map_err(|message| Failure::new(EXIT_FAILURE, message))
            });
        if let Err(failure) = written {
            fail(&failure);
            answers.clear();
        }
    }
    match show(arguments, &answers) {
        Ok(text) => print(&text),
        Err(failure) => fail(&failure),
    }
    ExitCode::from(exit_code)
}

struct Failure {
    exit_code: u8,
    message: String,
    /// The daemon has no disk of that name.
    is_other_disk: bool,
}

impl Failure {
    fn new(exit_code: u8, message: String) -> Failure {
        Failure {
            exit_code,
            message,
            is_other_disk: false,
        }
    }

    fn unreachable(error: &io::Error, patience: Duration) -> Failure {
        let message = match error.kind() {
            io::ErrorKind::WouldBlock => format!("no answer within {} seconds", patience.as_secs()),
            _ => format!("no daemon can be reached there: {error}"),
        };
        Failure::new(EXIT_UNREACHABLE, message)
    }

    fn senseless(error: &dyn std::fmt::Display) -> Failure {
        Failure::new(EXIT_FAILURE, format!("the answer makes no sense: {error}"))
    }

    fn at(self, path: &Path) -> Failure {
        Failure {
            message: format!("{}: {}", path.display(), self.message),
            ..self
        }
    }
}

/// One question, one line of answer.
fn ask(path: &Path, command: Option<&Command>) -> Result<String, Failure> {
    let (name, patience) = match command {
        None | Some(Command::Contexts { .. }) => ("stats", PATIENCE),
        Some(Command::MmStat) => ("mm-stat", PATIENCE),
        Some(Command::IoStat) => ("io-stat", PATIENCE),
        Some(Command::Set { .. }) => ("set", PATIENCE),
        Some(Command::Resize { .. }) => ("resize", PATIENCE_COMPACT),
        Some(Command::Compact { .. }) => ("compact", PATIENCE_COMPACT),
        Some(Command::Idle { .. }) => ("idle", PATIENCE_COMPACT),
        Some(Command::Recompress { .. }) => ("recompress", PATIENCE_RECOMPRESS),
        Some(Command::TrainDict { .. }) => ("train-dict", PATIENCE_COMPACT),
        Some(Command::Arena { .. }) => ("arena", PATIENCE),
    };
    let request = Request {
        command: name.into(),
        disk: command.and_then(Command::disk).map(String::from),
        values: match command {
            Some(Command::Set { values, .. } | Command::Recompress { values, .. }) => {
                Some(values.iter().cloned().collect())
            }
            Some(Command::TrainDict { size, .. } | Command::Resize { size, .. }) => {
                Some([("size".to_string(), (*size).into())].into_iter().collect())
            }
            Some(Command::Idle { age: Age(age), .. }) => Some(std::iter::once(("age".into(), (*age).into())).collect()),
            _ => None,
        },
    };
    let answer = exchange_in_time(path, request, patience)
        .map_err(|error| Failure::unreachable(&error, patience))
        .and_then(understand);
    answer.map_err(|failure| failure.at(path))
}

fn understand(answer: Vec<u8>) -> Result<String, Failure> {
    let answer = String::from_utf8(answer).map_err(|error| Failure::senseless(&error))?;
    if !answer.ends_with('\n') {
        return Err(Failure::senseless(&"it has no end"));
    }
    match serde_json::from_str::<Refusal>(&answer) {
        Ok(Refusal { error }) => Err(Failure {
            is_other_disk: error.kind == "unknown-disk",
            ..Failure::new(EXIT_FAILURE, format!("refused: {}", error.message))
        }),
        Err(_) => Ok(answer),
    }
}

/// One deadline for all of it: connecting to a daemon with a full backlog waits for ever, and so does a byte now and then.
fn exchange_in_time(path: &Path, request: Request, patience: Duration) -> io::Result<Vec<u8>> {
    let path = path.to_owned();
    let (answers, answer) = mpsc::channel();
    thread::spawn(move || answers.send(exchange(&path, &request)));
    answer
        .recv_timeout(patience)
        .unwrap_or_else(|_| Err(io::ErrorKind::WouldBlock.into()))
}

fn exchange(path: &Path, request: &Request) -> io::Result<Vec<u8>> {
    let mut stream = UnixStream::connect(path)?;
    let mut request = serde_json::to_vec(request)?;
    request.push(b'\n');
    // A daemon with too many clients says so and hangs up before it is asked: then the answer counts, not the question.
    let sent = stream.write_all(&request);
    let mut answer = Vec::new();
    BufReader::new(stream.take(ANSWER_BYTES_MAX)).read_until(b'\n', &mut answer)?;
    sent.or_else(|error| if answer.is_empty() { Err(error) } else { Ok(()) })?;
    if answer.is_empty() {
        return Err(io::Error::other("the connection was closed"));
    }
    Ok(answer)
}

fn show(arguments: &Arguments, answers: &[String]) -> Result<String, Failure> {
    if arguments.json {
        return Ok(answers.concat());
    }
    match &arguments.command {
        Some(Command::MmStat) => lines(answers, |stat: MmStat| stat.mm_stat),
        Some(Command::IoStat) => lines(answers, |stat: IoStat| stat.io_stat),
        Some(Command::Set { .. }) => lines(answers, |settings| settings_line(&settings, arguments.bytes)),
        Some(Command::Compact { .. }) => lines(answers, |report| compact_line(&report, arguments.bytes)),
        Some(Command::Resize { .. }) => lines(answers, |report| resize_lines(&report, arguments.bytes)),
        Some(Command::Idle { .. }) => lines(answers, |report: IdleReport| {
            format!("{}: {} pages are marked as idle\n", report.name, report.pages_marked)
        }),
        Some(Command::Recompress { .. }) => lines(answers, |report| recompress_line(&report, arguments.bytes)),
        Some(Command::Arena { .. }) => lines(answers, |arena: Arena| picture::arena(&arena)),
        Some(Command::TrainDict { .. }) => lines(answers, |report: DictionaryReport| dictionary_lines(&report)),
        Some(Command::Contexts { .. }) => lines(answers, |disk| picture::contexts(&disk, arguments.bytes)),
        None if answers.is_empty() => Ok(String::new()),
        None => {
            let disks = answers
                .iter()
                .map(|answer| read(answer))
                .collect::<Result<Vec<DiskStats>, Failure>>()?;
            Ok(table(&disks, arguments.bytes))
        }
    }
}

fn lines<T: DeserializeOwned>(answers: &[String], line: impl Fn(T) -> String) -> Result<String, Failure> {
    answers.iter().map(|answer| read(answer).map(&line)).collect()
}

fn read<T: DeserializeOwned>(answer: &str) -> Result<T, Failure> {
    serde_json::from_str(answer).map_err(|error| Failure::senseless(&error))
}

fn recompress_line(report: &RecompressReport, bytes: bool) -> String {
    let gained = match bytes {
        true => report.bytes_gained.to_string(),
        false => human(report.bytes_gained),
    };
    let limit = if report.limit_reached {
        "; it ended at the memory limit"
    } else {
        ""
    };
    format!(
        "{}: {} of {} pages recompressed in {:.1} s, {gained} gained; {} cannot be compressed{limit}\n",
        report.name,
        report.pages_recompressed,
        report.pages_tried,
        report.milliseconds as f64 / 1000.0,
        report.pages_incompressible,
    )
}

fn settings_line(settings: &Settings, bytes: bool) -> String {
    let Settings {
        name,
        mem_limit,
        mem_used_total,
        mem_used_max,
        iops_limit,
        bandwidth_limit,
        limit_burst_ms,
    } = settings;
    let size = |value| written(value, bytes);
    let or_none = |limit: u64, text: String| if limit == 0 { "none".into() } else { text };
    let limit = or_none(*mem_limit, size(*mem_limit));
    let iops = or_none(*iops_limit, iops_limit.to_string());
    let bandwidth = or_none(*bandwidth_limit, size(*bandwidth_limit));
    let burst = match (*iops_limit, *bandwidth_limit) {
        (0, 0) => String::new(),
        _ => format!(" limit-burst-ms={limit_burst_ms}"),
    };
    let held = size(*mem_used_total);
    let more = match *mem_limit {
        0 => "",
        limit if limit < *mem_used_total => ", more than the limit: new pages are refused until it holds less",
        _ => "",
    };
    format!(
        "{name}: mem-limit={limit} mem-used-max={}, holds {held}{more}\n\
         {name}: iops-limit={iops} bandwidth-limit={bandwidth}{burst}\n",
        size(*mem_used_max)
    )
}

fn resize_lines(report: &ResizeReport, bytes: bool) -> String {
    let size = |value| written(value, bytes);
    let (name, before, now) = (&report.name, size(report.disksize_before), size(report.disksize));
    let notice = match report.notice.as_str() {
        "unchanged" => return format!("{name}: it has {now} already\n"),
        "told" => "its VMM was told",
        "no-frontend" => "no VMM is connected; the next one will see it",
        "no-channel" => "its VMM cannot be told; the guest sees it when the VMM connects again",
        _ => "its VMM does not read what it is told; it sees it when it connects again",
    };
    format!("{name}: {before} -> {now}\n{name}: {notice}\n")
}

fn compact_line(report: &CompactReport, bytes: bool) -> String {
    let CompactReport {
        name,
        objects_moved,
        pages_compacted,
        mem_used_before,
        mem_used_total,
    } = report;
    let size = |value| written(value, bytes);
    let (before, after) = (size(*mem_used_before), size(*mem_used_total));
    format!("{name}: {objects_moved} objects moved, {pages_compacted} pages gained; held {before}, holds {after}\n")
}

fn dictionary_lines(report: &DictionaryReport) -> String {
    let mut text = format!(
        "{}: a dictionary of {} bytes from {} pages; on {} others it gains\n",
        report.name,
        report.dictionary.len() / 2,
        report.pages_trained,
        report.pages_held_out
    );
    for gain in &report.gains {
        let (without, with) = (gain.bytes_without, gain.bytes_with);
        let (algorithm, sizes) = (&gain.algorithm, format!("{without} bytes without, {with} with it"));
        text += &match without.saturating_sub(with) {
            0 => format!("  {algorithm}: nothing ({sizes}): do not use it for this\n"),
            gained => format!(
                "  {algorithm}: {:.1} % ({sizes})\n",
                gained as f64 * 100.0 / without as f64
            ),
        };
    }
    text
}

fn written(size: u64, bytes: bool) -> String {
    if bytes { size.to_string() } else { human(size) }
}

const COLUMNS: [&str; 9] = [
    "NAME",
    "SIZE",
    "DATA",
    "COMPR",
    "RATIO",
    "TOTAL",
    "LIMIT",
    "ALGORITHM",
    "VMM",
];
/// Columns of text; all others are numbers and stand to the right.
const TEXT_COLUMNS: [usize; 2] = [0, 7];

fn table(disks: &[DiskStats], bytes: bool) -> String {
    let size = |value| written(value, bytes);
    let mut table = Table::new();
    table.load_style(presets::NOTHING).set_header(COLUMNS);
    for disk in disks {
        table.add_row([
            disk.name.clone(),
            size(disk.disksize),
            size(disk.orig_data_size),
            size(disk.compr_data_size),
            ratio(disk),
            size(disk.total_bytes),
            if disk.mem_limit == 0 && !bytes {
                "-".into()
            } else {
                size(disk.mem_limit)
            },
            if bytes {
                disk.algorithm.clone()
            } else {
                cut(&disk.algorithm)
            },
            disk.frontend
                .as_ref()
                .map_or("-".into(), |frontend| frontend.pid.to_string()),
        ]);
    }
    for (index, column) in table.column_iter_mut().enumerate() {
        // One space between columns, as in zramctl: more does not fit 80 columns.
        column.set_padding((0, if index + 1 < COLUMNS.len() { 1 } else { 0 }));
        if !TEXT_COLUMNS.contains(&index) {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
    format!("{}\n", table.trim_fmt())
}

/// What is left of 80 columns when all others are at their widest. Dictionaries have paths.
const ALGORITHM_CHARS_MAX: usize = 15;

fn cut(algorithm: &str) -> String {
    match algorithm.char_indices().nth(ALGORITHM_CHARS_MAX) {
        None => algorithm.into(),
        Some(_) => algorithm
            .chars()
            .take(ALGORITHM_CHARS_MAX - 2)
            .chain("..".chars())
            .collect(),
    }
}

fn ratio(disk: &DiskStats) -> String {
    match disk.compr_data_size {
        0 => "-".into(),
        // At most five characters.
        compressed => match disk.orig_data_size as f64 / compressed as f64 {
            ratio if ratio < 99.995 => format!("{ratio:.2}"),
            ratio if ratio < 9999.5 => format!("{ratio:.0}"),
            _ => ">9999".into(),
        },
    }
}

fn print(text: &str) {
    // Whoever reads may have hung up.
    let _ = io::stdout().write_all(text.as_bytes());
}

fn complain(message: &str) {
    let _ = writeln!(io::stderr(), "vzramctl: {message}");
}
