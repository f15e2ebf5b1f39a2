# Recipes for developers. `just` without arguments lists them.

_default:
    @just --list

# Build the release binary.
build:
    cargo build --release

# Run the server on 127.0.0.1:2379 with its data in orlop-data.
run *args:
    cargo run --release -- {{ args }}

# Run every test. Comparisons with a real etcd print "skipped" if it is not installed; `just etcd` downloads it.
test *args:
    cargo test {{ args }}

# Unpack three versions of etcd and etcdctl from Debian's packages into target/tools, for the tests and benches.
etcd:
    scripts/fetch-etcd

# Run test modules on Postgres 13, 17 or 18 of another Debian: `just postgres 18 instances:: failover::`.
postgres version *modules:
    scripts/fetch-database postgres-{{ version }}
    ORLOP_TEST_POSTGRES_BIN=$PWD/target/tools/postgres-{{ version }}/usr/lib/postgresql/{{ version }}/bin cargo test --test it -- {{ modules }}

# Run the tests of `orlop import kine` on MySQL instead of MariaDB.
mysql:
    scripts/fetch-database mysql
    ORLOP_TEST_MYSQL=$PWD/target/tools/mysql/usr/sbin/mysqld cargo test --test it kine::

# Format the code.
fmt:
    cargo fmt

# Check format and lints as CI does.
lint:
    cargo fmt --check
    cargo clippy --all-targets -- -D warnings

# Build the code's documentation.
docs:
    RUSTDOCFLAGS="-D warnings" cargo doc --no-deps --document-private-items

# Check licences, banned crates and sources.
deny:
    cargo deny check licenses bans sources

# Check the dependencies for known vulnerabilities (needs the network).
advisories:
    cargo deny check advisories

# Build the tarballs, Debian packages and SBOMs of both architectures in target/dist: `just release --trial --arch x86_64` builds one, without the conditions of a release.
release *args:
    scripts/release {{ args }}

# Start the binaries of target/dist, test its package in a clean Debian (as root), and build it again: it must be the same.
release-check *args:
    scripts/check-tarballs
    scripts/check-deb
    scripts/check-reproducible {{ args }}

# Package the Helm chart in target/chart, for `helm push`.
chart:
    scripts/package-chart

# Lint and render the Helm chart; check the image, the Compose file and the systemd unit.
packaging:
    scripts/check-chart
    scripts/check-packaging

# Run the commands of README.md, the tutorial, the how-to pages and the reference: `just docs-check docs/tutorial.md`.
docs-check *pages:
    cargo build
    scripts/check-docs {{ pages }}

# Compare random operations with etcd: `just differential 1000000`.
differential ops="1000000":
    ORLOP_DIFF_OPS={{ ops }} cargo test --test it differential -- --nocapture

# Check linearizability of three instances and their Postgres under faults, for a number of seconds: `just linearizability 3600`.
linearizability secs="1800":
    ORLOP_LINEAR_SECS={{ secs }} cargo test --test it linearizability -- --nocapture

# Simulate the core with a number of seeds; `ORLOP_SEED=7 just simulate` prints one run step by step.
simulate seeds="10000":
    ORLOP_SIM_SEEDS={{ seeds }} cargo test -p orlop-core --test simulation every -- --nocapture

# Run the threads of the core under schedules of their locks; a number multiplies them: `just races 100`.
races factor="1":
    cargo clippy --quiet -p orlop-core --features shuttle --lib --tests -- -D warnings
    ORLOP_SCHEDULES={{ factor }} cargo test -p orlop-core --features shuttle --lib races::

# Inject faults into Orlop and etcd: `just torture 300` kills each 300 times, which takes hours.
torture times="300":
    cargo build --release
    ORLOP_TEST_SERVER=$PWD/target/release/orlop ORLOP_TORTURE={{ times }} ORLOP_TORTURE_REPORT=target/torture.tsv cargo test --test it torture:: -- --nocapture --test-threads=1

# Crash ext4, XFS or btrfs below a server under load, and judge what each crash leaves (as root): `just crash-images --fs xfs --cache lose`.
crash-images *args:
    cargo build --release
    scripts/crash-images {{ args }}

# Let Postgres fail over under load a number of times, Patroni ten times, and check linearizability meanwhile: `just failover 200`.
failover times="200":
    ORLOP_FAILOVER_LONG={{ times }} ORLOP_LINEAR_FAILOVERS=1 cargo test --test it failover -- --nocapture --test-threads=1

# Run a Kubernetes control plane on Orlop; the first time this builds Kubernetes, which takes long: `just kubernetes http`.
kubernetes *args:
    cargo build --bin orlop
    scripts/try-kube-apiserver {{ args }}

# Run the attacks of docs/explanation/overload.md and print its table.
hostile:
    cargo build --release
    ORLOP_HOSTILE_LONG=1 ORLOP_TEST_SERVER=$PWD/target/release/orlop cargo test --test it hostile -- --nocapture --test-threads 1 | grep -o '| .* |$'

# Fuzz a target (requests, txn, gateway, token, settings, snapshot, objects) for a number of seconds; needs a nightly Rust and cargo-fuzz.
fuzz target secs="600":
    cargo test -p orlop-fuzz seeds_are_written -- --ignored
    cargo +nightly fuzz run --features libfuzzer --sanitizer none {{ target }} -- -max_total_time={{ secs }} -print_final_stats=1

# Run a control plane's load on SQLite and Postgres at the same time; fails if a resource leaks: `just soak 60`.
soak minutes="60" *args:
    cargo build --release
    target/release/orlop bench soak --minutes {{ minutes }} --work-dir target --output target/soak {{ args }}

# Measure the pure cores with 1,000,000 keys.
bench-cores:
    cargo bench --bench time

# Count the instructions of the pure cores; fails if one exceeds its limit.
instructions:
    scripts/count-instructions

# Compare Orlop with etcd on this machine; writes the tables and plots in docs/benchmarks.
bench-compare *args:
    cargo build --release
    scripts/fetch-etcd
    target/release/orlop bench compare --work-dir target --output docs/benchmarks/tables.md {{ args }}

# Run everything that CI runs.
ci:
    .ci/run
