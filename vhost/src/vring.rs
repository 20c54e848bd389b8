//! One virtqueue seen from the control thread: what the frontend has said of it, and its worker while it runs.
//!
//! A ring runs when five things have come, in any order: size, base, addresses, a kick descriptor (or the word that there is
//! none) and the enabling. GET_VRING_BASE and disabling stop it. The frontend may not change size, base or addresses of a
//! running ring, and may change everything else (vhost-user.rst, "Ring states").
//!
//! Where the ring is: here or with its worker, never in both places, and lost only with a worker that could not be started
//! or died; then a broken ring stands in for it until the frontend starts anew.

use std::fs::File;
use std::io;
use std::sync::Arc;

use rustix::fs::{FileType, OFlags};

use crate::guest::Guest;
use crate::inflight;
use crate::memory::GuestTable;
use crate::ring::{Areas, BadAreas, BrokenRing, Ring};
use crate::worker::{self, Kick, Parts, RunningWorker, Shared, Signals};

/// Addresses of a ring's areas in the frontend's own space.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct UserAreas {
    pub descriptors: u64,
    pub avail: u64,
    pub used: u64,
}

impl UserAreas {
    /// Whether all three begin in memory; where they end is known with the size.
    pub fn are_in(&self, table: &GuestTable) -> bool {
        self.translate(table).is_some()
    }

    fn translate(&self, table: &GuestTable) -> Option<Areas> {
        Some(Areas {
            descriptors: table.translate(self.descriptors)?,
            avail: table.translate(self.avail)?,
            used: table.translate(self.used)?,
        })
    }
}

/// What negotiation settles for a ring.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct RingFeatures {
    pub event_idx: bool,
    pub indirect: bool,
}

/// Why a request about a ring is refused; the connection ends with it.
#[derive(Debug, thiserror::Error)]
pub(crate) enum VringError {
    #[error("the ring is running")]
    Running,
    #[error("ring size {0}: must be a power of two, at most {1}")]
    Size(u32, u16),
    #[error("ring base {0} does not fit 16 bits")]
    Base(u32),
    #[error("a ring address is outside guest memory")]
    OutsideMemory,
    #[error(transparent)]
    Areas(#[from] BadAreas),
    #[error("a kick, call or error descriptor is a file or directory")]
    NotAnEvent,
    #[error("starting the queue: {0}")]
    Start(#[source] io::Error),
}

enum Place {
    Home(Ring),
    Worker(RunningWorker),
}

pub(crate) struct Vring {
    index: u16,
    place: Place,
    shared: Arc<Shared>,
    signals: Arc<Signals>,
    size: Option<u16>,
    areas: Option<UserAreas>,
    base_is_set: bool,
    kick: Option<Kick>,
    enabled: bool,
    /// The used index has been read since the frontend last set the ring's base.
    used_index_is_known: bool,
}

impl Vring {
    pub fn new(index: u16, shared: Arc<Shared>) -> Vring {
        Vring {
            index,
            place: Place::Home(new_ring(&shared)),
            shared,
            signals: Arc::default(),
            size: None,
            areas: None,
            base_is_set: false,
            kick: None,
            enabled: false,
            used_index_is_known: false,
        }
    }

    pub fn is_running(&self) -> bool {
        matches!(self.place, Place::Worker(_))
    }

    pub fn set_size(&mut self, size: u32) -> Result<(), VringError> {
        self.home()?;
        let size_max = self.shared.disk.config.queue_size_max;
        match u16::try_from(size) {
            Ok(size) if size.is_power_of_two() && size <= size_max => self.size = Some(size),
            _ => return Err(VringError::Size(size, size_max)),
        }
        Ok(())
    }

    pub fn set_areas(&mut self, areas: UserAreas) -> Result<(), VringError> {
        self.home()?;
        self.areas = Some(areas);
        Ok(())
    }

    pub fn set_base(&mut self, base: u32) -> Result<(), VringError> {
        let base = u16::try_from(base).map_err(|_| VringError::Base(base))?;
        self.home()?.set_base(base);
        self.base_is_set = true;
        self.used_index_is_known = false;
        Ok(())
    }

    /// Takes the kick descriptor, or the word that there is none. Of a running ring too: it goes on with the new one.
    pub fn set_kick(&mut self, file: Option<File>) -> Result<(), VringError> {
        let kick = match file {
            Some(file) => Kick::File(Arc::new(checked_event(file)?)),
            None => Kick::Polled,
        };
        self.stop();
        self.kick = Some(kick);
        Ok(())
    }

    /// Takes the call descriptor and calls once: a frontend that reconnects may have missed one.
    pub fn set_call(&mut self, file: Option<File>) -> Result<(), VringError> {
        self.signals.set_call(file.map(checked_event).transpose()?);
        if self.used_index_is_known {
            self.signals.call(self.shared.queue_counters(self.index));
        }
        Ok(())
    }

    pub fn set_error(&mut self, file: Option<File>) -> Result<(), VringError> {
        self.signals.set_error(file.map(checked_event).transpose()?);
        Ok(())
    }

    pub fn set_enabled(&mut self, enabled: bool) {
        self.enabled = enabled;
        if !enabled {
            self.stop();
        }
    }

    /// Asks a running worker to stop, so that many can stop at the same time. [`Vring::stop`] waits for it.
    pub fn ask_to_stop(&self) {
        if let Place::Worker(worker) = &self.place {
            worker.ask_to_stop();
        }
    }

    /// Brings the ring home: when this returns, nothing touches ring or guest memory for this queue any more.
    pub fn stop(&mut self) {
        self.place = match self.take_place() {
            Place::Worker(worker) => Place::Home(worker.join().unwrap_or_else(|| lost_ring(&self.shared))),
            home => home,
        };
    }

    /// What GET_VRING_BASE does: stops the ring until the frontend gives a kick descriptor again.
    pub fn stop_for_frontend(&mut self) -> Result<u16, VringError> {
        self.stop();
        self.kick = None;
        self.signals.set_call(None);
        let ring = self.home()?;
        ring.mend();
        Ok(ring.base())
    }

    /// Forgets what the frontend has said, except to which descriptor to report a broken ring: QEMU names that once, and
    /// resets the device whenever the guest does.
    pub fn reset(&mut self) {
        self.stop();
        let signals = self.signals.clone();
        signals.set_call(None);
        *self = Vring::new(self.index, self.shared.clone());
        self.signals = signals;
    }

    /// Starts the ring if all that it needs has come.
    pub fn start_if_ready(
        &mut self,
        table: &GuestTable,
        features: RingFeatures,
        inflight: Option<&inflight::Region>,
    ) -> Result<(), VringError> {
        let (Some(size), Some(areas), Some(kick)) = (self.size, self.areas, self.kick.clone()) else {
            return Ok(());
        };
        if !self.enabled || !self.base_is_set || table.is_empty() || self.is_running() {
            return Ok(());
        }
        let areas = areas.translate(table).ok_or(VringError::OutsideMemory)?;
        let used_index_is_known = self.used_index_is_known;
        let part = inflight.and_then(|region| region.part(self.index, size));
        if inflight.is_some() && part.is_none() {
            self.report_untracked(size);
        }
        let guest = table.guest();
        let ring = self.home()?;
        ring.set_up(&guest, size, areas, features.event_idx, features.indirect)?;
        if !used_index_is_known {
            ring.adopt_used_index();
        }
        if let (None, Some(part)) = (ring.broken(), part) {
            ring.track(part);
        }
        if guest.is_lost() {
            ring.break_for(BrokenRing::MemoryLost);
        }
        let broken = ring.broken();
        if broken.is_some() {
            ring.bring_home();
        }
        self.used_index_is_known = true;
        if let Some(reason) = broken {
            // Not worth a thread: it waits here for the frontend to stop and start it.
            self.report_broken(reason);
            return Ok(());
        }
        self.start(guest, kick)
    }

    fn start(&mut self, guest: Guest, kick: Kick) -> Result<(), VringError> {
        if let Place::Home(ring) = self.take_place() {
            let parts = Parts {
                index: self.index,
                ring,
                guest,
                kick,
                signals: self.signals.clone(),
                shared: self.shared.clone(),
            };
            self.place = Place::Worker(worker::start(parts).map_err(VringError::Start)?);
        }
        Ok(())
    }

    /// QEMU 10.0.13 asks for a region for rings of 128 entries and then starts one of 1024. What is in flight can be told
    /// from the used index alone, since requests are completed in order; so the ring is served, and only not noted there.
    fn report_untracked(&self, size: u16) {
        if self.shared.log_limit.allows() {
            tracing::warn!(
                disk = self.shared.disk.name(),
                queue = self.index,
                size,
                "the in-flight region has no room for this ring: it is served without"
            );
        }
    }

    fn report_broken(&self, reason: BrokenRing) {
        self.shared.queue_counters(self.index).broken_rings.count();
        if self.shared.log_limit.allows() {
            tracing::warn!(
                disk = self.shared.disk.name(),
                queue = self.index,
                "queue not started: {reason}"
            );
        }
        self.signals.report_broken();
    }

    fn home(&mut self) -> Result<&mut Ring, VringError> {
        match &mut self.place {
            Place::Home(ring) => Ok(ring),
            Place::Worker(_) => Err(VringError::Running),
        }
    }

    fn take_place(&mut self) -> Place {
        std::mem::replace(&mut self.place, Place::Home(lost_ring(&self.shared)))
    }
}

impl Drop for Vring {
    fn drop(&mut self) {
        self.stop();
    }
}

fn new_ring(shared: &Shared) -> Ring {
    Ring::new(shared.disk.config.queue_size_max)
}

/// In place of a ring that died with its thread.
fn lost_ring(shared: &Shared) -> Ring {
    let mut ring = new_ring(shared);
    ring.break_for(BrokenRing::Defect);
    ring
}

/// Makes a received descriptor safe to write and read: it must never block us. What grows when written is refused.
fn checked_event(file: File) -> Result<File, VringError> {
    let refused = |_| VringError::NotAnEvent;
    let kind = FileType::from_raw_mode(rustix::fs::fstat(&file).map_err(refused)?.st_mode);
    if matches!(
        kind,
        FileType::RegularFile | FileType::Directory | FileType::BlockDevice
    ) {
        return Err(VringError::NotAnEvent);
    }
    let flags = rustix::fs::fcntl_getfl(&file).map_err(refused)?;
    rustix::fs::fcntl_setfl(&file, flags | OFlags::NONBLOCK).map_err(refused)?;
    Ok(file)
}
