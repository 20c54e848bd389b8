//! Malformed chains and rings, to the daemon and to qemu-storage-daemon: what each makes of them. Ours is the answer that
//! docs/conformance.md promises; theirs is written down so that a difference is known for one.

use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::raw::*;
use crate::support::{Backend, wait_for};

const SIZE: u16 = 128;
/// Away from the descriptors of healthy requests.
const SLOT: u16 = 64;
/// Long enough for an answer on a busy machine. Where none comes the test waits so long.
const PATIENCE: Duration = Duration::from_secs(2);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Outcome {
    /// The chain came back with so many bytes written, and this status byte.
    Answered(u32, u8),
    /// It came back with nothing written.
    Returned,
    /// Nothing came back, and the connection lives.
    Silence,
    /// The connection was closed.
    Closed,
}
use Outcome::{Answered, Closed, Returned, Silence};

/// Lays a chain into the slots from [`SLOT`] on; gives its head and where its status byte would be.
type Attack = fn(&mut Queue) -> (u16, u64);

fn header(queue: &mut Queue) -> u64 {
    queue.keep(&[0; 16])
}

fn status(queue: &mut Queue) -> u64 {
    queue.keep(&[UNTOUCHED])
}

/// What, how it is made, our answer, theirs (qemu-storage-daemon 7.2 to 10.0).
const ATTACKS: [(&str, Attack, Outcome, Outcome); 11] = [
    (
        "a descriptor that is its own next",
        |queue| {
            let header = header(queue);
            queue.describe(SLOT, descriptor(header, 16, NEXT, SLOT));
            (SLOT, header)
        },
        Returned,
        Closed,
    ),
    (
        "a next outside of the table",
        |queue| {
            let header = header(queue);
            queue.describe(SLOT, descriptor(header, 16, NEXT, SIZE));
            (SLOT, header)
        },
        Returned,
        Closed,
    ),
    (
        "a head outside of the table",
        |queue| (SIZE, header(queue)),
        Silence,
        Closed,
    ),
    (
        "an indirect table of 17 bytes",
        |queue| {
            let table = queue.keep(&[0; 32]);
            queue.describe(SLOT, descriptor(table, 17, INDIRECT, 0));
            (SLOT, table)
        },
        Returned,
        Closed,
    ),
    (
        "a table within a table",
        |queue| {
            let table = queue.keep(&[0; 32]);
            queue.describe_at(table, 0, descriptor(table, 16, INDIRECT, 0));
            queue.describe(SLOT, descriptor(table, 16, INDIRECT, 0));
            (SLOT, table)
        },
        Returned,
        Silence,
    ),
    (
        "no byte to write",
        |queue| {
            let header = header(queue);
            queue.describe(SLOT, descriptor(header, 16, 0, 0));
            (SLOT, header)
        },
        Returned,
        Silence,
    ),
    (
        "nothing but a status byte",
        |queue| {
            let status = status(queue);
            queue.describe(SLOT, descriptor(status, 1, WRITE, 0));
            (SLOT, status)
        },
        Answered(1, UNSUPP),
        Silence,
    ),
    (
        "a header of 8 bytes",
        |queue| {
            let (header, status) = (header(queue), status(queue));
            queue.describe(SLOT, descriptor(header, 8, NEXT, SLOT + 1));
            queue.describe(SLOT + 1, descriptor(status, 1, WRITE, 0));
            (SLOT, status)
        },
        Answered(1, UNSUPP),
        Silence,
    ),
    (
        "data outside of memory",
        |queue| {
            let (header, status) = (header(queue), status(queue));
            queue.describe(SLOT, descriptor(header, 16, NEXT, SLOT + 1));
            queue.describe(SLOT + 1, descriptor(1 << 40, 4096, NEXT | WRITE, SLOT + 2));
            queue.describe(SLOT + 2, descriptor(status, 1, WRITE, 0));
            (SLOT, status)
        },
        Answered(1, IOERR),
        Closed,
    ),
    (
        "a readable buffer behind a writable one",
        |queue| {
            let (header, status) = (header(queue), status(queue));
            queue.describe(SLOT, descriptor(status, 1, NEXT | WRITE, SLOT + 1));
            queue.describe(SLOT + 1, descriptor(header, 16, 0, 0));
            (SLOT, status)
        },
        Answered(1, IOERR),
        Closed,
    ),
    (
        "a status byte of 16 bytes",
        |queue| {
            let (header, status) = (header(queue), queue.keep(&[UNTOUCHED; 16]));
            queue.describe(SLOT, descriptor(header, 16, NEXT, SLOT + 1));
            queue.describe(SLOT + 1, descriptor(status, 513, WRITE, 0));
            (SLOT, status + 512)
        },
        Answered(513, OK),
        Answered(513, OK),
    ),
];

fn outcome(backend: &Backend, attack: Attack) -> Outcome {
    let mut guest = Guest::reconnect(backend);
    let mut queue = guest.queue(0, SIZE);
    queue.read(0, PAGE);
    let (head, status) = attack(&mut queue);
    let since = queue.offered;
    queue.offer(head);
    queue.kick(since);
    let deadline = Instant::now() + PATIENCE;
    while Instant::now() < deadline {
        if let Some(used) = queue.take_used() {
            return match used.len {
                0 => Returned,
                len => Answered(len, queue.bytes(status, 1)[0]),
            };
        }
        if is_hung_up(&guest) {
            return Closed;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    Silence
}

fn is_hung_up(guest: &Guest) -> bool {
    let mut fds = [PollFd::new(&guest.stream, PollFlags::RDHUP)];
    let now = Timespec { tv_sec: 0, tv_nsec: 0 };
    poll(&mut fds, Some(&now)).unwrap() > 0
}

#[test]
fn malformed_chains_end_as_is_known_here_and_at_qemu_storage_daemon() {
    let ours = Backend::daemon("4M", &["--logical-block-size", "512"]);
    let theirs = Backend::qsd(4 << 20, 1);
    let mut found = vec![];
    for (what, attack, ..) in ATTACKS {
        found.push((what, outcome(&ours, attack), outcome(&theirs, attack)));
    }
    let known: Vec<_> = ATTACKS
        .iter()
        .map(|&(what, _, ours, theirs)| (what, ours, theirs))
        .collect();
    assert_eq!(found, known);
    // Both still serve who comes next.
    for backend in [&ours, &theirs] {
        let mut guest = wait_for("it serves", PATIENCE, || Some(Guest::reconnect(backend)));
        guest.queue(0, SIZE).read(0, PAGE);
    }
}
