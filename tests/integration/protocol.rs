//! Negotiation, rings coming and going, connections coming and going.

use std::collections::VecDeque;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};

use vhost::vhost_user::message::{
    VhostUserConfigFlags, VhostUserHeaderFlag, VhostUserInflight, VhostUserProtocolFeatures,
};
use vhost::vhost_user::{Frontend, VhostUserFrontend};
use vhost::{VhostBackend, VhostUserMemoryRegionInfo};
use virtio_bindings::virtio_blk::*;
use virtio_bindings::virtio_config::*;
use virtio_bindings::virtio_ring::*;

use crate::raw::*;
use crate::support::{Backend, Dice, PATIENCE, wait_for};

const DISK: &str = "64M";

const OFFERED: u64 = bit(VIRTIO_F_VERSION_1)
    | bit(VIRTIO_RING_F_EVENT_IDX)
    | bit(VIRTIO_RING_F_INDIRECT_DESC)
    | bit(VIRTIO_F_IN_ORDER)
    | bit(VIRTIO_BLK_F_MQ)
    | bit(VIRTIO_BLK_F_SEG_MAX)
    | bit(VIRTIO_BLK_F_BLK_SIZE)
    | bit(VIRTIO_BLK_F_TOPOLOGY)
    | bit(VIRTIO_BLK_F_DISCARD)
    | bit(VIRTIO_BLK_F_WRITE_ZEROES)
    | PROTOCOL_FEATURES_BIT;

/// Firmware's choice: SEG_MAX and so on by accident, VERSION_1, and none of the ring features.
const FIRMWARE_FEATURES: u64 = 0x1_4000_0046;

/// A page that tells its number and its age.
fn page(number: u64, age: u64) -> Vec<u8> {
    Dice::seeded(number << 32 | age).bytes(PAGE)
}

#[test]
fn the_offered_features_are_these_and_no_others() {
    let disk = Backend::daemon(DISK, &[]);
    assert_eq!(Guest::new(disk.connect()).offered, OFFERED);
    let read_only = Backend::daemon(DISK, &["--read-only"]);
    assert_eq!(Guest::new(read_only.connect()).offered, OFFERED | bit(VIRTIO_BLK_F_RO));
}

#[test]
fn the_offered_protocol_features_contain_what_frontends_need() {
    let disk = Backend::daemon(DISK, &[]);
    let mut guest = Guest::new(disk.connect());
    let offered = guest.frontend.get_protocol_features().unwrap();
    let expected = VhostUserProtocolFeatures::MQ
        | VhostUserProtocolFeatures::REPLY_ACK
        | VhostUserProtocolFeatures::CONFIG
        | VhostUserProtocolFeatures::CONFIGURE_MEM_SLOTS
        | VhostUserProtocolFeatures::BACKEND_REQ
        | VhostUserProtocolFeatures::INFLIGHT_SHMFD
        | VhostUserProtocolFeatures::RESET_DEVICE;
    assert_eq!(offered, expected);
    assert_eq!(guest.frontend.get_queue_num().unwrap(), 64);
    assert!(guest.frontend.get_max_mem_slots().unwrap() >= 32);
}

#[test]
fn the_config_space_is_this_and_reads_of_any_shape_agree() {
    let disk = Backend::daemon(DISK, &[]);
    let mut guest = Guest::new(disk.connect());
    #[rustfmt::skip]
    let golden: [u8; 60] = [
        0, 0, 2, 0, 0, 0, 0, 0,                 // capacity: 128 Ki sectors
        0, 0, 0, 0, 126, 0, 0, 0,               // size_max, seg_max
        0, 0, 0, 0, 0, 16, 0, 0,                // geometry, blk_size
        0, 0, 1, 0, 1, 0, 0, 0,                 // topology
        0, 0, 64, 0,                            // writeback, unused, num_queues
        0xf8, 0xff, 0xff, 0xff, 0, 1, 0, 0,     // max_discard_sectors, max_discard_seg
        8, 0, 0, 0,                             // discard_sector_alignment
        0xf8, 0xff, 0xff, 0xff, 0, 1, 0, 0,     // max_write_zeroes_sectors, max_write_zeroes_seg
        1, 0, 0, 0,                             // write_zeroes_may_unmap
    ];
    assert_eq!(guest.config(0, 60), golden);
    assert_eq!(guest.config(0, 57), golden[..57], "QEMU's read");
    assert_eq!(guest.config(0x100, 60), golden, "old cloud-hypervisor's read");
    for (offset, len) in [(0, 1), (20, 4), (59, 1), (8, 8)] {
        assert_eq!(
            guest.config(offset, len),
            golden[offset as usize..offset as usize + len]
        );
    }
    assert_eq!(guest.config(60, 32), [0; 32], "beyond the last field");
    assert_eq!(guest.config(0, 256)[..60], golden);
}

#[test]
fn the_config_space_cannot_be_written() {
    let mut disk = Backend::daemon(DISK, &[]);
    let mut guest = Guest::new(disk.connect());
    let written = guest.frontend.set_config(32, VhostUserConfigFlags::WRITABLE, &[1]);
    assert!(written.is_err(), "a read-only field was written");
    drop(guest);
    disk.assert_alive();
    assert_eq!(Guest::reconnect(&disk).capacity_sectors(), 64 << 11);
}

#[test]
fn rings_may_be_set_up_in_any_order() {
    const STEPS: [&str; 6] = ["num", "addr", "base", "kick", "call", "enable"];
    let disk = Backend::daemon(DISK, &[]);
    let mut dice = Dice::new();
    for round in 0..60 {
        let mut steps = STEPS;
        for i in (1..steps.len()).rev() {
            steps.swap(i, dice.below(i as u64 + 1) as usize);
        }
        let mut guest = Guest::reconnect(&disk);
        let mut queue = guest.lay_out_queue(0, 64);
        for step in steps {
            let result = match step {
                "num" => guest.frontend.set_vring_num(0, queue.size),
                "addr" => guest.frontend.set_vring_addr(0, &Guest::ring_addresses(&queue)),
                "base" => guest.frontend.set_vring_base(0, 0),
                "kick" => guest.frontend.set_vring_kick(0, &queue.kick),
                "call" => guest.frontend.set_vring_call(0, queue.call.as_ref().unwrap()),
                _ => guest.frontend.set_vring_enable(0, true),
            };
            result.unwrap_or_else(|error| panic!("{step} of {steps:?}: {error}"));
        }
        queue.write(round * 8, &page(round, 0));
        assert!(queue.read(round * 8, PAGE) == page(round, 0), "{steps:?}");
    }
}

#[test]
fn a_request_kicked_before_the_ring_is_enabled_is_served_when_it_is() {
    let disk = Backend::daemon(DISK, &[]);
    let mut guest = Guest::new(disk.connect());
    let mut queue = guest.lay_out_queue(0, 64);
    guest.start(&queue, 0);
    guest.frontend.set_vring_enable(0, false).unwrap();
    let ticket = queue.submit(&Request::read(0, PAGE));
    queue.kick.write(1).unwrap();
    // A round trip, and the worker has had its chance to do the wrong thing.
    assert_eq!(guest.capacity_sectors(), 64 << 11);
    assert_eq!(
        queue.wait_used(Duration::from_millis(50)),
        None,
        "a ring that is not enabled was served"
    );
    guest.frontend.set_vring_enable(0, true).unwrap();
    let used = queue.wait_used(PATIENCE).expect("an answer after ENABLE");
    assert_eq!(queue.finish(ticket, used).status, OK);
}

#[test]
fn requests_that_were_available_before_the_kick_descriptor_came_are_served() {
    let disk = Backend::daemon(DISK, &[]);
    let mut guest = Guest::new(disk.connect());
    let mut queue = guest.lay_out_queue(0, 64);
    let ticket = queue.submit(&Request::read(0, PAGE));
    guest.start(&queue, 0);
    let used = queue.wait_used(PATIENCE).expect("an answer without any kick");
    assert_eq!(queue.finish(ticket, used).status, OK);
}

#[test]
fn a_queue_disabled_under_load_loses_and_doubles_nothing() {
    let disk = Backend::daemon(DISK, &[]);
    let mut guest = Guest::new(disk.connect());
    let mut queue = guest.queue(0, 128);
    let mut tickets = VecDeque::new();
    for round in 0..100 {
        for i in 0..8 {
            let since = queue.offered;
            tickets.push_back(queue.submit(&Request::write(i * 8, &page(i, round))));
            queue.kick(since);
        }
        guest.frontend.set_vring_enable(0, false).unwrap();
        guest.frontend.set_vring_enable(0, true).unwrap();
        while let Some(ticket) = tickets.pop_front() {
            let used = queue.wait_used(PATIENCE).expect("an answer");
            assert_eq!(queue.finish(ticket, used).status, OK);
        }
        assert_eq!(queue.take_used(), None);
    }
    for i in 0..8 {
        assert!(queue.read(i * 8, PAGE) == page(i, 99));
    }
}

#[test]
fn a_frontend_without_a_call_descriptor_polls() {
    let disk = Backend::daemon(DISK, &[]);
    let mut guest = Guest::new(disk.connect());
    let mut queue = guest.lay_out_queue(0, 64);
    queue.call = None;
    guest.start(&queue, 0);
    for i in 0..50 {
        queue.write(i * 8, &page(i, 0));
    }
    for i in 0..50 {
        assert!(queue.read(i * 8, PAGE) == page(i, 0));
    }
}

#[test]
fn a_frontend_without_a_kick_descriptor_is_polled() {
    let disk = Backend::daemon(DISK, &[]);
    let mut guest = Guest::new(disk.connect());
    let mut queue = guest.lay_out_queue(0, 64);
    let addresses = Guest::ring_addresses(&queue);
    guest.frontend.set_vring_num(0, queue.size).unwrap();
    guest.frontend.set_vring_base(0, 0).unwrap();
    guest.frontend.set_vring_addr(0, &addresses).unwrap();
    guest.frontend.set_vring_call(0, queue.call.as_ref().unwrap()).unwrap();
    guest.vring_without_fd(SET_VRING_KICK, 0);
    guest.frontend.set_vring_enable(0, true).unwrap();
    for i in 0..20 {
        queue.write(i * 8, &page(i, 0));
    }
    assert!(queue.read(19 * 8, PAGE) == page(19, 0));
}

#[test]
fn firmware_then_the_kernel_use_one_connection_with_one_memory_table() {
    let disk = Backend::daemon(DISK, &[]);
    let mut guest = Guest::with_features(disk.connect(), FIRMWARE_FEATURES);
    assert_eq!(
        guest.features & (bit(VIRTIO_RING_F_EVENT_IDX) | bit(VIRTIO_RING_F_INDIRECT_DESC)),
        0
    );
    let mut firmware = guest.queue(0, 16);
    for i in 0..40 {
        firmware.write(i * 8, &page(i, 1));
    }
    let base = guest.stop(&firmware);
    assert_eq!(base, firmware.used_index());

    // The kernel: other features, twice, another ring, more queues, the same memory.
    guest.features = OFFERED;
    guest.frontend.set_features(OFFERED).unwrap();
    guest.frontend.set_features(OFFERED).unwrap();
    let mut first = guest.queue(0, 128);
    let mut second = guest.queue(1, 128);
    for i in 0..40 {
        assert!(first.read(i * 8, PAGE) == page(i, 1), "what firmware wrote");
        second.write(i * 8, &page(i, 2));
        assert!(first.read(i * 8, PAGE) == page(i, 2));
    }
}

#[test]
fn without_the_event_index_the_flag_against_interrupts_is_heard_or_harmless() {
    let disk = Backend::daemon(DISK, &[]);
    let mut guest = Guest::with_features(disk.connect(), FIRMWARE_FEATURES);
    let mut queue = guest.queue(0, 16);
    queue.put(queue.avail, &1u16.to_le_bytes()); // VRING_AVAIL_F_NO_INTERRUPT
    let call = queue.call.take();
    for i in 0..20 {
        queue.write(i * 8, &page(i, 0));
    }
    queue.call = call;
    queue.put(queue.avail, &0u16.to_le_bytes());
    // With the flag cleared the call must come again: run() insists on it.
    let _ = queue.call.as_ref().unwrap().read();
    assert!(queue.read(0, PAGE) == page(0, 0));
}

#[test]
fn the_base_of_a_stopped_ring_accounts_for_every_request_and_nothing_follows_it() {
    let disk = Backend::daemon(DISK, &[]);
    let mut guest = Guest::new(disk.connect());
    let mut dice = Dice::new();
    let mut queue = guest.lay_out_queue(0, 256);
    let content = dice.content(16 * PAGE);
    let mut base = 0;
    for round in 0..200 {
        guest.start(&queue, base);
        let since = queue.offered;
        // Up to 64 KiB, so that a stop also falls into the middle of a request.
        let tickets: Vec<Ticket> = (0..1 + dice.below(16))
            .map(|i| queue.submit(&Request::write(i * 128, &content[..PAGE << dice.below(5)])))
            .collect();
        queue.kick(since);
        // Sometimes before the worker wakes, sometimes in the middle, sometimes at the end.
        let lead = dice.below(300);
        let since = std::time::Instant::now();
        while since.elapsed() < Duration::from_micros(lead) {
            std::hint::spin_loop();
        }
        base = if dice.chance(2) {
            guest.stop(&queue)
        } else {
            guest.frontend.get_vring_base(0).unwrap() as u16
        };
        let at_reply = queue.used_index();
        assert_eq!(
            base, at_reply,
            "round {round}: the base and the used index at the reply"
        );
        // Over this round trip and a while nothing may come.
        queue.kick.write(1).unwrap();
        assert_eq!(guest.capacity_sectors(), 64 << 11);
        if round % 10 == 0 {
            std::thread::sleep(Duration::from_millis(5));
        }
        assert_eq!(
            queue.used_index(),
            at_reply,
            "round {round}: a used entry after the reply"
        );
        // What was not done goes on after the next start, from the base.
        guest.start(&queue, base);
        queue.kick.write(1).unwrap();
        for ticket in tickets {
            let used = queue.wait_used(PATIENCE).expect("a request that the stop left over");
            assert_eq!(queue.finish(ticket, used).status, OK);
        }
        base = guest.stop(&queue);
        assert_eq!(base, queue.seen);
    }
}

#[test]
fn a_ring_goes_on_from_a_base_that_the_frontend_names() {
    let disk = Backend::daemon(DISK, &[]);
    for base in [1, 63, 64, 0x7fff, 0xfff0, 0xffff] {
        let mut guest = Guest::reconnect(&disk);
        let mut queue = guest.lay_out_queue(0, 64);
        queue.offered = base;
        queue.seen = base;
        queue.set_avail_index(base);
        queue.put(queue.used + 2, &base.to_le_bytes());
        queue.put(queue.avail + 4 + 64 * 2, &base.to_le_bytes()); // used_event
        guest.start(&queue, base);
        for i in 0..100 {
            queue.write(i * 8, &page(i, u64::from(base)));
        }
        assert_eq!(queue.used_index(), base.wrapping_add(100));
        assert!(queue.read(99 * 8, PAGE) == page(99, u64::from(base)));
    }
}

#[test]
fn sixty_four_queues_serve_at_once() {
    let disk = Backend::daemon(DISK, &[]);
    let mut guest = Guest::new(disk.connect());
    guest.share_buffers_among(64);
    let threads = disk.settled_counts().1;
    let mut queues: Vec<Queue> = (0..64).map(|index| guest.queue(index, 64)).collect();
    let mut tickets = Vec::new();
    for queue in &mut queues {
        let sector = queue.index as u64 * 8;
        tickets.push(queue.submit(&Request::write(sector, &page(sector, 0))));
        queue.kick(0);
    }
    for (queue, ticket) in queues.iter_mut().zip(tickets) {
        let used = queue.wait_used(PATIENCE).expect("an answer");
        assert_eq!(queue.finish(ticket, used).status, OK);
    }
    for i in 0..64 {
        assert!(queues[63 - i as usize].read(i * 8, PAGE) == page(i * 8, 0));
    }
    drop((queues, guest));
    wait_for("the workers end with their connection", PATIENCE, || {
        (disk.thread_count() == threads).then_some(())
    });
}

#[test]
fn only_the_queues_that_the_guest_sets_up_are_touched() {
    let disk = Backend::daemon(DISK, &[]);
    let mut guest = Guest::new(disk.connect());
    let mut queue = guest.queue(5, 64);
    queue.write(0, &page(0, 0));
    assert!(queue.read(0, PAGE) == page(0, 0));
    // QEMU disables the queues that a driver left alone.
    guest.frontend.set_vring_enable(9, false).unwrap();
    guest.frontend.get_vring_base(9).unwrap();
    assert!(queue.read(0, PAGE) == page(0, 0));
}

#[test]
fn the_largest_ring_that_was_allowed_works() {
    let disk = Backend::daemon(DISK, &["--queue-size-max", "32768"]);
    let mut guest = Guest::new(disk.connect());
    let mut queue = guest.queue(0, 32768);
    let tickets: Vec<Ticket> = (0..200)
        .map(|i| queue.submit(&Request::write(i * 8, &page(i, 0))))
        .collect();
    queue.kick(0);
    for ticket in tickets {
        let used = queue.wait_used(PATIENCE).expect("an answer");
        assert_eq!(queue.finish(ticket, used).status, OK);
    }
}

#[test]
fn a_ring_size_out_of_range_ends_the_connection_only() {
    let mut disk = Backend::daemon(DISK, &[]);
    for size in [0u32, 3, 2048, 32769, 65536, 65536 + 128, u32::MAX] {
        let guest = Guest::reconnect(&disk);
        let payload: Vec<u8> = [0u32, size].into_iter().flat_map(u32::to_le_bytes).collect();
        send(&guest.stream, SET_VRING_NUM, &payload, &[]).unwrap();
        assert_refused(&guest, &format!("SET_VRING_NUM {size}"));
        assert_serves(&mut disk);
    }
}

/// The backend answers "no" or nothing, and closes.
fn assert_refused(guest: &Guest, what: &str) {
    if let Ok((_, reply)) = receive(&guest.stream) {
        assert_ne!(reply, 0u64.to_le_bytes(), "{what} was accepted");
    }
    assert!(
        is_closed_by_backend(&guest.stream),
        "the connection lives on after {what}"
    );
}

/// A new frontend gets its work done.
fn assert_serves(disk: &mut Backend) {
    disk.assert_alive();
    let mut guest = Guest::reconnect(disk);
    let mut queue = guest.queue(0, 64);
    queue.write(80, &page(80, 0));
    assert!(queue.read(80, PAGE) == page(80, 0));
}

#[test]
fn a_second_frontend_is_turned_away_at_once_and_the_first_goes_on() {
    let disk = Backend::daemon(DISK, &[]);
    let mut guest = Guest::new(disk.connect());
    let mut queue = guest.queue(0, 64);
    for i in 0..20 {
        let second = disk.connect();
        assert!(is_closed_by_backend(&second), "the second connection stays open");
        queue.write(i * 8, &page(i, 0));
        assert!(queue.read(i * 8, PAGE) == page(i, 0));
    }
}

#[test]
fn a_frontend_that_comes_right_after_another_left_is_served() {
    let disk = Backend::daemon(DISK, &[]);
    for i in 0..200 {
        // No second try: the last connection was closed before this one was made.
        let mut guest = Guest::new(disk.connect());
        let mut queue = guest.queue(0, 64);
        queue.write(8, &page(8, i));
        assert!(queue.read(8, PAGE) == page(8, i));
    }
}

#[test]
fn a_frontend_without_shared_memory_is_told_what_is_missing() {
    let mut disk = Backend::daemon(DISK, &[]);
    let mut guest = Guest::without_memory(disk.connect(), LINUX_FEATURES).unwrap();
    let queue = guest.lay_out_queue(0, 64);
    let _ = guest.frontend.set_vring_num(0, queue.size);
    let _ = guest.frontend.set_vring_base(0, 0);
    let _ = guest.frontend.set_vring_addr(0, &Guest::ring_addresses(&queue));
    let _ = guest.frontend.set_vring_kick(0, &queue.kick);
    let _ = guest.frontend.set_vring_enable(0, true);
    let said = wait_for("a line about shared memory", PATIENCE, || {
        let stderr = disk.stderr();
        stderr.contains("share=on").then_some(stderr)
    });
    assert_eq!(said.matches("share=on").count(), 1, "{said}");
    drop((guest, queue));
    assert_serves(&mut disk);
}

#[test]
fn content_stays_over_connections() {
    let disk = Backend::daemon(DISK, &[]);
    for age in 0..20 {
        let mut guest = Guest::reconnect(&disk);
        let mut queue = guest.queue(age as usize % 4, 64);
        if age > 0 {
            assert!(queue.read(40, PAGE) == page(40, age - 1));
        }
        queue.write(40, &page(40, age));
    }
}

#[test]
fn reset_device_stops_the_rings_and_keeps_the_content() {
    let disk = Backend::daemon(DISK, &[]);
    let mut guest = Guest::new(disk.connect());
    let mut queue = guest.queue(0, 64);
    queue.write(0, &page(0, 0));
    guest.frontend.reset_device().unwrap();
    let before = queue.used_index();
    queue.submit(&Request::read(0, PAGE));
    queue.kick.write(1).unwrap();
    assert_eq!(guest.capacity_sectors(), 64 << 11);
    assert_eq!(
        queue.wait_used(Duration::from_millis(50)),
        None,
        "a ring ran on after RESET_DEVICE"
    );
    assert_eq!(queue.used_index(), before);
    queue.forget();
    guest.frontend.set_features(guest.features).unwrap();
    guest.start(&queue, 0);
    assert!(queue.read(0, PAGE) == page(0, 0));
}

#[test]
fn a_guest_that_moves_to_a_new_connection_loses_no_request_in_flight() {
    let disk = Backend::daemon(DISK, &[]);
    let mut guest = Guest::new(disk.connect());
    let mut queue = guest.queue(0, 128);
    let mut dice = Dice::new();
    for round in 0..100 {
        let since = queue.offered;
        let tickets: Vec<Ticket> = (0..32)
            .map(|i| queue.submit(&Request::write(i * 8, &page(i, round))))
            .collect();
        queue.kick(since);
        let begin = std::time::Instant::now();
        let lead = Duration::from_micros(dice.below(500));
        while begin.elapsed() < lead {
            std::hint::spin_loop();
        }
        guest.stream.shutdown(std::net::Shutdown::Both).unwrap();
        wait_for("the backend takes the new connection", PATIENCE, || {
            guest.move_to(disk.connect()).ok()
        });
        // What QEMU and cloud-hypervisor do: the used index is the account of what is done.
        let base = queue.used_index();
        guest.start(&queue, base);
        queue.kick.write(1).unwrap();
        for ticket in tickets {
            let used = queue.wait_used(PATIENCE).expect("every request is answered once");
            assert_eq!(queue.finish(ticket, used).status, OK);
        }
        assert_eq!(queue.take_used(), None);
    }
    for i in 0..32 {
        assert!(queue.read(i * 8, PAGE) == page(i, 99));
    }
}

#[test]
fn rings_start_enabled_for_a_frontend_without_protocol_features() {
    let disk = Backend::daemon(DISK, &[]);
    let mut guest = Guest::with_features(disk.connect(), LINUX_FEATURES & !PROTOCOL_FEATURES_BIT);
    let mut queue = guest.lay_out_queue(0, 64);
    guest.frontend.set_vring_num(0, queue.size).unwrap();
    guest.frontend.set_vring_base(0, 0).unwrap();
    let addresses = Guest::ring_addresses(&queue);
    guest.frontend.set_vring_addr(0, &addresses).unwrap();
    guest.frontend.set_vring_call(0, queue.call.as_ref().unwrap()).unwrap();
    guest.frontend.set_vring_kick(0, &queue.kick).unwrap();
    queue.write(0, &page(0, 0));
    assert!(queue.read(0, PAGE) == page(0, 0));
}

#[test]
fn memory_comes_and_goes_by_single_regions_with_requests_in_flight() {
    let disk = Backend::daemon(DISK, &[]);
    let mut guest = Guest::without_memory(disk.connect(), LINUX_FEATURES).unwrap();
    for index in 0..3 {
        let region = guest.region(index);
        guest.frontend.add_mem_region(&region).unwrap();
    }
    // Rings and buffers lie in the first two regions; the third goes away and comes back under load.
    let mut queue = guest.queue(0, 128);
    for round in 0..100 {
        let since = queue.offered;
        let tickets: Vec<Ticket> = (0..8)
            .map(|i| queue.submit(&Request::write(i * 8, &page(i, round))))
            .collect();
        queue.kick(since);
        let region = guest.region(2);
        guest.frontend.remove_mem_region(&region).unwrap();
        guest.frontend.add_mem_region(&region).unwrap();
        for ticket in tickets {
            let used = queue.wait_used(PATIENCE).expect("an answer");
            assert_eq!(queue.finish(ticket, used).status, OK);
        }
    }
    for i in 0..8 {
        assert!(queue.read(i * 8, PAGE) == page(i, 99));
    }
}

#[test]
fn the_memory_table_is_replaced_with_requests_in_flight() {
    let disk = Backend::daemon(DISK, &[]);
    let mut guest = Guest::new(disk.connect());
    let mut queue = guest.queue(0, 128);
    let regions: Vec<VhostUserMemoryRegionInfo> = (0..3).map(|index| guest.region(index)).collect();
    for round in 0..200 {
        let since = queue.offered;
        let tickets: Vec<Ticket> = (0..8)
            .map(|i| queue.submit(&Request::write(i * 8, &page(i, round))))
            .collect();
        queue.kick(since);
        guest.frontend.set_mem_table(&regions).unwrap();
        for ticket in tickets {
            let used = queue.wait_used(PATIENCE).expect("an answer");
            assert_eq!(queue.finish(ticket, used).status, OK);
        }
    }
    for i in 0..8 {
        assert!(queue.read(i * 8, PAGE) == page(i, 199));
    }
}

#[test]
fn a_frontend_that_wants_no_replies_is_served() {
    let disk = Backend::daemon(DISK, &[]);
    let mut guest = Guest::new(disk.connect());
    guest.frontend.set_hdr_flags(VhostUserHeaderFlag::empty());
    let mut queue = guest.queue(0, 64);
    queue.write(0, &page(0, 0));
    assert!(queue.read(0, PAGE) == page(0, 0));
}

#[test]
fn features_that_were_never_offered_end_the_connection_only() {
    let mut disk = Backend::daemon(DISK, &[]);
    for feature in [
        VIRTIO_F_RING_PACKED,
        VIRTIO_BLK_F_SIZE_MAX,
        VIRTIO_F_ACCESS_PLATFORM,
        63,
    ] {
        let guest = Guest::reconnect(&disk);
        assert!(
            guest.frontend.set_features(OFFERED | bit(feature)).is_err(),
            "bit {feature} was accepted"
        );
        assert!(
            is_closed_by_backend(&guest.stream),
            "the connection lives on after bit {feature}"
        );
        assert_serves(&mut disk);
    }
}

#[test]
fn a_frontend_may_ask_for_features_before_it_owns_the_session() {
    let disk = Backend::daemon(DISK, &[]);
    let mut frontend = Frontend::from_stream(disk.connect(), 64);
    assert_eq!(frontend.get_features().unwrap(), OFFERED);
    frontend
        .set_protocol_features(VhostUserProtocolFeatures::MQ | VhostUserProtocolFeatures::CONFIG)
        .unwrap();
    assert_eq!(frontend.get_queue_num().unwrap(), 64);
    frontend.set_owner().unwrap();
    assert_eq!(frontend.get_features().unwrap(), OFFERED);
}

#[test]
fn requests_are_tracked_in_a_region_that_outlives_the_connection() {
    let disk = Backend::daemon(DISK, &[]);
    let mut guest = Guest::new(disk.connect());
    let asked = VhostUserInflight {
        mmap_size: 0,
        mmap_offset: 0,
        num_queues: 2,
        queue_size: 128,
    };
    let (region, file) = guest.frontend.get_inflight_fd(&asked).unwrap();
    guest.frontend.set_inflight_fd(&region, file.as_raw_fd()).unwrap();
    let mut queue = guest.queue(1, 128);
    for i in 0..200 {
        queue.write(i * 8, &page(i, 0));
    }
    let mut part = vec![0; 16];
    file.read_exact_at(&mut part, region.mmap_size / 2).unwrap();
    assert_eq!(part[8..12], [1, 0, 128, 0], "version and size of the second part");
    assert_eq!(part[14..], 200u16.to_le_bytes(), "its used index");
    guest.stream.shutdown(std::net::Shutdown::Both).unwrap();
    wait_for("the backend takes the new connection", PATIENCE, || {
        guest.move_to(disk.connect()).ok()
    });
    guest.frontend.set_inflight_fd(&region, file.as_raw_fd()).unwrap();
    // As a frontend does that counts what it has offered, not what was answered.
    let ticket = queue.submit(&Request::read(0, PAGE));
    guest.start(&queue, 201);
    let used = queue.wait_used(PATIENCE).expect("an answer");
    assert_eq!(queue.finish(ticket, used).status, OK);
}

#[test]
fn the_limit_of_requests_a_second_is_kept_and_discards_pass_it() {
    let disk = Backend::daemon(DISK, &["--iops-limit", "200", "--limit-burst-ms", "0"]);
    let mut guest = Guest::new(disk.connect());
    let mut queue = guest.queue(0, 128);
    let started = Instant::now();
    for i in 0..21 {
        queue.read(i * 8, PAGE);
    }
    assert!(
        started.elapsed() >= Duration::from_millis(95),
        "{:?}",
        started.elapsed()
    );
    let started = Instant::now();
    for i in 0..200 {
        let reply = queue.run(&Request::discard(&[range(i * 8, 8)]));
        assert_eq!(reply.status, OK);
    }
    assert!(
        started.elapsed() < Duration::from_millis(900),
        "{:?}",
        started.elapsed()
    );
}

#[test]
fn a_frontend_may_give_the_backend_a_channel_of_its_own() {
    let disk = Backend::daemon(DISK, &[]);
    let mut guest = Guest::new(disk.connect());
    let before = disk.fd_count();
    let (ours, theirs) = std::os::unix::net::UnixStream::pair().unwrap();
    guest.frontend.set_backend_request_fd(&ours).unwrap();
    drop(ours);
    guest.queue(0, 64).write(0, &page(0, 0));
    assert!(disk.fd_count() > before);
    drop(guest);
    assert!(is_closed_by_backend(&theirs), "it is closed with the connection");
}
