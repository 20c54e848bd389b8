//! `vhost-user-zram`: one compressed RAM disk for a virtual machine, served over vhost-user.
#![forbid(unsafe_code)]

use std::process::ExitCode;

use vhost_user_zram::config::{self, Invocation};
use vhost_user_zram::daemon;

fn main() -> ExitCode {
    match config::parse(std::env::args_os()) {
        Invocation::Serve(config) => daemon::run(&config),
        Invocation::Print(text) => daemon::print(&text),
        Invocation::Refuse(message) => daemon::refuse(&message),
    }
}
