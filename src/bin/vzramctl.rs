//! The control tool.
#![forbid(unsafe_code)]
fn main() {}
