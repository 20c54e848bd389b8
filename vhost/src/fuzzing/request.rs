//! Requests that are right or nearly so, served by the real worker, and the rules said a second time: which status and
//! used length must come out, which bytes of guest memory may change and to what, and what the disk then holds.
//!
//! Each buffer has a place of its own, with a gap before the next, so the order in which a batch is read does not matter.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};
use zram_core::{Page, SlotIndex};

use super::{Choices, DISK_BYTES, SERIAL, config, shared};
use crate::guest::Guest;
use crate::ring::{Areas, Ring};
use crate::worker::{Kick, Parts, QueueWorker, Signals};

/// In two adjacent regions.
const GUEST_BYTES: u64 = 1 << 18;
const RING_SIZE: u16 = 64;
const DESCRIPTORS: u64 = 0;
const AVAIL: u64 = 0x1000;
const USED: u64 = 0x2000;
const TABLES: u64 = 0x4000;
const BUFFERS: u64 = 0x1_0000;
const CHAINS_MAX: u64 = 8;
const SEGMENTS_MAX: u64 = 12;
/// Where no memory is.
const NOWHERE: [u64; 4] = [GUEST_BYTES, GUEST_BYTES - 1, 1 << 40, u64::MAX - 3];

const NEXT: u16 = 1;
const WRITE: u16 = 2;
const INDIRECT: u16 = 4;

const OK: u8 = 0;
const IOERR: u8 = 1;
const UNSUPP: u8 = 2;

struct Segment {
    addr: u64,
    len: u32,
    writable: bool,
}

impl Segment {
    fn is_in_memory(&self) -> bool {
        self.addr
            .checked_add(u64::from(self.len))
            .is_some_and(|end| end <= GUEST_BYTES)
    }
}

/// How a chain is spoiled on its way into the descriptor table.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Flaw {
    None,
    /// The last descriptor goes on with the first.
    Loop,
    /// The last descriptor goes on outside of the table.
    NextOutside,
    /// The table's length is none.
    TableLength,
    /// A table within a table.
    Nested,
    /// A table, and more.
    TableAndNext,
}

struct Case {
    head: u16,
    segments: Vec<Segment>,
    flaw: Flaw,
}

struct Model {
    memory: Vec<u8>,
    disk: Vec<u8>,
    read_only: bool,
    flush: bool,
    indirect: bool,
}

/// One input: a row of choices.
pub fn request(input: &[u8]) {
    let mut choices = Choices::new(input);
    let [event_idx, indirect, read_only, flush] = [2, 2, 8, 4].map(|count| choices.one_in(count));
    let mut model = Model {
        memory: (0..GUEST_BYTES).map(|at| ((at * 31) >> 3) as u8).collect(),
        disk: vec![0; DISK_BYTES as usize],
        read_only,
        flush,
        indirect,
    };
    let mut config = config(1, RING_SIZE);
    (config.read_only, config.flush) = (read_only, flush);
    let shared = shared(config);

    model.memory[..BUFFERS as usize].fill(0);
    let cases = lay_out(&mut choices, &mut model);
    let half = GUEST_BYTES as usize / 2;
    let ranges = [(GuestAddress(0), half), (GuestAddress(half as u64), half)];
    let mem: GuestMemoryMmap = GuestMemoryMmap::from_ranges(&ranges).expect("anonymous memory");
    mem.write_slice(&model.memory, GuestAddress(0)).expect("it fits");

    let mut ring = Ring::new(RING_SIZE);
    let areas = Areas {
        descriptors: GuestAddress(DESCRIPTORS),
        avail: GuestAddress(AVAIL),
        used: GuestAddress(USED),
    };
    ring.set_up(&Guest::of(&mem), RING_SIZE, areas, event_idx, indirect)
        .expect("areas in memory");
    let core = shared.disk.zram.worker().expect("the first worker");
    let parts = Parts {
        index: 0,
        ring,
        guest: Guest::of(&mem),
        kick: Kick::Polled,
        signals: Arc::<Signals>::default(),
        shared: shared.clone(),
    };
    QueueWorker::new(parts, core).turn(&AtomicBool::new(false));

    for (index, case) in cases.iter().enumerate() {
        let (status, used_len) = model.serve(case);
        let at = USED + 4 + 8 * index as u64;
        let element: [u8; 8] = mem.read_obj(GuestAddress(at)).expect("in memory");
        let expected = u64::from(case.head) | u64::from(used_len) << 32;
        assert_eq!(
            u64::from_le_bytes(element),
            expected,
            "used element {index}, status {status:?}"
        );
    }
    assert_eq!(
        mem.read_obj::<u16>(GuestAddress(USED + 2)).expect("in memory"),
        cases.len() as u16
    );
    let mut found = vec![0; GUEST_BYTES as usize];
    mem.read_slice(&mut found, GuestAddress(0)).expect("in memory");
    // The used ring was looked at above.
    let used = USED as usize..USED as usize + 6 + 8 * usize::from(RING_SIZE);
    found[used.clone()].copy_from_slice(&model.memory[used]);
    assert!(
        found == model.memory,
        "guest memory differs at {:x?}",
        first_difference(&found, &model.memory)
    );
    let mut reader = shared.disk.zram.worker().expect("another worker");
    let mut page = Page::zeroed();
    for (index, expected) in model.disk.chunks(4096).enumerate() {
        reader
            .read_page(SlotIndex(index as u32), &mut page)
            .expect("it decodes");
        assert!(page[..] == *expected, "page {index} of the disk differs");
    }
}

fn first_difference(a: &[u8], b: &[u8]) -> Option<usize> {
    a.iter().zip(b).position(|(a, b)| a != b)
}

/// Draws requests and writes them into memory as a driver would.
fn lay_out(choices: &mut Choices<'_>, model: &mut Model) -> Vec<Case> {
    let count = 1 + choices.below(CHAINS_MAX);
    let (mut free, mut descriptor) = (BUFFERS, 0);
    let mut cases = vec![];
    for index in 0..count {
        let (mut readable, writable_bytes) = contents(choices);
        let mut segments = vec![];
        let mut cut = |choices: &mut Choices<'_>, bytes: usize, writable: bool, model: &mut Model, content: &[u8]| {
            let mut done = 0;
            while done < bytes && segments.len() < SEGMENTS_MAX as usize {
                let is_last = segments.len() + 2 >= SEGMENTS_MAX as usize;
                let len = match choices.below(4) {
                    _ if is_last => bytes - done,
                    0 => (bytes - done).min(1 + choices.below(20) as usize),
                    1 => (bytes - done).min(1 + choices.below(5000) as usize),
                    _ => bytes - done,
                };
                free += choices.below(70);
                let addr = free;
                if addr + len as u64 > GUEST_BYTES {
                    return false;
                }
                free += len as u64;
                if !writable {
                    model.memory[addr as usize..][..len].copy_from_slice(&content[done..done + len]);
                }
                segments.push(Segment {
                    addr,
                    len: len as u32,
                    writable,
                });
                done += len;
            }
            true
        };
        let fits =
            cut(choices, readable.len(), false, model, &readable) && cut(choices, writable_bytes, true, model, &[]);
        readable.clear();
        if !fits || segments.is_empty() {
            break;
        }
        spoil(choices, &mut segments);
        let flaw = match choices.below(24) {
            0 => Flaw::Loop,
            1 => Flaw::NextOutside,
            2 => Flaw::TableLength,
            3 => Flaw::Nested,
            4 => Flaw::TableAndNext,
            _ => Flaw::None,
        };
        let as_table = matches!(flaw, Flaw::TableLength | Flaw::Nested | Flaw::TableAndNext) || choices.one_in(3);
        let needed = if as_table { 1 } else { segments.len() as u16 };
        if descriptor + needed > RING_SIZE {
            break;
        }
        let case = Case {
            head: descriptor,
            segments,
            flaw,
        };
        describe(&case, as_table, TABLES + index * 0x400, model);
        descriptor += needed;
        // A table is followed only where it was agreed upon.
        let flaw = if as_table && !model.indirect {
            Flaw::Nested
        } else {
            flaw
        };
        put(model, AVAIL + 4 + 2 * index, &case.head.to_le_bytes());
        cases.push(Case { flaw, ..case });
    }
    put(model, AVAIL + 2, &(cases.len() as u16).to_le_bytes());
    cases
}

/// What the device may read, and how many bytes it may write.
fn contents(choices: &mut Choices<'_>) -> (Vec<u8>, usize) {
    let kind = match choices.below(8) {
        0 | 1 => 0u32,
        2 | 3 => 1,
        4 => 11,
        5 => 13,
        6 => choices.pick(&[8, 4, 14, 2, 16, 1 << 31]),
        _ => choices.any(),
    };
    let sectors = DISK_BYTES / 512;
    let sector = match choices.below(8) {
        0 => choices.any::<u64>(),
        1 => sectors - choices.below(4),
        _ => choices.below(sectors),
    };
    let mut readable = [kind.to_le_bytes(), [0xff; 4]].concat();
    readable.extend(sector.to_le_bytes());
    let data = match choices.below(6) {
        0 => choices.below(9000) as usize,
        1 => 512 * choices.below(40) as usize,
        _ => 4096 * choices.below(4) as usize,
    };
    let mut writable = 1;
    match kind {
        1 => {
            let (seed, step) = (choices.any::<u8>(), choices.any::<u8>());
            let content = (0..data).map(|at| (at / 7) as u8 ^ seed.wrapping_add((at as u8).wrapping_mul(step)));
            readable.extend(content);
        }
        11 | 13 => {
            for _ in 0..choices.below(5) {
                let (first, count) = (choices.below(sectors + 1), choices.below(sectors + 1) as u32);
                let first = if choices.one_in(16) { choices.any() } else { first };
                let count = if choices.one_in(16) { choices.any() } else { count };
                let flags = choices.pick(&[0u32, 0, 0, 1, 2, 3, 1 << 31]);
                readable.extend(first.to_le_bytes());
                readable.extend(count.to_le_bytes());
                readable.extend(flags.to_le_bytes());
            }
        }
        8 => writable += choices.below(40) as usize,
        _ => writable += data,
    }
    match choices.below(16) {
        0 => readable.truncate(choices.below(17) as usize),
        1 => readable.push(0),
        2 => writable = 0,
        3 => writable += 1,
        _ => {}
    }
    (readable, writable)
}

/// Moves a buffer out of memory, or to where it should not be.
fn spoil(choices: &mut Choices<'_>, segments: &mut [Segment]) {
    let index = choices.below(segments.len() as u64) as usize;
    match choices.below(20) {
        0 => segments[index].addr = choices.pick(&NOWHERE),
        1 => segments.rotate_left(index),
        2 => segments[index].len = 0,
        _ => {}
    }
}

fn put(model: &mut Model, at: u64, bytes: &[u8]) {
    model.memory[at as usize..][..bytes.len()].copy_from_slice(bytes);
}

fn describe(case: &Case, as_table: bool, table: u64, model: &mut Model) {
    let count = case.segments.len() as u16;
    let (place, first) = if as_table { (table, 0) } else { (DESCRIPTORS, case.head) };
    for (index, segment) in case.segments.iter().enumerate() {
        let index = index as u16;
        let is_last = index + 1 == count;
        let (goes_on, next) = match case.flaw {
            Flaw::Loop if is_last => (true, first),
            Flaw::NextOutside if is_last => (true, if as_table { count } else { RING_SIZE }),
            _ => (!is_last, first + index + 1),
        };
        let mut flags = if segment.writable { WRITE } else { 0 };
        flags |= if goes_on { NEXT } else { 0 };
        let nested = case.flaw == Flaw::Nested && is_last;
        let (addr, len) = if nested {
            (table, 16)
        } else {
            (segment.addr, segment.len)
        };
        flags |= if nested { INDIRECT } else { 0 };
        let at = place + 16 * u64::from(first + index);
        put_descriptor(model, at, addr, len, flags, next);
    }
    if as_table {
        let len = u32::from(count) * 16 + u32::from(case.flaw == Flaw::TableLength);
        let more = if case.flaw == Flaw::TableAndNext { NEXT } else { 0 };
        let at = DESCRIPTORS + 16 * u64::from(case.head);
        put_descriptor(model, at, table, len, INDIRECT | more, 0);
    }
}

fn put_descriptor(model: &mut Model, at: u64, addr: u64, len: u32, flags: u16, next: u16) {
    put(model, at, &addr.to_le_bytes());
    put(model, at + 8, &len.to_le_bytes());
    put(model, at + 12, &flags.to_le_bytes());
    put(model, at + 14, &next.to_le_bytes());
}

/// The rules, said a second time and slowly: virtio 1.3 sections 2.7.4, 2.7.5.3 and 5.2.6, and this device's choice where
/// several statuses would do.
impl Model {
    /// The status, if one can be written, and the used length.
    fn serve(&mut self, case: &Case) -> (Option<u8>, u32) {
        let segments: Vec<&Segment> = case.segments.iter().filter(|segment| segment.len > 0).collect();
        let status_at = segments.iter().rfind(|segment| segment.writable).and_then(|segment| {
            let at = segment.addr.checked_add(u64::from(segment.len) - 1)?;
            (at < GUEST_BYTES).then_some(at)
        });
        let (Flaw::None, Some(status_at)) = (case.flaw, status_at) else {
            return (None, 0);
        };
        let (status, data_bytes) = match self.execute(&segments) {
            Ok(data_bytes) => (OK, data_bytes),
            Err(status) => (status, 0),
        };
        self.memory[status_at as usize] = status;
        (Some(status), data_bytes + 1)
    }

    fn execute(&mut self, segments: &[&Segment]) -> Result<u32, u8> {
        if !segments.iter().all(|segment| segment.is_in_memory()) {
            return Err(IOERR);
        }
        let readable: Vec<u8> = segments
            .iter()
            .filter(|segment| !segment.writable)
            .flat_map(|segment| self.memory[segment.addr as usize..][..segment.len as usize].to_vec())
            .collect();
        let mut room: Vec<u64> = segments
            .iter()
            .filter(|segment| segment.writable)
            .flat_map(|segment| segment.addr..segment.addr + u64::from(segment.len))
            .collect();
        room.pop();
        let Some((header, data)) = readable.split_at_checked(16) else {
            return Err(UNSUPP);
        };
        if segments.windows(2).any(|pair| pair[0].writable && !pair[1].writable) {
            return Err(IOERR);
        }
        let kind = u32::from_le_bytes(header[..4].try_into().expect("four bytes"));
        let sector = u64::from_le_bytes(header[8..].try_into().expect("eight bytes"));
        let writables = segments.iter().filter(|segment| segment.writable).count();
        match kind {
            0 if !data.is_empty() => Err(IOERR),
            0 => {
                let at = self.bytes_on_disk(sector, room.len() as u64)?;
                for (to, from) in room.iter().zip(at) {
                    self.memory[*to as usize] = self.disk[from];
                }
                Ok(room.len() as u32)
            }
            1 | 11 | 13 if self.read_only || writables > 1 => Err(IOERR),
            1 => {
                let at = self.bytes_on_disk(sector, data.len() as u64)?;
                self.disk[at].copy_from_slice(data);
                Ok(0)
            }
            4 if self.flush => Ok(0),
            8 if !data.is_empty() => Err(IOERR),
            8 => {
                let id = SERIAL.bytes().chain(std::iter::repeat(0)).take(20);
                let written = room
                    .iter()
                    .zip(id)
                    .map(|(to, byte)| self.memory[*to as usize] = byte)
                    .count();
                Ok(written as u32)
            }
            11 | 13 => self.zero(kind == 13, data),
            _ => Err(UNSUPP),
        }
    }

    fn bytes_on_disk(&self, sector: u64, bytes: u64) -> Result<std::ops::Range<usize>, u8> {
        let start = sector.checked_mul(512).ok_or(IOERR)?;
        let end = start.checked_add(bytes).ok_or(IOERR)?;
        if bytes.is_multiple_of(512) && end <= DISK_BYTES {
            Ok(start as usize..end as usize)
        } else {
            Err(IOERR)
        }
    }

    fn zero(&mut self, exactly: bool, ranges: &[u8]) -> Result<u32, u8> {
        if ranges.is_empty() || !ranges.len().is_multiple_of(16) {
            return Err(IOERR);
        }
        let mut all = vec![];
        for range in ranges.chunks(16) {
            let first = u64::from_le_bytes(range[..8].try_into().expect("eight bytes"));
            let count = u32::from_le_bytes(range[8..12].try_into().expect("four bytes"));
            let flags = u32::from_le_bytes(range[12..].try_into().expect("four bytes"));
            if flags > u32::from(exactly) {
                return Err(UNSUPP);
            }
            all.push(self.bytes_on_disk(first, u64::from(count) * 512)?);
        }
        for bytes in all {
            // Discarding frees whole pages and leaves the rest.
            let (start, end) = match exactly {
                true => (bytes.start, bytes.end),
                false => (bytes.start.next_multiple_of(4096), bytes.end / 4096 * 4096),
            };
            self.disk.get_mut(start..end).unwrap_or_default().fill(0);
        }
        Ok(0)
    }
}
