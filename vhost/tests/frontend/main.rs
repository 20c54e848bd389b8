//! The story of a device as a frontend lives it, in one process.
#![allow(clippy::unwrap_used)] // a test's way to fail

mod client;
mod huge;
mod transcript;

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use client::*;
use vhost::vhost_user::VhostUserFrontend;
use vhost::vhost_user::message::VhostUserConfigFlags;
use vhost::{VhostBackend, VhostUserMemoryRegionInfo};
use vm_memory::{Bytes, GuestAddress};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};
use zram_vhost::{Device, DeviceConfig, Endpoint};

const MIB: u64 = 1 << 20;

fn rig() -> Rig {
    Rig::new(64 * MIB, |_| {})
}

#[test]
fn negotiation_shows_what_is_offered() {
    let rig = rig();
    let mut client = rig.connect();
    assert_eq!(client.frontend.get_features().unwrap(), 0x9_7000_7444);
    client.negotiate(VERSION_1 | PROTOCOL);
    assert_eq!(client.frontend.get_queue_num().unwrap(), 4);
    assert_eq!(client.frontend.get_max_mem_slots().unwrap(), 509);
    let (_, config) = client
        .frontend
        .get_config(0, 60, VhostUserConfigFlags::empty(), &[0; 60])
        .unwrap();
    assert_eq!(config[..8], (64 * MIB / 512).to_le_bytes());
    assert!(
        client
            .frontend
            .set_config(32, VhostUserConfigFlags::empty(), &[1])
            .is_err(),
        "refused"
    );
    assert_eq!(
        client.frontend.get_queue_num().unwrap(),
        4,
        "and the connection lives on"
    );
}

#[test]
fn what_is_written_is_read_on_every_queue() {
    let rig = rig();
    let mut client = rig.client();
    let mut queues: Vec<_> = (0..4).map(|index| client.start_queue(index)).collect();
    rig.wait_for_queues(4);
    for (number, queue) in queues.iter_mut().enumerate() {
        queue.write(8 * number as u64, &page(number as u64));
    }
    for (number, queue) in queues.iter_mut().rev().enumerate() {
        assert_eq!(queue.read(8 * number as u64, 4096), page(number as u64));
    }
    assert_eq!(queues[0].read(1000, 4096), [0; 4096], "what was never written is zero");
    let requests = rig.device().status().requests;
    assert_eq!((requests.reads, requests.writes, requests.sectors_written), (5, 4, 32));
    assert!(requests.calls > 0);
}

#[test]
fn threads_are_named_for_disk_and_queue() {
    let rig = Rig::new(MIB, |config| config.name = "named".to_string());
    let mut client = rig.client();
    let _queue = client.start_queue(3);
    // A thread takes its name as the first thing it does.
    let named = |name: &str| {
        let tasks = std::fs::read_dir("/proc/self/task").unwrap();
        let names = tasks.filter_map(|task| std::fs::read_to_string(task.unwrap().path().join("comm")).ok());
        names.into_iter().any(|found| found.trim_end() == name)
    };
    wait_until("the control thread", || named("zram-named"));
    wait_until("the worker", || named("zram-named-q3"));
}

#[test]
fn requests_are_answered_as_the_table_says() {
    let rig = rig();
    let mut client = rig.client();
    let mut queue = client.start_queue(0);
    let capacity = 64 * MIB / 512;
    assert_eq!(queue.request(GET_ID, 0, &[], 20), (OK, 21));
    let mut id = [0; 20];
    client
        .mem
        .read_slice(&mut id, GuestAddress(queue.slot(0).data))
        .unwrap();
    assert_eq!(&id, b"story-serial\0\0\0\0\0\0\0\0");
    assert_eq!(queue.request(GET_ID, 0, &[], 3), (OK, 4));
    assert_eq!(queue.request(4, 0, &[], 0), (UNSUPP, 1), "flush was not offered");
    assert_eq!(queue.request(99, 0, &[], 0), (UNSUPP, 1));
    assert_eq!(queue.request(IN, capacity, &[], 512), (IOERR, 1));
    assert_eq!(queue.request(OUT, capacity - 7, &page(1), 4096), (IOERR, 1));
    assert_eq!(queue.request(OUT, 0, &page(1), 100), (IOERR, 1));
    queue.write(16, &page(2));
    let range = |sector: u64, count: u32, flags: u32| {
        [&sector.to_le_bytes()[..], &count.to_le_bytes(), &flags.to_le_bytes()].concat()
    };
    assert_eq!(queue.request(DISCARD, 0, &range(16, 8, 1), 16), (UNSUPP, 1));
    assert_eq!(queue.read(16, 4096), page(2));
    assert_eq!(queue.request(WRITE_ZEROES, 0, &range(17, 1, 1), 16), (OK, 1));
    let mut expected = page(2);
    expected[512..1024].fill(0);
    assert_eq!(queue.read(16, 4096), expected);
    let two = [range(16, 8, 0), range(capacity, 8, 0)].concat();
    assert_eq!(
        queue.request(DISCARD, 0, &two, 32),
        (IOERR, 1),
        "one bad range spoils all"
    );
    assert_eq!(queue.read(16, 4096), expected);
    assert_eq!(queue.request(DISCARD, 0, &range(0, capacity as u32, 0), 16), (OK, 1));
    assert_eq!(queue.read(16, 4096), [0; 4096]);
}

#[test]
fn a_read_only_disk_is_read_only() {
    let rig = Rig::new(MIB, |config| config.read_only = true);
    let mut client = rig.client();
    let mut queue = client.start_queue(0);
    assert_eq!(queue.request(OUT, 0, &page(1), 4096), (IOERR, 1));
    assert_eq!(queue.request(GET_ID, 0, &[], 20), (OK, 21));
    assert_eq!(queue.read(0, 4096), [0; 4096]);
}

#[test]
fn a_reset_keeps_memory_and_content() {
    let rig = rig();
    let mut client = rig.client();
    // Firmware: one queue, few features.
    client.set_features(VERSION_1 | PROTOCOL);
    let mut queue = client.start_queue(0);
    queue.write(8, &page(1));
    for round in 0..20 {
        client.frontend.set_vring_enable(0, false).unwrap();
        assert_eq!(
            client.frontend.get_vring_base(0).unwrap(),
            u32::from(queue.used_index())
        );
        client.set_features(VERSION_1 | PROTOCOL | if round % 2 == 0 { EVENT_IDX } else { 0 });
        queue = client.start_queue(0);
        assert_eq!(queue.read(8, 4096), page(1));
        queue.write(16, &page(round));
    }
    client.frontend.reset_device().unwrap();
    rig.wait_for_queues(0);
    client.set_features(VERSION_1 | PROTOCOL);
    let mut queue = client.start_queue(0);
    assert_eq!(queue.read(16, 4096), page(19));
}

#[test]
fn reconnecting_keeps_content() {
    let rig = rig();
    for round in 0..10 {
        let mut client = rig.client();
        let mut queue = client.start_queue(round % 4);
        if round > 0 {
            assert_eq!(queue.read(8 * (round as u64 - 1), 4096), page(round as u64 - 1));
        }
        queue.write(8 * round as u64, &page(round as u64));
        drop(client);
        wait_until("the frontend is gone", || rig.device().status().frontend.is_none());
    }
    assert_eq!(rig.device().status().connections_total, 10);
    assert_eq!(rig.device().status().failed_connections, 0);
}

fn open_descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

/// Alone in a process of its own: other tests open descriptors too.
#[test]
fn a_thousand_connections_leak_nothing() {
    const CHILD: &str = "ZRAM_VHOST_TEST_CHILD";
    if std::env::var_os(CHILD).is_none() {
        let test = std::env::current_exe().unwrap();
        let name = "a_thousand_connections_leak_nothing";
        let child = std::process::Command::new(test)
            .args(["--exact", name])
            .env(CHILD, "1")
            .output()
            .unwrap();
        assert!(child.status.success(), "{}", String::from_utf8_lossy(&child.stdout));
        return;
    }
    let rig = rig();
    let mut after_first = None;
    for round in 0..1000u64 {
        let mut client = rig.client();
        let mut queues = [client.start_queue(0), client.start_queue(1)];
        if round % 100 == 0 {
            queues[1].write(0, &page(round));
        }
        // Some leave in the middle of a message, some with descriptors that nobody asked for.
        match round % 4 {
            0 => client.raw.write_all(&[1, 0, 0]).unwrap(),
            1 => send_with_fd(&client.raw, &[2, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0], &client.file),
            _ => {}
        }
        drop((client, queues));
        wait_until("the frontend is gone", || rig.device().status().frontend.is_none());
        let open = (open_descriptors(), threads());
        assert_eq!(*after_first.get_or_insert(open), open, "round {round}");
    }
}

fn threads() -> usize {
    std::fs::read_dir("/proc/self/task").unwrap().count()
}

/// Connects besides the connection that is alive. Once refused, the control thread has looked at that one too.
fn expect_refusal(rig: &Rig) {
    let mut second = UnixStream::connect(&rig.path).unwrap();
    second.set_read_timeout(Some(Duration::from_secs(5))).unwrap();
    assert_eq!(second.read(&mut [0; 1]).unwrap(), 0, "closed at once");
}

#[test]
fn a_second_frontend_is_refused_and_the_first_served() {
    let rig = rig();
    let mut client = rig.client();
    let mut queue = client.start_queue(0);
    for _ in 0..4 {
        expect_refusal(&rig);
    }
    queue.write(0, &page(3));
    let status = rig.device().status();
    assert_eq!((status.refused_connections, status.connections_total), (4, 1));
    assert_eq!(status.frontend.unwrap().pid, std::process::id() as i32);
}

#[test]
fn a_kick_before_enabling_is_not_lost() {
    let rig = rig();
    let mut client = rig.client();
    let mut queue = Queue::new(&client, 0);
    client.configure(&queue, 0);
    client.frontend.set_vring_kick(0, &queue.kick).unwrap();
    client.frontend.set_vring_call(0, &queue.call).unwrap();
    let slot = queue.lay_out(0, OUT, 0, &page(1), 4096);
    queue.publish(slot.head);
    queue.kick();
    std::thread::sleep(Duration::from_millis(20));
    assert_eq!(queue.completed(), 0, "not enabled");
    client.frontend.set_vring_enable(0, true).unwrap();
    assert_eq!(queue.next_used(), (slot.head, 1));
}

#[test]
fn start_messages_come_in_any_order() {
    let rig = rig();
    let mut client = rig.client();
    const STEPS: usize = 6;
    for rotation in 0..STEPS {
        for reversed in [false, true] {
            let mut queue = Queue::new(&client, 0);
            for step in 0..STEPS {
                let step = (if reversed { STEPS - 1 - step } else { step } + rotation) % STEPS;
                let frontend = &mut client.frontend;
                match step {
                    0 => frontend.set_vring_num(0, 64).unwrap(),
                    1 => frontend.set_vring_base(0, 0).unwrap(),
                    2 => frontend.set_vring_addr(0, &queue.addresses()).unwrap(),
                    3 => frontend.set_vring_kick(0, &queue.kick).unwrap(),
                    4 => frontend.set_vring_call(0, &queue.call).unwrap(),
                    _ => frontend.set_vring_enable(0, true).unwrap(),
                }
            }
            queue.write(0, &page(rotation as u64));
            assert_eq!(queue.read(0, 4096), page(rotation as u64));
            client.frontend.reset_device().unwrap();
            client.set_features(VERSION_1 | EVENT_IDX | INDIRECT | PROTOCOL);
        }
    }
}

#[test]
fn a_driver_that_polls_needs_no_call_descriptor() {
    let rig = rig();
    let mut client = rig.client();
    let mut queue = Queue::new(&client, 0);
    client.configure(&queue, 0);
    client.frontend.set_vring_kick(0, &queue.kick).unwrap();
    client.send_no_fd(13, 0);
    client.frontend.set_vring_enable(0, true).unwrap();
    queue.write(0, &page(1));
    assert_eq!(queue.read(0, 4096), page(1));
    assert_eq!(rig.device().status().requests.calls, 0);
}

#[test]
fn without_a_kick_descriptor_the_ring_is_polled() {
    let rig = rig();
    let mut client = rig.client();
    let mut queue = Queue::new(&client, 0);
    client.configure(&queue, 0);
    client.send_no_fd(12, 0);
    client.frontend.set_vring_call(0, &queue.call).unwrap();
    client.frontend.set_vring_enable(0, true).unwrap();
    rig.wait_for_queues(1);
    let slot = queue.lay_out(0, OUT, 0, &page(1), 4096);
    queue.publish(slot.head);
    assert_eq!(queue.next_used(), (slot.head, 1), "without a kick");
}

#[test]
fn without_protocol_features_rings_come_enabled() {
    let rig = rig();
    let mut client = rig.client();
    client.set_features(VERSION_1);
    let mut queue = Queue::new(&client, 0);
    client.configure(&queue, 0);
    client.frontend.set_vring_kick(0, &queue.kick).unwrap();
    queue.write(0, &page(1));
}

/// Keeps `depth` writes in flight.
fn flood(queue: &mut Queue, depth: u16, until: impl Fn() -> bool) {
    let mut idle: Vec<u16> = (0..depth).collect();
    while !until() {
        let count = idle.len() as u16;
        while let Some(number) = idle.pop() {
            let slot = queue.lay_out(number, OUT, 8 * u64::from(number), &page(u64::from(number)), 4096);
            queue.publish(slot.head);
        }
        queue.kick_if_wanted(count);
        while queue.completed() > 0 {
            let (head, len) = queue.next_used();
            assert_eq!(len, 1);
            assert_eq!(queue.status(&queue.slot(head / 3)), OK);
            idle.push(head / 3);
        }
    }
}

#[test]
fn stopping_under_load_accounts_for_every_request() {
    let rig = rig();
    let mut client = rig.client();
    let mut queue = Queue::new(&client, 0);
    client.start_at(&queue, 0);
    for round in 0..200 {
        let end = Instant::now() + Duration::from_micros(500 + 37 * (round % 50));
        flood(&mut queue, 20, || Instant::now() >= end);
        let base = client.frontend.get_vring_base(0).unwrap();
        let used = queue.used_index();
        assert_eq!(base, u32::from(used), "round {round}");
        std::thread::sleep(Duration::from_micros(200));
        assert_eq!(queue.used_index(), used, "nothing after the answer");
        client.start_at(&queue, used);
        // All that was in flight comes through, once.
        while queue.in_flight() > 0 {
            let (head, _) = queue.next_used();
            assert_eq!(queue.status(&queue.slot(head / 3)), OK);
        }
    }
}

#[test]
fn a_disconnect_with_requests_in_flight_loses_nothing() {
    let rig = rig();
    let mut client = rig.client();
    let mut queue = client.start_queue(0);
    for round in 0..50 {
        let end = Instant::now() + Duration::from_micros(500 + 37 * round);
        flood(&mut queue, 20, || Instant::now() >= end);
        let file = client.file.try_clone().unwrap();
        drop(client);
        wait_until("the frontend is gone", || rig.device().status().frontend.is_none());
        let used = queue.used_index();
        let stream = UnixStream::connect(&rig.path).unwrap();
        client = Client::with_memory(stream, file);
        client.negotiate(VERSION_1 | EVENT_IDX | INDIRECT | PROTOCOL);
        client.share_memory();
        queue = queue.reconnected(&client);
        client.start_at(&queue, used);
        while queue.in_flight() > 0 {
            let (head, _) = queue.next_used();
            assert_eq!(queue.status(&queue.slot(head / 3)), OK);
        }
    }
}

#[test]
fn memory_changes_with_requests_in_flight() {
    let rig = rig();
    let mut client = rig.client();
    let mut queue = client.start_queue(0);
    let stop = std::sync::Arc::new(std::sync::atomic::AtomicBool::new(false));
    let stop_seen = stop.clone();
    let driver = std::thread::spawn(move || {
        flood(&mut queue, 20, || stop_seen.load(std::sync::atomic::Ordering::Relaxed));
        queue
    });
    let extra = VhostUserMemoryRegionInfo {
        guest_phys_addr: 1 << 32,
        userspace_addr: USER_BASE + (1 << 32),
        ..client.region()
    };
    let mut rounds = 0;
    while rounds < 100 || rig.device().status().requests.writes < 100 {
        rounds += 1;
        client.share_memory();
        client.frontend.add_mem_region(&extra).unwrap();
        client.frontend.remove_mem_region(&extra).unwrap();
    }
    stop.store(true, std::sync::atomic::Ordering::Relaxed);
    let mut queue = driver.join().unwrap();
    while queue.in_flight() > 0 {
        queue.next_used();
    }
    for number in 0..20 {
        assert_eq!(queue.read(8 * number, 4096), page(number));
    }
}

#[test]
fn enabling_and_disabling_under_load_loses_nothing() {
    let rig = rig();
    let mut client = rig.client();
    let mut queue = client.start_queue(0);
    let stop = std::sync::Arc::new(std::sync::atomic::AtomicBool::new(false));
    let stop_seen = stop.clone();
    let driver = std::thread::spawn(move || {
        flood(&mut queue, 20, || stop_seen.load(std::sync::atomic::Ordering::Relaxed));
        queue
    });
    for _ in 0..200 {
        client.frontend.set_vring_enable(0, false).unwrap();
        client.frontend.set_vring_enable(0, true).unwrap();
    }
    stop.store(true, std::sync::atomic::Ordering::Relaxed);
    let mut queue = driver.join().unwrap();
    while queue.in_flight() > 0 {
        queue.next_used();
    }
    assert_eq!(queue.completed(), 0);
}

#[test]
fn a_bad_chain_is_returned_and_the_queue_goes_on() {
    let rig = rig();
    let mut client = rig.client();
    let mut queue = client.start_queue(0);
    queue.set_descriptor(5, queue.slot(0).header, 16, NEXT, 5);
    queue.publish(5);
    queue.kick();
    assert_eq!(queue.next_used(), (5, 0));
    queue.set_descriptor(6, queue.slot(0).header, 16, 0, 0);
    queue.publish(6);
    queue.kick();
    assert_eq!(queue.next_used(), (6, 0), "no status byte");
    queue.write(0, &page(1));
    assert_eq!(rig.device().status().requests.bad_chains, 2);
}

#[test]
fn a_broken_ring_leaves_the_others_alone_until_it_is_restarted() {
    let rig = rig();
    let mut client = rig.client();
    let error = EventFd::new(EFD_NONBLOCK).unwrap();
    client.frontend.set_vring_err(0, &error).unwrap();
    client.frontend.reset_device().unwrap(); // which QEMU does without naming the descriptor again
    client.set_features(VERSION_1 | EVENT_IDX | INDIRECT | PROTOCOL);
    let broken = client.start_queue(0);
    let mut other = client.start_queue(1);
    broken.set_avail_index(1000);
    broken.kick();
    wait_until("the ring breaks", || rig.device().status().requests.broken_rings == 1);
    wait_until("the frontend is told", || error.read().is_ok());
    other.write(0, &page(1));
    assert_eq!(client.frontend.get_vring_base(0).unwrap(), 0);
    let mut mended = client.start_queue(0);
    assert_eq!(mended.read(0, 4096), page(1));
}

#[test]
fn memory_that_vanishes_costs_its_own_disk_only() {
    let (rig, neighbour) = (rig(), self::rig());
    let mut other_guest = neighbour.client();
    let mut other = other_guest.start_queue(0);
    let mut client = rig.client();
    let error = EventFd::new(EFD_NONBLOCK).unwrap();
    client.frontend.set_vring_err(0, &error).unwrap();
    let mut queue = client.start_queue(0);
    queue.write(0, &page(1));
    let slot = queue.lay_out(0, OUT, 0, &page(2), 4096);
    queue.publish(slot.head);
    client.file.set_len(0).unwrap();
    queue.kick();
    wait_until("the ring breaks", || rig.device().status().requests.broken_rings == 1);
    wait_until("the frontend is told", || error.read().is_ok());
    other.write(8, &page(3));
    client.frontend.get_vring_base(0).unwrap();
    client.frontend.set_vring_kick(0, &queue.kick).unwrap();
    wait_until("it does not start again", || {
        rig.device().status().requests.broken_rings == 2
    });
    drop(client);
    rig.wait_for_queues(0);
    let mut client = rig.client();
    assert_eq!(client.start_queue(0).read(0, 4096), page(1));
    assert_eq!(other.read(8, 4096), page(3));
}

#[test]
fn a_write_whose_data_vanished_stores_nothing() {
    let rig = rig();
    let mut client = rig.client();
    let mut queue = client.start_queue(0);
    queue.write(0, &page(1));
    let slot = queue.lay_out(0, OUT, 0, &page(2), 4096);
    queue.publish(slot.head);
    // Rings and header stay.
    client.file.set_len(slot.data).unwrap();
    queue.kick();
    wait_until("the ring breaks", || rig.device().status().requests.broken_rings == 1);
    drop(client);
    rig.wait_for_queues(0);
    assert_eq!(rig.client().start_queue(0).read(0, 4096), page(1));
}

#[test]
fn memory_that_could_vanish_is_refused_where_the_owner_insists() {
    let rig = Rig::new(1 << 20, |config| config.require_sealed_memory = true);
    let mut client = rig.connect();
    client.negotiate(VERSION_1 | PROTOCOL);
    assert!(client.frontend.set_mem_table(&[client.region()]).is_err());
    wait_until("the connection ends", || rig.device().status().failed_connections == 1);
}

#[test]
fn a_base_far_from_the_used_index_breaks_the_ring_only() {
    let rig = rig();
    let mut client = rig.client();
    let queue = Queue::new(&client, 0);
    client.start_at(&queue, 65);
    wait_until("the ring breaks", || rig.device().status().requests.broken_rings == 1);
    let mut other = client.start_queue(1);
    other.write(0, &page(1));
}

/// Runs `wrong` on a fresh session with queue 0 running; it must fail, end the connection, and leave the device well.
fn refused(what: &str, wrong: impl FnOnce(&mut Client, &Queue) -> bool) {
    let rig = rig();
    let mut client = rig.client();
    let queue = client.start_queue(0);
    assert!(wrong(&mut client, &queue), "{what}: a negative answer");
    wait_until(what, || rig.device().status().frontend.is_none());
    assert_eq!(rig.device().status().failed_connections, 1, "{what}");
    let mut client = rig.client();
    client.start_queue(0).write(0, &page(1));
}

#[test]
fn what_a_frontend_may_not_do_ends_its_connection() {
    refused("size of a running ring", |client, _| {
        client.frontend.set_vring_num(0, 32).is_err()
    });
    refused("base of a running ring", |client, _| {
        client.frontend.set_vring_base(0, 0).is_err()
    });
    refused("addresses of a running ring", |client, queue| {
        client.frontend.set_vring_addr(0, &queue.addresses()).is_err()
    });
    for size in [0, 3, 2048] {
        refused("a wrong size", |client, _| {
            client.frontend.set_vring_num(1, size).is_err()
        });
    }
    refused("no such queue", |client, _| {
        client.frontend.set_vring_num(4, 64).is_err()
    });
    refused("an address outside memory", |client, queue| {
        let addresses = vhost::VringConfigData {
            used_ring_addr: USER_BASE + GUEST_BYTES,
            ..queue.addresses()
        };
        client.frontend.set_vring_addr(1, &addresses).is_err()
    });
    refused("a feature that was not offered", |client, _| {
        client.frontend.set_features(1 << 34).is_err()
    });
    refused("a region past its file", |client, _| {
        let region = VhostUserMemoryRegionInfo {
            memory_size: GUEST_BYTES + 4096,
            ..client.region()
        };
        client.frontend.set_mem_table(&[region]).is_err()
    });
    refused("memory without the ring that runs in it", |client, _| {
        let region = VhostUserMemoryRegionInfo {
            memory_size: 4096,
            ..client.region()
        };
        client.frontend.set_mem_table(&[region]).is_err()
    });
}

#[test]
fn a_file_as_kick_is_refused() {
    refused("a file as kick", |client, _| {
        let file = client.file.try_clone().unwrap();
        let mut message = Vec::new();
        message.extend(12u32.to_ne_bytes());
        message.extend(1u32.to_ne_bytes());
        message.extend(8u32.to_ne_bytes());
        message.extend(1u64.to_ne_bytes());
        send_with_fd(&client.raw, &message, &file);
        true
    });
}

fn send_with_fd(stream: &UnixStream, bytes: &[u8], fd: &impl std::os::fd::AsRawFd) {
    use vmm_sys_util::sock_ctrl_msg::ScmSocket;
    stream.send_with_fd(bytes, fd.as_raw_fd()).unwrap();
}

#[test]
fn no_kick_is_missed() {
    let rig = rig();
    let mut client = rig.client();
    for features in [0, EVENT_IDX] {
        client.set_features(VERSION_1 | PROTOCOL | features);
        let mut queue = client.start_queue(0);
        for round in 0..20_000u64 {
            // Now and then time enough for the worker to be just about to sleep.
            (0..round % 512).for_each(|_| std::hint::spin_loop());
            assert_eq!(queue.request(GET_ID, 0, &[], 20), (OK, 21));
        }
        client.frontend.set_vring_enable(0, false).unwrap();
        client.frontend.get_vring_base(0).unwrap();
    }
}

#[test]
fn a_call_made_blocking_and_full_behind_our_back_holds_up_nobody() {
    let rig = rig();
    let mut client = rig.client();
    let mut queue = client.start_queue(0);
    let event = rustix::event::eventfd(0, rustix::event::EventfdFlags::NONBLOCK).unwrap();
    let call = [13u32, 1, 8, 0, 0].map(u32::to_ne_bytes).concat();
    send_with_fd(&client.raw, &call, &event);
    client.frontend.get_queue_num().unwrap();
    // The file's settings belong to whoever holds it, and the frontend does too.
    rustix::io::write(&event, &(u64::MAX - 1).to_ne_bytes())
        .or_else(|_| {
            rustix::io::read(&event, &mut [0; 8])?;
            rustix::io::write(&event, &(u64::MAX - 1).to_ne_bytes())
        })
        .unwrap();
    rustix::fs::fcntl_setfl(&event, rustix::fs::OFlags::empty()).unwrap();
    for _ in 0..10 {
        queue.write(0, &page(2));
    }
    drop((queue, client));
    // The next frontend is served, so the worker has ended.
    let mut client = rig.client();
    assert_eq!(client.start_queue(0).read(0, 4096), page(2));
}

#[test]
fn a_full_blocking_pipe_as_call_holds_up_nobody() {
    let rig = rig();
    let mut client = rig.client();
    let mut queue = client.start_queue(0);
    let (_reader, mut writer) = std::io::pipe().unwrap();
    writer.write_all(&[0; 65536]).unwrap(); // a pipe's whole room
    let call = [13u32, 1, 8, 0, 0].map(u32::to_ne_bytes).concat();
    send_with_fd(&client.raw, &call, &writer);
    client.frontend.get_queue_num().unwrap();
    for _ in 0..10 {
        queue.write(0, &page(1));
    }
    assert!(rig.device().status().requests.calls_lost > 0);
}

#[test]
fn half_a_message_holds_up_nobody() {
    let rig = rig();
    let mut client = rig.client();
    let mut queue = client.start_queue(0);
    client.raw.write_all(&[1, 0, 0, 0, 1]).unwrap();
    queue.write(0, &page(1));
    expect_refusal(&rig);
    let begin = Instant::now();
    drop(rig);
    assert!(begin.elapsed() < Duration::from_secs(1));
}

#[test]
fn half_a_message_ends_its_connection_in_time() {
    let rig = rig();
    let client = rig.client();
    (&client.raw).write_all(&[1, 0, 0, 0, 1]).unwrap();
    wait_until("the connection ends", || rig.device().status().failed_connections == 1);
    rig.client().start_queue(0).write(0, &page(1));
}

#[test]
fn a_frontend_that_reads_no_answers_holds_up_nobody() {
    let rig = rig();
    let client = rig.client();
    client.raw.set_nonblocking(true).unwrap();
    let get_features = [1u32, 1, 0].map(u32::to_ne_bytes).concat();
    // Until neither side takes any more: the requests' buffer stays full.
    let mut full_since = Instant::now();
    while full_since.elapsed() < Duration::from_millis(300) {
        if (&client.raw).write_all(&get_features).is_ok() {
            full_since = Instant::now();
        }
    }
    expect_refusal(&rig);
    let begin = Instant::now();
    drop(rig);
    assert!(begin.elapsed() < Duration::from_secs(1));
}

#[test]
fn answers_follow_once_they_are_read() {
    let rig = rig();
    let client = rig.client();
    let get_features = [1u32, 1, 0].map(u32::to_ne_bytes).concat();
    const REQUESTS: usize = 20_000;
    let mut writer = client.raw.try_clone().unwrap();
    let sender = std::thread::spawn(move || (0..REQUESTS).for_each(|_| writer.write_all(&get_features).unwrap()));
    std::thread::sleep(Duration::from_millis(50)); // so that the answers' buffer is full
    let mut answer = [0; 20];
    for _ in 0..REQUESTS {
        (&client.raw).read_exact(&mut answer).unwrap();
        assert_eq!(answer[12..], 0x9_7000_7444u64.to_ne_bytes());
    }
    sender.join().unwrap();
}

#[test]
fn a_message_in_pieces_is_one_message() {
    let rig = rig();
    let client = rig.client();
    const GET_CONFIG: u32 = 24;
    let mut message = [GET_CONFIG, 1, 12 + 60, 0, 60, 0].map(u32::to_ne_bytes).concat();
    message.extend([0; 60]);
    // In the header, behind it, and in the body.
    let mut sent = 0;
    for end in [5, 12, 13, 40, message.len()] {
        (&client.raw).write_all(&message[sent..end]).unwrap();
        sent = end;
        expect_refusal(&rig);
    }
    let mut answer = [0; 12 + 12 + 60];
    (&client.raw).read_exact(&mut answer).unwrap();
    assert_eq!(answer[24..32], (64 * MIB / 512).to_le_bytes());
}

#[test]
fn rubbish_on_the_socket_ends_its_connection() {
    let rig = rig();
    for rubbish in [[0xffu8; 64], [0u8; 64]] {
        let mut stream = UnixStream::connect(&rig.path).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(5))).unwrap();
        stream.write_all(&rubbish).unwrap();
        // Closed with bytes unread, the kernel may say "reset" instead of "end".
        assert!(matches!(stream.read(&mut [0; 1]), Ok(0) | Err(_)));
        wait_until("the frontend is gone", || rig.device().status().frontend.is_none());
    }
    rig.client().start_queue(0).write(0, &page(1));
}

#[test]
fn stop_is_quick_under_load() {
    let mut rig = rig();
    let mut client = rig.client();
    let mut queues: Vec<_> = (0..4).map(|index| client.start_queue(index)).collect();
    for queue in &mut queues {
        for number in 0..20 {
            let slot = queue.lay_out(number, OUT, 0, &page(1), 4096);
            queue.publish(slot.head);
        }
        queue.kick();
    }
    let begin = Instant::now();
    rig.device.take().unwrap().stop();
    assert!(begin.elapsed() < Duration::from_secs(1));
    let used: Vec<_> = queues.iter().map(Queue::used_index).collect();
    std::thread::sleep(Duration::from_millis(20));
    assert_eq!(
        used,
        queues.iter().map(Queue::used_index).collect::<Vec<_>>(),
        "nothing after the stop"
    );
}

#[test]
fn an_inherited_connection_ends_the_device() {
    let zram = rig().zram.clone();
    let (ours, theirs) = UnixStream::pair().unwrap();
    let config = DeviceConfig {
        name: "inherited".to_string(),
        num_queues: 1,
        queue_size_max: 1024,
        read_only: false,
        serial: "x".parse().unwrap(),
        logical_block_size: 512,
        flush: true,
        thread_start: Default::default(),
        poll_max: Duration::ZERO,
        require_sealed_memory: false,
        rate_limit: Default::default(),
    };
    let device = Device::start(zram, Endpoint::Stream(theirs), config).unwrap();
    let mut client = Client::on(ours);
    client.negotiate(VERSION_1 | PROTOCOL);
    client.share_memory();
    let mut queue = client.start_queue(0);
    queue.write(0, &page(1));
    assert_eq!(queue.request(4, 0, &[], 0), (OK, 1), "flush was offered");
    assert!(!is_readable(&device));
    drop(client);
    wait_until("the device ends", || is_readable(&device));
    device.stop();
}

fn is_readable(device: &Device) -> bool {
    use rustix::event::{PollFd, PollFlags, Timespec, poll};
    let ended = device.ended();
    let mut fds = [PollFd::new(&ended, PollFlags::IN)];
    poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })).unwrap() == 1
}

#[test]
fn calls_follow_the_event_index() {
    let rig = rig();
    let mut client = rig.client();
    let mut queue = client.start_queue(0);
    for number in 1..=3 {
        let page = page(number);
        let slot = queue.lay_out(0, OUT, 0, &page, page.len() as u32);
        queue.publish(slot.head);
        queue.kick_if_wanted(1);
        // Not taken before the call: taking it moves the event index on, and whoever has seen it need not be called.
        wait_until("a call", || queue.call.read().is_ok());
        assert_eq!(queue.next_used(), (slot.head, 1));
    }
}
