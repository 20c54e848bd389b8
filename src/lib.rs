//! The daemon around a compressed RAM disk: arguments, wiring, signals, control socket. No logic of storage and none of
//! virtio lives here; those are `zram-core` and `zram-vhost`.
//!
//! A map, in the order in which a start passes through the rooms:
//!
//! - [`config`]: the command line -> one [`config::Config`], validated once
//! - [`logging`]: where log lines go and what they look like
//! - [`host`]: what the host must grant: descriptors, file size, memory
//! - [`socket`]: sockets on paths (mode and group before they can be seen, stale ones replaced) and inherited ones
//! - [`sandbox`]: what the daemon gives up before a frontend can come
//! - [`daemon`]: builds the disk, serves it, ends
//! - [`announce`]: the block that a start prints, and its hints
//! - [`disk`]: the store and its device, as the threads of the daemon share them
//! - [`control`]: the control socket; [`command`]: what a request there is answered; [`protocol`] has the messages, which
//!   `vzramctl` shares
//! - [`training`]: dictionaries from pages; [`dictionary_file`]: their files, which only `vzramctl` touches
//! - [`picture`]: the arena as `vzramctl` shows it
//! - [`size`]: bytes as people write and read them
#![forbid(unsafe_code)]

pub mod announce;
pub mod command;
pub mod config;
pub mod control;
pub mod cpus;
pub mod daemon;
pub mod dictionary_file;
pub mod disk;
pub mod host;
pub mod logging;
pub mod picture;
pub mod protocol;
pub mod sandbox;
mod settings;
pub mod size;
pub mod socket;
pub mod training;
