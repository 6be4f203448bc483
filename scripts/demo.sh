#!/bin/sh
# Builds everything and runs the demo: one copy of the n-body example alone, then two sharing one device and two
# without mpsshim, on the GPU when there is one, else on softgpu; a verdict compares them. Arguments go to the demo; --help lists them. Nothing it starts is left behind.
# DEMO_PROGRAMS: a folder with programs and libraries that are built already.
set -eu
cd "$(dirname "$0")/.."
# shellcheck source=scripts/tools.sh
. scripts/tools.sh

programs=${DEMO_PROGRAMS:-${CARGO_TARGET_DIR:-target}/release}
if [ -z "${DEMO_PROGRAMS:-}" ]; then
    need_cargo
    cargo build --release -p mpsshim -p mpsshim-server -p softgpu -p mpsshim-examples
fi
exec "$programs/demo" "$@"
