//! See `vhost/src/fuzzing/request.rs`: `cargo fuzz run request` in `vhost/`.
#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| zram_vhost::fuzzing::request(input));
