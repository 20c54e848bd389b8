//! One disk on one socket: the control thread that accepts a frontend, serves it, drops it, and accepts again.
//!
//! Invariants:
//! 1. One frontend at a time; whoever else connects is accepted and closed at once, which is cheap and quickly noticed.
//! 2. A frontend is gone, its workers joined and its memory unmapped, before the next is accepted.
//! 3. The thread blocks in epoll and nowhere else. A request is handled only when all of it has arrived and there is room
//!    for the answer, so a frontend that stalls in the middle of a message holds up nobody, not even a stop.
//!
//! The path of the socket, its mode and its end are the owner's affair.

use std::io::{self, IoSliceMut};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use epoll::Events;
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec};
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendFlags};
use vhost::vhost_user::{BackendReqHandler, Error};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};
use zram_core::Zram;

use crate::config::{DeviceConfig, Disk, ThreadKind};
use crate::counters::{Burst, DeviceStatus, Frontend, LogLimit, QueueCounters, RequestCounts};
use crate::fault;
use crate::handler::Session;
use crate::limit::RateLimit;
use crate::poller::Poller;
use crate::worker::{self, Shared};

/// How long a message that has begun, or an answer that finds no room, may take. Then the connection ends.
const MESSAGE_TIME_MAX: Duration = Duration::from_secs(10);

/// Messages handled between two looks at listener and stop event.
const MESSAGES_PER_TURN: usize = 64;

/// Connections accepted between two looks at connection and stop event.
const ACCEPTS_PER_TURN: usize = 64;

/// How long the listener rests after accept has failed for want of descriptors or memory.
const ACCEPT_REST: Duration = Duration::from_millis(100);

const STOP: u64 = 0;
const LISTENER: u64 = 1;
const CONNECTION: u64 = 2;

/// Where frontends come from.
pub enum Endpoint {
    /// Bound and listening. The device accepts one frontend after another.
    Listener(UnixListener),
    /// Connected already, by whoever started us. The device ends with it.
    Stream(UnixStream),
}

/// A running device. Dropping it stops it.
pub struct Device {
    control: Option<JoinHandle<()>>,
    stop: Arc<EventFd>,
    ended: OwnedFd,
    pub(crate) shared: Arc<Shared>,
    board: Arc<Board>,
}

/// What the control thread tells [`Device::status`].
#[derive(Default)]
struct Board {
    queues_running: AtomicUsize,
    connections_total: AtomicU64,
    refused_connections: AtomicU64,
    failed_connections: AtomicU64,
    frontend: Mutex<Option<Frontend>>,
}

impl Board {
    /// The one lock of the status; held only to exchange or copy a name.
    fn set_frontend(&self, frontend: Option<Frontend>) {
        *self.frontend.lock().unwrap_or_else(PoisonError::into_inner) = frontend;
    }
}

impl Device {
    /// Starts the control thread.
    pub fn start(zram: Arc<Zram>, endpoint: Endpoint, config: DeviceConfig) -> io::Result<Device> {
        fault::install()?;
        let disk = Disk::new(zram, config)?;
        let counters = (0..disk.config.num_queues).map(|_| QueueCounters::default()).collect();
        let shared = Arc::new(Shared {
            log_limit: LogLimit::new(disk.name()),
            disk,
            counters,
            failures: Burst::default(),
            channel: Default::default(),
            resizing: Default::default(),
        });
        let board = Arc::<Board>::default();
        let stop = Arc::new(EventFd::new(EFD_NONBLOCK)?);
        // Not vmm-sys-util's event descriptor, because this one is handed out as a borrowed descriptor.
        let ended = rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        let control = Control::new(endpoint, &stop, shared.clone(), board.clone())?;
        let ends = ended.try_clone()?;
        let name = worker::thread_name(shared.disk.name(), None);
        let thread = thread::Builder::new().name(name).spawn(move || {
            control.shared.disk.config.thread_start.run(ThreadKind::Control);
            control.run();
            // The counter is 0, so this cannot fail.
            let _ = rustix::io::write(&ends, &1u64.to_ne_bytes());
        })?;
        Ok(Device {
            control: Some(thread),
            stop,
            ended,
            shared,
            board,
        })
    }

    /// The device as it is now. Waits for no I/O.
    pub fn status(&self) -> DeviceStatus {
        // Numbers for people: no order among them is promised, so none is asked for.
        DeviceStatus {
            queues_running: self.board.queues_running.load(Ordering::Relaxed),
            frontend: self
                .board
                .frontend
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .clone(),
            connections_total: self.board.connections_total.load(Ordering::Relaxed),
            refused_connections: self.board.refused_connections.load(Ordering::Relaxed),
            failed_connections: self.board.failed_connections.load(Ordering::Relaxed),
            requests: RequestCounts::sum(self.shared.counters.iter()),
        }
    }

    /// Changes how much the disk may move from now on. A request that waits already asks again within 100 ms.
    pub fn set_rate_limit(&self, limit: &RateLimit) -> io::Result<()> {
        if !limit.is_valid() {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, format!("{limit:?}")));
        }
        self.shared.disk.limiter.set(limit);
        Ok(())
    }

    /// How much the disk may move.
    pub fn rate_limit(&self) -> RateLimit {
        self.shared.disk.limiter.limit()
    }

    /// Readable once the device has ended by itself: its stream was closed, or its control thread failed.
    pub fn ended(&self) -> BorrowedFd<'_> {
        self.ended.as_fd()
    }

    /// Stops accepting, drains each worker's present chain, joins all threads and closes all descriptors.
    pub fn stop(self) {
        // Dropping does it.
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        // Fails only if the counter is full, and then the event is readable already.
        let _ = self.stop.write(1);
        if let Some(control) = self.control.take() {
            // A panic there has been logged by the panic hook, and leaves nothing to do.
            let _ = control.join();
        }
    }
}

/// The control thread's state.
struct Control {
    poller: Poller,
    /// `None` for a stream that came connected: the device ends with it.
    listener: Option<Listener>,
    connection: Option<Connection>,
    shared: Arc<Shared>,
    board: Arc<Board>,
    /// Kept open as long as it is watched.
    _stop: Arc<EventFd>,
}

struct Listener {
    socket: UnixListener,
    /// Set while the listener is not watched because accept failed.
    rests_until: Option<Instant>,
}

impl Control {
    fn new(endpoint: Endpoint, stop: &Arc<EventFd>, shared: Arc<Shared>, board: Arc<Board>) -> io::Result<Control> {
        let poller = Poller::new()?;
        poller.add(&**stop, Events::EPOLLIN, STOP)?;
        let mut control = Control {
            poller,
            listener: None,
            connection: None,
            shared,
            board,
            _stop: stop.clone(),
        };
        match endpoint {
            Endpoint::Listener(socket) => {
                socket.set_nonblocking(true)?;
                control.poller.add(&socket, Events::EPOLLIN, LISTENER)?;
                control.listener = Some(Listener {
                    socket,
                    rests_until: None,
                });
            }
            Endpoint::Stream(stream) => control.connect(stream)?,
        }
        Ok(control)
    }

    fn run(mut self) {
        if let Err(error) = self.serve() {
            tracing::error!(disk = self.shared.disk.name(), %error, "control thread ends");
        }
        self.disconnect();
    }

    fn serve(&mut self) -> io::Result<()> {
        while self.listener.is_some() || self.connection.is_some() {
            let mut listener_is_ready = false;
            for token in self.poller.wait(self.timeout_ms())? {
                match token {
                    STOP => return Ok(()),
                    LISTENER => listener_is_ready = true,
                    _ => {}
                }
            }
            // The connection first: who waits at the listener may be the same frontend, which has just gone.
            self.serve_connection();
            if listener_is_ready {
                self.accept_some()?;
            }
            self.wake_listener()?;
        }
        Ok(())
    }

    /// Time until the next deadline; 0 if there is more to do, -1 if there is nothing to wait for.
    fn timeout_ms(&self) -> i32 {
        let rest = self.listener.as_ref().and_then(|listener| listener.rests_until);
        let deadline = match &self.connection {
            Some(connection) if connection.has_more => return 0,
            Some(connection) => connection.deadline,
            None => None,
        };
        let Some(next) = [rest, deadline].into_iter().flatten().min() else {
            return -1;
        };
        let left = next.saturating_duration_since(Instant::now());
        // Rounded up, or the loop would turn idly through the last millisecond.
        i32::try_from(left.as_millis()).unwrap_or(i32::MAX).saturating_add(1)
    }

    fn accept_some(&mut self) -> io::Result<()> {
        for _ in 0..ACCEPTS_PER_TURN {
            let Some(listener) = &mut self.listener else { break };
            match listener.socket.accept() {
                Ok((stream, _)) => self.admit(stream),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(()),
                Err(error)
                    if matches!(
                        error.kind(),
                        io::ErrorKind::Interrupted | io::ErrorKind::ConnectionAborted
                    ) => {}
                Err(error) => {
                    // Out of descriptors or memory: the frontend waits in the backlog meanwhile.
                    self.poller.modify(&listener.socket, Events::empty(), LISTENER)?;
                    listener.rests_until = Some(Instant::now() + ACCEPT_REST);
                    self.log_limited(|disk| tracing::warn!(disk, %error, "accepting a frontend"));
                    return Ok(());
                }
            }
        }
        Ok(())
    }

    fn wake_listener(&mut self) -> io::Result<()> {
        if let Some(listener) = &mut self.listener
            && listener.rests_until.is_some_and(|until| until <= Instant::now())
        {
            listener.rests_until = None;
            self.poller.modify(&listener.socket, Events::EPOLLIN, LISTENER)?;
        }
        Ok(())
    }

    fn admit(&mut self, stream: UnixStream) {
        if self.connection.is_some() {
            self.board.refused_connections.fetch_add(1, Ordering::Relaxed);
            self.log_limited(|disk| tracing::warn!(disk, "second frontend refused: one is connected"));
            return;
        }
        if let Err(error) = self.connect(stream) {
            self.log_limited(|disk| tracing::warn!(disk, %error, "taking a frontend"));
        }
    }

    fn connect(&mut self, stream: UnixStream) -> io::Result<()> {
        let connection = Connection::new(stream, self.shared.clone())?;
        let events = Events::EPOLLIN | Events::EPOLLOUT | Events::EPOLLRDHUP | Events::EPOLLET;
        self.poller.add(&connection.stream, events, CONNECTION)?;
        let frontend = peer(&connection.stream);
        self.log_limited(|disk| {
            let (pid, command) = frontend
                .as_ref()
                .map_or((0, ""), |peer| (peer.pid, peer.command.as_str()));
            tracing::info!(disk, pid, command, "frontend connected");
        });
        self.shared.channel.connected();
        self.board.set_frontend(frontend);
        self.board.connections_total.fetch_add(1, Ordering::Relaxed);
        self.connection = Some(connection);
        Ok(())
    }

    fn serve_connection(&mut self) {
        let Some(connection) = &mut self.connection else { return };
        // A panic in here is a defect of ours; it costs this connection and not the device.
        let served = catch_unwind(AssertUnwindSafe(|| connection.serve()));
        self.board
            .queues_running
            .store(connection.queues_running(), Ordering::Relaxed);
        let end = match served {
            Ok(Ok(())) => return,
            Ok(Err(end)) => end,
            Err(_) => End::Panic,
        };
        if matches!(end, End::Closed) {
            self.log_limited(|disk| tracing::info!(disk, "frontend disconnected"));
        } else {
            self.board.failed_connections.fetch_add(1, Ordering::Relaxed);
            self.log_limited(|disk| tracing::warn!(disk, "frontend dropped: {end}"));
        }
        self.disconnect();
    }

    /// Ends the connection: when this returns its workers are joined, its memory unmapped and its descriptors closed.
    fn disconnect(&mut self) {
        let Some(connection) = self.connection.take() else {
            return;
        };
        self.shared.channel.disconnected();
        // It may fail for a socket that the kernel has dropped by itself.
        let _ = self.poller.remove(&connection.stream);
        let _ = catch_unwind(AssertUnwindSafe(|| connection.close()));
        self.board.queues_running.store(0, Ordering::Relaxed);
        self.board.set_frontend(None);
    }

    fn log_limited(&self, log: impl FnOnce(&str)) {
        if self.shared.log_limit.allows() {
            log(self.shared.disk.name());
        }
    }
}

/// Why a connection ends.
#[derive(Debug, thiserror::Error)]
enum End {
    #[error("it closed the connection")]
    Closed,
    #[error("it left a message unfinished, or an answer unread, for {} s", MESSAGE_TIME_MAX.as_secs())]
    Stalled,
    #[error("it split a message where none can be split")]
    Split,
    #[error("it gave us its own end of the connection, whose end would never be seen")]
    ItsOwn,
    #[error(transparent)]
    Request(#[from] Error),
    #[error(transparent)]
    Socket(#[from] io::Error),
    #[error("a panic in its handler")]
    Panic,
}

/// What the socket holds.
enum Arrived {
    /// A whole message that begins so, and room for its answer.
    Message(Header),
    /// Nothing at all.
    Nothing,
    /// Something that has to be waited for.
    Part,
    /// The end of the stream.
    End,
}

/// What a message begins with, less its size.
struct Header {
    request: u32,
    flags: u32,
}

/// Request, flags, size.
const HEADER_BYTES: usize = 12;

const SET_VRING_KICK: u32 = 12;
const SET_VRING_CALL: u32 = 13;
const SET_VRING_ERR: u32 = 14;
const SET_BACKEND_REQ_FD: u32 = 21;

/// Whether the `vhost` crate has answered, if an answer was asked for, before it gave this error: it has when the error is
/// the session's, and has not when the message never came that far, but for some requests.
fn is_answered(request: u32, error: &Error) -> bool {
    const SET_MEM_TABLE: u32 = 5;
    const SET_CONFIG: u32 = 25;
    let always = [SET_MEM_TABLE, SET_BACKEND_REQ_FD, SET_CONFIG].contains(&request);
    always
        || !matches!(
            error,
            Error::InvalidMessage
                | Error::IncorrectFds
                | Error::OversizedMsg
                | Error::InactiveFeature(_)
                | Error::InactiveOperation(_)
        )
}

/// One frontend's connection.
struct Connection {
    /// A second descriptor of the requests' socket, to look at it without reading.
    stream: UnixStream,
    requests: BackendReqHandler<Mutex<Session>>,
    session: Arc<Mutex<Session>>,
    shared: Arc<Shared>,
    /// When a message that has begun must be complete.
    deadline: Option<Instant>,
    /// The turn ended before the socket was empty.
    has_more: bool,
}

impl Connection {
    fn new(stream: UnixStream, shared: Arc<Shared>) -> io::Result<Connection> {
        // Answers are sent blocking, but only when there is room.
        stream.set_nonblocking(false)?;
        let session = Arc::new(Mutex::new(Session::new(shared.clone())));
        let requests = BackendReqHandler::from_stream(stream.try_clone()?, session.clone());
        Ok(Connection {
            stream,
            requests,
            session,
            shared,
            deadline: None,
            has_more: true,
        })
    }

    /// Handles what has arrived.
    fn serve(&mut self) -> Result<(), End> {
        self.has_more = false;
        for _ in 0..MESSAGES_PER_TURN {
            match self.arrived()? {
                Arrived::Message(header) => self.handle(&header)?,
                Arrived::Nothing => {
                    self.deadline = None;
                    return Ok(());
                }
                Arrived::Part => return self.wait_for_rest(),
                Arrived::End => return Err(End::Closed),
            }
        }
        self.has_more = true;
        Ok(())
    }

    fn handle(&mut self, header: &Header) -> Result<(), End> {
        self.deadline = None;
        let kept = match header.request {
            SET_BACKEND_REQ_FD | SET_VRING_KICK | SET_VRING_CALL | SET_VRING_ERR => self.peek_descriptor(),
            _ => None,
        };
        if kept.as_ref().is_some_and(|fd| self.is_its_own_end(fd)) {
            self.refuse(header);
            return Err(End::ItsOwn);
        }
        let channel = kept.filter(|_| header.request == SET_BACKEND_REQ_FD);
        match self.requests.handle_request() {
            Ok(()) => {
                if let Some(channel) = channel {
                    self.shared.channel.given(channel);
                }
                Ok(())
            }
            // Said by the session alone, for "refused, go on".
            Err(Error::InvalidOperation(_)) => Ok(()),
            Err(Error::Disconnected | Error::SocketBroken(_)) => Err(End::Closed),
            Err(error) => {
                if !is_answered(header.request, &error) {
                    self.refuse(header);
                }
                Err(End::Request(error))
            }
        }
    }

    /// Whether a descriptor that is to be kept is the other end of this connection. That held open by ourselves, the
    /// frontend could die and the disk would wait for it for ever. Sockets without a name cannot be told apart.
    fn is_its_own_end(&self, fd: &OwnedFd) -> bool {
        let is_socket = rustix::fs::fstat(fd)
            .is_ok_and(|stat| rustix::fs::FileType::from_raw_mode(stat.st_mode) == rustix::fs::FileType::Socket);
        let named = |name: &rustix::net::SocketAddrAny| name.addr_len() as usize > size_of::<u16>();
        is_socket
            && match (rustix::net::getpeername(fd), rustix::net::getsockname(&self.stream)) {
                (Ok(Some(theirs)), Ok(ours)) => named(&ours) && theirs == ours,
                _ => false,
            }
    }

    /// A descriptor of our own of what comes with the message: the `vhost` crate keeps its for messages of its choice.
    fn peek_descriptor(&self) -> Option<OwnedFd> {
        let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let mut header = [0; HEADER_BYTES];
        let flags = RecvFlags::PEEK | RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
        rustix::net::recvmsg(&self.stream, &mut [IoSliceMut::new(&mut header)], &mut control, flags).ok()?;
        control.drain().find_map(|message| match message {
            RecvAncillaryMessage::ScmRights(mut descriptors) => descriptors.next(),
            _ => None,
        })
    }

    /// Says no to a message that the `vhost` crate has not answered, if an answer was asked for.
    fn refuse(&self, header: &Header) {
        const VERSION_AND_REPLY: u32 = 1 | 1 << 2;
        const NEED_REPLY: u32 = 1 << 3;
        if header.flags & NEED_REPLY == 0 || !self.lock_session().replies_are_acked() {
            return;
        }
        let mut message = Vec::new();
        for word in [header.request, VERSION_AND_REPLY, 8, 1, 0] {
            message.extend(word.to_le_bytes());
        }
        // The connection ends anyway.
        let _ = rustix::net::send(&self.stream, &message, SendFlags::DONTWAIT | SendFlags::NOSIGNAL);
    }

    fn wait_for_rest(&mut self) -> Result<(), End> {
        let now = Instant::now();
        let deadline = *self.deadline.get_or_insert(now + MESSAGE_TIME_MAX);
        if deadline <= now { Err(End::Stalled) } else { Ok(()) }
    }

    /// Looks at the socket without reading from it. The `vhost` crate reads a message in blocking pieces, and would wait
    /// in the middle of one for as long as the frontend likes.
    fn arrived(&self) -> Result<Arrived, End> {
        let mut header = [0; HEADER_BYTES];
        let peeked = match rustix::net::recv(&self.stream, &mut header, RecvFlags::PEEK | RecvFlags::DONTWAIT) {
            Ok((_, 0)) => return Ok(Arrived::End),
            Ok((_, bytes)) => bytes,
            Err(rustix::io::Errno::AGAIN) => return Ok(Arrived::Nothing),
            Err(error) => return Err(End::Socket(error.into())),
        };
        let waiting = rustix::io::ioctl_fionread(&self.stream).map_err(io::Error::from)?;
        if peeked < HEADER_BYTES {
            // A peek stops at descriptors, a count does not: such a message will not become whole.
            return if waiting >= HEADER_BYTES as u64 {
                Err(End::Split)
            } else {
                self.part_or_end()
            };
        }
        let raw = u128::from_le_bytes(std::array::from_fn(|at| header.get(at).copied().unwrap_or(0)));
        let (request, flags, body_bytes) = (raw as u32, (raw >> 32) as u32, u64::from((raw >> 64) as u32));
        // A size beyond the protocol's is for the handler to refuse, at once.
        if body_bytes <= MAX_BODY_BYTES && waiting < HEADER_BYTES as u64 + body_bytes {
            return self.part_or_end();
        }
        if self.has_room()? {
            Ok(Arrived::Message(Header { request, flags }))
        } else {
            self.part_or_end()
        }
    }

    /// Room for the largest answer: the kernel calls a socket writable when a good part of its buffer is free.
    fn has_room(&self) -> io::Result<bool> {
        Ok(self.poll(PollFlags::OUT)?.contains(PollFlags::OUT))
    }

    /// A part of a message, unless nothing will follow it.
    fn part_or_end(&self) -> Result<Arrived, End> {
        let hung_up = self
            .poll(PollFlags::RDHUP)?
            .intersects(PollFlags::RDHUP | PollFlags::HUP | PollFlags::ERR);
        Ok(if hung_up { Arrived::End } else { Arrived::Part })
    }

    fn poll(&self, flags: PollFlags) -> io::Result<PollFlags> {
        let mut fds = [PollFd::new(&self.stream, flags)];
        rustix::event::poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: 0 }))?;
        let [fd] = fds;
        Ok(fd.revents())
    }

    fn queues_running(&self) -> usize {
        self.lock_session().queues_running()
    }

    fn close(self) {
        self.lock_session().hint_at_missing_memory();
        // Dropping does the rest.
    }

    fn lock_session(&self) -> std::sync::MutexGuard<'_, Session> {
        self.session.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The protocol's largest message body, as the `vhost` crate bounds it.
const MAX_BODY_BYTES: u64 = 0x1000;

/// The process at the other end; its id is 0 if it lives in another pid namespace.
fn peer(stream: &UnixStream) -> Option<Frontend> {
    let pid = rustix::net::sockopt::socket_peercred(stream)
        .ok()?
        .pid
        .as_raw_nonzero()
        .get();
    // It may be gone, or hidden from us.
    let command = std::fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
    Some(Frontend {
        pid,
        command: command.trim_end().to_string(),
    })
}
