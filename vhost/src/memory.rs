//! The guest's memory as the frontend shares it: mapping, checks, address translation.
//!
//! A frontend gives regions as (file, offset, size) with two addresses each: the guest's (GPA), used in descriptors, and its
//! own (user address), used for the rings (vhost-user.rst, "Memory region description", "Ring addresses").
//!
//! Checked before a region is mapped: it does not end past its file (the first touch would be a SIGBUS for the whole
//! process), the total has a limit, no address range overlaps another. A file that is cut later costs its own disk, see
//! `fault`; one that is sealed against it cannot be, and an owner may insist on that.

use std::fs::File;
use std::io;
use std::sync::Arc;

use rustix::fs::{FileType, SealFlags};
use vm_memory::{FileOffset, GuestAddress, MmapRegion};

use crate::fault::Mapping;
use crate::guest::{Guest, Region};

/// Regions of one guest: what VHOST_USER_GET_MAX_MEM_SLOTS answers, and what QEMU has at most.
pub(crate) const REGIONS_MAX: usize = 509;

/// Bytes of all regions together. Only address space is used, and x86-64 has 128 TiB for all devices of the process.
const TOTAL_BYTES_MAX: u64 = 1 << 40;

/// One region as announced.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct RegionInfo {
    pub guest_addr: u64,
    pub user_addr: u64,
    pub bytes: u64,
    pub file_offset: u64,
}

/// Why memory was not taken. The connection ends, so the reason is for the log.
#[derive(Debug, thiserror::Error)]
pub(crate) enum MemoryError {
    #[error("more than {REGIONS_MAX} memory regions")]
    TooMany,
    #[error("memory regions of more than {TOTAL_BYTES_MAX} bytes together")]
    TooLarge,
    #[error("a memory region is empty or wraps around")]
    BadRange,
    #[error("memory regions overlap")]
    Overlap,
    #[error("a memory region ends past its file")]
    PastFile,
    #[error("a memory region's descriptor is not a file in memory")]
    NotAFile,
    #[error("a memory region's file is not sealed against shrinking")]
    Unsealed,
    #[error("a memory region is not whole huge pages of {0} bytes")]
    HugePages(u64),
    #[error("no such memory region")]
    Unknown,
    #[error("mapping a memory region: {0}")]
    Map(#[source] io::Error),
}

/// All regions of one guest. Cheap to replace: whoever uses a mapping shares it.
pub(crate) struct GuestTable {
    /// By guest address, not overlapping.
    regions: Vec<(RegionInfo, Region)>,
    require_sealed: bool,
}

impl GuestTable {
    /// With `require_sealed`, files that can be cut are refused.
    pub fn empty(require_sealed: bool) -> GuestTable {
        GuestTable {
            regions: Vec::new(),
            require_sealed,
        }
    }

    pub fn is_empty(&self) -> bool {
        self.regions.is_empty()
    }

    /// What a worker uses.
    pub fn guest(&self) -> Guest {
        Guest::new(self.regions.iter().map(|(_, region)| region.clone()).collect())
    }

    /// A table of these regions and no others.
    pub fn replaced_by(
        &self,
        regions: impl IntoIterator<Item = (RegionInfo, File)>,
    ) -> Result<GuestTable, MemoryError> {
        let mut table = GuestTable::empty(self.require_sealed);
        for (info, file) in regions {
            table = table.with(info, file)?;
        }
        Ok(table)
    }

    /// This table and one more region.
    pub fn with(&self, info: RegionInfo, file: File) -> Result<GuestTable, MemoryError> {
        self.check(&info)?;
        if self.require_sealed {
            check_sealed(&file)?;
        }
        let mapping = Arc::new(map_checked(&info, file)?);
        let region = Region {
            start: info.guest_addr,
            bytes: info.bytes,
            mapping,
        };
        let mut regions = self.regions.clone();
        let place = regions.partition_point(|(other, _)| other.guest_addr < info.guest_addr);
        regions.insert(place, (info, region));
        Ok(GuestTable {
            regions,
            require_sealed: self.require_sealed,
        })
    }

    /// This table without the region that has these addresses and this size.
    pub fn without(&self, gone: &RegionInfo) -> Result<GuestTable, MemoryError> {
        // The offset is not compared: for removal the standard names the three others only.
        let same = |info: &RegionInfo| {
            (info.guest_addr, info.user_addr, info.bytes) == (gone.guest_addr, gone.user_addr, gone.bytes)
        };
        let mut regions = self.regions.clone();
        regions.retain(|(info, _)| !same(info));
        if regions.len() == self.regions.len() {
            return Err(MemoryError::Unknown);
        }
        Ok(GuestTable {
            regions,
            require_sealed: self.require_sealed,
        })
    }

    /// The guest's address of what the frontend has at `user_addr`.
    pub fn translate(&self, user_addr: u64) -> Option<GuestAddress> {
        let (region, _) = self.regions.iter().find(|(info, _)| {
            user_addr
                .checked_sub(info.user_addr)
                .is_some_and(|offset| offset < info.bytes)
        })?;
        region
            .guest_addr
            .checked_add(user_addr - region.user_addr)
            .map(GuestAddress)
    }

    fn check(&self, info: &RegionInfo) -> Result<(), MemoryError> {
        if self.regions.len() >= REGIONS_MAX {
            return Err(MemoryError::TooMany);
        }
        let ends = [info.guest_addr, info.user_addr, info.file_offset].map(|start| start.checked_add(info.bytes));
        if info.bytes == 0 || ends.contains(&None) {
            return Err(MemoryError::BadRange);
        }
        let total = self
            .regions
            .iter()
            .try_fold(info.bytes, |sum, (region, _)| sum.checked_add(region.bytes));
        if total.is_none_or(|total| total > TOTAL_BYTES_MAX) {
            return Err(MemoryError::TooLarge);
        }
        // All of them have passed the check for wrapping.
        let cross = |a: u64, a_bytes: u64, b: u64, b_bytes: u64| a < b + b_bytes && b < a + a_bytes;
        let overlap = self.regions.iter().any(|(region, _)| {
            cross(info.user_addr, info.bytes, region.user_addr, region.bytes)
                || cross(info.guest_addr, info.bytes, region.guest_addr, region.bytes)
        });
        if overlap { Err(MemoryError::Overlap) } else { Ok(()) }
    }
}

/// What has no seals is no memfd, and can be cut.
fn check_sealed(file: &File) -> Result<(), MemoryError> {
    match rustix::fs::fcntl_get_seals(file) {
        Ok(seals) if seals.contains(SealFlags::SHRINK) => Ok(()),
        _ => Err(MemoryError::Unsealed),
    }
}

fn check_file(info: &RegionInfo, file: &File) -> Result<(), MemoryError> {
    let stat = rustix::fs::fstat(file).map_err(|error| MemoryError::Map(error.into()))?;
    if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
        return Err(MemoryError::NotAFile);
    }
    check_huge_pages(info, file)?;
    // The size need not be whole OS pages: libblkio's is not.
    match (u64::try_from(stat.st_size), info.file_offset.checked_add(info.bytes)) {
        (Ok(size), Some(end)) if end <= size => Ok(()),
        _ => Err(MemoryError::PastFile),
    }
}

/// Part of a huge page can be mapped, but neither replaced nor unmapped. Frontends know: QEMU rounds to whole ones.
fn check_huge_pages(info: &RegionInfo, file: &File) -> Result<(), MemoryError> {
    const HUGETLBFS_MAGIC: u64 = 0x958458f6;
    let stat = rustix::fs::fstatfs(file).map_err(|error| MemoryError::Map(error.into()))?;
    let page = u64::try_from(stat.f_bsize).unwrap_or(0);
    if stat.f_type as u64 != HUGETLBFS_MAGIC || info.bytes.is_multiple_of(page) {
        Ok(())
    } else {
        Err(MemoryError::HugePages(page))
    }
}

/// Maps what lies in the file, and is neither cut nor half a huge page.
pub(crate) fn map_checked(info: &RegionInfo, file: File) -> Result<Mapping, MemoryError> {
    check_file(info, &file)?;
    let bytes = usize::try_from(info.bytes).map_err(|_| MemoryError::TooLarge)?;
    let map = MmapRegion::from_file(FileOffset::new(file, info.file_offset), bytes)
        .map_err(|error| MemoryError::Map(io::Error::other(error)))?;
    Mapping::new(Arc::new(map)).map_err(MemoryError::Map)
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use super::*;

    fn memfd(bytes: u64) -> File {
        let fd = rustix::fs::memfd_create("guest", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(fd.as_fd(), bytes).unwrap();
        File::from(fd)
    }

    fn info(guest_addr: u64, user_addr: u64, bytes: u64) -> RegionInfo {
        RegionInfo {
            guest_addr,
            user_addr,
            bytes,
            file_offset: 0,
        }
    }

    #[test]
    fn regions_come_in_any_order_and_translate() {
        let high = (info(0x10_0000, 0x7000_0000, 0x2000), memfd(0x2000));
        let low = (info(0, 0x7f00_0000_0000, 0x1000), memfd(0x1000));
        let table = GuestTable::empty(false).replaced_by([high, low]).unwrap();
        assert_eq!(table.translate(0x7000_1fff), Some(GuestAddress(0x10_1fff)));
        assert_eq!(table.translate(0x7f00_0000_0000), Some(GuestAddress(0)));
        for outside in [0, 0x6fff_ffff, 0x7000_2000, 0x7f00_0000_1000, u64::MAX] {
            assert_eq!(table.translate(outside), None, "{outside:x}");
        }
        table.guest().write(GuestAddress(0x10_1fff), &[7]).unwrap();
        assert!(table.guest().write(GuestAddress(0x1000), &[7]).is_err());
    }

    #[test]
    fn a_region_past_its_file_is_refused() {
        let refused = |region: RegionInfo, file_bytes| {
            GuestTable::empty(false)
                .replaced_by([(region, memfd(file_bytes))])
                .err()
                .unwrap()
        };
        assert!(matches!(refused(info(0, 0, 0x1001), 0x1000), MemoryError::PastFile));
        let shifted = RegionInfo {
            file_offset: 0x1000,
            ..info(0, 0, 0x1000)
        };
        assert!(matches!(refused(shifted, 0x1fff), MemoryError::PastFile));
        assert!(GuestTable::empty(false).replaced_by([(shifted, memfd(0x2000))]).is_ok());
        assert!(
            GuestTable::empty(false)
                .replaced_by([(info(0, 0, 0x7620), memfd(0x7620))])
                .is_ok(),
            "sizes need not be whole pages"
        );
    }

    #[test]
    fn senseless_regions_are_refused() {
        let file_bytes = 0x4000;
        let second = |region: RegionInfo| {
            let first = GuestTable::empty(false)
                .replaced_by([(info(0x1000, 0x1000_0000, 0x2000), memfd(file_bytes))])
                .unwrap();
            first.with(region, memfd(file_bytes)).err().unwrap()
        };
        assert!(matches!(
            second(info(0x2000, 0x2000_0000, 0x1000)),
            MemoryError::Overlap
        ));
        assert!(matches!(
            second(info(0x8000, 0x1000_1000, 0x1000)),
            MemoryError::Overlap
        ));
        assert!(matches!(second(info(0x8000, 0x2000_0000, 0)), MemoryError::BadRange));
        assert!(matches!(
            second(info(u64::MAX - 0xfff, 0x2000_0000, 0x2000)),
            MemoryError::BadRange
        ));
        assert!(matches!(second(info(0x8000, u64::MAX, 0x1000)), MemoryError::BadRange));
        assert!(matches!(
            second(info(0x8000, 0x2000_0000, 1 << 40)),
            MemoryError::TooLarge
        ));
        let unaligned = RegionInfo {
            file_offset: 0x10,
            ..info(0x8000, 0x2000_0000, 0x1000)
        };
        assert!(matches!(second(unaligned), MemoryError::Map(_)));
        let null = File::open("/dev/null").unwrap();
        assert!(matches!(
            GuestTable::empty(false)
                .replaced_by([(info(0, 0, 0x1000), null)])
                .err()
                .unwrap(),
            MemoryError::NotAFile
        ));
    }

    #[test]
    fn unsealed_memory_is_refused_where_the_owner_insists() {
        let sealed = |seals| {
            let flags = rustix::fs::MemfdFlags::CLOEXEC | rustix::fs::MemfdFlags::ALLOW_SEALING;
            let fd = rustix::fs::memfd_create("guest", flags).unwrap();
            rustix::fs::ftruncate(&fd, 0x1000).unwrap();
            rustix::fs::fcntl_add_seals(&fd, seals).unwrap();
            File::from(fd)
        };
        let strict = |file| GuestTable::empty(true).with(info(0, 0x1000, 0x1000), file).map(drop);
        assert!(strict(sealed(SealFlags::SHRINK)).is_ok());
        assert!(matches!(strict(sealed(SealFlags::GROW)), Err(MemoryError::Unsealed)));
        assert!(matches!(strict(memfd(0x1000)), Err(MemoryError::Unsealed)));
        assert!(matches!(
            strict(tempfile::tempfile().unwrap()),
            Err(MemoryError::Unsealed)
        ));
    }

    #[test]
    fn a_region_goes_only_by_its_own_addresses() {
        let table = GuestTable::empty(false)
            .replaced_by([(info(0, 0x1000, 0x1000), memfd(0x1000))])
            .unwrap();
        assert!(table.without(&info(0, 0x1000, 0x2000)).is_err());
        assert!(table.without(&info(0, 0x2000, 0x1000)).is_err());
        assert!(table.without(&info(0, 0x1000, 0x1000)).unwrap().is_empty());
    }
}
