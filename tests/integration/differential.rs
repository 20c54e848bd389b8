//! The same random requests to the daemon and to qemu-storage-daemon on a raw file. Where the two differ, the difference is
//! in [`justified`] with its reason, or it is a bug.

use crate::raw::*;
use crate::support::{Backend, Dice};

const DISK_BYTES: u64 = 4 << 20;
const DISK_SECTORS: u64 = DISK_BYTES / SECTOR as u64;
const BARRIER: u32 = 1 << 31;
const REQUESTS: usize = 100_000;

/// Why the daemon may answer `request` otherwise than qemu-storage-daemon does: the answer that is right, and the reason.
/// `None`: the answers must be the same.
fn justified(request: &Request, ours: &Reply, theirs: &Reply) -> Option<&'static str> {
    let answers = ((ours.status, ours.used_len), (theirs.status, theirs.used_len));
    let all = request.in_len as u32 + 1;
    match (request.kind, answers) {
        (4, ((UNSUPP, 1), (OK, _))) => Some("FLUSH is not offered: a RAM disk keeps nothing by flushing"),
        (BARRIER, ((UNSUPP, 1), _)) => Some("the legacy barrier bit: an unknown type here, masked out there"),
        (8, ((OK, _), (OK, _))) => {
            Some("GET_ID: each has its own serial; bytes behind it are padding here, untouched there")
        }
        (11 | 13, ((OK, 1), (UNSUPP | IOERR, _))) if request.data.len() > 16 => {
            Some("many ranges in one request: offered here, one there")
        }
        (11 | 13, (_, (UNSUPP, _))) if request.data.len() != 16 && ours.status == IOERR => {
            Some("a list of ranges that is not whole is a malformed request here, an unsupported one there")
        }
        (11 | 13, ((IOERR, 1), (UNSUPP, _))) if request.data.len() > 16 => {
            Some("many ranges with a bad one: refused for the range here, for the number there")
        }
        (11 | 13, ((UNSUPP, 1), (IOERR, _))) if range_flags(request) != 0 => {
            Some("a range with bad flags that is not on the disk: the flags are looked at first here, last there")
        }
        (11 | 13, ((OK, 1), (IOERR, _))) if range_sectors(request) > 32768 => {
            Some("ranges of more than 16 MiB: offered here, not there")
        }
        (_, ((ours, 1), (theirs, used))) if ours == theirs && ours != OK && used == all => {
            Some("used length of a refusal: only the status byte was written, and only it is counted here")
        }
        _ => None,
    }
}

fn range_sectors(request: &Request) -> u32 {
    request
        .data
        .get(8..12)
        .map_or(0, |bytes| u32::from_le_bytes(bytes.try_into().unwrap()))
}

fn range_flags(request: &Request) -> u32 {
    request
        .data
        .get(12..16)
        .map_or(0, |bytes| u32::from_le_bytes(bytes.try_into().unwrap()))
}

/// A sector that is mostly on the disk, sometimes near its end, sometimes nowhere.
fn sector(dice: &mut Dice) -> u64 {
    match dice.below(12) {
        0 => DISK_SECTORS - dice.below(20),
        1 => DISK_SECTORS + dice.below(20),
        2 => dice.pick(&[u64::MAX, u64::MAX - 7, u64::MAX / 512, 1 << 55, 1 << 63]),
        _ => dice.below(DISK_SECTORS),
    }
}

fn sector_count(dice: &mut Dice) -> usize {
    let most = if dice.chance(4) { 128 } else { 10 };
    1 + dice.below(most) as usize
}

fn random_range(dice: &mut Dice, whole_pages: bool) -> Range {
    let flags = if dice.chance(8) {
        dice.pick(&[1, 2, 4, 1 << 31])
    } else {
        0
    };
    let sectors = match dice.below(20) {
        0 => dice.pick(&[u32::MAX, 1 << 31, 32769]),
        _ => sector_count(dice) as u32,
    };
    if whole_pages {
        return Range {
            sector: sector(dice) & !7,
            sectors: sectors.max(8) & !7,
            flags,
        };
    }
    Range {
        sector: sector(dice),
        sectors,
        flags,
    }
}

/// Cuts for `len` bytes; half of the time the usual ones.
fn cuts(dice: &mut Dice, usual: usize, len: usize) -> Vec<usize> {
    if dice.chance(2) {
        return vec![usual];
    }
    let mut left = len;
    let mut cuts = Vec::new();
    for _ in 0..dice.below(20) {
        let cut = dice.below(left as u64 + 1).min(1 + dice.next() % 3000) as usize;
        cuts.push(cut);
        left -= cut;
    }
    cuts
}

fn random_request(dice: &mut Dice) -> Request {
    let mut request = match dice.below(20) {
        0..7 => {
            let count = sector_count(dice);
            Request::write(sector(dice), &dice.content(count * SECTOR))
        }
        7..13 => Request::read(sector(dice), sector_count(dice) * SECTOR),
        13 | 14 => Request::discard(&[random_range(dice, true)]),
        15 | 16 => Request::write_zeroes(&[random_range(dice, false)]),
        17 => match dice.below(6) {
            0 => {
                let len = 1 + dice.below(2000) as usize;
                Request::write(sector(dice), &dice.bytes(len))
            }
            1 => Request::read(sector(dice), 1 + dice.below(2000) as usize),
            2 => Request::get_id(20),
            3 => Request::new(4, 0, &[], 0),
            _ => Request::new(
                dice.pick(&[2, 3, 5, 6, 7, 9, 10, 12, 14, 15, 16, 24, 40, 1 << 31]),
                0,
                &[],
                0,
            ),
        },
        18 => {
            let ranges = [random_range(dice, true), random_range(dice, true)];
            if dice.chance(2) {
                Request::discard(&ranges)
            } else {
                Request::write_zeroes(&ranges)
            }
        }
        _ => {
            let kind = dice.pick(&[11, 13]);
            let len = dice.below(40) as usize;
            Request::new(kind, 0, &dice.bytes(len), 0)
        }
    };
    request.readable = cuts(dice, 16, 16 + request.data.len());
    request.writable = cuts(dice, request.in_len, request.in_len + 1);
    request.indirect = dice.chance(3);
    request
}

fn same(ours: &Reply, theirs: &Reply) -> bool {
    let same_data = ours.status != OK || ours.data == theirs.data;
    ours.status == theirs.status && ours.used_len == theirs.used_len && same_data
}

#[test]
fn the_daemon_answers_as_qemu_storage_daemon_does() {
    let ours = Backend::daemon("4M", &["--logical-block-size", "512"]);
    let theirs = Backend::qsd(DISK_BYTES, 1);
    let mut our_guest = Guest::new(ours.connect());
    let mut their_guest = Guest::new(theirs.connect());
    let mut our_queue = our_guest.queue(0, 128);
    let mut their_queue = their_guest.queue(0, 128);
    let mut dice = Dice::new();
    let (mut applied, mut explained) = (0, 0);
    for number in 0..REQUESTS {
        let request = random_request(&mut dice);
        let our_reply = our_queue.run(&request);
        let their_reply = their_queue.run(&request);
        if our_reply.status == OK {
            applied += 1;
        }
        if !same(&our_reply, &their_reply) {
            let answers = format!(
                "request {number}: {request:?}\nours:   status {} used {}\ntheirs: status {} used {}",
                our_reply.status, our_reply.used_len, their_reply.status, their_reply.used_len
            );
            assert!(justified(&request, &our_reply, &their_reply).is_some(), "{answers}");
            explained += 1;
            // Applied here and refused there: the contents are brought together again with the means of both.
            if our_reply.status == OK && matches!(request.kind, 11 | 13) {
                repeat_on_theirs(&mut their_queue, &request);
            }
        }
        if number % 500 == 499 {
            compare_disks(&mut our_queue, &mut their_queue, number);
        }
    }
    compare_disks(&mut our_queue, &mut their_queue, REQUESTS);
    println!("{applied} of {REQUESTS} requests were carried out, {explained} answers differed for a reason");
    assert!(applied > REQUESTS / 2, "only {applied} requests were carried out");
    assert!(explained < REQUESTS / 3, "{explained} answers differed");
}

/// Zeroes the ranges of a request by plain writes.
fn repeat_on_theirs(queue: &mut Queue, request: &Request) {
    for range in request.data.chunks_exact(16) {
        let sector = u64::from_le_bytes(range[..8].try_into().unwrap());
        let sectors = u64::from(u32::from_le_bytes(range[8..12].try_into().unwrap()));
        for at in (sector..sector + sectors).step_by(128) {
            let count = (sector + sectors - at).min(128) as usize;
            queue.write(at, &vec![0; count * SECTOR]);
        }
    }
}

fn compare_disks(ours: &mut Queue, theirs: &mut Queue, number: usize) {
    for at in (0..DISK_SECTORS).step_by(256) {
        let (our_part, their_part) = (ours.read(at, 256 * SECTOR), theirs.read(at, 256 * SECTOR));
        if our_part != their_part {
            let first = our_part.iter().zip(&their_part).position(|(a, b)| a != b).unwrap();
            panic!(
                "after request {number} the disks differ in sector {}",
                at + (first / SECTOR) as u64
            );
        }
    }
}
