//! Frontends that break the rules: the fault costs them their connection, and nothing else.

use std::os::fd::AsRawFd;
use std::time::Duration;

use vhost::VhostBackend;
use vhost::vhost_user::VhostUserFrontend;
use vm_memory::{GuestAddress, GuestMemoryBackend, GuestMemoryRegion};
use vmm_sys_util::eventfd::EventFd;

use crate::raw::*;
use crate::support::{Backend, PATIENCE, wait_for};

const DISK: &str = "64M";
const DISK_SECTORS: u64 = (64 << 20) / SECTOR as u64;
const SIZE: u16 = 128;

/// The backend says no or nothing, closes, and serves the next frontend; nothing of the connection is left behind.
fn assert_connection_ends(disk: &mut Backend, guest: Guest, what: &str) {
    assert!(
        is_closed_by_backend(&guest.stream),
        "the connection lives on after {what}"
    );
    drop(guest);
    disk.assert_alive();
    let mut guest = Guest::reconnect(disk);
    let mut queue = guest.queue(0, SIZE);
    queue.write(0, &[0x42; PAGE]);
    assert_eq!(queue.read(0, PAGE), [0x42; PAGE], "{what}");
}

/// Runs hostile messages, each on its own connection, and sees that descriptors and threads stay flat.
fn each_ends_its_connection(attacks: &[(&str, u32, Vec<u8>, usize)]) {
    let mut disk = Backend::daemon(DISK, &[]);
    let event = EventFd::new(0).unwrap();
    drop(Guest::new(disk.connect()).queue(0, SIZE));
    let idle = disk.settled_counts();
    for (what, request, payload, fds) in attacks {
        let mut guest = Guest::reconnect(&disk);
        let _queue = guest.queue(1, SIZE);
        let fds = vec![event.as_raw_fd(); *fds];
        send(&guest.stream, *request, payload, &fds).unwrap();
        if let Ok((_, reply)) = receive(&guest.stream) {
            assert_ne!(reply, 0u64.to_le_bytes(), "{what} was accepted");
        }
        assert_connection_ends(&mut disk, guest, what);
    }
    wait_for("descriptors and threads are as before", PATIENCE, || {
        ((disk.fd_count(), disk.thread_count()) == idle).then_some(())
    });
    disk.assert_idle();
}

fn words(words: &[u64]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_le_bytes()).collect()
}

fn halves(halves: &[u32]) -> Vec<u8> {
    halves.iter().flat_map(|half| half.to_le_bytes()).collect()
}

#[test]
fn malformed_messages_end_their_connection_only() {
    each_ends_its_connection(&[
        ("an unknown request", 99, vec![], 0),
        ("request 0", 0, vec![], 0),
        ("SET_FEATURES without a body", 2, vec![], 0),
        ("SET_FEATURES with half a body", 2, vec![0; 4], 0),
        ("SET_FEATURES with a body too long", 2, vec![0; 16], 0),
        (
            "SET_MEM_TABLE that lies about its regions",
            SET_MEM_TABLE,
            halves(&[200, 0]),
            0,
        ),
        (
            "SET_MEM_TABLE without descriptors",
            SET_MEM_TABLE,
            {
                let mut body = halves(&[1, 0]);
                body.extend(words(&[0, 0x1000, 0x5000, 0]));
                body
            },
            0,
        ),
        ("GET_CONFIG of 4 GiB", 24, halves(&[0, u32::MAX, 0]), 0),
        ("SET_VRING_NUM of queue 64", SET_VRING_NUM, halves(&[64, 128]), 0),
        ("SET_VRING_BASE of queue 65535", 10, halves(&[65535, 0]), 0),
        ("GET_VRING_BASE of queue 2^31", 11, halves(&[1 << 31, 0]), 0),
        ("SET_VRING_ENABLE of queue 64", 18, halves(&[64, 1]), 0),
        ("SET_VRING_KICK of queue 64", SET_VRING_KICK, words(&[64]), 1),
        ("SET_VRING_KICK with two descriptors", SET_VRING_KICK, words(&[0]), 2),
        ("SET_VRING_CALL without its descriptor", SET_VRING_CALL, words(&[0]), 0),
        ("a log that was not negotiated", 6, words(&[0x1000, 0]), 1),
    ]);
}

#[test]
fn impossible_rings_end_their_connection_only() {
    const USER: u64 = 0x5500_0000_0000;
    let ring = |table: u64, used: u64, avail: u64| {
        let mut body = halves(&[0, 0]);
        body.extend(words(&[table, used, avail, 0]));
        body
    };
    each_ends_its_connection(&[
        (
            "a table outside memory",
            9,
            ring(0x1000, USER + 0x3000, USER + 0x2000),
            0,
        ),
        (
            "a table in the hole",
            9,
            ring(USER + HOLE, USER + 0x3000, USER + 0x2000),
            0,
        ),
        (
            "a used ring outside memory",
            9,
            ring(USER + 0x1000, 0x3000, USER + 0x2000),
            0,
        ),
        (
            "an avail ring outside memory",
            9,
            ring(USER + 0x1000, USER + 0x3000, 0x2000),
            0,
        ),
        (
            "a table out of line",
            9,
            ring(USER + 0x1001, USER + 0x3000, USER + 0x2000),
            0,
        ),
    ]);
}

#[test]
fn changes_to_a_running_ring_end_the_connection_only() {
    let mut disk = Backend::daemon(DISK, &[]);
    for what in ["num", "base", "addr"] {
        let mut guest = Guest::reconnect(&disk);
        let mut queue = guest.queue(0, SIZE);
        queue.write(0, &[1; PAGE]);
        let result = match what {
            "num" => guest.frontend.set_vring_num(0, 64),
            "base" => guest.frontend.set_vring_base(0, 7),
            _ => guest.frontend.set_vring_addr(0, &Guest::ring_addresses(&queue)),
        };
        assert!(result.is_err(), "{what} of a running ring was accepted");
        assert_connection_ends(&mut disk, guest, what);
    }
}

#[test]
fn memory_beyond_the_end_of_its_file_ends_the_connection_only() {
    let mut disk = Backend::daemon(DISK, &[]);
    let guest = Guest::without_memory(disk.connect(), LINUX_FEATURES).unwrap();
    let mut region = guest.region(2);
    region.mmap_offset += 0x1000;
    assert!(
        guest.frontend.set_mem_table(&[region]).is_err(),
        "memory beyond the end of its file was accepted"
    );
    assert_connection_ends(&mut disk, guest, "memory beyond the end of its file");
}

/// The host kernel's answer to a touch of what is gone is a signal that ends a process: here it ends a queue.
#[test]
fn memory_that_its_frontend_cuts_costs_its_own_queues_only() {
    let mut disk = Backend::daemon(DISK, &["--log-level", "warn"]);
    let mut guest = Guest::reconnect(&disk);
    let mut queue = guest.queue(0, SIZE);
    queue.write(0, &[0x42; PAGE]);
    let since = queue.offered;
    queue.submit(&Request::write(0, &[0x43; PAGE]));
    let region = guest.memory.find_region(GuestAddress(0)).unwrap();
    region.file_offset().unwrap().file().set_len(0).unwrap();
    // From here on the test must not touch guest memory either.
    assert_eq!(since, 1);
    queue.kick.write(1).unwrap();
    wait_for("the error descriptor is signalled", PATIENCE, || queue.err.read().ok());
    disk.assert_alive();
    drop(guest);
    let mut guest = Guest::reconnect(&disk);
    assert_eq!(guest.queue(0, SIZE).read(0, PAGE), [0x42; PAGE]);
    drop(guest);
    disk.assert_alive();
}

#[test]
fn memory_that_its_frontend_could_cut_is_refused_on_demand() {
    let disk = Backend::daemon(DISK, &["--require-sealed-memory"]);
    assert!(Guest::try_new(disk.connect(), LINUX_FEATURES).is_err());
    let guest = Guest::without_memory(disk.connect(), LINUX_FEATURES).unwrap();
    drop(guest);
}

#[test]
fn regions_that_overlap_end_the_connection_only() {
    let mut disk = Backend::daemon(DISK, &[]);
    let guest = Guest::without_memory(disk.connect(), LINUX_FEATURES).unwrap();
    let (first, mut second) = (guest.region(1), guest.region(2));
    second.guest_phys_addr = first.guest_phys_addr + 0x1000;
    assert!(
        guest.frontend.set_mem_table(&[first, second]).is_err(),
        "overlapping regions were accepted"
    );
    assert_connection_ends(&mut disk, guest, "overlapping regions");
}

#[test]
fn descriptors_that_are_no_event_descriptors_harm_nobody() {
    let mut disk = Backend::daemon(DISK, &[]);
    let file = tempfile::tempfile().unwrap();
    let (socket, _other) = std::os::unix::net::UnixStream::pair().unwrap();
    for fd in [file.as_raw_fd(), socket.as_raw_fd()] {
        for request in [SET_VRING_KICK, SET_VRING_CALL] {
            let mut guest = Guest::reconnect(&disk);
            let mut queue = guest.lay_out_queue(0, SIZE);
            guest.start(&queue, 0);
            queue.submit(&Request::read(0, PAGE));
            // Accepted or refused: the process and the next connection must not suffer.
            let _ = send(&guest.stream, request, &words(&[0]), &[fd]);
            let _ = receive(&guest.stream);
            let _ = queue.kick.write(1);
            guest.stream.shutdown(std::net::Shutdown::Both).unwrap();
            drop(guest);
            disk.assert_alive();
            Guest::reconnect(&disk).queue(0, SIZE).read(0, PAGE);
            disk.assert_idle();
        }
    }
}

#[test]
fn half_a_message_and_then_silence_holds_up_only_its_own_connection() {
    use std::io::Write;
    let mut disk = Backend::daemon(DISK, &[]);
    let mut stream = disk.connect();
    stream.write_all(&[1, 0, 0, 0, 1, 0]).unwrap();
    disk.assert_idle();
    drop(stream);
    Guest::reconnect(&disk).queue(0, SIZE).read(0, PAGE);
    let mut stream = disk.connect();
    stream.write_all(&[2, 0, 0, 0, 1, 0, 0, 0, 8, 0, 0, 0, 1]).unwrap();
    disk.assert_idle();
    disk.signal(rustix::process::Signal::TERM);
    assert!(
        disk.wait(Duration::from_secs(2)).success(),
        "half a message keeps the daemon from its end"
    );
}

#[test]
fn messages_with_unwanted_descriptors_leak_none() {
    let mut disk = Backend::daemon(DISK, &[]);
    let event = EventFd::new(0).unwrap();
    drop(Guest::new(disk.connect()));
    drop(Guest::reconnect(&disk));
    let before = disk.settled_counts().0;
    for _ in 0..300 {
        let stream = disk.connect();
        // GET_FEATURES carries no descriptors; here it brings eight.
        let _ = send(&stream, 1, &[], &[event.as_raw_fd(); 8]);
        let _ = receive(&stream);
    }
    wait_for("the unwanted descriptors are closed", PATIENCE, || {
        (disk.fd_count() <= before).then_some(())
    });
    assert_connection_serves(&mut disk);
}

fn assert_connection_serves(disk: &mut Backend) {
    disk.assert_alive();
    let mut guest = Guest::reconnect(disk);
    assert_eq!(guest.frontend.get_queue_num().unwrap(), 64);
    assert_eq!(guest.capacity_sectors(), DISK_SECTORS);
    guest.queue(0, SIZE).read(0, PAGE);
}

#[test]
fn a_call_descriptor_that_is_also_the_kick_does_not_keep_the_queue_awake() {
    let mut disk = Backend::daemon(DISK, &[]);
    let mut guest = Guest::new(disk.connect());
    let mut queue = guest.lay_out_queue(0, SIZE);
    queue.call = None;
    guest.start(&queue, 0);
    guest.frontend.set_vring_call(0, &queue.kick).unwrap();
    for _ in 0..20 {
        queue.read(0, PAGE);
    }
    disk.assert_idle();
    drop(guest);
    assert_connection_serves(&mut disk);
}

/// Kept by the backend, it would keep the connection open when its frontend is gone.
#[test]
fn a_frontend_that_gives_its_own_end_away_is_let_go_all_the_same() {
    const KICK: u32 = 12;
    const ERR: u32 = 14;
    const CHANNEL: u32 = 21;
    let disk = Backend::daemon(DISK, &[]);
    let word = |word: u64| word.to_ne_bytes().to_vec();
    for request in [KICK, KICK + 1, ERR, CHANNEL] {
        // By hand: the library hangs up in words, which a process that is killed does not.
        let stream = disk.connect();
        send(&stream, 3, &[], &[]).unwrap(); // SET_OWNER
        send(&stream, 2, &word(1 << 30 | 1 << 32), &[]).unwrap(); // SET_FEATURES
        send(&stream, 16, &word(0x9229), &[]).unwrap(); // SET_PROTOCOL_FEATURES
        let body = if request == CHANNEL { vec![] } else { word(0) };
        send(&stream, request, &body, &[stream.as_raw_fd()]).unwrap();
        drop(stream);
        let mut next = Guest::reconnect(&disk);
        next.queue(0, 64).read(0, 4096);
    }
    disk.assert_idle();
}
