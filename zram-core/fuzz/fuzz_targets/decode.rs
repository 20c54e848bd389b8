//! Any bytes through each decoder: `cargo fuzz run decode` in `zram-core/`.
#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| zram_core::fuzzing::decode(input));
