#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| orlop::internals::fuzz::txn(data));
