//! The backend's own way to the frontend: one socket for messages that are not answers (vhost-user.rst, "Back-end
//! communication"). One message goes there: that the config space has changed.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::{Mutex, PoisonError};

use rustix::net::SendFlags;

/// VHOST_USER_BACKEND_CONFIG_CHANGE_MSG, version 1, no body and no wish for an answer.
const CONFIG_CHANGE: [u32; 3] = [2, 1, 0];

/// Whether the frontend learns of a change.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Notice {
    /// It has been told.
    Told,
    /// Nobody is connected: the next frontend will read what is then true.
    NoFrontend,
    /// The frontend has given no socket for it (cloud-hypervisor, libblkio): it sees the change when it connects again.
    NoChannel,
    /// The frontend does not read what it is told.
    Unread,
}

#[derive(Default)]
enum State {
    #[default]
    NoFrontend,
    NoChannel,
    Channel(OwnedFd),
}

/// The present frontend's socket, if there is one. Its lock is taken for a change of state or a message, which waits for
/// nobody.
#[derive(Default)]
pub(crate) struct Channel(Mutex<State>);

impl Channel {
    fn set(&self, state: State) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = state;
    }

    pub fn connected(&self) {
        self.set(State::NoChannel);
    }

    pub fn given(&self, socket: OwnedFd) {
        self.set(State::Channel(socket));
    }

    pub fn disconnected(&self) {
        self.set(State::NoFrontend);
    }

    /// Says that the config space has changed.
    pub fn tell_config_change(&self) -> Notice {
        match &*self.0.lock().unwrap_or_else(PoisonError::into_inner) {
            State::NoFrontend => Notice::NoFrontend,
            State::NoChannel => Notice::NoChannel,
            State::Channel(socket) => match send(socket) {
                Ok(()) => Notice::Told,
                Err(_) => Notice::Unread,
            },
        }
    }
}

fn send(socket: &OwnedFd) -> io::Result<()> {
    let mut message = [0; 12];
    for (to, word) in message.chunks_exact_mut(4).zip(CONFIG_CHANGE) {
        to.copy_from_slice(&word.to_ne_bytes());
    }
    // A stream of messages of one size, so either there is room for a whole one or, at worst, the frontend has let it
    // run full, and gets what it deserves.
    let sent = rustix::net::send(socket, &message, SendFlags::DONTWAIT | SendFlags::NOSIGNAL)?;
    if sent == message.len() {
        Ok(())
    } else {
        Err(io::ErrorKind::WriteZero.into())
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read;
    use std::os::unix::net::UnixStream;

    use super::*;

    #[test]
    fn a_change_is_told_to_who_can_be_told() {
        let channel = Channel::default();
        assert_eq!(channel.tell_config_change(), Notice::NoFrontend);
        channel.connected();
        assert_eq!(channel.tell_config_change(), Notice::NoChannel);
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        channel.given(ours.into());
        assert_eq!(channel.tell_config_change(), Notice::Told);
        let mut message = [0; 12];
        theirs.read_exact(&mut message).unwrap();
        assert_eq!(message, [2, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0]);
        while channel.tell_config_change() == Notice::Told {}
        assert_eq!(channel.tell_config_change(), Notice::Unread, "and waits for nobody");
        drop(theirs);
        assert_eq!(channel.tell_config_change(), Notice::Unread);
        channel.disconnected();
        assert_eq!(channel.tell_config_change(), Notice::NoFrontend);
    }
}
