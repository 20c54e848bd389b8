//! A stack of numbered things that any thread pushes to and pops from without waiting: Treiber's, with a tag against a
//! head that came back (ABA). The links lie in an array of the owner, one 32-bit word for each thing.

use crate::sync::{AtomicU64, Ordering};

/// The end of the stack; no thing has this number.
const END: u32 = u32::MAX;

/// The links: `links(n)` is a place for the number below `n` on the stack.
pub(super) trait Links {
    fn get(&self, of: u32) -> u32;
    fn set(&self, of: u32, to: u32);
}

/// Head: the tag in the high half, the top's number in the low half.
#[derive(Debug)]
pub(super) struct Stack(AtomicU64);

impl Stack {
    pub(super) fn new() -> Stack {
        Stack(AtomicU64::new(u64::from(END)))
    }

    pub(super) fn push(&self, links: &impl Links, thing: u32) {
        let mut head = self.0.load(Ordering::Relaxed);
        loop {
            links.set(thing, top(head));
            // Release: the link, and all that was done to the thing, come before it can be popped.
            match self
                .0
                .compare_exchange_weak(head, next_head(head, thing), Ordering::Release, Ordering::Relaxed)
            {
                Ok(_) => return,
                Err(found) => head = found,
            }
        }
    }

    pub(super) fn pop(&self, links: &impl Links) -> Option<u32> {
        // Acquire pairs with the release of `push`: the link is there, and what was done to the thing.
        let mut head = self.0.load(Ordering::Acquire);
        loop {
            let thing = top(head);
            if thing == END {
                return None;
            }
            // Another thread may have popped the thing meanwhile: then the link is rubbish, and the tag has moved on.
            let below = links.get(thing);
            match self
                .0
                .compare_exchange_weak(head, next_head(head, below), Ordering::Acquire, Ordering::Acquire)
            {
                Ok(_) => return Some(thing),
                Err(found) => head = found,
            }
        }
    }
}

fn top(head: u64) -> u32 {
    head as u32
}

/// A push and a pop both move the tag on, so a head seen once never comes back within 2^32 steps of others.
fn next_head(head: u64, top: u32) -> u64 {
    ((head >> 32) + 1) << 32 | u64::from(top)
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicU32;

    impl Links for Vec<AtomicU32> {
        fn get(&self, of: u32) -> u32 {
            self[of as usize].load(Ordering::Relaxed)
        }
        fn set(&self, of: u32, to: u32) {
            self[of as usize].store(to, Ordering::Relaxed);
        }
    }

    #[test]
    fn last_in_is_first_out() {
        let links = (0..3).map(|_| AtomicU32::new(0)).collect::<Vec<_>>();
        let stack = Stack::new();
        assert_eq!(stack.pop(&links), None);
        (0..3).for_each(|thing| stack.push(&links, thing));
        assert_eq!(
            [stack.pop(&links), stack.pop(&links), stack.pop(&links)],
            [Some(2), Some(1), Some(0)]
        );
        assert_eq!(stack.pop(&links), None);
    }
}

#[cfg(all(test, loom))]
mod loom_tests {
    use super::*;
    use loom::sync::Arc;
    use loom::sync::atomic::AtomicU32;
    use loom::thread;

    struct Both {
        stack: Stack,
        links: Vec<AtomicU32>,
    }

    impl Links for Vec<AtomicU32> {
        fn get(&self, of: u32) -> u32 {
            self[of as usize].load(Ordering::Relaxed)
        }
        fn set(&self, of: u32, to: u32) {
            self[of as usize].store(to, Ordering::Relaxed);
        }
    }

    #[test]
    fn nothing_is_popped_twice_or_lost() {
        loom::model(|| {
            let both = Arc::new(Both {
                stack: Stack::new(),
                links: (0..2).map(|_| AtomicU32::new(9)).collect(),
            });
            both.stack.push(&both.links, 0);
            both.stack.push(&both.links, 1);
            let other = {
                let both = Arc::clone(&both);
                thread::spawn(move || {
                    let popped = both.stack.pop(&both.links).unwrap();
                    both.stack.push(&both.links, popped);
                })
            };
            let first = both.stack.pop(&both.links);
            if let Some(thing) = first {
                both.stack.push(&both.links, thing);
            }
            other.join().unwrap();
            let mut left = vec![
                both.stack.pop(&both.links).unwrap(),
                both.stack.pop(&both.links).unwrap(),
            ];
            left.sort_unstable();
            assert_eq!(left, [0, 1]);
            assert_eq!(both.stack.pop(&both.links), None);
        });
    }
}
