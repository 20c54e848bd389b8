//! The daemon and its tool from outside: every test starts the real binaries.
//!
//! As people and programs meet them: `program` runs them; `cli` (arguments, sockets, signals, exit codes), `control` (the
//! control socket and vzramctl), `sandbox` (what the daemon gives up).
//!
//! As frontends see it: `support` starts backends and watches their process, `raw` is a frontend that can say anything a
//! guest can, right or wrong. `protocol` (negotiation, rings and connections coming and going), `data` (requests and their
//! answers), `hostile_guest` and `hostile_frontend` (those that break the rules), `libblkio` (a frontend that nobody here
//! wrote; `wiretap` hears what it says), `memory` (what the host gets back), `recompress` (as the operator uses it), `live`
//! (what the operator changes meanwhile), `chaos` (ends in the middle), `differential` (the same requests to qemu-storage-daemon).
// A test ends at the first surprise, and the line that failed says which.
#![allow(clippy::unwrap_used)]
#![deny(unsafe_code)]

mod chaos;
mod cli;
mod control;
mod data;
mod differential;
mod hostile_frontend;
mod hostile_guest;
mod libblkio;
mod live;
mod memory;
mod program;
mod protocol;
mod raw;
mod recompress;
mod sandbox;
mod second_opinion;
mod support;
mod train_dict;
mod wiretap;
