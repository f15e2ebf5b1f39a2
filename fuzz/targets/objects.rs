#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| orlop_fuzz::objects::run(data));
