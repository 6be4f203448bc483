#!/bin/sh
# Usage: scripts/test.sh [--all]
#
# Runs all checks that need no GPU: format, lints, tests, the models of the ring and of parking. Continues after a
# failure and reports all failures at the end; the exit status is then 1. With a GPU, run scripts/gpu-check.sh too.
#
# Needs a C compiler, make, python3 and cargo; installs the first three with apt if it may. Tests of MPI, Slurm,
# packages, containers and Kubernetes run only if their tools are installed; a line for each says what is not tested.
# --all installs those tools too (about 700 MB), and builds the packages for the containers.
#
# Takes about 12 minutes on two cores the first time, 18 with --all, and 4 GB in target/ (6 GB with --all).
# Removes temporary files and container images at the end.
set -eu
all=
for argument in "$@"; do
    case $argument in
    --all) all=yes ;;
    -h | --help) exec sed -n '2,/^set -eu$/{/^set/d; s/^# \{0,1\}//p;}' "$0" ;;
    *)
        echo "$0: unknown argument $argument; --help shows the usage" >&2
        exit 2
        ;;
    esac
done
cd "$(dirname "$0")/.."
# shellcheck source=scripts/tools.sh
. scripts/tools.sh
target=${CARGO_TARGET_DIR:-target}

# has COMMAND SUBJECT PACKAGE...: installs the command with --all; says what is not tested without it.
has() {
    tool=$1 subject=$2
    shift 2
    if [ -n "$all" ]; then
        want "$tool" "$@" && return
    else
        command -v "$tool" >/dev/null 2>&1 && return
    fi
    echo "not tested: $subject (no $tool${all:+ can be installed})"
}
echo "== tools; $([ -n "$all" ] && echo "installs what is missing of all of them" ||
    echo "installs a C compiler, make and python3 if they are missing; --all: everything that a test can use")"
need make make
need python3 python3
need_cargo
has mpicc "MPI" openmpi-bin libopenmpi-dev
has slurmctld "Slurm" slurmctld slurmd slurm-client munge
has debootstrap "containers" debootstrap
has lintian "the Debian package's form" lintian
has docker "containers" docker.io
has docker-compose "the compose file" docker-compose
has podman "CDI in Podman" podman
if [ -n "$all" ]; then
    want_python prometheus_client python3-prometheus-client || true
    kubernetes=$target/kubernetes-validate
    if [ ! -x "$kubernetes/bin/kubernetes-validate" ]; then
        python3 -c 'import ensurepip' 2>/dev/null || want_python ensurepip python3-venv || true
        { python3 -m venv "$kubernetes" &&
            "$kubernetes/bin/pip" --quiet --disable-pip-version-check install kubernetes-validate==1.37.0; } ||
            echo "not tested: the manifests for Kubernetes (kubernetes-validate cannot be installed)"
    fi
fi

# What tests leave lies here. Its path is short, since sockets are bound in it.
TMPDIR=$(mktemp -d "${TMPDIR:-/tmp}/mt-XXXXXX")
export TMPDIR
# Programs of other users write there too.
chmod 1777 "$TMPDIR"
clean_up() {
    rm -rf "$TMPDIR" || true
    if command -v docker >/dev/null 2>&1; then
        docker image ls --format '{{.Repository}}:{{.Tag}}' 2>/dev/null |
            grep -E '^(mpsshim-test-base:.*|mpsshim:test|mpsshim-nbody:test)$' | xargs -r docker image rm >/dev/null 2>&1 || true
    fi
}
trap clean_up EXIT
trap 'exit 1' HUP INT TERM

failed=
step() {
    echo "== $*"
    "$@" || {
        failed="$failed
    $*"
        return 0
    }
}

step cargo fmt --all --check
step cargo clippy --workspace --all-targets -- -D warnings
# Tests start libraries and programs of other packages, which cargo does not build for a test. All at once: another choice
# of packages gives shared dependencies other features, and cargo would build them once more.
before=$failed
step cargo build --workspace --lib --bins --tests
if [ "$failed" = "$before" ]; then
    export MPSSHIM_BUILT=1
    # The tests of packages and containers need its tools.
    [ -z "$all" ] || step scripts/package.sh -p softgpu -p mpsshim-examples
    # It runs tests of several programs at once; .config/nextest.toml names those that need the machine for themselves.
    if command -v cargo-nextest >/dev/null 2>&1; then
        step cargo nextest run --workspace --no-fail-fast
        step cargo test --workspace --doc
    else
        step cargo test --workspace --no-fail-fast
    fi
fi
# A folder of its own: other flags would have cargo build everything anew each time.
step env RUSTFLAGS="${RUSTFLAGS:-} --cfg loom" CARGO_TARGET_DIR="$target/loom" cargo test -p mpsshim-proto --test loom
if [ -n "$all" ]; then
    # Checked only, so that neither a nightly compiler nor libFuzzer is needed.
    mkdir -p "$target/fuzz"
    : >"$target/fuzz/libfuzzer.a"
    library=$(cd "$target/fuzz" && pwd)/libfuzzer.a
    step env CUSTOM_LIBFUZZER_PATH="$library" CARGO_TARGET_DIR="$target/fuzz" \
        cargo check --manifest-path fuzz/Cargo.toml
fi
step python3 -m unittest discover -s benches/gpu
step python3 -m unittest discover -s tests/gpu
if [ -n "$failed" ]; then
    echo "== failed:$failed"
    exit 1
fi
echo "== all checks passed"
