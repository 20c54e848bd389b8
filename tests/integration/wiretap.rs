//! A man in the middle between a frontend and a backend, who passes all on and writes down which messages went by.

use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::thread;

use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags,
    recvmsg, sendmsg,
};
use tempfile::TempDir;

const FDS_MAX: usize = 16;

/// Requests of frontends, by number and with the descriptors they came with; connections are parted by [`CONNECTED`].
pub struct Wiretap {
    dir: TempDir,
    heard: Arc<Mutex<Vec<(u32, usize)>>>,
}

/// A connection begins.
pub const CONNECTED: (u32, usize) = (0, 0);

impl Wiretap {
    /// In front of the backend at `socket`.
    pub fn new(socket: PathBuf) -> Wiretap {
        let dir = TempDir::with_prefix("zram-tap-").unwrap();
        let listener = UnixListener::bind(dir.path().join("tap.sock")).unwrap();
        let heard = Arc::<Mutex<Vec<_>>>::default();
        let notes = heard.clone();
        thread::spawn(move || {
            for front in listener.incoming() {
                let (Ok(front), Ok(back)) = (front, UnixStream::connect(&socket)) else {
                    return;
                };
                notes.lock().unwrap().push(CONNECTED);
                let (to_front, from_back) = (front.try_clone().unwrap(), back.try_clone().unwrap());
                let notes = notes.clone();
                thread::spawn(move || {
                    pass_on(&front, &back, |request, fds| notes.lock().unwrap().push((request, fds)))
                });
                thread::spawn(move || pass_on(&from_back, &to_front, |_, _| {}));
            }
        });
        Wiretap { dir, heard }
    }

    pub fn socket(&self) -> PathBuf {
        self.dir.path().join("tap.sock")
    }

    /// What went by so far.
    pub fn heard(&self) -> Vec<(u32, usize)> {
        self.heard.lock().unwrap().clone()
    }
}

/// Messages one by one, as vhost-user has them: request, flags and size in twelve bytes, then so many more.
fn pass_on(from: &UnixStream, to: &UnixStream, mut note: impl FnMut(u32, usize)) {
    while let Some((header, fds)) = take(from, 12) {
        let word = |at: usize| u32::from_ne_bytes(header[at..at + 4].try_into().unwrap());
        let Some((body, more)) = take(from, word(8) as usize) else {
            break;
        };
        let fds: Vec<OwnedFd> = fds.into_iter().chain(more).collect();
        note(word(0), fds.len());
        if !give(to, &[header, body].concat(), &fds) {
            break;
        }
    }
    let _ = to.shutdown(std::net::Shutdown::Both);
    let _ = from.shutdown(std::net::Shutdown::Both);
}

/// So many bytes and what comes with them; `None` at the end.
fn take(stream: &UnixStream, len: usize) -> Option<(Vec<u8>, Vec<OwnedFd>)> {
    let (mut bytes, mut done, mut fds) = (vec![0; len], 0, vec![]);
    while done < len {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FDS_MAX))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let mut slices = [IoSliceMut::new(&mut bytes[done..])];
        let got = recvmsg(stream, &mut slices, &mut control, RecvFlags::CMSG_CLOEXEC)
            .ok()?
            .bytes;
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(rights) = message {
                fds.extend(rights);
            }
        }
        if got == 0 {
            return None;
        }
        done += got;
    }
    Some((bytes, fds))
}

fn give(stream: &UnixStream, bytes: &[u8], fds: &[OwnedFd]) -> bool {
    let borrowed: Vec<_> = fds.iter().map(AsFd::as_fd).collect();
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FDS_MAX))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !borrowed.is_empty() {
        assert!(control.push(SendAncillaryMessage::ScmRights(&borrowed)));
    }
    let sent = sendmsg(stream, &[IoSlice::new(bytes)], &mut control, SendFlags::NOSIGNAL);
    sent.is_ok_and(|count| count == bytes.len())
}
