//! Guests whose memory is of huge pages.

use std::os::unix::net::UnixStream;

use rustix::fs::{MemfdFlags, ftruncate, memfd_create};

use crate::client::*;
use crate::rig;

/// Huge pages of the host's pool, taken for a test and given back: how many there were before.
struct HugePages(String);

impl HugePages {
    const POOL: &str = "/proc/sys/vm/nr_hugepages";

    /// `None` where the pool may not be changed, or has no room.
    fn reserve(count: u64) -> Option<HugePages> {
        let before = std::fs::read_to_string(HugePages::POOL).ok()?;
        let wanted = before.trim().parse::<u64>().ok()? + count;
        std::fs::write(HugePages::POOL, wanted.to_string()).ok()?;
        let reserved = HugePages(before);
        let now = std::fs::read_to_string(HugePages::POOL).ok()?;
        (now.trim().parse::<u64>().ok()? == wanted).then_some(reserved)
    }
}

impl Drop for HugePages {
    fn drop(&mut self) {
        let _ = std::fs::write(HugePages::POOL, &self.0);
    }
}

#[test]
fn guests_may_have_huge_pages() {
    const HUGE: u64 = 2 << 20;
    let Some(_reserved) = HugePages::reserve(GUEST_BYTES.div_ceil(HUGE)) else {
        eprintln!("NOT TRIED: this host has no huge pages to spare, or not for this user");
        return;
    };
    let rig = rig();
    let memory = memfd_create("huge", MemfdFlags::CLOEXEC | MemfdFlags::HUGETLB | MemfdFlags::HUGE_2MB).unwrap();
    ftruncate(&memory, GUEST_BYTES.next_multiple_of(HUGE)).unwrap();
    let stream = UnixStream::connect(&rig.path).unwrap();
    let mut client = Client::with_memory(stream, memory.into());
    client.negotiate(VERSION_1 | EVENT_IDX | INDIRECT | PROTOCOL);
    client.share_memory();
    let mut queue = client.start_queue(0);
    for number in 0..20 {
        queue.write(number * 8, &page(number));
    }
    for number in 0..20 {
        assert_eq!(queue.read(number * 8, 4096), page(number));
    }
    drop(client);
    rig.wait_for_queues(0);
}
