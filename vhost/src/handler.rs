//! The vhost-user requests of one connection (vhost-user.rst, "Front-end message types").
//!
//! A [`Session`] is made when a frontend connects and dropped when it is gone; dropping stops and joins all workers and
//! unmaps the guest. The disk is not part of it.
//!
//! An `Err` here becomes a negative reply, if one was asked for, and ends the connection: the frontend's fault never goes
//! further than its own device. The one exception is [`Error::InvalidOperation`], by which this file says "refused, go on".
//!
//! Memory: guest memory is only ever replaced while no worker runs, and replaced before the request is acknowledged, so a
//! frontend that has its answer may reuse what it has taken away.

use std::fs::File;
use std::sync::Arc;

use vhost::VhostUserMemoryRegionBase;
use vhost::vhost_user::message::{
    VhostTransferStateDirection, VhostTransferStatePhase, VhostUserConfigFlags, VhostUserInflight, VhostUserLog,
    VhostUserMemoryRegion, VhostUserProtocolFeatures, VhostUserShMemConfig, VhostUserSharedMsg,
    VhostUserSingleMemoryRegion, VhostUserVringAddrFlags, VhostUserVringState,
};
use vhost::vhost_user::{Error, GpuBackend, Result, VhostUserBackendReqHandlerMut};
use virtio_bindings::virtio_ring::{VIRTIO_RING_F_EVENT_IDX, VIRTIO_RING_F_INDIRECT_DESC};

use crate::config_space::{self, PROTOCOL_FEATURES_BIT, has};
use crate::inflight;
use crate::memory::{GuestTable, MemoryError, REGIONS_MAX, RegionInfo};
use crate::vring::{RingFeatures, UserAreas, Vring, VringError};
use crate::worker::Shared;

/// The protocol features of this version. REPLY_ACK is served by the `vhost` crate.
pub(crate) const PROTOCOL_FEATURES: VhostUserProtocolFeatures = VhostUserProtocolFeatures::MQ
    .union(VhostUserProtocolFeatures::REPLY_ACK)
    .union(VhostUserProtocolFeatures::CONFIG)
    .union(VhostUserProtocolFeatures::CONFIGURE_MEM_SLOTS)
    .union(VhostUserProtocolFeatures::BACKEND_REQ)
    .union(VhostUserProtocolFeatures::INFLIGHT_SHMFD)
    .union(VhostUserProtocolFeatures::RESET_DEVICE);

/// One frontend's state.
pub(crate) struct Session {
    shared: Arc<Shared>,
    vrings: Vec<Vring>,
    memory: GuestTable,
    inflight: Option<inflight::Region>,
    acked_features: u64,
    features_are_set: bool,
    replies_are_acked: bool,
    calls_are_set: bool,
    memory_was_shared: bool,
    memory_hint_given: bool,
}

impl Session {
    pub fn new(shared: Arc<Shared>) -> Session {
        let vrings = (0..shared.disk.config.num_queues)
            .map(|index| Vring::new(index, shared.clone()))
            .collect();
        let require_sealed = shared.disk.config.require_sealed_memory;
        Session {
            shared,
            vrings,
            memory: GuestTable::empty(require_sealed),
            inflight: None,
            acked_features: 0,
            features_are_set: false,
            replies_are_acked: false,
            calls_are_set: false,
            memory_was_shared: false,
            memory_hint_given: false,
        }
    }

    /// Whether REPLY_ACK was negotiated.
    pub fn replies_are_acked(&self) -> bool {
        self.replies_are_acked
    }

    pub fn queues_running(&self) -> usize {
        self.vrings.iter().filter(|vring| vring.is_running()).count()
    }

    /// To be called when the frontend is gone: older QEMU, having found no memory that it can share, leaves without a word.
    /// Features alone are set by clients that only look, call descriptors alone by QEMU for a disk that no driver uses.
    pub fn hint_at_missing_memory(&mut self) {
        if self.features_are_set && self.calls_are_set && !self.memory_was_shared {
            self.hint_at_unshared_memory();
        }
    }

    fn vring(&mut self, index: u32) -> Result<&mut Vring> {
        self.vrings.get_mut(index as usize).ok_or(Error::InvalidParam)
    }

    fn inflight_shape(&self, said: &VhostUserInflight) -> Result<inflight::Shape> {
        let config = &self.shared.disk.config;
        let fits = (1..=config.num_queues).contains(&said.num_queues)
            && (1..=config.queue_size_max).contains(&said.queue_size);
        fits.then_some(inflight::Shape {
            num_queues: said.num_queues,
            queue_size: said.queue_size,
        })
        .ok_or(Error::InvalidParam)
    }

    fn ring_features(&self) -> RingFeatures {
        RingFeatures {
            event_idx: has(self.acked_features, VIRTIO_RING_F_EVENT_IDX),
            indirect: has(self.acked_features, VIRTIO_RING_F_INDIRECT_DESC),
        }
    }

    /// Applies `change` to one ring, then starts the ring if that was the last thing it waited for.
    fn with_vring(
        &mut self,
        index: u32,
        change: impl FnOnce(&mut Vring) -> std::result::Result<(), VringError>,
    ) -> Result<()> {
        let features = self.ring_features();
        let vring = self.vrings.get_mut(index as usize).ok_or(Error::InvalidParam)?;
        let done = change(vring).and_then(|()| vring.start_if_ready(&self.memory, features, self.inflight.as_ref()));
        done.map_err(|error| self.refuse_vring(index, &error))
    }

    fn start_all_ready(&mut self) -> Result<()> {
        (0..self.vrings.len() as u32).try_for_each(|index| self.with_vring(index, |_| Ok(())))
    }

    fn stop_all(&mut self) {
        self.vrings.iter().for_each(Vring::ask_to_stop);
        self.vrings.iter_mut().for_each(Vring::stop);
    }

    /// Replaces guest memory while no worker runs, then lets the rings go on.
    fn change_memory(
        &mut self,
        change: impl FnOnce(&GuestTable) -> std::result::Result<GuestTable, MemoryError>,
    ) -> Result<()> {
        self.stop_all();
        match change(&self.memory) {
            Ok(memory) => {
                self.memory = memory;
                self.memory_was_shared = true;
            }
            Err(error) => {
                self.warn(&error);
                return Err(Error::InvalidParam);
            }
        }
        self.start_all_ready()
    }

    fn refuse_vring(&mut self, queue: u32, error: &VringError) -> Error {
        if matches!(error, VringError::OutsideMemory) {
            self.hint_at_unshared_memory();
        }
        if self.shared.log_limit.allows() {
            tracing::warn!(disk = self.shared.disk.name(), queue, "frontend: {error}");
        }
        Error::InvalidParam
    }

    fn warn(&self, error: &dyn std::error::Error) {
        if self.shared.log_limit.allows() {
            tracing::warn!(disk = self.shared.disk.name(), "frontend: {error}");
        }
    }

    /// Said once per connection: this is how it looks from here when a VM was started without the flag.
    fn hint_at_unshared_memory(&mut self) {
        if std::mem::replace(&mut self.memory_hint_given, true) || !self.shared.log_limit.allows() {
            return;
        }
        tracing::warn!(
            disk = self.shared.disk.name(),
            "the VM does not share its memory: start QEMU with `-object memory-backend-memfd,id=mem,size=...,share=on \
             -machine memory-backend=mem`, cloud-hypervisor with `--memory shared=on`"
        );
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        self.stop_all();
    }
}

fn region_info(region: &VhostUserMemoryRegion) -> RegionInfo {
    RegionInfo {
        guest_addr: region.guest_phys_addr,
        user_addr: region.user_addr,
        bytes: region.memory_size,
        file_offset: region.mmap_offset,
    }
}

/// The answer to what is not offered.
fn not_offered<T>() -> Result<T> {
    Err(Error::InvalidParam)
}

impl VhostUserBackendReqHandlerMut for Session {
    fn set_owner(&mut self) -> Result<()> {
        Ok(())
    }

    /// Deprecated, and sent by some at reset where others send GET_VRING_BASE: the standard says to ignore it.
    fn reset_owner(&mut self) -> Result<()> {
        Ok(())
    }

    fn reset_device(&mut self) -> Result<()> {
        self.stop_all();
        self.vrings.iter_mut().for_each(Vring::reset);
        self.acked_features = 0;
        Ok(())
    }

    fn get_features(&mut self) -> Result<u64> {
        Ok(config_space::offered_features(&self.shared.disk))
    }

    fn set_features(&mut self, features: u64) -> Result<()> {
        if features & !config_space::offered_features(&self.shared.disk) != 0 {
            return not_offered();
        }
        if features != self.acked_features {
            self.stop_all();
        }
        self.acked_features = features;
        self.features_are_set = true;
        if !has(features, PROTOCOL_FEATURES_BIT) {
            // Without the bit there is no message to enable a ring, so rings come enabled.
            self.vrings.iter_mut().for_each(|vring| vring.set_enabled(true));
        }
        self.start_all_ready()
    }

    fn set_mem_table(
        &mut self,
        regions: &[VhostUserMemoryRegion],
        files: Vec<File>,
        _postcopy_listening: Option<bool>,
    ) -> Result<Option<Vec<VhostUserMemoryRegionBase>>> {
        self.change_memory(|memory| memory.replaced_by(regions.iter().map(region_info).zip(files)))?;
        Ok(None)
    }

    fn set_vring_num(&mut self, index: u32, num: u32) -> Result<()> {
        self.with_vring(index, |vring| vring.set_size(num))
    }

    fn set_vring_addr(
        &mut self,
        index: u32,
        flags: VhostUserVringAddrFlags,
        descriptor: u64,
        used: u64,
        available: u64,
        _log: u64,
    ) -> Result<()> {
        if !flags.is_empty() {
            return not_offered(); // the dirty log
        }
        let areas = UserAreas {
            descriptors: descriptor,
            avail: available,
            used,
        };
        if self.memory.is_empty() {
            // It may still come; but so far this is the picture of a VM that shares nothing.
            self.hint_at_unshared_memory();
        } else if !areas.are_in(&self.memory) {
            return Err(self.refuse_vring(index, &VringError::OutsideMemory));
        }
        self.with_vring(index, |vring| vring.set_areas(areas))
    }

    fn set_vring_base(&mut self, index: u32, base: u32) -> Result<()> {
        self.with_vring(index, |vring| vring.set_base(base))
    }

    fn get_vring_base(&mut self, index: u32) -> Result<VhostUserVringState> {
        let base = self.vring(index)?.stop_for_frontend();
        let base = base.map_err(|error| self.refuse_vring(index, &error))?;
        Ok(VhostUserVringState::new(index, u32::from(base)))
    }

    fn set_vring_kick(&mut self, index: u8, fd: Option<File>) -> Result<()> {
        self.with_vring(u32::from(index), |vring| vring.set_kick(fd))
    }

    fn set_vring_call(&mut self, index: u8, fd: Option<File>) -> Result<()> {
        self.calls_are_set = true;
        self.with_vring(u32::from(index), |vring| vring.set_call(fd))
    }

    fn set_vring_err(&mut self, index: u8, fd: Option<File>) -> Result<()> {
        self.with_vring(u32::from(index), |vring| vring.set_error(fd))
    }

    fn get_protocol_features(&mut self) -> Result<VhostUserProtocolFeatures> {
        Ok(PROTOCOL_FEATURES)
    }

    fn set_protocol_features(&mut self, features: u64) -> Result<()> {
        if features & !PROTOCOL_FEATURES.bits() != 0 {
            return not_offered();
        }
        self.replies_are_acked = features & VhostUserProtocolFeatures::REPLY_ACK.bits() != 0;
        Ok(())
    }

    fn get_queue_num(&mut self) -> Result<u64> {
        Ok(u64::from(self.shared.disk.config.num_queues))
    }

    fn set_vring_enable(&mut self, index: u32, enable: bool) -> Result<()> {
        self.with_vring(index, |vring| {
            vring.set_enabled(enable);
            Ok(())
        })
    }

    fn get_config(&mut self, offset: u32, size: u32, _flags: VhostUserConfigFlags) -> Result<Vec<u8>> {
        Ok(config_space::read(&self.shared.disk, offset, size))
    }

    /// Nothing is writable. QEMU passes a guest's writes on whatever was negotiated, so this must not cost the connection.
    fn set_config(&mut self, _offset: u32, _buf: &[u8], _flags: VhostUserConfigFlags) -> Result<()> {
        Err(Error::InvalidOperation("the config space cannot be written"))
    }

    fn set_gpu_socket(&mut self, _gpu_backend: GpuBackend) -> Result<()> {
        not_offered()
    }

    fn get_shared_object(&mut self, _uuid: VhostUserSharedMsg) -> Result<File> {
        not_offered()
    }

    fn get_inflight_fd(&mut self, wanted: &VhostUserInflight) -> Result<(VhostUserInflight, File)> {
        let shape = self.inflight_shape(wanted)?;
        let file = inflight::create(shape).map_err(|error| Error::ReqHandlerError(error.into()))?;
        let answer = VhostUserInflight {
            mmap_size: shape.bytes(),
            mmap_offset: 0,
            ..*wanted
        };
        Ok((answer, file))
    }

    /// A region that we have made, perhaps in a life before this one; but nobody says that it is.
    fn set_inflight_fd(&mut self, given: &VhostUserInflight, file: File) -> Result<()> {
        let shape = self.inflight_shape(given)?;
        if given.mmap_size < shape.bytes() || self.queues_running() > 0 {
            return Err(Error::InvalidParam);
        }
        match inflight::Region::map(file, given.mmap_offset, shape) {
            Ok(region) => self.inflight = Some(region),
            Err(error) => {
                self.warn(&error);
                return Err(Error::InvalidParam);
            }
        }
        Ok(())
    }

    fn get_max_mem_slots(&mut self) -> Result<u64> {
        Ok(REGIONS_MAX as u64)
    }

    fn add_mem_region(
        &mut self,
        region: &VhostUserSingleMemoryRegion,
        fd: File,
        _postcopy_listening: Option<bool>,
    ) -> Result<Option<VhostUserMemoryRegionBase>> {
        self.change_memory(|memory| memory.with(region_info(region), fd))?;
        Ok(None)
    }

    fn remove_mem_region(&mut self, region: &VhostUserSingleMemoryRegion) -> Result<()> {
        self.change_memory(|memory| memory.without(&region_info(region)))
    }

    fn set_device_state_fd(
        &mut self,
        _direction: VhostTransferStateDirection,
        _phase: VhostTransferStatePhase,
        _fd: File,
    ) -> Result<Option<File>> {
        not_offered()
    }

    fn check_device_state(&mut self) -> Result<()> {
        not_offered()
    }

    fn get_shmem_config(&mut self) -> Result<VhostUserShMemConfig> {
        not_offered()
    }

    fn set_log_base(&mut self, _log: &VhostUserLog, _file: File) -> Result<()> {
        not_offered()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use tracing::field::{Field, Visit};
    use tracing::span;

    use super::*;
    use crate::config::tests::disk;
    use crate::counters::{Burst, LogLimit, QueueCounters};

    fn session() -> Session {
        Session::new(Arc::new(Shared {
            disk: disk(1 << 20, |config| config.num_queues = 2),
            counters: vec![QueueCounters::default(), QueueCounters::default()],
            log_limit: LogLimit::new("test"),
            failures: Burst::default(),
            channel: Default::default(),
            resizing: Default::default(),
        }))
    }

    /// Counts the log lines that name the flag.
    struct Hints(Arc<AtomicUsize>);

    struct IsHint(bool);

    impl Visit for IsHint {
        fn record_debug(&mut self, _: &Field, value: &dyn std::fmt::Debug) {
            self.0 |= format!("{value:?}").contains("memory-backend-memfd");
        }
    }

    impl tracing::Subscriber for Hints {
        fn enabled(&self, _: &tracing::Metadata<'_>) -> bool {
            true
        }
        fn new_span(&self, _: &span::Attributes<'_>) -> span::Id {
            span::Id::from_u64(1)
        }
        fn record(&self, _: &span::Id, _: &span::Record<'_>) {}
        fn record_follows_from(&self, _: &span::Id, _: &span::Id) {}
        fn event(&self, event: &tracing::Event<'_>) {
            let mut hint = IsHint(false);
            event.record(&mut hint);
            self.0.fetch_add(usize::from(hint.0), Ordering::Relaxed);
        }
        fn enter(&self, _: &span::Id) {}
        fn exit(&self, _: &span::Id) {}
    }

    fn hints(story: impl FnOnce(&mut Session)) -> usize {
        let count = Arc::<AtomicUsize>::default();
        tracing::subscriber::with_default(Hints(count.clone()), || {
            let mut session = session();
            story(&mut session);
            session.hint_at_missing_memory();
        });
        count.load(Ordering::Relaxed)
    }

    fn memory() -> (VhostUserMemoryRegion, File) {
        let fd = rustix::fs::memfd_create("guest", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&fd, 0x1_0000).unwrap();
        (VhostUserMemoryRegion::new(0, 0x1_0000, 0x7000_0000, 0), File::from(fd))
    }

    #[test]
    fn a_vm_that_does_not_share_its_memory_is_told_the_flag_once() {
        let no_flags = VhostUserVringAddrFlags::empty;
        let told_nothing = hints(|session| session.set_features(1 << 32).unwrap());
        assert_eq!(told_nothing, 0, "a mere look at the device is no fault");
        let unused = hints(|session| session.set_vring_call(0, None).unwrap());
        assert_eq!(unused, 0, "nor is a disk without a driver");
        let gave_up = hints(|session| {
            session.set_features(1 << 32).unwrap();
            session.set_vring_call(0, None).unwrap();
        });
        assert_eq!(gave_up, 1);
        let went_on = hints(|session| {
            session.set_features(1 << 32).unwrap();
            session
                .set_vring_addr(0, no_flags(), 0x1000, 0x3000, 0x2000, 0)
                .unwrap();
            session
                .set_vring_addr(1, no_flags(), 0x1000, 0x3000, 0x2000, 0)
                .unwrap();
        });
        assert_eq!(went_on, 1);
        let outside = hints(|session| {
            let (region, file) = memory();
            session.set_features(1 << 32).unwrap();
            session.set_mem_table(&[region], vec![file], None).unwrap();
            assert!(
                session
                    .set_vring_addr(0, no_flags(), 0x1000, 0x3000, 0x2000, 0)
                    .is_err()
            );
        });
        assert_eq!(outside, 1);
        let all_well = hints(|session| {
            let (region, file) = memory();
            session.set_features(1 << 32).unwrap();
            session.set_mem_table(&[region], vec![file], None).unwrap();
            session
                .set_vring_addr(0, no_flags(), 0x7000_1000, 0x7000_3000, 0x7000_2000, 0)
                .unwrap();
        });
        assert_eq!(all_well, 0);
    }

    #[test]
    fn the_offered_protocol_bits_are_these() {
        assert_eq!(PROTOCOL_FEATURES.bits(), 0xb229);
        assert!(session().set_protocol_features(0xb229).is_ok());
        for bit in (0..64).filter(|bit| 0xb229 & 1u64 << bit == 0) {
            assert!(session().set_protocol_features(1 << bit).is_err(), "bit {bit}");
        }
    }

    #[test]
    fn a_ring_that_is_not_all_there_does_not_start() {
        let mut session = session();
        let (region, file) = memory();
        session.set_features(1 << 32).unwrap();
        session.set_mem_table(&[region], vec![file], None).unwrap();
        session.set_vring_num(0, 16).unwrap();
        session
            .set_vring_addr(
                0,
                VhostUserVringAddrFlags::empty(),
                0x7000_1000,
                0x7000_3000,
                0x7000_2000,
                0,
            )
            .unwrap();
        session.set_vring_base(0, 0).unwrap();
        assert_eq!(session.queues_running(), 0);
        session.set_vring_kick(0, None).unwrap();
        assert_eq!(session.queues_running(), 1);
        let base = session.get_vring_base(0).unwrap();
        assert_eq!({ base.num }, 0);
        assert_eq!(session.queues_running(), 0);
        session.set_vring_kick(0, None).unwrap();
        assert_eq!(session.queues_running(), 1, "a kick descriptor starts a stopped ring");
    }

    #[test]
    fn a_ring_whose_end_is_outside_memory_is_refused() {
        let mut session = session();
        let (region, file) = memory();
        session.set_features(1 << 32).unwrap();
        session.set_mem_table(&[region], vec![file], None).unwrap();
        session.set_vring_num(0, 1024).unwrap();
        session
            .set_vring_addr(
                0,
                VhostUserVringAddrFlags::empty(),
                0x7000_0000,
                0x7000_f000,
                0x7000_5000,
                0,
            )
            .unwrap();
        session.set_vring_base(0, 0).unwrap();
        assert!(session.set_vring_kick(0, None).is_err());
        assert_eq!(session.queues_running(), 0);
    }
}
