//! An epoll instance that closes itself: the `epoll` crate hands out bare descriptors.

use std::io;
use std::os::fd::{AsRawFd, RawFd};

use epoll::{ControlOptions, Event, Events};

/// Events taken from the kernel in one call.
const EVENTS_MAX: usize = 8;

pub(crate) struct Poller {
    epoll: RawFd,
}

impl Poller {
    pub fn new() -> io::Result<Poller> {
        Ok(Poller {
            epoll: epoll::create(true)?,
        })
    }

    /// Watches `fd`; its events are reported as `token`. Fails for what cannot be watched, regular files above all.
    pub fn add(&self, fd: &impl AsRawFd, events: Events, token: u64) -> io::Result<()> {
        epoll::ctl(
            self.epoll,
            ControlOptions::EPOLL_CTL_ADD,
            fd.as_raw_fd(),
            Event::new(events, token),
        )
    }

    /// Watches `fd` for other events than so far.
    pub fn modify(&self, fd: &impl AsRawFd, events: Events, token: u64) -> io::Result<()> {
        epoll::ctl(
            self.epoll,
            ControlOptions::EPOLL_CTL_MOD,
            fd.as_raw_fd(),
            Event::new(events, token),
        )
    }

    /// Ends the watch. To be called before `fd` is closed: the kernel would go on watching a description that someone
    /// else, the frontend for one, still holds open.
    pub fn remove(&self, fd: &impl AsRawFd) -> io::Result<()> {
        epoll::ctl(
            self.epoll,
            ControlOptions::EPOLL_CTL_DEL,
            fd.as_raw_fd(),
            Event::new(Events::empty(), 0),
        )
    }

    /// Waits for up to `timeout_ms` (for ever if negative) and gives the tokens of what happened.
    pub fn wait(&self, timeout_ms: i32) -> io::Result<impl Iterator<Item = u64>> {
        let mut events = [Event::new(Events::empty(), 0); EVENTS_MAX];
        let count = match epoll::wait(self.epoll, timeout_ms, &mut events) {
            Ok(count) => count,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => 0,
            Err(error) => return Err(error),
        };
        Ok(events.into_iter().take(count).map(|event| event.data))
    }
}

impl Drop for Poller {
    fn drop(&mut self) {
        // Nothing to be done about a failure; the descriptor is gone either way.
        let _ = epoll::close(self.epoll);
    }
}
