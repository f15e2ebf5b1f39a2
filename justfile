# Recipes for those who work on Orlop. `just` alone lists them.

_default:
    @just --list

# Build the server for use.
build:
    cargo build --release

# Serve on 127.0.0.1:2379 with data in orlop-data.
run *args:
    cargo run --release -- {{ args }}

# Run every test. Those that compare with a real etcd say "skipped" where there is none; `just etcd` gets one.
test *args:
    cargo test {{ args }}

# Unpack etcd and etcdctl from Debian's packages into target/tools, for the tests and benches.
etcd:
    scripts/fetch-etcd

# Format the code.
fmt:
    cargo fmt

# What CI holds of format and lints.
lint:
    cargo fmt --check
    cargo clippy --all-targets -- -D warnings

# Build the documentation of the code.
docs:
    RUSTDOCFLAGS="-D warnings" cargo doc --no-deps --document-private-items

# Licences, banned crates and sources.
deny:
    cargo deny check licenses bans sources

# Known vulnerabilities in what Orlop depends on (needs the network).
advisories:
    cargo deny check advisories

# Lint and render the Helm chart; check the Dockerfile and the systemd unit.
packaging:
    scripts/check-chart
    scripts/check-packaging

# Compare with etcd at random for long: `just differential 1000000`.
differential ops="1000000":
    ORLOP_DIFF_OPS={{ ops }} cargo test --test it differential -- --nocapture

# Break three instances and their Postgres for long and check the history: `just linearizability 3600`.
linearizability secs="1800":
    ORLOP_LINEAR_SECS={{ secs }} cargo test --test it linearizability -- --nocapture

# Run the core under simulation from so many seeds; `ORLOP_SEED=7 just simulate` tells one run step by step.
simulate seeds="10000":
    ORLOP_SIM_SEEDS={{ seeds }} cargo test -p orlop-core --test simulation every -- --nocapture

# Kill, cut off, starve and fill up Orlop, and etcd beside it: `just torture 300` kills each 300 times, which takes hours.
torture times="300":
    cargo build --release
    ORLOP_TEST_SERVER=$PWD/target/release/orlop ORLOP_TORTURE={{ times }} ORLOP_TORTURE_REPORT=target/torture.tsv cargo test --test it torture:: -- --nocapture --test-threads=1

# Make the attacks of docs/explanation/overload.md and print its table.
hostile:
    cargo build --release
    ORLOP_HOSTILE_LONG=1 ORLOP_TEST_SERVER=$PWD/target/release/orlop cargo test --test it hostile -- --nocapture --test-threads 1 | grep -o '| .* |$'

# Fuzz one of requests, txn, gateway, settings, snapshot for so many seconds; needs a nightly Rust and cargo-fuzz.
fuzz target secs="600":
    cargo test -p orlop-fuzz seeds_are_written -- --ignored
    cargo +nightly fuzz run --features libfuzzer --sanitizer none {{ target }} -- -max_total_time={{ secs }} -print_final_stats=1

# Live a control plane's life for long, SQLite and Postgres at the same time; fails where something leaks: `just soak 60`.
soak minutes="60" *args:
    cargo build --release
    target/release/orlop bench soak --minutes {{ minutes }} --work-dir target --output target/soak {{ args }}

# How long the pure cores take with a million keys.
bench-cores:
    cargo bench --bench time

# Count the instructions of the pure cores; fails where one takes twice what it did.
instructions:
    scripts/count-instructions

# Compare Orlop with etcd on this machine; writes the tables and plots in docs/benchmarks.
bench-compare *args:
    cargo build --release
    scripts/fetch-etcd
    target/release/orlop bench compare --work-dir target --output docs/benchmarks/tables.md {{ args }}

# All that CI does.
ci:
    .ci/run
