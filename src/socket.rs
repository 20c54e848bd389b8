//! Unix sockets: new ones on paths, and inherited ones.
//!
//! What holds for a socket on a path:
//!
//! 1. Whoever sees its file sees it with the mode asked for, and with the group too where the kernel lets us create it so;
//!    else the file starts with the owner's bits only. Nobody ever has more rights to it than were asked for.
//! 2. Nobody can connect before mode and group are right, for listen(2) comes last.
//! 3. Its name in the kernel's list (`ss -xl`, /proc/net/unix) is the path, and its inode stays the same until the end.
//! 4. A file at the path is only ever taken away if it is a socket on which nobody listens, and the same one (by inode)
//!    that was found dead: two daemons that start at once cannot remove each other's socket.
//! 5. At the end the file is removed only if it still is ours, by inode.

use std::ffi::OsString;
use std::fs::{self, Metadata};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};

use nix::unistd::{Gid as FsGid, setfsgid};
use rustix::fs::{AtFlags, CWD, Mode, RenameFlags, chownat, fchmod, renameat_with};
use rustix::io::Errno;
use rustix::net::sockopt::{socket_acceptconn, socket_domain, socket_type};
use rustix::net::{
    AddressFamily, SocketAddrUnix, SocketFlags, SocketType, bind, connect, getpeername, listen, socket_with,
};
use rustix::process::{PidfdFlags, PidfdGetfdFlags, getpid, pidfd_getfd, pidfd_open, umask};

use crate::config::Permissions;

/// Connections that may wait to be accepted. One frontend at a time is served, and a control client is answered at once.
const BACKLOG: i32 = 128;

/// The file of a socket of ours. Dropping it removes the file.
#[derive(Debug)]
pub struct SocketFile {
    path: PathBuf,
    identity: Identity,
}

/// Makes a socket at `path` that listens. The error is a sentence with the path in it.
///
/// The umask changes for a moment, so this belongs before the first thread.
pub fn listen_at(path: &Path, permissions: Permissions) -> Result<(UnixListener, SocketFile), String> {
    clear_the_way(path)?;
    let said = |error: Errno| match error {
        Errno::ADDRINUSE => format!(
            "{}: somebody made this socket just now; leaving it alone",
            path.display()
        ),
        error => format!("{}: no socket can be made there: {error}", path.display()),
    };
    let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None).map_err(said)?;
    create_file(&socket, path, permissions).map_err(said)?;
    let metadata = fs::symlink_metadata(path).map_err(|error| format!("{}: {error}", path.display()))?;
    let file = SocketFile {
        path: path.into(),
        identity: Identity::of(&metadata),
    };
    settle_permissions(&metadata, path, permissions)?;
    listen(&socket, BACKLOG).map_err(said)?;
    Ok((UnixListener::from(socket), file))
}

/// bind(2) gives the new file the mode of the socket, less the umask, and the group of the thread. Both are set for just
/// that call.
fn create_file(socket: &OwnedFd, path: &Path, permissions: Permissions) -> Result<(), Errno> {
    let address = SocketAddrUnix::new(path)?;
    let previous_group = permissions.group.map(|group| setfsgid(FsGid::from_raw(group.as_raw())));
    let group_taken = permissions.group.is_none_or(|group| {
        // The only way to ask; -1 is no group, so nothing changes.
        setfsgid(FsGid::from_raw(u32::MAX)).as_raw() == group.as_raw()
    });
    let mode = if group_taken {
        permissions.mode
    } else {
        permissions.mode & 0o700
    };
    let previous_umask = umask(Mode::empty());
    let result = fchmod(socket, Mode::from_raw_mode(mode)).and_then(|()| bind(socket, &address));
    umask(previous_umask);
    if let Some(previous) = previous_group {
        setfsgid(previous);
    }
    result
}

/// What the kernel did not do by itself: it gives no group that is only a supplementary one of ours, and a directory with
/// the set-group-id bit gives its own.
fn settle_permissions(metadata: &Metadata, path: &Path, permissions: Permissions) -> Result<(), String> {
    if let Some(group) = permissions.group.filter(|group| group.as_raw() != metadata.gid()) {
        chownat(CWD, path, None, Some(group), AtFlags::SYMLINK_NOFOLLOW).map_err(|error| {
            format!(
                "{}: cannot be given to group {}: {error}",
                path.display(),
                group.as_raw()
            )
        })?;
    }
    if metadata.mode() & 0o777 != permissions.mode {
        fs::set_permissions(path, fs::Permissions::from_mode(permissions.mode))
            .map_err(|error| format!("{}: cannot get mode {:04o}: {error}", path.display(), permissions.mode))?;
    }
    Ok(())
}

/// Removes a dead socket at `path`; refuses if anything else is there.
fn clear_the_way(path: &Path) -> Result<(), String> {
    let metadata = match fs::symlink_metadata(path) {
        Ok(metadata) => metadata,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()), // or the directory is missing: bind will say so
        Err(error) => return Err(format!("{}: {error}", path.display())),
    };
    if !metadata.file_type().is_socket() {
        return Err(format!(
            "{}: is there and is not a socket; leaving it alone",
            path.display()
        ));
    }
    match probe(path) {
        Err(Errno::CONNREFUSED) => remove_dead(path, Identity::of(&metadata)),
        Err(Errno::NOENT) => Ok(()),
        // EAGAIN: so many wait to be accepted that there is no room for one more.
        Ok(()) | Err(Errno::AGAIN | Errno::PROTOTYPE) => Err(format!(
            "{}: somebody listens on this socket; leaving it alone",
            path.display()
        )),
        Err(error) => Err(format!(
            "{}: whether somebody listens there cannot be found out: {error}",
            path.display()
        )),
    }
}

/// Connects and hangs up. Never waits.
fn probe(path: &Path) -> Result<(), Errno> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    connect(&socket, &SocketAddrUnix::new(path)?)
}

/// Moves the file aside, looks whether it is the one that was found dead, and only then removes it.
fn remove_dead(path: &Path, dead: Identity) -> Result<(), String> {
    let mut aside = OsString::from(path);
    aside.push(format!(".dead-{}", getpid()));
    let said = |error: io::Error| format!("{}: the dead socket there cannot be removed: {error}", path.display());
    match fs::rename(path, &aside) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        result => result.map_err(said)?,
    }
    if Identity::at(Path::new(&aside)) == Some(dead) {
        return fs::remove_file(&aside).map_err(said);
    }
    renameat_with(CWD, &aside, CWD, path, RenameFlags::NOREPLACE).map_err(|error| said(error.into()))?;
    Err(format!(
        "{}: somebody made this socket just now; leaving it alone",
        path.display()
    ))
}

impl SocketFile {
    /// Where it lies.
    pub fn directory(&self) -> PathBuf {
        match self.path.parent() {
            Some(directory) if !directory.as_os_str().is_empty() => directory.into(),
            _ => ".".into(),
        }
    }
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        if Identity::at(&self.path) == Some(self.identity) {
            let _ = fs::remove_file(&self.path);
        }
    }
}

/// A file for as long as it exists, whatever it is called.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Identity {
    device: u64,
    inode: u64,
}

impl Identity {
    fn of(metadata: &Metadata) -> Identity {
        Identity {
            device: metadata.dev(),
            inode: metadata.ino(),
        }
    }

    fn at(path: &Path) -> Option<Identity> {
        fs::symlink_metadata(path).ok().map(|metadata| Identity::of(&metadata))
    }
}

/// A socket that the daemon was started with.
#[derive(Debug)]
pub enum Inherited {
    /// To be served like one on a path.
    Listener(UnixListener),
    /// A frontend at the other end already.
    Stream(UnixStream),
}

/// Takes descriptor `number` over. The error is a sentence without the number.
///
/// To own a descriptor by its number takes `unsafe` in std. pidfd_getfd(2) (Linux 5.6) on ourselves needs none: it gives a
/// new descriptor of the same socket, or says that there is none. The old number stays open until the daemon ends, which
/// is when the socket is done with in any case.
pub fn inherit(number: i32) -> Result<Inherited, String> {
    let socket = pidfd_open(getpid(), PidfdFlags::empty())
        .and_then(|this| pidfd_getfd(this, number, PidfdGetfdFlags::empty()))
        .map_err(|error| match error {
            Errno::BADF => "is not an open descriptor".to_string(),
            error => format!("cannot be taken over: {error}"),
        })?;
    if socket_domain(&socket) != Ok(AddressFamily::UNIX) || socket_type(&socket) != Ok(SocketType::STREAM) {
        return Err("is not a Unix stream socket".into());
    }
    if socket_acceptconn(socket.as_fd()) == Ok(true) {
        Ok(Inherited::Listener(socket.into()))
    } else if getpeername(&socket).is_ok() {
        Ok(Inherited::Stream(socket.into()))
    } else {
        Err("is a socket that neither listens nor is connected".into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PRIVATE: Permissions = Permissions {
        mode: 0o600,
        group: None,
    };

    #[test]
    fn a_socket_has_its_mode_whatever_the_umask_and_goes_with_its_owner() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("s");
        let (_listener, file) = listen_at(
            &path,
            Permissions {
                mode: 0o666,
                group: None,
            },
        )
        .expect("a socket");
        assert_eq!(fs::symlink_metadata(&path).expect("there").mode() & 0o7777, 0o666);
        drop(file);
        assert!(!path.exists());
    }

    #[test]
    fn a_socket_that_replaced_ours_is_not_removed() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("s");
        let (_listener, file) = listen_at(&path, PRIVATE).expect("a socket");
        fs::remove_file(&path).expect("removed");
        // Made while the old inode is still held, or the number could be used again.
        let _other = UnixListener::bind(&path).expect("another");
        drop(file);
        assert!(path.exists());
    }

    #[test]
    fn a_dead_socket_is_known_by_its_inode() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("s");
        let live = UnixListener::bind(&path).expect("a socket");
        let other = Identity { device: 0, inode: 0 };
        assert!(remove_dead(&path, other).is_err());
        assert!(path.exists(), "put back");
        drop(live);
        let dead = Identity::at(&path).expect("still there");
        assert_eq!(remove_dead(&path, dead), Ok(()));
        assert_eq!(fs::read_dir(directory.path()).expect("readable").count(), 0);
    }

    #[test]
    fn a_full_backlog_counts_as_listening() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("s");
        let socket =
            socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None).expect("a socket");
        bind(&socket, &SocketAddrUnix::new(&path).expect("an address")).expect("bound");
        listen(&socket, 0).expect("listening");
        let _waits = UnixStream::connect(&path).expect("room for one");
        assert_eq!(probe(&path), Err(Errno::AGAIN));
        assert!(clear_the_way(&path).is_err());
    }
}
