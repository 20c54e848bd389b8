//! A vhost-user virtio-blk device over zram-core: one disk on one socket.
//!
//! | module | what it is for |
//! | --- | --- |
//! | `config` | what the owner of a device decides, checked once |
//! | `device` | the control thread: accept, serve one frontend, drop it, accept again |
//! | `channel` | the backend's own way to the frontend: that the config space has changed |
//! | `handler` | the vhost-user requests of one connection: features, config space, memory, rings |
//! | `memory` | the guest's memory as the frontend shares it: mapping, checks, address translation |
//! | `inflight` | what is in flight, noted in memory that the frontend keeps |
//! | `vring` | one virtqueue seen from the control thread: when it may start, its thread, its stop |
//! | `worker` | one virtqueue seen from its own thread: batches, calls, sleep |
//! | `ring` | the split ring: three-way pop, used ring, notification |
//! | `request` | descriptor chain to request, outcome to status byte and used length |
//! | `execute` | request to page operations on the core |
//! | `guest` | guest memory as a worker sees it: copies between a chain's buffers and private memory |
//! | `fault` | guest memory that vanishes costs its own disk only; the one room with `unsafe` |
//! | `config_space` | virtio-blk's config space |
//! | `limit` | requests and bytes a second |
//! | `poller` | an epoll instance that closes itself |
//! | `polling` | whether a worker looks at its ring before it sleeps, and how long |
//! | `counters` | what the device counts, and how often it may log |
//!
//! Two rules run through all of it. Guest bytes are read once: a descriptor, header, range or page is copied into memory
//! that the guest cannot reach, and only the copy is checked and used. And a ring has one owner: it moves to the worker
//! when the queue starts and comes back when the worker is joined, so that nothing on the data path is locked.
//!
//! Sources: virtio 1.3 sections 2.7 (split virtqueues) and 5.2 (block device), and QEMU's vhost-user.rst.
#![deny(unsafe_code)]

mod batching;
mod channel;
mod config;
mod config_space;
mod counters;
mod device;
mod execute;
mod fault;
#[cfg(any(test, fuzzing))]
pub mod fuzzing;
mod guest;
mod handler;
mod inflight;
mod limit;
mod memory;
mod poller;
mod polling;
mod request;
mod resize;
mod ring;
mod vring;
mod worker;

pub use channel::Notice;
pub use config::{
    DeviceConfig, POLL_MAX, QUEUE_SIZE_DEFAULT, QUEUE_SIZE_MAX, QUEUES_MAX, Serial, SerialError, ThreadKind,
    ThreadStart,
};
pub use counters::{DeviceStatus, Frontend, RequestCounts};
pub use device::{Device, Endpoint};
pub use limit::{BURST_DEFAULT, BURST_MAX, RateLimit};
pub use resize::{ResizeError, Resized, Resizer};
