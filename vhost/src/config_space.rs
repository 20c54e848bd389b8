//! virtio-blk's config space and feature bits (virtio 1.3 sections 5.2.3 and 5.2.4).
//!
//! Both are part of what a guest may rely on across restarts and migrations, hence the golden tests at the end: a change
//! there is a change of the contract.

use virtio_bindings::virtio_blk::{
    VIRTIO_BLK_F_BLK_SIZE, VIRTIO_BLK_F_DISCARD, VIRTIO_BLK_F_FLUSH, VIRTIO_BLK_F_MQ, VIRTIO_BLK_F_RO,
    VIRTIO_BLK_F_SEG_MAX, VIRTIO_BLK_F_TOPOLOGY, VIRTIO_BLK_F_WRITE_ZEROES,
};
use virtio_bindings::virtio_config::{VIRTIO_F_IN_ORDER, VIRTIO_F_VERSION_1};
use virtio_bindings::virtio_ring::{VIRTIO_RING_F_EVENT_IDX, VIRTIO_RING_F_INDIRECT_DESC};
use zram_core::{PAGE_SIZE, SECTORS_PER_PAGE};

use crate::config::Disk;

/// The bytes that carry fields; reads beyond are zero.
const CONFIG_BYTES: usize = 60;

/// Data segments of one request that a guest is told it may use: a ring of 128 less header and status. More are accepted.
pub(crate) const SEG_MAX: u32 = 126;

/// Ranges of one DISCARD or WRITE_ZEROES request: what Linux uses at most.
pub(crate) const RANGES_MAX: u32 = 256;

/// Sectors of one range, the most that a u32 holds in whole pages. Never zero: Windows' driver divides by it.
pub(crate) const RANGE_SECTORS_MAX: u32 = u32::MAX - (u32::MAX % SECTORS_PER_PAGE as u32);

/// VHOST_USER_F_PROTOCOL_FEATURES, a virtio feature bit by number only.
pub(crate) const PROTOCOL_FEATURES_BIT: u32 = 30;

/// Whether the feature bit `bit` is in `features`.
pub(crate) fn has(features: u64, bit: u32) -> bool {
    features & (1 << bit) != 0
}

/// What the device offers. Never SIZE_MAX (a guest would cut its segments), never FLUSH unless asked for.
pub(crate) fn offered_features(disk: &Disk) -> u64 {
    let always = [
        VIRTIO_BLK_F_SEG_MAX,
        VIRTIO_BLK_F_BLK_SIZE,
        VIRTIO_BLK_F_TOPOLOGY,
        VIRTIO_BLK_F_MQ,
        VIRTIO_BLK_F_DISCARD,
        VIRTIO_BLK_F_WRITE_ZEROES,
        VIRTIO_RING_F_INDIRECT_DESC,
        VIRTIO_RING_F_EVENT_IDX,
        PROTOCOL_FEATURES_BIT,
        VIRTIO_F_VERSION_1,
        VIRTIO_F_IN_ORDER,
    ];
    let by_option = [
        (disk.config.read_only, VIRTIO_BLK_F_RO),
        (disk.config.flush, VIRTIO_BLK_F_FLUSH),
    ];
    let chosen = by_option.into_iter().filter(|(on, _)| *on).map(|(_, bit)| bit);
    always
        .into_iter()
        .chain(chosen)
        .fold(0, |features, bit| features | (1 << bit))
}

/// The answer to GET_CONFIG: exactly `size` bytes, zero beyond the fields. Old cloud-hypervisor counts from 0x100, where
/// virtio-mmio has its config space.
pub(crate) fn read(disk: &Disk, offset: u32, size: u32) -> Vec<u8> {
    const MMIO_CONFIG_OFFSET: u32 = 0x100;
    let offset = offset.checked_sub(MMIO_CONFIG_OFFSET).unwrap_or(offset);
    let fields = fields(disk);
    let rest = fields.iter().skip(offset as usize).chain(std::iter::repeat(&0));
    rest.take(size as usize).copied().collect()
}

fn fields(disk: &Disk) -> [u8; CONFIG_BYTES] {
    let block_bytes = disk.config.logical_block_size;
    let blocks_per_page = PAGE_SIZE as u32 / block_bytes;
    let mut space = [0; CONFIG_BYTES];
    let mut put = |offset: usize, field: &[u8]| {
        for (to, from) in space.iter_mut().skip(offset).zip(field) {
            *to = *from;
        }
    };
    put(0, &disk.capacity_sectors().to_le_bytes());
    put(12, &SEG_MAX.to_le_bytes());
    put(20, &block_bytes.to_le_bytes());
    put(24, &[blocks_per_page.trailing_zeros() as u8]); // physical_block_exp
    put(26, &(blocks_per_page as u16).to_le_bytes()); // min_io_size
    put(28, &blocks_per_page.to_le_bytes()); // opt_io_size
    put(34, &disk.config.num_queues.to_le_bytes());
    put(36, &RANGE_SECTORS_MAX.to_le_bytes()); // max_discard_sectors
    put(40, &RANGES_MAX.to_le_bytes()); // max_discard_seg
    put(44, &(SECTORS_PER_PAGE as u32).to_le_bytes()); // discard_sector_alignment
    put(48, &RANGE_SECTORS_MAX.to_le_bytes()); // max_write_zeroes_sectors
    put(52, &RANGES_MAX.to_le_bytes()); // max_write_zeroes_seg
    put(56, &[1]); // write_zeroes_may_unmap
    space
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::tests::disk;

    const GIB: u64 = 1 << 30;

    #[test]
    fn the_offered_bits_are_these() {
        assert_eq!(offered_features(&disk(GIB, |_| {})), 0x9_7000_7444);
        assert_eq!(
            offered_features(&disk(GIB, |config| config.read_only = true)),
            0x9_7000_7464
        );
        assert_eq!(
            offered_features(&disk(GIB, |config| config.flush = true)),
            0x9_7000_7644
        );
    }

    #[test]
    fn the_config_space_is_these_bytes() {
        #[rustfmt::skip]
        let golden: [u8; 60] = [
            0, 0, 0x20, 0, 0, 0, 0, 0,              // capacity: 2 Mi sectors
            0, 0, 0, 0, 126, 0, 0, 0,               // size_max, seg_max
            0, 0, 0, 0, 0, 0x10, 0, 0,              // geometry, blk_size
            0, 0, 1, 0, 1, 0, 0, 0,                 // topology
            0, 0, 64, 0,                            // writeback, unused, num_queues
            0xf8, 0xff, 0xff, 0xff, 0, 1, 0, 0,     // max_discard_sectors, max_discard_seg
            8, 0, 0, 0,                             // discard_sector_alignment
            0xf8, 0xff, 0xff, 0xff, 0, 1, 0, 0,     // max_write_zeroes_sectors, max_write_zeroes_seg
            1, 0, 0, 0,                             // write_zeroes_may_unmap
        ];
        assert_eq!(read(&disk(GIB, |_| {}), 0, 60), golden);
    }

    #[test]
    fn blocks_of_512_bytes_keep_the_page_as_physical_block() {
        let space = read(&disk(GIB, |config| config.logical_block_size = 512), 20, 12);
        assert_eq!(space, [0, 2, 0, 0, 3, 0, 8, 0, 8, 0, 0, 0]);
    }

    #[test]
    fn a_read_gives_exactly_what_was_asked() {
        let disk = disk(GIB, |_| {});
        let whole = read(&disk, 0, 60);
        assert_eq!(read(&disk, 0, 57), whole[..57]);
        assert_eq!(read(&disk, 0x100, 60), whole);
        assert_eq!(read(&disk, 34, 2), [64, 0]);
        assert_eq!(read(&disk, 50, 30), [&whole[50..], &[0; 20]].concat());
        assert_eq!(read(&disk, 0, 256), [&whole[..], &[0; 196]].concat());
        for offset in [60, 61, 0xff, 0x13c, 4000, u32::MAX] {
            assert_eq!(read(&disk, offset, 8), [0; 8], "offset {offset}");
        }
    }
}
