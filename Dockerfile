# syntax=docker/dockerfile:1

# Image of Orlop: one binary, no shell, not root. Build it with BuildKit (docker, buildx, podman, buildah).
#
#     docker build -t orlop .
#     docker run --read-only -p 2379:2379 -v orlop:/var/lib/orlop orlop

ARG RUST_VERSION=1.95

# Debian 12 in both stages: a binary needs the glibc that it was linked with, or a newer one. The slim image contains the C
# compiler for SQLite, ring and mimalloc.
FROM rust:${RUST_VERSION}-slim-bookworm AS build
ARG TARGETPLATFORM
WORKDIR /src
# .cargo/config.toml has compiler flags for SQLite; without them commits are slower.
COPY .cargo/config.toml .cargo/config.toml
COPY Cargo.toml Cargo.lock ./
COPY proto proto
COPY migrations migrations
COPY crates crates
COPY src src
# The manifest names these; the image does not build them.
COPY benches benches
COPY fuzz fuzz
COPY tests/it/main.rs tests/it/main.rs
# The target directory is a cache and not part of the layer, so the same step copies the binary out of it.
RUN --mount=type=cache,id=orlop-registry-${TARGETPLATFORM},target=/usr/local/cargo/registry,sharing=locked \
    --mount=type=cache,id=orlop-target-${TARGETPLATFORM},target=/src/target,sharing=locked \
    cargo build --release --locked --bin orlop \
    && install -D -m 0755 target/release/orlop /out/orlop \
    && install -d -m 0700 /out/data

# Contains only glibc, libgcc and the public root certificates (for Postgres with sslmode=verify-full).
FROM gcr.io/distroless/cc-debian12:nonroot
ARG VERSION=0.2.0
ARG REVISION=unknown
LABEL org.opencontainers.image.title="orlop" \
      org.opencontainers.image.description="etcd's v3 API over a log in SQLite or Postgres" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.url="https://git.example/orlop/orlop" \
      org.opencontainers.image.source="https://git.example/orlop/orlop" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"
COPY --from=build /out/orlop /usr/local/bin/orlop
# A volume created from the image gets the owner of the directory.
COPY --from=build --chown=65532:65532 /out/data /var/lib/orlop
# 127.0.0.1 in a container cannot be reached from outside.
ENV ORLOP_DATA_DIR=/var/lib/orlop \
    ORLOP_LISTEN_CLIENT_URLS=http://0.0.0.0:2379
# A number, so that Kubernetes can verify that it is not root (runAsNonRoot).
USER 65532:65532
# Orlop writes only here; the rest of the file system can be read-only.
VOLUME /var/lib/orlop
EXPOSE 2379
ENTRYPOINT ["/usr/local/bin/orlop"]
