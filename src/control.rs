//! The control socket: one thread a client. What is answered is [`crate::command`]'s affair.
//!
//! Clients cannot harm the disk or each other: their number, the length of a line and the time of a read or write are
//! bounded. What a client sends wrong is answered with an error, and its connection goes on.

use std::io::{self, BufRead, BufReader, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;

use tracing::{debug, warn};

use crate::command::{answer, refusal};
use crate::disk::Disk;
use crate::protocol::REQUEST_BYTES_MAX;
use crate::sandbox::{Kind, Sandbox};

/// Clients at once. Each has a thread with a small stack.
pub const CLIENTS_MAX: usize = 32;
const STACK_BYTES: usize = 256 << 10;
/// A client that says nothing for so long is let go.
const IDLE_MAX: Duration = Duration::from_secs(60);
/// A client that does not take its answer in so long is let go.
const WRITE_MAX: Duration = Duration::from_secs(5);
/// A line of more bytes than this is not even skipped.
const SKIPPED_BYTES_MAX: usize = 1 << 20;

/// Answers on `listener` from a thread of its own, until the process ends.
///
/// The first thing on each thread is to enter the sandbox.
pub fn serve(listener: UnixListener, disk: Arc<Disk>, sandbox: Sandbox) -> io::Result<()> {
    let clients = Arc::new(AtomicUsize::new(0));
    thread::Builder::new()
        .name("control".into())
        .stack_size(STACK_BYTES)
        .spawn(move || {
            sandbox.enter(Kind::ControlSocket);
            let mut was_told = false;
            for stream in listener.incoming() {
                let greeted = stream.and_then(|stream| greet(stream, &disk, &clients, &sandbox));
                if let Err(error) = &greeted {
                    // Out of descriptors or threads: said once, until it goes well again. The next try would fail at once:
                    // wait for some to come back.
                    if !was_told {
                        warn!(disk = disk.name(), "control clients are turned away: {error}");
                    }
                    thread::sleep(Duration::from_millis(100));
                }
                was_told = greeted.is_err();
            }
        })?;
    Ok(())
}

fn greet(mut stream: UnixStream, disk: &Arc<Disk>, clients: &Arc<AtomicUsize>, sandbox: &Sandbox) -> io::Result<()> {
    stream.set_read_timeout(Some(IDLE_MAX))?;
    stream.set_write_timeout(Some(WRITE_MAX))?;
    let Some(seat) = Seat::take(clients) else {
        // Does not wait: there is room for a line in a new connection. And it may be gone already; let it.
        let _ = stream.write_all(&refusal(
            "too-many-clients",
            &format!("at most {CLIENTS_MAX} clients at once"),
        ));
        return Ok(());
    };
    let (disk, sandbox) = (disk.clone(), sandbox.clone());
    thread::Builder::new()
        .name("control-client".into())
        .stack_size(STACK_BYTES)
        .spawn(move || {
            let _seat = seat;
            sandbox.enter(Kind::ControlClient);
            if let Err(error) = converse(&stream, &disk) {
                debug!(disk = disk.name(), "a control client was let go: {error}");
            }
        })?;
    Ok(())
}

/// A client's place among [`CLIENTS_MAX`], free again when dropped.
struct Seat(Arc<AtomicUsize>);

impl Seat {
    fn take(clients: &Arc<AtomicUsize>) -> Option<Seat> {
        // Only a number is kept, and nothing is published with it: no order is needed.
        let seat = Seat(clients.clone());
        (clients.fetch_add(1, Ordering::Relaxed) < CLIENTS_MAX).then_some(seat)
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

fn converse(mut stream: &UnixStream, disk: &Disk) -> io::Result<()> {
    let mut reader = BufReader::with_capacity(REQUEST_BYTES_MAX, stream);
    let mut line = Vec::with_capacity(REQUEST_BYTES_MAX);
    loop {
        let reply = match read_line(&mut reader, &mut line)? {
            Line::Whole => answer(&line, disk),
            Line::TooLong => refusal(
                "line-too-long",
                &format!("a request has at most {REQUEST_BYTES_MAX} bytes"),
            ),
            Line::End => return Ok(()),
        };
        stream.write_all(&reply)?;
    }
}

#[derive(Debug, PartialEq, Eq)]
enum Line {
    Whole,
    TooLong,
    End,
}

/// Reads one line into `line`, without its newline; the last one need not have any. What does not fit is skipped.
fn read_line(reader: &mut impl BufRead, line: &mut Vec<u8>) -> io::Result<Line> {
    line.clear();
    let mut skipped = 0;
    loop {
        let bytes = reader.fill_buf()?;
        let newline = bytes.iter().position(|&byte| byte == b'\n');
        let part = newline.unwrap_or(bytes.len());
        if skipped > 0 || line.len() + part > REQUEST_BYTES_MAX {
            skipped += part.max(1);
        } else {
            line.extend_from_slice(&bytes[..part]);
        }
        let at_end = bytes.is_empty();
        reader.consume(part + usize::from(newline.is_some()));
        if newline.is_none() && !at_end && skipped <= SKIPPED_BYTES_MAX {
            continue;
        }
        return match skipped {
            1..=SKIPPED_BYTES_MAX => Ok(Line::TooLong),
            0 if at_end && line.is_empty() => Ok(Line::End),
            0 => Ok(Line::Whole),
            _ => Err(io::Error::other("a line without end")),
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lines(mut bytes: &[u8]) -> Vec<(Line, usize)> {
        let mut line = Vec::new();
        let mut seen = Vec::new();
        loop {
            // A small buffer, so that lines come in parts.
            let mut reader = BufReader::with_capacity(7, bytes);
            let kind = read_line(&mut reader, &mut line).expect("reads from memory do not fail");
            let left = reader.buffer().len() + reader.get_ref().len();
            bytes = &bytes[bytes.len() - left..];
            if kind == Line::End {
                return seen;
            }
            seen.push((kind, line.len()));
        }
    }

    #[test]
    fn lines_are_read_up_to_the_limit_and_skipped_beyond() {
        let long = |length: usize| "x".repeat(length);
        let text = format!(
            "ab\n\n{}\n{}\nlast",
            long(REQUEST_BYTES_MAX),
            long(REQUEST_BYTES_MAX + 1)
        );
        let seen = lines(text.as_bytes());
        assert_eq!(seen.len(), 5);
        assert_eq!(seen[0], (Line::Whole, 2));
        assert_eq!(seen[1], (Line::Whole, 0));
        assert_eq!(seen[2], (Line::Whole, REQUEST_BYTES_MAX));
        assert_eq!(seen[3].0, Line::TooLong);
        assert_eq!(seen[4], (Line::Whole, 4));
    }

    #[test]
    fn a_line_without_end_is_given_up() {
        let mut endless = BufReader::new(io::Read::take(io::repeat(b'x'), 4 << 20));
        assert!(read_line(&mut endless, &mut Vec::new()).is_err());
    }

    #[test]
    fn seats_are_counted_and_come_back() {
        let clients = Arc::new(AtomicUsize::new(0));
        let mut seats: Vec<Seat> = (0..CLIENTS_MAX)
            .map(|_| Seat::take(&clients).expect("a free seat"))
            .collect();
        assert!(Seat::take(&clients).is_none());
        seats.pop();
        assert!(Seat::take(&clients).is_some());
    }
}
