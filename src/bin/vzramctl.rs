//! `vzramctl`: asks a `vhost-user-zram` for its numbers and shows them as `zramctl` would.
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
use vhost_user_zram::config::one_line;
use vhost_user_zram::protocol::{DiskStats, IoStat, MmStat, Refusal, Request};
use vhost_user_zram::size::human;

/// A daemon answers in microseconds; one that takes this long is stuck or stopped.
const PATIENCE: Duration = Duration::from_secs(5);
/// Far more than any answer has.
const ANSWER_BYTES_MAX: u64 = 1 << 20;

/// Shows what the disks of vhost-user-zram hold and what they cost
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
    #[arg(short, long)]
    bytes: bool,

    #[command(subcommand)]
    command: Option<Command>,
}

#[derive(Subcommand, Clone, Copy)]
enum Command {
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

const SHORT_HELP: &str = "See --help for what the columns mean.";

const LONG_HELP: &str = "\
Columns:
  NAME       the disk's name: --serial, or the socket's file name
  DISKSIZE   size as the guest sees it
  DATA       what is stored, uncompressed: pages in use times 4 KiB. A guest
             that frees memory does not tell at once, so it may use less
  COMPR      the same data as it is kept, compressed
  RATIO      DATA / COMPR, more is better; \"-\" when COMPR is 0
  TOTAL      host memory the disk holds now: what holds COMPR, with the room
             between its pieces, and the slot table
  LIMIT      the most TOTAL may be, the slot table not counted; \"-\" when there is
             no limit, 0 with --bytes
  ALGORITHM  how data is compressed
  QUEUES     virtqueues that a guest uses now
  FRONTEND   process id of the connected VMM; \"-\" when none

Sizes are rounded to powers of 1024: 1.5G is 1.5 GiB. The names in --json are
orig_data_size for DATA, compr_data_size for COMPR, total_bytes for TOTAL and
mem_limit for LIMIT. Numbers are read while guests go on writing.

Exit codes:
  0  done
  1  the daemon refused, or its answer makes no sense
  2  the command line is wrong
  6  a daemon cannot be reached, or does not answer within 5 seconds";

const EXIT_FAILURE: u8 = 1;
const EXIT_USAGE: u8 = 2;
const EXIT_UNREACHABLE: u8 = 6;

fn main() -> ExitCode {
    match Arguments::try_parse() {
        Ok(arguments) if arguments.control.is_empty() => {
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

/// Asks every daemon, shows what came, and ends with the code of the first that failed.
fn run(arguments: &Arguments) -> ExitCode {
    let mut exit_code = 0;
    let mut answers = Vec::new();
    for path in &arguments.control {
        match ask(path, arguments.command) {
            Ok(answer) => answers.push(answer),
            Err(failure) => {
                complain(&format!("{}: {}", path.display(), failure.message));
                exit_code = if exit_code == 0 { failure.exit_code } else { exit_code };
            }
        }
    }
    match show(arguments, &answers) {
        Ok(text) => print(&text),
        Err(failure) => {
            complain(&failure.message);
            exit_code = if exit_code == 0 { failure.exit_code } else { exit_code };
        }
    }
    ExitCode::from(exit_code)
}

struct Failure {
    exit_code: u8,
    message: String,
}

impl Failure {
    fn unreachable(error: &io::Error) -> Failure {
        let message = match error.kind() {
            io::ErrorKind::WouldBlock => "no answer within 5 seconds".into(),
            _ => format!("no daemon can be reached there: {error}"),
        };
        Failure {
            exit_code: EXIT_UNREACHABLE,
            message,
        }
    }

    fn senseless(error: &dyn std::fmt::Display) -> Failure {
        Failure {
            exit_code: EXIT_FAILURE,
            message: format!("the answer makes no sense: {error}"),
        }
    }
}

/// One question, one line of answer.
fn ask(path: &Path, command: Option<Command>) -> Result<String, Failure> {
    let command = match command {
        None => "stats",
        Some(Command::MmStat) => "mm-stat",
        Some(Command::IoStat) => "io-stat",
    };
    let answer = exchange_in_time(path, command).map_err(|error| Failure::unreachable(&error))?;
    let answer = String::from_utf8(answer).map_err(|error| Failure::senseless(&error))?;
    if !answer.ends_with('\n') {
        return Err(Failure::senseless(&"it has no end"));
    }
    match serde_json::from_str::<Refusal>(&answer) {
        Ok(refusal) => Err(Failure {
            exit_code: EXIT_FAILURE,
            message: format!("refused: {}", refusal.error.message),
        }),
        Err(_) => Ok(answer),
    }
}

/// One deadline for all of it: connecting to a daemon with a full backlog waits for ever, and so does a byte now and then.
fn exchange_in_time(path: &Path, command: &'static str) -> io::Result<Vec<u8>> {
    let path = path.to_owned();
    let (answers, answer) = mpsc::channel();
    thread::spawn(move || answers.send(exchange(&path, command)));
    answer
        .recv_timeout(PATIENCE)
        .unwrap_or_else(|_| Err(io::ErrorKind::WouldBlock.into()))
}

fn exchange(path: &Path, command: &str) -> io::Result<Vec<u8>> {
    let mut stream = UnixStream::connect(path)?;
    let mut request = serde_json::to_vec(&Request {
        command: command.into(),
    })?;
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
    match arguments.command {
        Some(Command::MmStat) => lines(answers, |stat: MmStat| stat.mm_stat),
        Some(Command::IoStat) => lines(answers, |stat: IoStat| stat.io_stat),
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

const COLUMNS: [&str; 10] = [
    "NAME",
    "DISKSIZE",
    "DATA",
    "COMPR",
    "RATIO",
    "TOTAL",
    "LIMIT",
    "ALGORITHM",
    "QUEUES",
    "FRONTEND",
];
/// Columns of text; all others are numbers and stand to the right.
const TEXT_COLUMNS: [usize; 2] = [0, 7];

fn table(disks: &[DiskStats], bytes: bool) -> String {
    let size = |value: u64| if bytes { value.to_string() } else { human(value) };
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
            disk.algorithm.clone(),
            disk.queues_running.to_string(),
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

fn ratio(disk: &DiskStats) -> String {
    match disk.compr_data_size {
        0 => "-".into(),
        compressed => format!("{:.2}", disk.orig_data_size as f64 / compressed as f64),
    }
}

fn print(text: &str) {
    // Whoever reads may have hung up.
    let _ = io::stdout().write_all(text.as_bytes());
}

fn complain(message: &str) {
    let _ = writeln!(io::stderr(), "vzramctl: {message}");
}
