//! See `vhost/src/fuzzing/session.rs`: `cargo fuzz run session` in `vhost/`.
#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| zram_vhost::fuzzing::session(input));
