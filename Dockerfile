# syntax=docker/dockerfile:1

# Orlop as an image: one binary, no shell, no root. Builds with BuildKit (docker, buildx, podman, buildah).
#
#     docker build -t orlop .
#     docker run --read-only -p 2379:2379 -v orlop:/var/lib/orlop orlop

ARG RUST_VERSION=1.95

# Debian 12 on both sides: a binary needs the glibc that it was linked with or a newer one, and this one is as old as the
# final image's. The slim image has the C compiler that SQLite, ring and mimalloc are built with.
FROM rust:${RUST_VERSION}-slim-bookworm AS build
ARG TARGETPLATFORM
WORKDIR /src
# .cargo/config.toml says how SQLite is compiled; without it commits are slower.
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
# The target folder is a cache and not part of the layer, so the binary leaves it in the same step.
RUN --mount=type=cache,id=orlop-registry-${TARGETPLATFORM},target=/usr/local/cargo/registry,sharing=locked \
    --mount=type=cache,id=orlop-target-${TARGETPLATFORM},target=/src/target,sharing=locked \
    cargo build --release --locked --bin orlop \
    && install -D -m 0755 target/release/orlop /out/orlop \
    && install -d -m 0700 /out/data

# glibc, libgcc and the roots of public certificates (for Postgres with sslmode=verify-full), and nothing else.
FROM gcr.io/distroless/cc-debian12:nonroot
ARG VERSION=0.2.0
ARG REVISION=unknown
LABEL org.opencontainers.image.title="orlop" \
      org.opencontainers.image.description="etcd's v3 API over a log in SQLite or Postgres" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"
COPY --from=build /out/orlop /usr/local/bin/orlop
# A volume that is made from the image takes over the folder's owner.
COPY --from=build --chown=65532:65532 /out/data /var/lib/orlop
# In a container 127.0.0.1 is nobody else's address.
ENV ORLOP_DATA_DIR=/var/lib/orlop \
    ORLOP_LISTEN_CLIENT_URLS=http://0.0.0.0:2379
# By number, so that Kubernetes can tell that it is not root (runAsNonRoot).
USER 65532:65532
# The only place that is written to: the rest may be read-only.
VOLUME /var/lib/orlop
EXPOSE 2379
ENTRYPOINT ["/usr/local/bin/orlop"]
