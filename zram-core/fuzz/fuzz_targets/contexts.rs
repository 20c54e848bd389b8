//! Codecs with contexts, levels and dictionaries, both ways: `cargo fuzz run contexts -- -max_len=4097` in `zram-core/`.
#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| zram_core::fuzzing::contexts(input));
