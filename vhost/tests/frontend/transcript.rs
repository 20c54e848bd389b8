//! Message by message, byte by byte: what frontends say in their order, and what they are to hear.

use std::io::{Read, Write};
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;

use vhost::vhost_user::VhostUserFrontend;
use vhost::vhost_user::message::VhostUserInflight;
use vmm_sys_util::sock_ctrl_msg::ScmSocket;
use zram_vhost::Notice;

use super::*;

const NEED_REPLY: u32 = 8;

/// Sends one message: request, flags beside the version, body.
fn say(stream: &UnixStream, request: u32, flags: u32, body: &[u8], fds: &[RawFd]) {
    let mut message = Vec::new();
    for word in [request, 1 | flags, body.len() as u32] {
        message.extend(word.to_le_bytes());
    }
    message.extend(body);
    if fds.is_empty() {
        (&*stream).write_all(&message).unwrap();
    } else {
        assert_eq!(stream.send_with_fds(&[&message[..]], fds).unwrap(), message.len());
    }
}

/// Receives one answer to `request` and gives its body.
fn hear(stream: &UnixStream, request: u32) -> Vec<u8> {
    let mut header = [0; 12];
    (&*stream).read_exact(&mut header).unwrap();
    let word = |at: usize| u32::from_le_bytes(header[at..at + 4].try_into().unwrap());
    assert_eq!((word(0), word(4)), (request, 1 | 4), "request {request}");
    let mut body = vec![0; word(8) as usize];
    (&*stream).read_exact(&mut body).unwrap();
    body
}

fn ask(stream: &UnixStream, request: u32, body: &[u8]) -> Vec<u8> {
    say(stream, request, 0, body, &[]);
    hear(stream, request)
}

fn wide(value: u64) -> Vec<u8> {
    value.to_le_bytes().to_vec()
}

fn words(words: &[u32]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_le_bytes()).collect()
}

/// QEMU's order, as seen in QEMU 10: first the device is looked at, then a driver starts queue 0, then it is reset.
#[test]
fn qemu_starts_and_resets() {
    let rig = rig();
    let stream = UnixStream::connect(&rig.path).unwrap();
    let event = EventFd::new(EFD_NONBLOCK).unwrap();
    let (ours, _theirs) = UnixStream::pair().unwrap();
    assert_eq!(ask(&stream, 1, &[]), wide(0x9_7000_7444)); // GET_FEATURES
    assert_eq!(ask(&stream, 15, &[]), wide(0xb229)); // GET_PROTOCOL_FEATURES
    say(&stream, 16, 0, &wide(0xb229), &[]); // SET_PROTOCOL_FEATURES
    assert_eq!(ask(&stream, 17, &[]), wide(4)); // GET_QUEUE_NUM
    assert_eq!(ask(&stream, 36, &[]), wide(509)); // GET_MAX_MEM_SLOTS
    say(&stream, 21, NEED_REPLY, &[], &[ours.as_raw_fd()]); // SET_BACKEND_REQ_FD
    assert_eq!(hear(&stream, 21), wide(0));
    say(&stream, 3, 0, &[], &[]); // SET_OWNER
    assert_eq!(ask(&stream, 1, &[]), wide(0x9_7000_7444));
    for queue in 0..4u64 {
        say(&stream, 13, 0, &wide(queue), &[event.as_raw_fd()]); // SET_VRING_CALL
        say(&stream, 14, 0, &wide(queue), &[event.as_raw_fd()]); // SET_VRING_ERR
    }
    let config = ask(&stream, 24, &[words(&[0, 57, 0]), vec![0; 57]].concat()); // GET_CONFIG
    assert_eq!((config.len(), &config[..12]), (12 + 57, &words(&[0, 57, 0])[..]));

    let client = Client::on(stream.try_clone().unwrap());
    let mut queue = Queue::new(&client, 0);
    // GET_INFLIGHT_FD: size and offset are the backend's to say.
    let body = [wide(0), wide(0), vec![4, 0, 64, 0, 0, 0, 0, 0]].concat();
    say(&stream, 31, 0, &body, &[]);
    let mut answer = [0; 12 + 24];
    let (bytes, file) = stream.recv_with_fd(&mut answer).unwrap();
    let part = (16u64 + 16 * 64).next_multiple_of(64);
    let region = [wide(4 * part), wide(0), vec![4, 0, 64, 0, 0, 0, 0, 0]].concat();
    assert_eq!(&answer[..12], words(&[31, 5, answer[8].into()]));
    assert_eq!(answer[12..bytes], region[..bytes - 12]);
    say(
        &stream,
        32,
        NEED_REPLY,
        &region[..bytes - 12],
        &[file.unwrap().as_raw_fd()],
    ); // SET_INFLIGHT_FD
    assert_eq!(hear(&stream, 32), wide(0));
    for _ in 0..2 {
        say(&stream, 2, 0, &wide(0x1_7000_7444), &[]); // SET_FEATURES
    }
    say(&stream, 13, 0, &wide(0), &[queue.call.as_raw_fd()]);
    let memory = [wide(0), wide(0), wide(GUEST_BYTES), wide(USER_BASE), wide(0)].concat();
    say(&stream, 37, NEED_REPLY, &memory, &[client.file.as_raw_fd()]); // ADD_MEM_REG
    assert_eq!(hear(&stream, 37), wide(0));
    let addresses = queue.addresses();
    for round in 0..2 {
        say(&stream, 8, 0, &words(&[0, 64]), &[]); // SET_VRING_NUM
        say(&stream, 10, 0, &words(&[0, 0]), &[]); // SET_VRING_BASE
        let mut body = words(&[0, 0]);
        for addr in [
            addresses.desc_table_addr,
            addresses.used_ring_addr,
            addresses.avail_ring_addr,
            0,
        ] {
            body.extend(wide(addr));
        }
        say(&stream, 9, 0, &body, &[]); // SET_VRING_ADDR
        say(&stream, 12, 0, &wide(0), &[queue.kick.as_raw_fd()]); // SET_VRING_KICK
        say(&stream, 18, NEED_REPLY, &words(&[0, 1]), &[]); // SET_VRING_ENABLE
        assert_eq!(hear(&stream, 18), wide(0));
        queue.write(0, &page(round));
        assert_eq!(queue.read(0, 4096), page(round));
        say(&stream, 18, 0, &words(&[0, 0]), &[]);
        assert_eq!(ask(&stream, 11, &words(&[0, 0])), words(&[0, 2])); // GET_VRING_BASE
        // The driver begins anew, on memory that is not named again.
        say(&stream, 2, 0, &wide(0x1_7000_7444), &[]);
        queue = Queue::new(&client, 0);
        say(&stream, 13, 0, &wide(0), &[queue.call.as_raw_fd()]);
    }
}

/// cloud-hypervisor wants an answer to everything, and shares memory in one table.
#[test]
fn cloud_hypervisor_starts() {
    let rig = rig();
    let stream = UnixStream::connect(&rig.path).unwrap();
    let tell = |request: u32, body: &[u8], fds: &[RawFd]| {
        say(&stream, request, NEED_REPLY, body, fds);
        assert_eq!(hear(&stream, request), wide(0), "request {request}");
    };
    say(&stream, 3, 0, &[], &[]);
    assert_eq!(ask(&stream, 1, &[]), wide(0x9_7000_7444));
    assert_eq!(ask(&stream, 15, &[]), wide(0xb229));
    say(&stream, 16, 0, &wide(0x9209), &[]);
    say(&stream, 17, NEED_REPLY, &[], &[]);
    assert_eq!(hear(&stream, 17), wide(4));
    let config = ask(&stream, 24, &[words(&[0, 60, 0]), vec![0; 60]].concat());
    assert_eq!(config.len(), 12 + 60);
    tell(2, &wide(0x9_7000_7444), &[]);
    let client = Client::on(stream.try_clone().unwrap());
    let table = [words(&[1, 0]), wide(0), wide(GUEST_BYTES), wide(USER_BASE), wide(0)].concat();
    tell(5, &table, &[client.file.as_raw_fd()]);
    let mut queue = Queue::new(&client, 0);
    tell(8, &words(&[0, 64]), &[]);
    let addresses = queue.addresses();
    let mut body = words(&[0, 0]);
    for addr in [
        addresses.desc_table_addr,
        addresses.used_ring_addr,
        addresses.avail_ring_addr,
        0,
    ] {
        body.extend(wide(addr));
    }
    tell(9, &body, &[]);
    tell(10, &words(&[0, 0]), &[]);
    tell(13, &wide(0), &[queue.call.as_raw_fd()]);
    tell(12, &wide(0), &[queue.kick.as_raw_fd()]);
    tell(18, &words(&[0, 1]), &[]);
    queue.write(0, &page(1));
    assert_eq!(queue.read(0, 4096), page(1));
}

#[test]
fn what_cannot_be_understood_is_refused_in_words_before_the_end() {
    let end = |negotiate: bool, request: u32, body: &[u8]| {
        let rig = rig();
        let mut client = rig.connect();
        if negotiate {
            client.negotiate(VERSION_1 | PROTOCOL);
        }
        say(&client.raw, request, NEED_REPLY, body, &[]);
        let mut all = Vec::new();
        (&client.raw).read_to_end(&mut all).unwrap();
        let no = [words(&[request, 5, 8]), wide(1)].concat();
        assert_eq!(all, if negotiate { no } else { Vec::new() }, "request {request}");
    };
    end(true, 99, &[]);
    end(true, 2, &[0; 4]); // half a SET_FEATURES
    end(true, 8, &words(&[0, 3])); // a ring of 3
    end(true, 8, &words(&[64, 64])); // a queue too many
    end(true, 12, &wide(0)); // a kick without its descriptor
    end(true, 6, &words(&[0, 0])); // SET_LOG_BASE
    end(true, 26, &[]); // POSTCOPY_ADVISE
    end(true, 39, &wide(0)); // SET_STATUS
    end(false, 99, &[]); // nobody said that answers are understood
}

#[test]
fn a_change_of_the_size_is_told_and_takes_effect() {
    const KIB: u64 = 1 << 10;
    let rig = rig();
    let resize = |bytes: u64| rig.device().resizer().resize(bytes).map(|resized| resized.notice);
    assert_eq!(resize(512 * KIB).unwrap(), Some(Notice::NoFrontend));
    let mut client = rig.client();
    let capacity = |client: &mut Client| {
        let flags = vhost::vhost_user::message::VhostUserConfigFlags::empty();
        let config = client.frontend.get_config(0, 8, flags, &[0; 8]).unwrap().1;
        u64::from_le_bytes(config[..].try_into().unwrap()) * 512
    };
    assert_eq!(capacity(&mut client), 512 * KIB);
    assert_eq!(resize(1024 * KIB).unwrap(), Some(Notice::NoChannel));
    let (ours, mut theirs) = UnixStream::pair().unwrap();
    client.frontend.set_backend_request_fd(&ours).unwrap();
    drop(ours);
    let mut queue = client.start_queue(0);
    let told = |theirs: &mut UnixStream| {
        let mut message = [0; 12];
        theirs.read_exact(&mut message).unwrap();
        assert_eq!(message[..], words(&[2, 1, 0]));
    };
    assert_eq!(resize(2048 * KIB).unwrap(), Some(Notice::Told));
    told(&mut theirs);
    assert_eq!(capacity(&mut client), 2048 * KIB);
    queue.write(2048, &page(1));
    assert_eq!(queue.request(IN, 2048, &[], 4096), (OK, 4097));

    let error = resize(512 * KIB).unwrap_err().to_string();
    assert!(
        error.contains("1 pages behind that hold data") && error.contains("1052672"),
        "{error}"
    );
    assert_eq!(capacity(&mut client), 2048 * KIB);
    assert_eq!(queue.request(IN, 2048, &[], 4096), (OK, 4097));
    let zeroes = vec![0; 4096];
    queue.write(2048, &zeroes);
    assert_eq!(resize(512 * KIB).unwrap(), Some(Notice::Told));
    told(&mut theirs);
    assert_eq!(capacity(&mut client), 512 * KIB);
    assert_eq!(queue.request(IN, 1024, &[], 4096), (IOERR, 1));
    assert_eq!(resize(512 * KIB).unwrap(), None, "it has that size");
    for wrong in [0, 4095, 1 << 40] {
        assert!(resize(wrong).is_err(), "{wrong}");
    }
    drop(client);
    rig.wait_for_queues(0);
    wait_until("the channel is closed", || {
        theirs.read(&mut [0; 12]).is_ok_and(|bytes| bytes == 0)
    });
}

fn inflight(num_queues: u16, queue_size: u16) -> VhostUserInflight {
    VhostUserInflight {
        mmap_size: 0,
        mmap_offset: 0,
        num_queues,
        queue_size,
    }
}

/// A frontend without IN_ORDER names a base behind what was never answered: the region says better.
#[test]
fn requests_in_flight_at_the_end_are_answered_by_the_next() {
    let rig = rig();
    let mut client = rig.client();
    let (region, file) = client.frontend.get_inflight_fd(&inflight(1, 64)).unwrap();
    client.frontend.set_inflight_fd(&region, file.as_raw_fd()).unwrap();
    let mut queue = client.start_queue(0);
    for number in 0..3 {
        queue.write(number * 8, &page(number));
    }
    let used = queue.used_index();
    client.frontend.get_vring_base(0).unwrap();
    // Taken, as far as the driver and the frontend know, and lost with the backend.
    let slots: Vec<_> = (1..4)
        .map(|number| queue.lay_out(number, OUT, 800 + 8 * u64::from(number), &page(7), 4096))
        .collect();
    slots.iter().for_each(|slot| queue.publish(slot.head));
    let memory = client.file.try_clone().unwrap();
    drop(client);
    rig.wait_for_queues(0);
    let mut client = Client::with_memory(UnixStream::connect(&rig.path).unwrap(), memory);
    client.negotiate(VERSION_1 | EVENT_IDX | INDIRECT | PROTOCOL);
    client.share_memory();
    client.frontend.set_inflight_fd(&region, file.as_raw_fd()).unwrap();
    let mut queue = queue.reconnected(&client);
    client.start_at(&queue, used + 3);
    for slot in slots {
        assert_eq!(queue.next_used(), (slot.head, 1));
        assert_eq!(queue.status(&slot), OK);
    }
}

/// As QEMU 10.0.13 does, with 128 and 1024.
#[test]
fn a_ring_larger_than_the_inflight_region_has_room_for_is_served_without() {
    let rig = rig();
    let mut client = rig.client();
    let (region, file) = client.frontend.get_inflight_fd(&inflight(1, 8)).unwrap();
    client.frontend.set_inflight_fd(&region, file.as_raw_fd()).unwrap();
    let mut queue = client.start_queue(0);
    queue.write(0, &page(1));
    assert_eq!(queue.read(0, 4096), page(1));
    let mut part = vec![0xff; region.mmap_size as usize];
    file.read_exact_at(&mut part, 0).unwrap();
    assert!(part.iter().all(|&byte| byte == 0), "nothing is noted there");
    assert!(client.frontend.get_vring_base(0).is_ok());
}

#[test]
fn an_inflight_region_that_cannot_be_is_refused() {
    let wrong = |what: &str, change: fn(&mut VhostUserInflight)| {
        let rig = rig();
        let mut client = rig.client();
        let (mut region, file) = client.frontend.get_inflight_fd(&inflight(2, 64)).unwrap();
        change(&mut region);
        assert!(
            client.frontend.set_inflight_fd(&region, file.as_raw_fd()).is_err(),
            "{what}"
        );
        wait_until("the connection ends", || rig.device().status().failed_connections == 1);
    };
    wrong("too small", |region| region.mmap_size -= 1);
    wrong("more queues than there are", |region| region.num_queues = 5);
    wrong("more queues than it has room for", |region| region.num_queues = 4);
    wrong("larger rings than it has room for", |region| region.queue_size = 1024);
    wrong("past its file", |region| region.mmap_offset = 4096);
    wrong("unaligned", |region| region.mmap_offset = 8);
    for (num_queues, queue_size) in [(5, 64), (1, 2048)] {
        let mut client = rig().client();
        assert!(
            client
                .frontend
                .get_inflight_fd(&inflight(num_queues, queue_size))
                .is_err()
        );
    }
}

/// One after the other up to the limit, and one too many; every one of them is used.
#[test]
fn as_many_regions_as_are_promised() {
    const SLOTS: u64 = 509;
    const STEP: u64 = 0x10_0000;
    let rig = rig();
    let mut client = rig.connect();
    client.negotiate(VERSION_1 | PROTOCOL);
    assert_eq!(client.frontend.get_max_mem_slots().unwrap(), SLOTS);
    client.frontend.add_mem_region(&client.region()).unwrap();
    let small = |number: u64| VhostUserMemoryRegionInfo {
        guest_phys_addr: GUEST_BYTES + number * STEP,
        memory_size: 0x1000,
        userspace_addr: USER_BASE + GUEST_BYTES + number * STEP,
        ..client.region()
    };
    let regions: Vec<_> = (1..=SLOTS).map(small).collect();
    let (last, most) = regions.split_last().unwrap();
    for region in most {
        client.frontend.add_mem_region(region).unwrap();
    }
    let mut queue = client.start_queue(0);
    queue.write(0, &page(3));
    for region in most.iter().step_by(60) {
        let slot = queue.lay_out(0, IN, 0, &[], 4096);
        // All small regions are the file's first page.
        queue.set_descriptor(slot.head + 1, region.guest_phys_addr, 4096, NEXT | WRITE, slot.head + 2);
        queue.publish(slot.head);
        queue.kick();
        assert_eq!(queue.next_used(), (slot.head, 4097));
        let mut got = vec![0; 4096];
        client.mem.read_slice(&mut got, GuestAddress(0)).unwrap();
        assert_eq!(got, page(3));
    }
    assert!(client.frontend.add_mem_region(last).is_err());
}
