//! Any page through each codec and back: `cargo fuzz run roundtrip -- -max_len=4096` in `zram-core/`.
#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| zram_core::fuzzing::roundtrip(input));
