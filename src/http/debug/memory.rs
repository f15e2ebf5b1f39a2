//! The memory of the process, from `/proc/self/status`. The allocator keeps no record of allocations by their place in
//! the code, so this is not a heap profile.

use serde_json::{Value, json};

/// Sizes in bytes; 0 if the system does not report one.
pub(super) struct Memory {
    /// Size of the address space.
    mapped: u64,
    /// Pages in memory.
    resident: u64,
    /// Maximum of `resident` since the start.
    resident_max: u64,
    /// Pages in memory that belong to no file: heap and stacks.
    anonymous: u64,
    stack: u64,
    swapped: u64,
    threads: u64,
}

impl Memory {
    pub(super) fn read() -> Self {
        Self::parse(&std::fs::read_to_string("/proc/self/status").unwrap_or_default())
    }

    fn parse(status: &str) -> Self {
        let number = |name: &str| -> Option<u64> {
            let value = status.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
            value.split_whitespace().next()?.parse().ok()
        };
        // Sizes are in kB.
        let bytes = |name| number(name).unwrap_or(0).saturating_mul(1024);
        Self {
            mapped: bytes("VmSize"),
            resident: bytes("VmRSS"),
            resident_max: bytes("VmHWM"),
            anonymous: bytes("RssAnon"),
            stack: bytes("VmStk"),
            swapped: bytes("VmSwap"),
            threads: number("Threads").unwrap_or(0),
        }
    }

    /// Returns the fields of Go's `runtime.MemStats` that have a meaning here. There is no garbage collector.
    pub(super) fn as_go(&self) -> Value {
        let &Self { resident, anonymous, stack, .. } = self;
        json!({
            "Alloc": anonymous,
            "HeapAlloc": anonymous,
            "HeapInuse": anonymous,
            "StackInuse": stack,
            "Sys": resident,
            "NumGC": 0,
            "PauseTotalNs": 0,
            "EnableGC": false,
        })
    }

    pub(super) fn as_text(&self) -> String {
        let Self { mapped, resident, resident_max, anonymous, stack, swapped, threads } = self;
        format!(
            "# Memory of the process in bytes. Orlop does not record where memory is allocated.\n\
             mapped {mapped}\nresident {resident}\nresident_max {resident_max}\nanonymous {anonymous}\n\
             stack {stack}\nswapped {swapped}\nthreads {threads}\n"
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_in_bytes() {
        let memory = Memory::parse("Name:\torlop\nVmSize:\t  9 kB\nVmRSS:\t     5 kB\nRssAnon:\t 3 kB\nThreads:\t4\n");
        let text = memory.as_text();
        for line in ["mapped 9216", "resident 5120", "anonymous 3072", "threads 4", "swapped 0"] {
            assert!(text.lines().any(|found| found == line), "{line}: {text}");
        }
        assert_eq!(memory.as_go()["Alloc"], 3072);
    }
}
