//! One virtqueue seen from its own thread.
//!
//! A worker owns its ring, its handle on the core and its scratch, so the data path takes no lock; the one lock it takes
//! guards the call descriptor, which a frontend may exchange while the queue runs, and is taken once a batch.
//!
//! The life of a worker: look at the ring (a kick may have come before it) -> batches until the ring is empty -> sleep
//! until a kick or the stop event -> again. On stop it leaves between two chains, or in the middle of a long one, which it
//! puts back; the thread then returns the ring.
//!
//! A batch: take some chains off the ring and parse them all, so that the cache misses of one overlap those of the next;
//! then execute them one by one, in the order of the avail ring; then show the driver what is done, with one store and at
//! most one call. So the used index is a full account whenever it is published.

use std::fs::File;
use std::io::{self, Write};
use std::ops::ControlFlow;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use epoll::Events;
use rustix::event::{PollFd, PollFlags, Timespec};
use vm_memory::GuestAddress;
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};
use zram_core::{Page, SECTOR_SIZE, SECTORS_PER_PAGE};

use crate::batching::{Batching, CHAINS_PER_BATCH_MAX};
use crate::channel::Channel;
use crate::config::{Disk, ThreadKind};
use crate::counters::{Burst, LogLimit, QueueCounters};
use crate::execute::{Execution, Store};
use crate::guest::Guest;
use crate::poller::Poller;
use crate::polling::Polling;
use crate::request::{self, Outcome, Ranges, Refusal, Request};
use crate::ring::{BrokenRing, Chain, Pop, Ring};

/// After so much time a batch shows what it has completed after each request: slow codecs, long requests.
const BATCH_TIME_MAX: Duration = Duration::from_micros(100);

/// Reads and writes of more than this are long: what was completed before is shown first. 256 KiB, a hundred microseconds
/// and more.
const LONG_SECTORS_MIN: u64 = 512;

/// How far a read's object is fetched ahead: the next read takes a microsecond or two. Without it a third of a read is
/// waiting for memory: 2.97 us of CPU at depth 32, with it 2.6; two ahead is the same.
const PREFETCH_AHEAD: usize = 1;

/// Time between two looks at a ring whose frontend gave no kick descriptor, or at objects that a reader still held when
/// the last batch ended.
const POLL_MS: i32 = 1;

/// The longest that a worker waits for the rate limit without asking again: it may have been raised.
const LIMIT_WAIT_MAX: Duration = Duration::from_millis(100);

const STOP: u64 = 0;
const KICK: u64 = 1;

/// What all workers and connections of a device share.
pub(crate) struct Shared {
    pub disk: Disk,
    /// One for each queue.
    pub counters: Vec<QueueCounters>,
    pub log_limit: LogLimit,
    pub failures: Burst,
    pub channel: Channel,
    /// Held while the size changes.
    pub resizing: Mutex<()>,
}

impl Shared {
    /// A queue's counters; queues are checked to be below the configured number before.
    pub fn queue_counters(&self, queue: u16) -> &QueueCounters {
        self.counters
            .get(usize::from(queue))
            .expect("one set of counters for each configured queue")
    }
}

/// How the driver announces work.
#[derive(Clone)]
pub(crate) enum Kick {
    /// By a descriptor that becomes readable.
    File(Arc<File>),
    /// Not at all: the ring is looked at every [`POLL_MS`].
    Polled,
}

/// The descriptors by which the device speaks up. The frontend may exchange them while the queue runs.
#[derive(Default)]
pub(crate) struct Signals {
    call: Mutex<Option<File>>,
    error: Mutex<Option<File>>,
}

impl Signals {
    pub fn set_call(&self, file: Option<File>) {
        *self.call.lock().unwrap_or_else(PoisonError::into_inner) = file;
    }

    pub fn set_error(&self, file: Option<File>) {
        *self.error.lock().unwrap_or_else(PoisonError::into_inner) = file;
    }

    /// Tells the driver of completions. A frontend that polls has given no descriptor.
    pub fn call(&self, counters: &QueueCounters) {
        match signal(&self.call) {
            Ok(true) => counters.calls.count(),
            Ok(false) => {}
            Err(_) => counters.calls_lost.count(),
        }
    }

    /// Tells the frontend that the ring is broken: the only way without a device status.
    pub fn report_broken(&self) {
        // Whoever does not listen is not told.
        let _ = signal(&self.error);
    }
}

/// Writes to the descriptor if it can take it. False if there is none.
fn signal(file: &Mutex<Option<File>>) -> io::Result<bool> {
    match &*file.lock().unwrap_or_else(PoisonError::into_inner) {
        Some(file) => {
            // That it does not block was set when it came; but the frontend shares that setting and may have undone it.
            let mut fds = [PollFd::new(file, PollFlags::OUT)];
            rustix::event::poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: 0 }))?;
            if !fds[0].revents().contains(PollFlags::OUT) {
                return Err(io::ErrorKind::WouldBlock.into());
            }
            (&*file).write_all(&1u64.to_ne_bytes()).map(|()| true)
        }
        None => Ok(false),
    }
}

/// How a worker is asked to stop: a flag for when it is busy, an event for when it sleeps.
struct Stop {
    flag: AtomicBool,
    event: EventFd,
}

/// A running worker, held by the control thread. Dropping it without [`RunningWorker::join`] would leave the thread alone.
pub(crate) struct RunningWorker {
    stop: Arc<Stop>,
    thread: JoinHandle<Ring>,
}

impl RunningWorker {
    /// Asks the worker to stop, without waiting.
    pub fn ask_to_stop(&self) {
        self.stop.flag.store(true, Ordering::Release);
        // Fails only if the counter is full, and then the event is readable already.
        let _ = self.stop.event.write(1);
    }

    /// Stops the worker and takes the ring back; `None` if the thread has died with it.
    pub fn join(self) -> Option<Ring> {
        self.ask_to_stop();
        self.thread.join().ok()
    }
}

/// What a worker starts with.
pub(crate) struct Parts {
    pub index: u16,
    pub ring: Ring,
    pub guest: Guest,
    pub kick: Kick,
    pub signals: Arc<Signals>,
    pub shared: Arc<Shared>,
}

/// Starts a worker on its own thread. A failure costs the ring: the connection ends with it.
pub(crate) fn start(parts: Parts) -> io::Result<RunningWorker> {
    // Made here rather than on the thread, so that what cannot be had is the control thread's error.
    let core = parts.shared.disk.zram.worker().map_err(io::Error::other)?;
    let stop = Arc::new(Stop {
        flag: AtomicBool::new(false),
        event: EventFd::new(EFD_NONBLOCK)?,
    });
    let poller = Poller::new()?;
    poller.add(&stop.event, Events::EPOLLIN, STOP)?;
    if let Kick::File(file) = &parts.kick {
        // Edge-triggered and never read: each kick is an edge of its own, and a read can block, when the frontend, who
        // shares the descriptor's settings, has it so and takes the kick away before us.
        poller.add(&**file, Events::EPOLLIN | Events::EPOLLET, KICK)?;
    }
    let name = thread_name(parts.shared.disk.name(), Some(parts.index));
    let worker = Worker {
        queue: QueueWorker::new(parts, core),
        stop: stop.clone(),
        poller,
    };
    let thread = thread::Builder::new().name(name).spawn(move || {
        let kind = ThreadKind::Worker(worker.queue.index);
        worker.queue.shared.disk.config.thread_start.run(kind);
        worker.run()
    })?;
    Ok(RunningWorker { stop, thread })
}

/// "zram-NAME" or "zram-NAME-qN", cut in the name to the 15 bytes that the kernel keeps.
pub(crate) fn thread_name(disk: &str, queue: Option<u16>) -> String {
    const THREAD_NAME_BYTES_MAX: usize = 15;
    let tail = queue.map(|index| format!("-q{index}")).unwrap_or_default();
    let room = THREAD_NAME_BYTES_MAX - "zram-".len() - tail.len();
    let fits = disk
        .char_indices()
        .take_while(|(at, char)| at + char.len_utf8() <= room && *char != '\0');
    format!("zram-{}{tail}", fits.map(|(_, char)| char).collect::<String>())
}

struct Worker {
    queue: QueueWorker,
    stop: Arc<Stop>,
    poller: Poller,
}

impl Worker {
    fn run(mut self) -> Ring {
        while !self.stop.flag.load(Ordering::Acquire) {
            self.queue.guarded(|queue| queue.turn(&self.stop.flag));
            if let Err(error) = self.sleep() {
                // Without a wait there is no worker; nothing the guest does leads here.
                tracing::error!(disk = self.queue.shared.disk.name(), %error, "waiting for kicks");
                self.queue.break_ring(BrokenRing::Defect);
                break;
            }
        }
        self.queue.into_ring()
    }

    /// Waits for a kick or the stop event.
    fn sleep(&mut self) -> io::Result<()> {
        // Whatever woke it, the turn looks at the ring and at the stop flag.
        self.poller.wait(self.queue.sleep_ms()).map(drop)?;
        self.queue.woken();
        Ok(())
    }
}

/// A chain that was taken off the ring. Its buffers are used again for the next one.
#[derive(Default)]
struct Taken {
    head: u16,
    chain: Chain,
    ranges: Ranges,
    /// Where the status byte goes and what is wanted; `None` if the chain cannot be answered.
    order: Option<(GuestAddress, Result<Request, Refusal>)>,
}

/// The queue's work without its thread: what tests and fuzzing drive directly.
pub(crate) struct QueueWorker {
    index: u16,
    ring: Ring,
    guest: Guest,
    kick: Kick,
    signals: Arc<Signals>,
    shared: Arc<Shared>,
    store: Store,
    batch: Box<[Taken]>,
    batching: Batching,
    polling: Polling,
    /// The disk's rate limit is reached: nothing is served before.
    limited_until: Option<Instant>,
}

impl QueueWorker {
    pub fn new(parts: Parts, core: zram_core::Worker) -> QueueWorker {
        let Parts {
            index,
            ring,
            guest,
            kick,
            signals,
            shared,
        } = parts;
        let polling = Polling::new(shared.disk.config.poll_max);
        QueueWorker {
            index,
            ring,
            guest,
            kick,
            signals,
            shared,
            store: Store {
                core,
                page: Page::zeroed(),
            },
            batch: (0..CHAINS_PER_BATCH_MAX).map(|_| Taken::default()).collect(),
            batching: Batching::default(),
            polling,
            limited_until: None,
        }
    }

    /// Does some work whose panic, a defect of ours, breaks this queue and nothing else.
    fn guarded(&mut self, work: impl FnOnce(&mut QueueWorker)) {
        // Whatever the panic left half-done is not used again: this worker does no more until it is stopped.
        if catch_unwind(AssertUnwindSafe(|| work(self))).is_err() {
            self.counters().panics.count();
            self.counters().turns.end();
            self.break_ring(BrokenRing::Defect);
        }
    }

    fn woken(&mut self) {
        if self.ring.broken().is_none() && self.ring.has_more() {
            self.polling.woken();
        }
    }

    /// Serves the ring until it is empty, broken or to be stopped.
    pub fn turn(&mut self, stop: &AtomicBool) {
        if self.ring.broken().is_some() || self.is_limited() {
            return;
        }
        if let Err(reason) = self.serve(stop) {
            self.break_ring(reason);
        }
    }

    fn serve(&mut self, stop: &AtomicBool) -> Result<(), BrokenRing> {
        loop {
            self.ring.silence_kicks()?;
            while self.serve_batch(stop)?.is_continue() {}
            if self.limited_until.is_some() {
                return Ok(());
            }
            if self.look(stop) {
                continue;
            }
            // Also when stopping: the driver may sleep on the first entry that it has not seen.
            if self.ring.await_kicks()? && !stop.load(Ordering::Relaxed) {
                continue;
            }
            return Ok(());
        }
    }

    /// Whether the rate limit is still to be waited for.
    fn is_limited(&mut self) -> bool {
        self.limited_until = self.limited_until.filter(|until| *until > Instant::now());
        self.limited_until.is_some()
    }

    /// Whether the request may pass now. If not, the worker is to sleep.
    fn passes_limit(&mut self, request: Request) -> bool {
        let (Request::In(range) | Request::Out(range)) = request else {
            return true;
        };
        match self.shared.disk.limiter.pass(range.count * SECTOR_SIZE as u64) {
            Ok(()) => true,
            Err(wait) => {
                self.limited_until = Some(Instant::now() + wait.min(LIMIT_WAIT_MAX));
                false
            }
        }
    }

    /// Looks whether more comes, while the driver need not kick.
    fn look(&mut self, stop: &AtomicBool) -> bool {
        if stop.load(Ordering::Relaxed) {
            return false;
        }
        let ring = &self.ring;
        self.polling.look(|| ring.has_more(), || stop.load(Ordering::Relaxed))
    }

    /// Serves some chains. `Break` when there are no more, or on stop.
    fn serve_batch(&mut self, stop: &AtomicBool) -> Result<ControlFlow<()>, BrokenRing> {
        self.counters().turns.begin();
        let served = self.serve_some(stop);
        self.counters().turns.end();
        served
    }

    fn serve_some(&mut self, stop: &AtomicBool) -> Result<ControlFlow<()>, BrokenRing> {
        let (count, found) = self.take();
        if self.guest.is_lost() {
            // What was read may be zeroes in place of what the driver wrote.
            return Err(BrokenRing::MemoryLost);
        }
        let served = self.answer_all(count, stop);
        if self.guest.is_lost() {
            return Err(BrokenRing::MemoryLost);
        }
        if count > 0 {
            self.batching.saw(self.ring.in_flight());
        }
        // Also when the ring breaks: the driver waits for what was completed before.
        self.show_completed()?;
        self.store.core.end_batch();
        match served? {
            ControlFlow::Continue(()) => found,
            ControlFlow::Break(()) => Ok(ControlFlow::Break(())),
        }
    }

    /// Takes chains off the ring, as many as a batch has. Also tells whether there may be more.
    fn take(&mut self) -> (usize, Result<ControlFlow<()>, BrokenRing>) {
        // What the last batch left is no part of this one.
        self.batch.iter_mut().for_each(|taken| taken.order = None);
        let chains = self.batching.chains();
        for (index, taken) in self.batch.iter_mut().take(chains).enumerate() {
            match self.ring.pop(&self.guest, &mut taken.chain) {
                Pop::Empty => return (index, Ok(ControlFlow::Break(()))),
                Pop::Broken(reason) => return (index, Err(reason)),
                Pop::BadChain(head) => taken.head = head,
                Pop::Chain(head) => {
                    taken.head = head;
                    let Taken { chain, ranges, .. } = taken;
                    taken.order = request::status_addr(chain, &self.guest).map(|status| {
                        let request = request::parse(chain, &self.guest, &self.shared.disk, ranges);
                        (status, request)
                    });
                    if let Some((_, Ok(Request::In(range) | Request::Out(range)))) = taken.order
                        && range.count > 0
                    {
                        // Without it a tenth of a read is waiting for the slot's word, before its object can be fetched.
                        self.store.core.prefetch_slot(range.first_slot());
                    }
                }
            }
        }
        (chains, Ok(ControlFlow::Continue(())))
    }

    /// Shows what was completed before a request that may take its time, or when the batch has taken long already.
    fn show_before(&mut self, request: Request, started: &mut Instant) -> Result<(), BrokenRing> {
        let is_long = match request {
            // The usual case, for which not even the clock is read: a whole batch of them is soon done.
            Request::In(range) if range.count <= SECTORS_PER_PAGE as u64 => return Ok(()),
            Request::In(range) | Request::Out(range) => range.count > LONG_SECTORS_MIN,
            Request::Discard | Request::WriteZeroes => true,
            Request::Flush | Request::GetId(_) => false,
        };
        if is_long || started.elapsed() >= BATCH_TIME_MAX {
            self.show_completed()?;
            *started = Instant::now();
        }
        Ok(())
    }

    /// Executes what was taken and completes it, in order. `Break` on stop or at the rate limit: the rest is put back.
    fn answer_all(&mut self, count: usize, stop: &AtomicBool) -> Result<ControlFlow<()>, BrokenRing> {
        let mut started = Instant::now();
        for index in 0..count {
            self.prefetch(index + PREFETCH_AHEAD);
            if let Some((_, Ok(request))) = self.batch.get(index).and_then(|taken| taken.order) {
                self.show_before(request, &mut started)?;
            }
            if self.answer(index, stop)?.is_break() {
                self.ring.unpop();
                return Ok(ControlFlow::Break(()));
            }
        }
        Ok(ControlFlow::Continue(()))
    }

    /// Has the caches fetch what a later read of the batch will decode first.
    fn prefetch(&self, index: usize) {
        if let Some(Taken {
            order: Some((_, Ok(Request::In(range)))),
            ..
        }) = self.batch.get(index)
            && range.count > 0
        {
            self.store.core.prefetch(range.first_slot());
        }
    }

    /// Executes and completes one chain. `Break` on stop or at the rate limit: it is to be done again.
    fn answer(&mut self, index: usize, stop: &AtomicBool) -> Result<ControlFlow<()>, BrokenRing> {
        let Some(&Taken { head, order, .. }) = self.batch.get(index) else {
            return Ok(ControlFlow::Continue(()));
        };
        if stop.load(Ordering::Relaxed) {
            return Ok(ControlFlow::Break(()));
        }
        let Some((status, request)) = order else {
            self.counters().bad_chains.count();
            self.ring.complete_bad(head)?;
            return Ok(ControlFlow::Continue(()));
        };
        let outcome = match request {
            Ok(request) if !self.passes_limit(request) => return Ok(ControlFlow::Break(())),
            Ok(request) => match self.execute(index, request, stop) {
                ControlFlow::Continue(outcome) => outcome,
                ControlFlow::Break(()) => return Ok(ControlFlow::Break(())),
            },
            Err(refusal) => {
                self.count_refusal(refusal);
                Outcome::Refused(refusal)
            }
        };
        // Last, whatever the data may have been laid over. It was in memory a moment ago and the mapping is ours.
        self.guest
            .write(status, &[outcome.status()])
            .map_err(|_| BrokenRing::Memory)?;
        self.ring.complete(head, outcome.used_len())?;
        Ok(ControlFlow::Continue(()))
    }

    fn execute(&mut self, index: usize, request: Request, stop: &AtomicBool) -> ControlFlow<(), Outcome> {
        let disk = &self.shared.disk;
        #[cfg(test)]
        tests::panic_if_asked(disk, request);
        let Some(Taken { chain, ranges, .. }) = self.batch.get(index) else {
            return ControlFlow::Break(());
        };
        let mut execution = Execution {
            disk,
            store: &mut self.store,
            guest: &self.guest,
            chain,
            ranges,
            stop,
        };
        let outcome = execution.run(request)?;
        self.count(request, outcome);
        ControlFlow::Continue(outcome)
    }

    /// Shows the driver what was completed, and calls it if it waits for that.
    fn show_completed(&mut self) -> Result<(), BrokenRing> {
        self.ring.publish()?;
        if self.ring.wants_call()? {
            self.signals.call(self.counters());
        }
        Ok(())
    }

    fn count_refusal(&self, refusal: Refusal) {
        let outcome = Outcome::Refused(refusal);
        if outcome.status() == Outcome::Refused(Refusal::UnknownType).status() {
            self.counters().unsupported.count();
        } else {
            self.counters().io_errors.count();
            self.shared.disk.zram.io_counters().count_invalid_io();
        }
    }

    fn count(&self, request: Request, outcome: Outcome) {
        let counters = self.counters();
        let done = matches!(outcome, Outcome::Done(_));
        match request {
            Request::In(range) => {
                counters.reads.count();
                counters.sectors_read.add(if done { range.count } else { 0 });
            }
            Request::Out(range) => {
                counters.writes.count();
                counters.sectors_written.add(if done { range.count } else { 0 });
            }
            Request::Flush => counters.flushes.count(),
            Request::GetId(_) => counters.get_ids.count(),
            Request::Discard => counters.discards.count(),
            Request::WriteZeroes => counters.write_zeroes.count(),
        }
        if !done {
            counters.io_errors.count();
            self.report_failure(request);
        }
    }

    /// One line for a burst of requests that fail: at the memory limit a guest may try thousands a second.
    fn report_failure(&self, request: Request) {
        if self.shared.failures.begins() {
            let (disk, stats) = (self.shared.disk.name(), self.shared.disk.zram.stats());
            match request {
                Request::Out(_) | Request::WriteZeroes if stats.refused_writes != 0 => tracing::warn!(
                    disk,
                    refused_pages = stats.refused_writes,
                    mem_limit = stats.mem_limit,
                    "the memory limit is reached: writes that need more memory fail"
                ),
                _ => tracing::warn!(disk, "requests fail: pages do not decode"),
            }
        }
    }

    fn break_ring(&mut self, reason: BrokenRing) {
        // After a panic in the middle of a batch: what was completed is done.
        let _ = self.show_completed();
        self.ring.break_for(reason);
        self.counters().broken_rings.count();
        if self.shared.log_limit.allows() {
            let (disk, queue) = (self.shared.disk.name(), self.index);
            tracing::warn!(disk, queue, "queue stopped: {reason}");
        }
        self.signals.report_broken();
    }

    fn counters(&self) -> &QueueCounters {
        self.shared.queue_counters(self.index)
    }

    /// How long to sleep if nothing happens.
    fn sleep_ms(&self) -> i32 {
        if let Some(until) = self.limited_until {
            // Rounded up, or it would turn idly through the last millisecond.
            let left = until.saturating_duration_since(Instant::now());
            return i32::try_from(left.as_millis()).unwrap_or(0).saturating_add(1);
        }
        match self.ring.broken() {
            None if matches!(self.kick, Kick::Polled) => POLL_MS,
            Some(BrokenRing::Defect) => -1,
            None if self.store.core.has_retired() => POLL_MS,
            _ => -1,
        }
    }

    /// Ends the worker. Dropping the core's handle gives back what it holds; a panic there must not cost the ring.
    fn into_ring(self) -> Ring {
        let QueueWorker { mut ring, store, .. } = self;
        ring.bring_home();
        let _ = catch_unwind(AssertUnwindSafe(|| drop(store)));
        ring
    }
}

#[cfg(test)]
pub(crate) mod tests;
