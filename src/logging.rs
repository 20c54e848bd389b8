//! Log lines on stderr, one line an event: the time and the level, or, when stderr is the journal, the priority that the
//! journal understands (`sd-daemon(3)`) instead of both.
//!
//! Nobody waits for whoever reads them: a line that does not get through is dropped and counted.

use std::fmt;
use std::io::{self, Write};
use std::sync::{Mutex, PoisonError};

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::fs::fstat;
use tracing::{Event, Level, Subscriber};
use tracing_subscriber::filter::LevelFilter;
use tracing_subscriber::fmt::format::{FormatEvent, FormatFields, Writer};
use tracing_subscriber::fmt::time::{FormatTime, SystemTime};
use tracing_subscriber::fmt::{FmtContext, Subscriber as FmtSubscriber};
use tracing_subscriber::registry::LookupSpan;

/// Sends all that is at least as urgent as `level` to stderr, from now on.
pub fn start(level: LevelFilter) {
    let subscriber = FmtSubscriber::builder()
        .with_max_level(level)
        .with_ansi(false)
        .with_writer(|| Stderr)
        // It would complain with eprintln, which panics, when whoever read stderr is gone.
        .log_internal_errors(false)
        .event_format(LineFormat {
            journal: stderr_is_journal(),
        })
        .finish();
    // Fails when one is set already, as in a test that starts twice in one process: the first one stays.
    let _ = tracing::subscriber::set_global_default(subscriber);
}

/// Writes `vhost-user-zram: MESSAGE` to stderr: what a start has to say whether or not anything is logged.
pub fn say(priority: Priority, message: &str) {
    let prefix = if stderr_is_journal() {
        format!("<{}>", priority as u8)
    } else {
        String::new()
    };
    let _ = Stderr.write_all(format!("{prefix}vhost-user-zram: {message}\n").as_bytes());
}

/// The longest line: a pipe that can be written to takes so much at once.
const LINE_BYTES_MAX: usize = 4096;

/// Lines lost since the last one that got through. The lock makes asking and writing one step among our threads.
static LOST: Mutex<u64> = Mutex::new(0);

/// stderr, one line at a time, when it can take it. Its settings are not ours alone, so it is not made non-blocking.
struct Stderr;

impl Write for Stderr {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        let mut lost = LOST.lock().unwrap_or_else(PoisonError::into_inner);
        if !takes_a_line() {
            *lost += 1;
            return Ok(line.len());
        }
        let mut text = Vec::with_capacity(line.len() + 32);
        if *lost > 0 {
            writeln!(text, "{lost} log lines lost")?;
        }
        text.extend_from_slice(line);
        if text.len() > LINE_BYTES_MAX {
            text.truncate(LINE_BYTES_MAX - 1);
            text.push(b'\n');
        }
        *lost = 0;
        io::stderr().write_all(&text).map(|()| line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

fn takes_a_line() -> bool {
    let stderr = io::stderr();
    let mut fds = [PollFd::new(&stderr, PollFlags::OUT)];
    // One that is closed or has no reader is ready too: writing to it fails, and does not wait.
    let ready = rustix::event::poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: 0 }));
    ready.is_ok_and(|count| count > 0)
}

/// syslog(3)'s priorities, as far as they are used here.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Priority {
    /// Something failed.
    Error = 3,
    /// Something looks wrong.
    Warning = 4,
    /// Worth knowing.
    Notice = 5,
    /// Everyday events.
    Info = 6,
    /// For those who look for a fault.
    Debug = 7,
}

impl From<Level> for Priority {
    fn from(level: Level) -> Priority {
        match level {
            Level::ERROR => Priority::Error,
            Level::WARN => Priority::Warning,
            Level::INFO => Priority::Info,
            Level::DEBUG | Level::TRACE => Priority::Debug,
        }
    }
}

/// systemd says in JOURNAL_STREAM which file it gave as stderr or stdout. A program further down may have another one, so
/// the numbers are compared (systemd.exec(5)).
fn stderr_is_journal() -> bool {
    let Ok(named) = std::env::var("JOURNAL_STREAM") else {
        return false;
    };
    fstat(io::stderr()).is_ok_and(|stat| named == format!("{}:{}", stat.st_dev, stat.st_ino))
}

struct LineFormat {
    journal: bool,
}

impl<S, N> FormatEvent<S, N> for LineFormat
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    N: for<'a> FormatFields<'a> + 'static,
{
    fn format_event(&self, context: &FmtContext<'_, S, N>, mut out: Writer<'_>, event: &Event<'_>) -> fmt::Result {
        let level = *event.metadata().level();
        if self.journal {
            write!(out, "<{}>", Priority::from(level) as u8)?;
        } else {
            SystemTime.format_time(&mut out)?;
            write!(out, " {level:>5} ")?;
        }
        context.format_fields(out.by_ref(), event)?;
        writeln!(out)
    }
}
