#!/bin/sh
# Regenerates examples/nbody/kernels/nbody.ptx from nbody.cu. Needed only after a change to the .cu file: the .ptx is
# checked in, so that neither a build nor CI needs a CUDA toolkit. NVCC names the compiler (default: nvcc on PATH).
set -eu
cd "$(dirname "$0")/../examples/nbody/kernels"
"${NVCC:-nvcc}" -ptx -arch=compute_75 -O3 nbody.cu -o nbody.ptx
# A driver refuses PTX of a newer version than its own, and the text uses nothing newer than 7.0 (CUDA 11.0).
# The compiler's build number says nothing about the text.
sed -i -e 's/^\.version .*/.version 7.0/' -e '/^\/\/ Compiler Build ID/d' nbody.ptx
echo "wrote examples/nbody/kernels/nbody.ptx"
