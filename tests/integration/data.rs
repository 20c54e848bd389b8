//! Requests and their answers: framing, ranges, lengths, limits. Every request goes through the raw frontend, which checks
//! guards, the preset status, order and calls.

use crate::raw::*;
use crate::support::{Backend, Dice};

const DISK: &str = "64M";
const DISK_SECTORS: u64 = (64 << 20) / SECTOR as u64;

fn disk(args: &[&str]) -> (Backend, Queue, Guest) {
    let backend = Backend::daemon(DISK, args);
    let mut guest = Guest::new(backend.connect());
    let queue = guest.queue(0, 128);
    (backend, queue, guest)
}

fn small_blocks() -> (Backend, Queue, Guest) {
    disk(&["--logical-block-size", "512"])
}

/// Status and used length of an answer that carries no data.
fn answer(queue: &mut Queue, request: &Request) -> (u8, u32) {
    let reply = queue.run(request);
    (reply.status, reply.used_len)
}

/// Asserts that a request is refused with `status`, one byte written, and that none of the bytes round it changed.
fn assert_refused(queue: &mut Queue, request: &Request, status: u8) {
    let reply = queue.run(request);
    assert_eq!(reply.status, status, "{request:?}");
    assert_eq!(reply.used_len, 1, "used length of {request:?}");
}

#[test]
fn a_new_disk_reads_as_zeroes() {
    let (_backend, mut queue, _guest) = disk(&[]);
    assert_eq!(queue.read(0, PAGE), vec![0; PAGE]);
    assert_eq!(queue.read(DISK_SECTORS - 8, PAGE), vec![0; PAGE]);
}

#[test]
fn what_is_written_is_read_back_for_every_kind_of_content() {
    let (_backend, mut queue, _guest) = disk(&[]);
    let mut dice = Dice::new();
    let pages: Vec<(u64, Vec<u8>)> = (0..200).map(|page| (page * 8, dice.content(PAGE))).collect();
    for (sector, page) in &pages {
        queue.write(*sector, page);
    }
    for (sector, page) in &pages {
        assert!(queue.read(*sector, PAGE) == *page, "sector {sector}");
    }
}

#[test]
fn a_header_may_be_cut_anywhere_and_joined_to_its_data() {
    let (_backend, mut queue, _guest) = disk(&[]);
    let mut dice = Dice::new();
    let cuts: [&[usize]; 7] = [
        &[16],
        &[8, 8],
        &[1, 15],
        &[15, 1],
        &[4, 4, 4, 4],
        &[16 + PAGE],
        &[7, 9 + 100],
    ];
    for indirect in [false, true] {
        for cut in cuts {
            let page = dice.bytes(PAGE);
            let mut write = Request::write(8, &page).cut(cut, &[]);
            write.indirect = indirect;
            assert_eq!(answer(&mut queue, &write), (OK, 1), "write with {cut:?}");
            let header_cut = if cut == [16 + PAGE] || cut == [7, 109] {
                &[16][..]
            } else {
                cut
            };
            let mut read = Request::read(8, PAGE).cut(header_cut, &[PAGE]);
            read.indirect = indirect;
            let reply = queue.run(&read);
            assert_eq!(
                (reply.status, reply.used_len),
                (OK, PAGE as u32 + 1),
                "read with {cut:?}"
            );
            assert!(reply.data == page, "content with {cut:?}");
        }
    }
}

#[test]
fn a_status_byte_may_share_a_descriptor_with_the_data() {
    let (_backend, mut queue, _guest) = disk(&[]);
    let page = Dice::new().bytes(PAGE);
    queue.write(0, &page);
    for cut in [vec![], vec![1], vec![PAGE - 1], vec![100, 412]] {
        let reply = queue.run(&Request::read(0, PAGE).cut(&[16], &cut));
        assert_eq!((reply.status, reply.used_len), (OK, PAGE as u32 + 1), "{cut:?}");
        assert!(reply.data == page, "{cut:?}");
    }
}

#[test]
fn a_hundred_descriptors_of_one_byte_make_a_request() {
    let (_backend, mut queue, _guest) = disk(&[]);
    let page = Dice::new().bytes(PAGE);
    let ones = [1; 100];
    assert_eq!(answer(&mut queue, &Request::write(16, &page).cut(&ones, &[])), (OK, 1));
    assert_eq!(
        answer(&mut queue, &Request::write(24, &page).cut(&ones, &[]).indirect()),
        (OK, 1)
    );
    for sector in [16, 24] {
        let reply = queue.run(&Request::read(sector, PAGE).cut(&[16], &ones));
        assert_eq!((reply.status, reply.used_len), (OK, PAGE as u32 + 1));
        assert!(reply.data == page);
    }
}

#[test]
fn a_request_may_have_126_segments_of_odd_lengths() {
    let (_backend, mut queue, _guest) = disk(&[]);
    let mut dice = Dice::new();
    let data = dice.bytes(32 * PAGE);
    // 125 cuts of odd lengths; what is left makes the 126th.
    let odd: Vec<usize> = (0..125).map(|_| 1 + 2 * dice.below(500) as usize).collect();
    let with_header: Vec<usize> = [16].into_iter().chain(odd.iter().copied()).collect();
    for indirect in [false, true] {
        let mut write = Request::write(800, &data).cut(&with_header, &[]);
        write.indirect = indirect;
        assert_eq!(answer(&mut queue, &write), (OK, 1), "indirect: {indirect}");
        let mut read = Request::read(800, data.len());
        // The last segment is cut from the status byte.
        let last = data.len() - odd.iter().sum::<usize>();
        read.writable = odd.iter().copied().chain([last]).collect();
        read.indirect = indirect;
        let reply = queue.run(&read);
        assert_eq!((reply.status, reply.used_len), (OK, data.len() as u32 + 1));
        assert!(reply.data == data);
        queue.write(800, &vec![0; data.len()]);
    }
}

#[test]
fn an_empty_descriptor_in_a_chain_is_an_empty_segment() {
    let (_backend, mut queue, _guest) = disk(&[]);
    let page = Dice::new().bytes(PAGE);
    queue.write(0, &page);
    let header = queue.keep(&[0; 16]);
    let data = queue.keep(&[0; PAGE]);
    let status = queue.keep(&[UNTOUCHED]);
    queue.describe(120, descriptor(header, 16, NEXT, 121));
    queue.describe(121, descriptor(data, 0, NEXT | WRITE, 122));
    queue.describe(122, descriptor(data, PAGE as u32, NEXT | WRITE, 123));
    queue.describe(123, descriptor(status, 1, WRITE, 0));
    let since = queue.offered;
    queue.offer(120);
    queue.kick(since);
    let used = queue.wait_used(crate::support::PATIENCE).unwrap();
    assert_eq!(
        used,
        Used {
            id: 120,
            len: PAGE as u32 + 1
        }
    );
    assert_eq!(queue.bytes(status, 1), [OK]);
    assert!(queue.bytes(data, PAGE) == page);
}

#[test]
fn a_buffer_may_cross_two_regions_that_touch() {
    let (_backend, mut queue, _guest) = disk(&[]);
    let page = Dice::new().bytes(PAGE);
    queue.write(0, &page);
    let header = queue.keep(&[0; 16]);
    let data = SEAM - 1001;
    let status = queue.keep(&[UNTOUCHED]);
    queue.describe(120, descriptor(header, 16, NEXT, 121));
    queue.describe(121, descriptor(data, PAGE as u32, NEXT | WRITE, 122));
    queue.describe(122, descriptor(status, 1, WRITE, 0));
    let since = queue.offered;
    queue.offer(120);
    queue.kick(since);
    assert_eq!(
        queue.wait_used(crate::support::PATIENCE),
        Some(Used {
            id: 120,
            len: PAGE as u32 + 1
        })
    );
    assert_eq!(queue.bytes(status, 1), [OK]);
    assert!(queue.bytes(data, PAGE) == page);
}

#[test]
fn the_serial_number_is_twenty_bytes_or_as_much_as_fits() {
    let (_backend, mut queue, _guest) = disk(&["--serial", "swap-disk-7"]);
    let mut full = b"swap-disk-7".to_vec();
    full.resize(20, 0);
    for (len, written) in [(20, 20), (8, 8), (1, 1), (64, 20)] {
        let reply = queue.run(&Request::get_id(len));
        assert_eq!(reply.status, OK, "buffer of {len}");
        assert_eq!(reply.data[..written], full[..written], "buffer of {len}");
        // In a longer buffer the status byte lies beyond bytes that nobody wrote: the used length may count them or not.
        if len <= 20 {
            assert_eq!(reply.used_len as usize, written + 1, "buffer of {len}");
        }
    }
}

#[test]
fn a_serial_number_of_twenty_characters_has_no_terminator() {
    let (_backend, mut queue, _guest) = disk(&["--serial", "12345678901234567890"]);
    assert_eq!(queue.run(&Request::get_id(20)).data, b"12345678901234567890");
}

#[test]
fn the_serial_number_is_never_empty() {
    let (_backend, mut queue, _guest) = disk(&[]);
    let reply = queue.run(&Request::get_id(20));
    assert_eq!((reply.status, reply.used_len), (OK, 21));
    assert_ne!(reply.data[0], 0, "{:?}", reply.data);
}

#[test]
fn unknown_request_types_are_unsupported() {
    let (_backend, mut queue, _guest) = disk(&[]);
    let page = Dice::new().bytes(PAGE);
    queue.write(0, &page);
    let known = [0, 1, 8, 11, 13];
    let others = (0..=40)
        .filter(|kind| !known.contains(kind))
        .chain([1 << 31, (1 << 31) | 1, u32::MAX]);
    for kind in others {
        // FLUSH (4) is among them: it is not offered.
        for (data, in_len) in [(&page[..0], 0), (&page[..], 0), (&page[..0], PAGE)] {
            let reply = queue.run(&Request::new(kind, 0, data, in_len));
            assert_eq!(reply.status, UNSUPP, "type {kind} with {} + {in_len} bytes", data.len());
            assert_eq!(reply.used_len, 1, "type {kind} with {} + {in_len} bytes", data.len());
        }
    }
    assert!(queue.read(0, PAGE) == page, "an unknown request changed the disk");
}

#[test]
fn a_request_out_of_range_fails_and_changes_nothing() {
    let (_backend, mut queue, _guest) = small_blocks();
    let mut dice = Dice::new();
    let tail = dice.bytes(4 * PAGE);
    let tail_sector = DISK_SECTORS - 32;
    queue.write(tail_sector, &tail);
    let noise = dice.bytes(4 * PAGE);
    let sectors = [
        DISK_SECTORS,
        DISK_SECTORS + 1,
        DISK_SECTORS - 1,
        DISK_SECTORS - 31,
        1 << 55,
        (1 << 55) - 1,
        u64::MAX / 512,
        u64::MAX / 512 + 1,
        u64::MAX - 7,
        u64::MAX,
    ];
    for sector in sectors {
        assert_refused(&mut queue, &Request::write(sector, &noise), IOERR);
        let read = queue.run(&Request::read(sector, noise.len()));
        assert_eq!(read.status, IOERR, "read at {sector}");
        for request in [Request::discard, Request::write_zeroes] {
            assert_refused(&mut queue, &request(&[range(sector, 32)]), IOERR);
            assert_refused(&mut queue, &request(&[range(sector, u32::MAX)]), IOERR);
        }
    }
    assert!(
        queue.read(tail_sector, tail.len()) == tail,
        "a refused request changed the disk"
    );
}

#[test]
fn a_failed_read_gives_away_no_bytes() {
    let (_backend, mut queue, _guest) = disk(&[]);
    queue.write(DISK_SECTORS - 8, &[0x77; PAGE]);
    let reply = queue.run(&Request::read(DISK_SECTORS - 8, 2 * PAGE));
    assert_eq!(reply.status, IOERR);
    assert!(!reply.data.contains(&0x77), "bytes of the disk came with a failed read");
}

#[test]
fn a_request_of_no_bytes_succeeds() {
    let (_backend, mut queue, _guest) = disk(&[]);
    assert_eq!(answer(&mut queue, &Request::read(0, 0)), (OK, 1));
    assert_eq!(answer(&mut queue, &Request::write(0, &[])), (OK, 1));
}

#[test]
fn a_length_that_is_no_multiple_of_a_sector_fails() {
    let (_backend, mut queue, _guest) = small_blocks();
    let page = Dice::new().bytes(2 * PAGE);
    queue.write(0, &page);
    for len in [1, 511, 513, 4095, 4097] {
        assert_refused(&mut queue, &Request::write(0, &vec![0x11; len]), IOERR);
        assert_eq!(queue.run(&Request::read(0, len)).status, IOERR, "read of {len}");
    }
    assert!(queue.read(0, page.len()) == page);
}

#[test]
fn single_sectors_are_written_without_touching_their_neighbours() {
    let (_backend, mut queue, _guest) = small_blocks();
    let mut dice = Dice::new();
    let mut model = dice.bytes(4 * PAGE);
    queue.write(0, &model);
    for _ in 0..300 {
        let first = dice.below(32) as usize;
        let count = 1 + dice.below(32 - first as u64) as usize;
        let data = dice.content(count * SECTOR);
        queue.write(first as u64, &data);
        model[first * SECTOR..(first + count) * SECTOR].copy_from_slice(&data);
    }
    assert!(queue.read(0, model.len()) == model);
}

/// A disk whose first 16 pages hold noise, and the noise.
fn noisy(queue: &mut Queue) -> Vec<u8> {
    let noise = Dice::new().bytes(16 * PAGE);
    queue.write(0, &noise);
    noise
}

fn zero(model: &mut [u8], sector: usize, sectors: usize) {
    model[sector * SECTOR..(sector + sectors) * SECTOR].fill(0);
}

#[test]
fn discarded_pages_read_as_zeroes_and_their_neighbours_stay() {
    let (_backend, mut queue, _guest) = disk(&[]);
    let mut model = noisy(&mut queue);
    let ranges = [range(8, 8), range(32, 24), range(96, 8)];
    assert_eq!(answer(&mut queue, &Request::discard(&ranges)), (OK, 1));
    for range in ranges {
        zero(&mut model, range.sector as usize, range.sectors as usize);
    }
    assert!(queue.read(0, model.len()) == model);
}

#[test]
fn discard_ranges_may_be_cut_anywhere() {
    let (_backend, mut queue, _guest) = disk(&[]);
    let mut model = noisy(&mut queue);
    let ranges = [range(0, 8), range(64, 16)];
    let request = Request::discard(&ranges).cut(&[3, 13 + 5, 20], &[]);
    assert_eq!(answer(&mut queue, &request), (OK, 1));
    zero(&mut model, 0, 8);
    zero(&mut model, 64, 16);
    assert!(queue.read(0, model.len()) == model);
}

#[test]
fn write_zeroes_is_exact_to_the_sector() {
    let (_backend, mut queue, _guest) = small_blocks();
    let mut model = noisy(&mut queue);
    let mut dice = Dice::new();
    for _ in 0..40 {
        let sector = dice.below(120);
        let sectors = 1 + dice.below(128 - sector) as u32;
        let flags = dice.below(2) as u32; // with and without unmap
        let ranges = [
            Range {
                sector,
                sectors: sectors.min(13),
                flags,
            },
            Range {
                sector: 127,
                sectors: 1,
                flags,
            },
        ];
        assert_eq!(
            answer(&mut queue, &Request::write_zeroes(&ranges)),
            (OK, 1),
            "{ranges:?}"
        );
        for range in ranges {
            zero(&mut model, range.sector as usize, range.sectors as usize);
        }
        assert!(queue.read(0, model.len()) == model, "after {ranges:?}");
    }
}

#[test]
fn the_whole_disk_can_be_discarded_or_zeroed_at_once() {
    let (_backend, mut queue, _guest) = disk(&[]);
    for request in [Request::discard, Request::write_zeroes] {
        let noise = noisy(&mut queue);
        queue.write(DISK_SECTORS - 8, &noise[..PAGE]);
        assert_eq!(answer(&mut queue, &request(&[range(0, DISK_SECTORS as u32)])), (OK, 1));
        assert_eq!(queue.read(0, noise.len()), vec![0; noise.len()]);
        assert_eq!(queue.read(DISK_SECTORS - 8, PAGE), vec![0; PAGE]);
    }
}

#[test]
fn one_bad_range_of_many_means_that_none_is_applied() {
    let (_backend, mut queue, _guest) = disk(&[]);
    let model = noisy(&mut queue);
    let outside = range(DISK_SECTORS - 8, 16);
    let reserved = Range {
        sector: 64,
        sectors: 8,
        flags: 1 << 5,
    };
    for request in [Request::discard, Request::write_zeroes] {
        assert_refused(&mut queue, &request(&[range(0, 8), range(16, 8), outside]), IOERR);
        assert_refused(&mut queue, &request(&[outside, range(0, 8)]), IOERR);
        assert_refused(&mut queue, &request(&[range(0, 8), reserved]), UNSUPP);
    }
    assert!(
        queue.read(0, model.len()) == model,
        "a refused request changed the disk"
    );
}

#[test]
fn unmap_is_a_flag_of_write_zeroes_only_and_no_other_flag_is_known() {
    let (_backend, mut queue, _guest) = disk(&[]);
    let model = noisy(&mut queue);
    for flags in [1, 2, 3, 1 << 31, u32::MAX] {
        let ranges = [Range {
            sector: 8,
            sectors: 8,
            flags,
        }];
        assert_refused(&mut queue, &Request::discard(&ranges), UNSUPP);
        if flags != 1 {
            assert_refused(&mut queue, &Request::write_zeroes(&ranges), UNSUPP);
        }
    }
    assert!(
        queue.read(0, model.len()) == model,
        "a refused request changed the disk"
    );
}

#[test]
fn a_range_list_must_be_whole_and_within_the_limit() {
    let (_backend, mut queue, mut guest) = disk(&[]);
    let model = noisy(&mut queue);
    let config = guest.config(0, 60);
    let limit = |offset: usize| u32::from_le_bytes(config[offset..offset + 4].try_into().unwrap()) as usize;
    for (kind, segments_max) in [(11, limit(40)), (13, limit(52))] {
        let bytes = Request::discard(&[range(0, 8)]).data;
        for len in [1, 15] {
            assert_refused(&mut queue, &Request::new(kind, 0, &bytes[..len], 0), IOERR);
        }
        let mut trailing = bytes.clone();
        trailing.push(0);
        assert_refused(&mut queue, &Request::new(kind, 0, &trailing, 0), IOERR);
        assert_refused(
            &mut queue,
            &Request::new(kind, 0, &bytes.repeat(segments_max + 1), 0),
            IOERR,
        );
        assert!(
            queue.read(0, model.len()) == model,
            "a refused request of type {kind} changed the disk"
        );
    }
    let most: Vec<Range> = (0..limit(40) as u64).map(|i| range(1024 + i * 8, 8)).collect();
    assert_eq!(answer(&mut queue, &Request::discard(&most)), (OK, 1));
    let most: Vec<Range> = (0..limit(52) as u64).map(|i| range(1024 + i * 8, 8)).collect();
    assert_eq!(answer(&mut queue, &Request::write_zeroes(&most)), (OK, 1));
}

#[test]
fn a_discard_of_parts_of_pages_harms_nothing_outside_its_range() {
    let (_backend, mut queue, _guest) = small_blocks();
    let model = noisy(&mut queue);
    let reply = queue.run(&Request::discard(&[range(3, 18)]));
    assert_eq!((reply.status, reply.used_len), (OK, 1));
    let after = queue.read(0, model.len());
    assert!(after[..3 * SECTOR] == model[..3 * SECTOR] && after[21 * SECTOR..] == model[21 * SECTOR..]);
    assert_eq!(
        after[8 * SECTOR..16 * SECTOR],
        vec![0; PAGE],
        "the whole page in the range"
    );
    for sector in (3..8).chain(16..21) {
        let bytes = &after[sector * SECTOR..(sector + 1) * SECTOR];
        let kept = *bytes == model[sector * SECTOR..(sector + 1) * SECTOR];
        assert!(
            kept || bytes.iter().all(|byte| *byte == 0),
            "sector {sector} is neither old nor zero"
        );
    }
}

#[test]
fn a_read_only_disk_is_read_and_named_but_never_changed() {
    let (_backend, mut queue, _guest) = disk(&["--read-only"]);
    assert_refused(&mut queue, &Request::write(0, &[1; PAGE]), IOERR);
    assert_refused(&mut queue, &Request::discard(&[range(0, 8)]), IOERR);
    assert_refused(&mut queue, &Request::write_zeroes(&[range(0, 8)]), IOERR);
    assert_eq!(queue.read(0, PAGE), vec![0; PAGE]);
    assert_eq!(queue.run(&Request::get_id(20)).status, OK);
}

#[test]
fn a_header_of_less_than_sixteen_bytes_is_unsupported() {
    let (_backend, mut queue, _guest) = disk(&[]);
    for len in [1, 8, 15] {
        let header = queue.keep(&vec![0; len]);
        let status = queue.keep(&[UNTOUCHED]);
        queue.describe(120, descriptor(header, len as u32, NEXT, 121));
        queue.describe(121, descriptor(status, 1, WRITE, 0));
        let since = queue.offered;
        queue.offer(120);
        queue.kick(since);
        assert_eq!(
            queue.wait_used(crate::support::PATIENCE),
            Some(Used { id: 120, len: 1 }),
            "header of {len}"
        );
        assert_eq!(queue.bytes(status, 1), [UNSUPP], "header of {len}");
    }
}

#[test]
fn a_batch_of_many_requests_completes_in_order_on_a_full_ring() {
    let (_backend, mut queue, _guest) = disk(&[]);
    let mut dice = Dice::new();
    let pages: Vec<Vec<u8>> = (0..42).map(|_| dice.content(PAGE)).collect();
    for round in 0..20 {
        let since = queue.offered;
        let tickets: Vec<Ticket> = pages
            .iter()
            .enumerate()
            .map(|(i, page)| match (i + round) % 2 {
                0 => queue.submit(&Request::write(i as u64 * 8, page)),
                _ => queue.submit(&Request::read(i as u64 * 8, PAGE)),
            })
            .collect();
        queue.kick(since);
        for ticket in tickets {
            let used = queue.wait_used(crate::support::PATIENCE).expect("a completion");
            assert_eq!(queue.finish(ticket, used).status, OK);
        }
    }
    for (i, page) in pages.iter().enumerate() {
        assert!(queue.read(i as u64 * 8, PAGE) == *page, "page {i}");
    }
}
