//! Guests that break the rules. Each attack has one answer: a status byte where one can be written (E), the chain back with
//! used length 0 where none can (U), a broken ring where there is nothing to give back (B). After each,
//! `Stage::assert_unharmed` sees that nothing else came of it.

use std::time::Duration;

use virtio_bindings::virtio_ring::*;

use crate::raw::*;
use crate::support::{Backend, Dice, PATIENCE, wait_for};

const DISK: &str = "64M";
const SIZE: u16 = 128;
/// The descriptors from here on are for attacks; healthy requests use those from 0.
const SLOT: u16 = 64;

/// A disk with a page that must not change, a queue to attack and a second one that must not care.
struct Stage {
    disk: Backend,
    guest: Guest,
    queue: Queue,
    bystander: Queue,
    precious: Vec<u8>,
    fds: usize,
    threads: usize,
    /// Chains given back unanswered, and rings broken, as far as the tests count them.
    returned: u64,
    broken: u64,
}

impl Stage {
    fn new() -> Stage {
        Stage::with_features(LINUX_FEATURES)
    }

    fn with_features(features: u64) -> Stage {
        let disk = Backend::daemon(DISK, &[]);
        let mut guest = Guest::with_features(disk.connect(), features);
        let mut queue = guest.queue(0, SIZE);
        let mut bystander = guest.queue(1, SIZE);
        let precious = Dice::new().bytes(PAGE);
        queue.write(0, &precious);
        bystander.write(8, &precious);
        let (fds, threads) = disk.settled_counts();
        Stage {
            disk,
            guest,
            queue,
            bystander,
            precious,
            fds,
            threads,
            returned: 0,
            broken: 0,
        }
    }

    fn header(&mut self, kind: u32) -> u64 {
        let mut bytes = [0; 16];
        bytes[..4].copy_from_slice(&kind.to_le_bytes());
        self.queue.keep(&bytes)
    }

    fn status(&mut self) -> u64 {
        self.queue.keep(&[UNTOUCHED])
    }

    /// Writes a chain into the slots from `SLOT` on, linked one after the other.
    fn chain(&mut self, descriptors: &[Descriptor]) {
        for (i, descriptor) in descriptors.iter().enumerate() {
            let slot = SLOT + i as u16;
            let last = i + 1 == descriptors.len();
            let flags = descriptor.flags | if last { 0 } else { NEXT };
            self.queue.describe(
                slot,
                Descriptor {
                    flags,
                    next: if last { 0 } else { slot + 1 },
                    ..*descriptor
                },
            );
        }
    }

    fn fire(&mut self, head: u16) {
        let since = self.queue.offered;
        self.queue.offer(head);
        self.queue.kick(since);
    }

    fn used(&mut self) -> Used {
        self.queue.wait_used(PATIENCE).expect("the attack gets an answer")
    }

    /// U: the chain comes back with nothing written, and the queue goes on.
    fn assert_returned(&mut self, what: &str) {
        self.fire(SLOT);
        assert_eq!(self.used(), Used { id: SLOT, len: 0 }, "{what}");
        self.returned += 1;
        self.assert_unharmed(what);
    }

    /// E: a status and nothing else, and the queue goes on.
    fn assert_answered(&mut self, status_addr: u64, status: u8, what: &str) {
        self.fire(SLOT);
        assert_eq!(self.used(), Used { id: SLOT, len: 1 }, "{what}");
        assert_eq!(self.queue.bytes(status_addr, 1), [status], "{what}");
        self.assert_unharmed(what);
    }

    /// B: the error descriptor fires, nothing is used any more, until the frontend has stopped and started the ring.
    fn assert_broken(&mut self, what: &str) {
        assert!(
            is_readable(&self.queue.err, PATIENCE),
            "{what}: no word on the error descriptor"
        );
        self.queue.err.read().unwrap();
        self.broken += 1;
        let used = self.queue.used_index();
        self.queue.kick.write(1).unwrap();
        self.assert_bystander_unharmed(what);
        assert_eq!(self.queue.used_index(), used, "{what}: a broken ring was served");
        self.disk.assert_idle();
        self.guest.stop(&self.queue);
        self.queue.forget();
        self.guest.start(&self.queue, 0);
        self.assert_unharmed(what);
    }

    fn assert_bystander_unharmed(&mut self, what: &str) {
        self.disk.assert_alive();
        assert!(
            self.bystander.read(8, PAGE) == self.precious,
            "{what}: the other queue reads something else"
        );
    }

    fn assert_unharmed(&mut self, what: &str) {
        self.assert_bystander_unharmed(what);
        assert!(self.queue.read(0, PAGE) == self.precious, "{what}: the disk changed");
        // The process may hold a descriptor for a moment, to look at something.
        wait_for(&format!("{what}: descriptors and threads as before"), PATIENCE, || {
            ((self.disk.fd_count(), self.disk.thread_count()) == (self.fds, self.threads)).then_some(())
        });
    }
}

impl Drop for Stage {
    /// The last word of every test: no thread spins, and a fresh connection finds the disk as it was.
    fn drop(&mut self) {
        if std::thread::panicking() {
            return;
        }
        self.disk.assert_idle();
        wait_for("the attacks are counted", PATIENCE, || {
            let requests = &self.disk.stats()["requests"];
            let count = |key: &str| requests[key].as_u64().unwrap();
            (count("bad_chains") >= self.returned && count("broken_rings") >= self.broken && count("panics") == 0)
                .then_some(())
        });
        // The old connection has to go first: one frontend at a time.
        self.guest.stream.shutdown(std::net::Shutdown::Both).unwrap();
        let mut fresh = Guest::reconnect(&self.disk);
        let mut queue = fresh.queue(0, SIZE);
        assert!(
            queue.read(0, PAGE) == self.precious,
            "a fresh connection reads something else"
        );
        assert!(
            self.disk.stderr().len() < 16 << 10,
            "the guest fills the log:\n{}",
            self.disk.stderr()
        );
    }
}

#[test]
fn a_descriptor_that_is_its_own_next_is_returned() {
    let mut stage = Stage::new();
    let header = stage.header(0);
    stage.queue.describe(SLOT, descriptor(header, 16, NEXT, SLOT));
    stage.assert_returned("self loop");
}

#[test]
fn a_loop_of_two_descriptors_is_returned() {
    let mut stage = Stage::new();
    let (header, status) = (stage.header(0), stage.status());
    stage.queue.describe(SLOT, descriptor(header, 16, NEXT, SLOT + 1));
    stage
        .queue
        .describe(SLOT + 1, descriptor(status, 1, NEXT | WRITE, SLOT));
    stage.assert_returned("loop of two");
}

#[test]
fn a_loop_in_an_indirect_table_is_returned() {
    let mut stage = Stage::new();
    let (header, table) = (stage.header(0), stage.queue.keep(&[0; 32]));
    stage.queue.describe_at(table, 0, descriptor(header, 16, NEXT, 1));
    stage.queue.describe_at(table, 1, descriptor(header, 16, NEXT, 0));
    stage.chain(&[descriptor(table, 32, INDIRECT, 0)]);
    stage.assert_returned("loop in an indirect table");
}

#[test]
fn a_next_beyond_the_table_is_returned() {
    let mut stage = Stage::new();
    for next in [SIZE, SIZE + 1, 0x7fff, 0xffff] {
        let header = stage.header(0);
        stage.queue.describe(SLOT, descriptor(header, 16, NEXT, next));
        stage.assert_returned(&format!("next {next}"));
    }
}

#[test]
fn a_next_beyond_an_indirect_table_is_returned() {
    let mut stage = Stage::new();
    for next in [2, 3, 0xffff] {
        let (header, table) = (stage.header(0), stage.queue.keep(&[0; 32]));
        stage.queue.describe_at(table, 0, descriptor(header, 16, NEXT, next));
        stage.chain(&[descriptor(table, 32, INDIRECT, 0)]);
        stage.assert_returned(&format!("next {next} in an indirect table of 2"));
    }
}

#[test]
fn a_head_beyond_the_table_breaks_the_ring() {
    let mut stage = Stage::new();
    for head in [SIZE, SIZE + 1, 0x7fff, 0xffff] {
        stage.fire(head);
        stage.assert_broken(&format!("head {head}"));
    }
}

#[test]
fn requests_before_a_head_beyond_the_table_are_answered_and_called_for() {
    let mut stage = Stage::new();
    for round in 0..50 {
        let since = stage.queue.offered;
        let tickets = [0, 8, 0].map(|sector| stage.queue.submit(&Request::read(sector, PAGE)));
        stage.queue.offer(SIZE);
        stage.queue.kick(since);
        for ticket in tickets {
            // Waiting insists on a call: the driver may sleep on these answers.
            let used = stage.queue.wait_used(Duration::from_secs(2)).expect("an answer");
            assert_eq!(stage.queue.finish(ticket, used).status, OK, "round {round}");
        }
        stage.assert_broken("a bad head after good ones");
    }
}

#[test]
fn an_avail_index_that_jumps_ahead_breaks_the_ring() {
    let mut stage = Stage::new();
    for jump in [SIZE + 1, SIZE * 2, 0x7fff, 0x8000] {
        let index = stage.queue.offered.wrapping_add(jump);
        stage.queue.set_avail_index(index);
        stage.queue.kick.write(1).unwrap();
        stage.assert_broken(&format!("avail index ahead by {jump}"));
    }
}

#[test]
fn an_avail_index_that_goes_back_breaks_the_ring() {
    let mut stage = Stage::new();
    stage.queue.read(0, PAGE);
    let index = stage.queue.offered.wrapping_sub(1);
    stage.queue.set_avail_index(index);
    stage.queue.kick.write(1).unwrap();
    stage.assert_broken("avail index backwards");
}

#[test]
fn an_indirect_table_of_odd_or_no_or_vast_length_is_returned() {
    let mut stage = Stage::new();
    for len in [0, 1, 15, 17, 31, 65535 * 16, u32::MAX, u32::MAX - 15] {
        let (header, status) = (stage.header(0), stage.status());
        let table = stage.queue.keep(&[0; 64]);
        stage.queue.describe_at(table, 0, descriptor(header, 16, NEXT, 1));
        stage.queue.describe_at(table, 1, descriptor(status, 1, WRITE, 0));
        stage.chain(&[descriptor(table, len, INDIRECT, 0)]);
        stage.assert_returned(&format!("indirect table of {len} bytes"));
        assert_eq!(stage.queue.bytes(status, 1), [UNTOUCHED]);
    }
}

#[test]
fn a_nested_indirect_table_is_returned() {
    let mut stage = Stage::new();
    let (header, status) = (stage.header(0), stage.status());
    let (inner, outer) = (stage.queue.keep(&[0; 32]), stage.queue.keep(&[0; 16]));
    stage.queue.describe_at(inner, 0, descriptor(header, 16, NEXT, 1));
    stage.queue.describe_at(inner, 1, descriptor(status, 1, WRITE, 0));
    stage.queue.describe_at(outer, 0, descriptor(inner, 32, INDIRECT, 0));
    stage.chain(&[descriptor(outer, 16, INDIRECT, 0)]);
    stage.assert_returned("nested indirect tables");
}

#[test]
fn an_indirect_descriptor_with_a_next_is_returned() {
    let mut stage = Stage::new();
    let (header, status, table) = (stage.header(0), stage.status(), stage.queue.keep(&[0; 16]));
    stage.queue.describe_at(table, 0, descriptor(header, 16, 0, 0));
    stage.chain(&[descriptor(table, 16, INDIRECT, 0), descriptor(status, 1, WRITE, 0)]);
    stage.assert_returned("INDIRECT with NEXT");
}

#[test]
fn an_indirect_table_outside_memory_is_returned() {
    let mut stage = Stage::new();
    for addr in [HOLE, HOLE - 16, MEMORY_END - 16, MEMORY_END, u64::MAX - 31, u64::MAX] {
        stage.chain(&[descriptor(addr, 32, INDIRECT, 0)]);
        stage.assert_returned(&format!("indirect table at {addr:#x}"));
    }
}

#[test]
fn an_indirect_table_that_was_not_negotiated_is_returned() {
    let mut stage = Stage::with_features(LINUX_FEATURES & !bit(VIRTIO_RING_F_INDIRECT_DESC));
    let (header, status, table) = (stage.header(0), stage.status(), stage.queue.keep(&[0; 32]));
    stage.queue.describe_at(table, 0, descriptor(header, 16, NEXT, 1));
    stage.queue.describe_at(table, 1, descriptor(status, 1, WRITE, 0));
    stage.chain(&[descriptor(table, 32, INDIRECT, 0)]);
    stage.assert_returned("INDIRECT not negotiated");
}

/// Addresses at which a buffer of `len` bytes does not lie wholly in memory.
fn outside(len: u64) -> Vec<u64> {
    let mut addresses = vec![HOLE, HOLE + 0x1000, MEMORY_END, 1 << 40, u64::MAX - len + 1, u64::MAX];
    if len > 1 {
        addresses.extend([HOLE - 1, HOLE - len + 1, HOLE_END - 1, MEMORY_END - 1, u64::MAX - 8]);
    }
    addresses
}

#[test]
fn data_outside_memory_fails_and_stores_nothing() {
    let mut stage = Stage::new();
    for addr in outside(PAGE as u64) {
        for (kind, direction) in [(1, 0), (0, WRITE)] {
            let (header, status) = (stage.header(kind), stage.status());
            stage.chain(&[
                descriptor(header, 16, 0, 0),
                descriptor(addr, PAGE as u32, direction, 0),
                descriptor(status, 1, WRITE, 0),
            ]);
            stage.assert_answered(status, IOERR, &format!("type {kind} with data at {addr:#x}"));
        }
    }
}

#[test]
fn a_write_whose_last_segment_is_outside_memory_stores_none_of_it() {
    let mut stage = Stage::new();
    let (header, status) = (stage.header(1), stage.status());
    let good = stage.queue.keep(&[0x11; PAGE]);
    stage.chain(&[
        descriptor(header, 16, 0, 0),
        descriptor(good, PAGE as u32, 0, 0),
        descriptor(HOLE, PAGE as u32, 0, 0),
        descriptor(status, 1, WRITE, 0),
    ]);
    stage.assert_answered(status, IOERR, "second page of a write in the hole");
}

#[test]
fn ranges_outside_memory_fail_and_discard_nothing() {
    let mut stage = Stage::new();
    for kind in [11, 13] {
        for addr in outside(16) {
            let (header, status) = (stage.header(kind), stage.status());
            let good = Request::discard(&[range(0, 8)]).data;
            let good = stage.queue.keep(&good);
            stage.chain(&[
                descriptor(header, 16, 0, 0),
                descriptor(good, 16, 0, 0),
                descriptor(addr, 16, 0, 0),
                descriptor(status, 1, WRITE, 0),
            ]);
            stage.assert_answered(status, IOERR, &format!("type {kind} with ranges at {addr:#x}"));
        }
    }
}

#[test]
fn a_header_outside_memory_fails() {
    let mut stage = Stage::new();
    for addr in outside(16) {
        let status = stage.status();
        stage.chain(&[descriptor(addr, 16, 0, 0), descriptor(status, 1, WRITE, 0)]);
        stage.assert_answered(status, IOERR, &format!("header at {addr:#x}"));
    }
}

#[test]
fn a_status_byte_outside_memory_is_returned() {
    let mut stage = Stage::new();
    for addr in outside(1) {
        for kind in [0, 1, 8, 77] {
            let header = stage.header(kind);
            stage.chain(&[descriptor(header, 16, 0, 0), descriptor(addr, 1, WRITE, 0)]);
            stage.assert_returned(&format!("type {kind} with status at {addr:#x}"));
        }
    }
}

#[test]
fn a_write_without_a_place_for_its_status_stores_nothing() {
    let mut stage = Stage::new();
    let header = stage.header(1);
    let data = stage.queue.keep(&[0x11; PAGE]);
    let parts = [descriptor(header, 16, 0, 0), descriptor(data, PAGE as u32, 0, 0)];
    stage.chain(&parts);
    stage.assert_returned("write with no writable byte");
    stage.chain(&[parts[0], parts[1], descriptor(HOLE, 1, WRITE, 0)]);
    stage.assert_returned("write with its status in the hole");
}

#[test]
fn chains_without_a_status_byte_are_returned() {
    let mut stage = Stage::new();
    let header = stage.header(0);
    stage.chain(&[descriptor(header, 16, 0, 0)]);
    stage.assert_returned("only a header");
    stage.chain(&[descriptor(header, 4, 0, 0)]);
    stage.assert_returned("only part of a header");
    stage.chain(&[descriptor(header, 0, 0, 0)]);
    stage.assert_returned("an empty readable descriptor");
    stage.chain(&[descriptor(header, 0, WRITE, 0)]);
    stage.assert_returned("an empty writable descriptor");
    stage.chain(&[descriptor(header, 16, 0, 0), descriptor(header, 0, WRITE, 0)]);
    stage.assert_returned("a header and an empty status");
}

#[test]
fn a_chain_of_only_a_status_byte_is_unsupported() {
    let mut stage = Stage::new();
    let status = stage.status();
    stage.chain(&[descriptor(status, 1, WRITE, 0)]);
    stage.assert_answered(status, UNSUPP, "only a status");
}

#[test]
fn a_readable_descriptor_after_a_writable_one_fails() {
    let mut stage = Stage::new();
    let (header, status) = (stage.header(1), stage.status());
    let data = stage.queue.keep(&[0x11; PAGE]);
    stage.chain(&[
        descriptor(header, 16, 0, 0),
        descriptor(status, 1, WRITE, 0),
        descriptor(data, PAGE as u32, 0, 0),
    ]);
    stage.assert_answered(status, IOERR, "data after the status");
    let status = stage.status();
    stage.chain(&[descriptor(status, 1, WRITE, 0), descriptor(header, 16, 0, 0)]);
    stage.assert_answered(status, IOERR, "header after the status");
}

#[test]
fn data_in_the_wrong_direction_fails() {
    let mut stage = Stage::new();
    let data = stage.queue.keep(&[0x11; PAGE]);
    for (kind, direction) in [(0, 0), (1, WRITE), (11, WRITE), (13, WRITE)] {
        let (header, status) = (stage.header(kind), stage.status());
        stage.chain(&[
            descriptor(header, 16, 0, 0),
            descriptor(data, PAGE as u32, direction, 0),
            descriptor(status, 1, WRITE, 0),
        ]);
        stage.fire(SLOT);
        let used = stage.used();
        let what = format!("type {kind} with data in the wrong direction");
        assert_eq!(used, Used { id: SLOT, len: 1 }, "{what}");
        // Writable bytes beyond the status may be ignored in a request of no data.
        assert!([IOERR, OK].contains(&stage.queue.bytes(status, 1)[0]), "{what}");
        if kind == 0 {
            assert_eq!(stage.queue.bytes(status, 1), [IOERR], "{what}");
        }
        assert_eq!(stage.queue.bytes(data, PAGE), [0x11; PAGE], "{what}");
        stage.assert_unharmed(&what);
    }
}

#[test]
fn a_chain_longer_than_the_ring_is_returned() {
    let mut stage = Stage::new();
    let (header, status) = (stage.header(0), stage.status());
    // An indirect table may have more entries than the ring, but not without end.
    let entries = 3000u32;
    let table = PLAYGROUND;
    for i in 0..entries - 1 {
        stage
            .queue
            .describe_at(table, i as u16, descriptor(header, 1, NEXT, i as u16 + 1));
    }
    stage
        .queue
        .describe_at(table, entries as u16 - 1, descriptor(status, 1, WRITE, 0));
    stage.chain(&[descriptor(table, entries * 16, INDIRECT, 0)]);
    stage.assert_returned("an indirect chain of 3,000 descriptors");
}

#[test]
fn buffers_on_top_of_the_rings_harm_only_their_guest() {
    let mut stage = Stage::new();
    let (table, avail, used) = (stage.queue.table, stage.queue.avail, stage.queue.used);
    for target in [table, avail, used] {
        // A sector of the disk over the ring: whatever becomes of this ring, nothing else may suffer.
        let header = stage.header(0);
        let status = stage.status();
        stage.chain(&[
            descriptor(header, 16, 0, 0),
            descriptor(target, SECTOR as u32, WRITE, 0),
            descriptor(status, 1, WRITE, 0),
        ]);
        stage.fire(SLOT);
        wait_for("the request was looked at", PATIENCE, || {
            (stage.queue.bytes(status, 1) != [UNTOUCHED]).then_some(())
        });
        stage.assert_bystander_unharmed("data over a ring");
        stage.guest.stop(&stage.queue);
        stage.queue.forget();
        let _ = stage.queue.err.read();
        stage.guest.start(&stage.queue, 0);
        stage.assert_unharmed("data over a ring");
    }
    for target in [table + u64::from(SLOT) * 16, avail, used + 4] {
        let header = stage.header(0);
        stage.chain(&[descriptor(header, 16, 0, 0), descriptor(target, 1, WRITE, 0)]);
        stage.fire(SLOT);
        wait_for("the request was used", PATIENCE, || {
            (stage.queue.used_index() == stage.queue.offered).then_some(())
        });
        stage.assert_bystander_unharmed("status over a ring");
        stage.guest.stop(&stage.queue);
        stage.queue.forget();
        stage.guest.start(&stage.queue, 0);
    }
}

#[test]
fn a_used_ring_that_the_guest_scribbles_on_is_not_believed() {
    let mut stage = Stage::new();
    for index in [0u16, 1, 0x8000, 0xffff] {
        let seen = stage.queue.seen;
        stage.queue.put(stage.queue.used + 2, &index.to_le_bytes());
        let (header, status) = (stage.header(8), stage.status());
        stage.chain(&[descriptor(header, 16, 0, 0), descriptor(status, 1, WRITE, 0)]);
        stage.fire(SLOT);
        // The device writes its own count over the scribble.
        wait_for("the device's own used index", PATIENCE, || {
            (stage.queue.used_index() == seen.wrapping_add(1)).then_some(())
        });
        assert_eq!(stage.used().id, SLOT);
        stage.assert_unharmed(&format!("used index {index}"));
    }
}

#[test]
fn an_event_index_that_lies_costs_only_calls() {
    let mut stage = Stage::new();
    for event in [0u16, 1, 0x7fff, 0xffff] {
        stage.queue.event_idx = false; // the kit no longer keeps the event index, and kicks by the flag
        stage
            .queue
            .put(stage.queue.avail + 4 + u64::from(SIZE) * 2, &event.to_le_bytes());
        let call = stage.queue.call.take();
        for _ in 0..300 {
            let ticket = stage.queue.submit(&Request::read(0, PAGE));
            stage.queue.kick.write(1).unwrap();
            let used = stage.queue.wait_used(PATIENCE).expect("an answer, called for or not");
            assert_eq!(stage.queue.finish(ticket, used).status, OK);
        }
        stage.queue.call = call;
    }
    stage.queue.event_idx = true;
    stage.guest.stop(&stage.queue);
    stage.queue.forget();
    stage.guest.start(&stage.queue, 0);
    stage.assert_unharmed("lies in the event index");
}

#[test]
fn a_kick_storm_on_an_empty_ring_leaves_the_device_responsive() {
    let mut stage = Stage::new();
    for _ in 0..20_000 {
        stage.queue.kick.write(1).unwrap();
    }
    stage.assert_unharmed("a storm of kicks");
}

#[test]
fn endless_bad_chains_break_the_ring_in_the_end_and_not_the_log() {
    let mut stage = Stage::new();
    let header = stage.header(0);
    stage.queue.describe(SLOT, descriptor(header, 16, NEXT, SLOT));
    let mut returned = 0;
    while !is_readable(&stage.queue.err, Duration::ZERO) {
        assert!(returned < 100_000, "a hundred thousand bad chains and no end");
        for _ in 0..SIZE {
            stage.queue.offer(SLOT);
        }
        stage.queue.kick.write(1).unwrap();
        let offered = stage.queue.offered;
        wait_for("the bad chains are returned, or the ring breaks", PATIENCE, || {
            (stage.queue.used_index() == offered || is_readable(&stage.queue.err, Duration::ZERO)).then_some(())
        });
        while stage.queue.take_used().is_some() {
            returned += 1;
        }
    }
    assert!(returned >= 100, "the ring broke after only {returned} bad chains");
    stage.assert_broken("a flood of bad chains");
}

#[test]
fn a_vast_write_of_zeroes_does_not_hold_up_another_queue() {
    let disk = Backend::daemon("1T", &[]);
    let mut guest = Guest::new(disk.connect());
    let mut queue = guest.queue(0, SIZE);
    let mut bystander = guest.queue(1, SIZE);
    let whole: Vec<Range> = (0..200).map(|_| range(0, 1 << 31)).collect();
    let ticket = queue.submit(&Request::write_zeroes(&whole));
    queue.kick(0);
    let begin = std::time::Instant::now();
    for _ in 0..100 {
        bystander.read(0, PAGE);
    }
    assert!(
        begin.elapsed() < Duration::from_secs(2),
        "100 reads took {:?}",
        begin.elapsed()
    );
    let used = queue.wait_used(PATIENCE).expect("the zeroes are written some day");
    assert_eq!(queue.finish(ticket, used).status, OK);
}

#[test]
fn data_that_changes_while_it_is_written_is_stored_as_some_mix() {
    let mut stage = Stage::new();
    let (header, status) = (stage.header(1), stage.status());
    let data = stage.queue.keep(&[0; PAGE]);
    let sector = 800u64;
    stage.queue.put(header + 8, &sector.to_le_bytes());
    stage.chain(&[
        descriptor(header, 16, 0, 0),
        descriptor(data, PAGE as u32, 0, 0),
        descriptor(status, 1, WRITE, 0),
    ]);
    let memory = stage.queue.memory.clone();
    let stop = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        // Ends the hammer also when an assertion fails.
        struct Stop<'a>(&'a std::sync::atomic::AtomicBool);
        impl Drop for Stop<'_> {
            fn drop(&mut self) {
                self.0.store(true, std::sync::atomic::Ordering::Relaxed);
            }
        }
        let stop_at_end = Stop(&stop);
        scope.spawn(|| {
            use vm_memory::{Bytes, GuestAddress};
            let kinds = [[0u8; PAGE], [b'a'; PAGE], std::array::from_fn(|i| b'a' + (i % 7) as u8)];
            while !stop.load(std::sync::atomic::Ordering::Relaxed) {
                for kind in &kinds {
                    memory.write_slice(kind, GuestAddress(data)).unwrap();
                }
            }
        });
        for _ in 0..2000 {
            stage.fire(SLOT);
            assert_eq!(stage.used(), Used { id: SLOT, len: 1 });
            assert_eq!(stage.queue.bytes(status, 1), [OK]);
            let stored = stage.bystander.read(sector, PAGE);
            assert!(
                stored.iter().all(|byte| *byte == 0 || (b'a'..b'h').contains(byte)),
                "bytes from nowhere"
            );
        }
        drop(stop_at_end);
    });
    stage.assert_unharmed("racing writes");
}
