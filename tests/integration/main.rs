//! The daemon as its frontends see it: every test starts the real binary and talks to its socket.
//!
//! `support` starts backends and watches their process, `raw` is a frontend that can say anything a guest can, right or
//! wrong. The stories: `protocol` (negotiation, rings and connections coming and going), `data` (requests and their
//! answers), `hostile_guest` and `hostile_frontend` (those that break the rules), `libblkio` (a frontend that nobody here
//! wrote), `differential` (the same requests to qemu-storage-daemon).
// A test ends at the first surprise, and the line that failed says which.
#![allow(clippy::unwrap_used)]
#![deny(unsafe_code)]

mod data;
mod differential;
mod hostile_frontend;
mod hostile_guest;
mod libblkio;
mod protocol;
mod raw;
mod support;
