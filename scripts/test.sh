#!/bin/sh
# Installs what is missing, then runs every check that needs no GPU: format, lints, tests, the ring's models.
# Stops at the first that fails. With a GPU: scripts/gpu-check.sh besides.
set -eu
cd "$(dirname "$0")/.."
# shellcheck source=scripts/tools.sh
. scripts/tools.sh
need_cargo
need python3 python3
# For examples/mpi.
need make make
want mpicc openmpi-bin libopenmpi-dev || echo "$0: no mpicc: MPI will not be tested" >&2
want slurmctld slurmctld slurmd slurm-client munge || echo "$0: no slurmctld: Slurm will not be tested" >&2
# For the packages, and containers that they are installed in.
for tool in debootstrap lintian; do
    want $tool $tool || echo "$0: no $tool: some of the packages will not be tested" >&2
done
want docker-compose docker-compose || true
want docker docker.io || echo "$0: no docker: containers will not be tested" >&2
# An engine that knows CDI.
want podman podman || true
want_python prometheus_client python3-prometheus-client ||
    echo "$0: no prometheus_client: its parser will not read the metrics" >&2

kubernetes=${CARGO_TARGET_DIR:-target}/kubernetes-validate
if [ ! -x "$kubernetes/bin/kubernetes-validate" ]; then
    python3 -c 'import ensurepip' 2>/dev/null || want_python ensurepip python3-venv || true
    { python3 -m venv "$kubernetes" &&
        "$kubernetes/bin/pip" --quiet --disable-pip-version-check install kubernetes-validate==1.37.0; } ||
        echo "$0: no kubernetes-validate: the manifests for Kubernetes will not be tested" >&2
fi

step() {
    echo "== $*"
    "$@"
}

step cargo fmt --all --check
step cargo clippy --workspace --all-targets -- -D warnings
# Tests start libraries and programs of other packages, which cargo does not build for a test. All at once: another choice
# of packages gives shared dependencies other features, and cargo would build them once more.
step cargo build --workspace --lib --bins --tests
export MPSSHIM_BUILT=1
# The tests of packages need its tools.
step scripts/package.sh -p softgpu -p mpsshim-examples
step cargo test --workspace
if [ -e proto/tests/loom.rs ]; then
    # A folder of its own: other flags would have cargo build everything anew each time.
    step env RUSTFLAGS="${RUSTFLAGS:-} --cfg loom" CARGO_TARGET_DIR="${CARGO_TARGET_DIR:-target}/loom" \
        cargo test -p mpsshim-proto --test loom
fi
step python3 -m unittest discover -s benches/gpu
step python3 -m unittest discover -s tests/gpu
echo "== all checks passed"
