//! The daemon and its tool as people and programs meet them: every test starts the real binaries.
//!
//! `program` runs them. The stories: `cli` (arguments, sockets, signals, exit codes), `control` (the control socket and
//! vzramctl).
// A test ends at the first surprise, and the line that failed says which.
#![allow(clippy::unwrap_used)]
#![deny(unsafe_code)]

mod cli;
mod control;
mod program;
