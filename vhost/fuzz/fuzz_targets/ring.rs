//! One ring over hostile guest memory: `cargo fuzz run ring` in `vhost/`.
#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| zram_vhost::fuzzing::ring(input));
