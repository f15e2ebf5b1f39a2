# syntax=docker/dockerfile:1

# Image of Orlop: one static binary, no shell, not root. Build it with BuildKit (docker, buildx, podman, buildah); see
# docker-bake.hcl for both architectures.
#
#     docker build --build-arg REVISION=$(git rev-parse --short=12 HEAD) -t orlop .
#     docker run --read-only -p 2379:2379 -v orlop:/var/lib/orlop orlop

ARG RUST_VERSION=1.95

# Runs on the architecture of the builder and compiles for the other one with zig (scripts/release). Emulation would take
# hours.
FROM --platform=$BUILDPLATFORM rust:${RUST_VERSION}-slim-bookworm AS build
ARG TARGETARCH
ARG REVISION
RUN apt-get update \
    && apt-get install -y --no-install-recommends python3-venv=3.11.* \
    && rm -rf /var/lib/apt/lists/* \
    && rustup target add x86_64-unknown-linux-musl aarch64-unknown-linux-musl
WORKDIR /src
# .cargo/config.toml has compiler flags for SQLite; without them commits are slower.
COPY .cargo/config.toml .cargo/config.toml
COPY Cargo.toml Cargo.lock build.rs ./
COPY proto proto
COPY crates crates
COPY src src
# The manifest names these; the image does not build them.
COPY benches benches
COPY fuzz fuzz
COPY tests/it/main.rs tests/it/main.rs
COPY scripts/release scripts/release_files.py scripts/release_sbom.py scripts/third-party scripts/tools_venv.py scripts/
COPY LICENSE LICENSE
COPY packaging/licences packaging/licences
# build.rs puts it into `orlop --version`; the image contains no git.
ENV ORLOP_COMMIT=${REVISION}
# The target directory is a cache and not part of the layer, so the same step copies the binary out of it.
RUN --mount=type=cache,id=orlop-registry,target=/usr/local/cargo/registry,sharing=locked \
    --mount=type=cache,id=orlop-target-${TARGETARCH},target=/src/target,sharing=locked \
    case "${TARGETARCH}" in \
      amd64) arch=x86_64 ;; \
      arm64) arch=aarch64 ;; \
      *) echo "no binary for ${TARGETARCH}" >&2; exit 1 ;; \
    esac \
    && install -d -m 0755 /out/doc && install -d -m 0700 /out/data \
    && scripts/release --compile /out/orlop --arch "${arch}" \
    && scripts/third-party >/out/doc/THIRD-PARTY && cp LICENSE /out/doc

# Contains only the public root certificates (for Postgres with sslmode=verify-full), the user and time zones.
FROM gcr.io/distroless/static-debian12:nonroot
ARG VERSION=0.3.0-dev
ARG REVISION=unknown
LABEL org.opencontainers.image.title="orlop" \
      org.opencontainers.image.description="etcd's v3 API over a log in SQLite or Postgres" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.url="https://git.example/orlop/orlop" \
      org.opencontainers.image.source="https://git.example/orlop/orlop" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"
COPY --from=build /out/orlop /usr/local/bin/orlop
COPY --from=build /out/doc /usr/share/doc/orlop
# A volume created from the image gets the owner of the directory.
COPY --from=build --chown=65532:65532 /out/data /var/lib/orlop
# 127.0.0.1 in a container cannot be reached from outside. Any setting overrides these, in a file, too.
ENV ORLOP_DEFAULT_DATA_DIR=/var/lib/orlop \
    ORLOP_DEFAULT_LISTEN_CLIENT_URLS=http://0.0.0.0:2379
# A number, so that Kubernetes can verify that it is not root (runAsNonRoot).
USER 65532:65532
# Orlop writes only here; the rest of the file system can be read-only.
VOLUME /var/lib/orlop
EXPOSE 2379
# Without a shell, the binary is its own client. A start reads the whole log, so the first failures do not count.
HEALTHCHECK --interval=10s --timeout=5s --start-period=5m \
    CMD ["/usr/local/bin/orlop", "status", "--ready", "--endpoints", "http://127.0.0.1:2379"]
ENTRYPOINT ["/usr/local/bin/orlop"]
