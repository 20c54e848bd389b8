//! The primitives that loom has to see: std's, or loom's under `cfg(loom)`.
//!
//! What lies in a mapping (the slot table, free objects of the arena) cannot be loom's, whose atomics are not plain
//! words; the protocols over it are modelled in `epoch.rs` and `arena/stack.rs` with what is exported here.

#[cfg(loom)]
pub(crate) use loom::sync::atomic::{AtomicBool, AtomicU64, Ordering, fence};
#[cfg(loom)]
pub(crate) use loom::sync::{Condvar, Mutex, MutexGuard};
#[cfg(not(loom))]
pub(crate) use std::sync::atomic::{AtomicBool, AtomicU64, Ordering, fence};
#[cfg(not(loom))]
pub(crate) use std::sync::{Condvar, Mutex, MutexGuard};
pub(crate) use std::sync::{PoisonError, TryLockError};

/// A value alone on its cache lines, so that two workers' counters do not share one. 128 bytes: the adjacent-line
/// prefetcher of x86 fetches lines in pairs.
#[derive(Debug, Default)]
#[repr(align(128))]
pub(crate) struct CachePadded<T>(pub(crate) T);
