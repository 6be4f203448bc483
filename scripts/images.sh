#!/bin/sh
# Builds the images mpsshim (daemon, server, library, device plugin) and mpsshim-nbody (a client) with Docker.
# BASE: the image that both are built on. MPSSHIM_TAG: their tag. Arguments are cargo's, as those of package.sh.
set -eu
cd "$(dirname "$0")/.."
scripts/package.sh -p mpsshim-examples "$@"

target=${CARGO_TARGET_DIR:-target}
context=$target/package/images

mkdir "$context"
cp "$target"/package/mpsshim_*.deb "$context/mpsshim.deb"
cp "$target/x86_64-unknown-linux-gnu/release/nbody" "$context"
build() {
    docker build --file packaging/containers/Dockerfile ${BASE:+--build-arg "BASE=$BASE"} --target "$1" --tag "$2:${MPSSHIM_TAG:-latest}" \
        "$context"
}
build mpsshim mpsshim
build nbody mpsshim-nbody
