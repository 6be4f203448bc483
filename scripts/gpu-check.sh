#!/bin/sh
# Checks a build on a machine with a GPU: scripts/gpu-check.sh PROGRAMS [BUILD] [OUT]
#
# PROGRAMS holds the compiled CUDA samples, `microbench` (benches/cuda) and the sample `nbody`; BUILD (target/release)
# the shim and the servers; OUT (gpu-check) gets every output and the table. Needs python3 and a driver, no toolchain.
# The samples run natively, through the shim alone, four at once and all together; then the numbers, side by side.
set -u
[ $# -ge 1 ] || { sed -n '2,6s/^# \{0,1\}//p' "$0" >&2; exit 2; }
here=$(cd "$(dirname "$0")/.." && pwd)
programs=$1 build=${2:-$here/target/release} out=${3:-gpu-check}
status=0

"$here/tests/gpu/samples.py" --programs "$programs" --build "$build" --out "$out/samples" || status=1
"$here/benches/gpu/run.py" --build "$build" --results "$out" --microbench "$programs/microbench" \
    --nbody "$programs/nbody" --quick || status=1
exit $status
