//! Points on the data path where a test can stop a thread, or let it fail. Nothing at all outside tests.
//!
//! A thread announces the step that it has reached; a test has told it before at which one to stop. So a test can hold
//! one worker at any instruction that matters and see that nobody else waits for it.

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Step {
    /// A reader is pinned and has its word.
    ReadPinned,
    /// A heap is locked, about to give a place.
    HeapLocked,
    /// A place is taken, its bytes are not there yet.
    Allocated,
    /// The object is complete and not published.
    Stored,
    /// The slot's word was exchanged, the old one not retired yet.
    Published,
    /// A batch is sealed, and nothing of it freed yet.
    Sealed,
    /// An object's grace period is over; it is about to be freed.
    Freeing,
    /// An object is about to enter the queue of a heap that is in use.
    Queueing,
    /// A heap's queue was taken and is not in the heap yet.
    QueueTaken,
    /// A segment left the stacks and its hole is about to be punched.
    GivingBack,
    /// The cleaner has closed its segments.
    Chosen,
    /// The cleaner is pinned and has the word of an object that it will move.
    MoveLoaded,
    /// The cleaner has copied the object; its slot still has the old one.
    Copied,
    /// The cleaner has exchanged the word.
    Moved,
    /// Recompression is pinned and has the word of a page that it will try.
    RecompressLoaded,
    /// It has stored what an algorithm made; the slot still has the old object.
    Recompressed,
}

#[cfg(not(test))]
#[inline(always)]
pub(crate) fn reach(_step: Step) {}

/// Whether the arena shall have no room now, whatever it holds.
#[cfg(not(test))]
#[inline(always)]
pub(crate) fn allocation_fails() -> bool {
    false
}

#[cfg(test)]
pub(crate) use for_tests::*;

#[cfg(test)]
mod for_tests {
    use super::Step;
    use std::cell::{Cell, RefCell};
    use std::sync::mpsc::{Receiver, Sender, channel};

    struct Stop {
        at: Step,
        reached: Sender<()>,
        go_on: Receiver<()>,
    }

    thread_local! {
        static STOP: RefCell<Option<Stop>> = const { RefCell::new(None) };
        /// Allocations until one fails.
        static FAILS_AFTER: Cell<Option<u64>> = const { Cell::new(None) };
    }

    /// The test's end of a stop: `reached` says that the thread stands there, dropping `go_on` lets it go on.
    pub(crate) struct Held {
        pub(crate) reached: Receiver<()>,
        pub(crate) go_on: Sender<()>,
    }

    /// How a thread stops itself at a step, once: made by the test, given to the thread.
    pub(crate) struct Arm(Stop);

    pub(crate) fn stop_at(at: Step) -> (Arm, Held) {
        let (reached_sender, reached) = channel();
        let (go_on, go_on_receiver) = channel();
        let stop = Stop {
            at,
            reached: reached_sender,
            go_on: go_on_receiver,
        };
        (Arm(stop), Held { reached, go_on })
    }

    impl Arm {
        /// On the thread that shall stop.
        pub(crate) fn set(self) {
            STOP.with(|stop| *stop.borrow_mut() = Some(self.0));
        }
    }

    pub(crate) fn reach(step: Step) {
        let stop = STOP.with(|stop| {
            let mut stop = stop.borrow_mut();
            stop.take_if(|stop| stop.at == step)
        });
        if let Some(stop) = stop {
            let _ = stop.reached.send(());
            let _ = stop.go_on.recv(); // an error: the test let go
        }
    }

    /// The `n`-th allocation of this thread from now on fails, counted from 0; `None`: none does.
    pub(crate) fn fail_allocation(n: Option<u64>) {
        FAILS_AFTER.set(n);
    }

    pub(crate) fn allocation_fails() -> bool {
        match FAILS_AFTER.get() {
            None => false,
            Some(0) => {
                FAILS_AFTER.set(None);
                true
            }
            Some(n) => {
                FAILS_AFTER.set(Some(n - 1));
                false
            }
        }
    }
}
