"""numba-cuda: kernels, shared memory, atomics, streams, mapped and managed memory, cooperative grids."""
import numpy as np

if not hasattr(np, "row_stack"):  # numpy 2.5 took away what older numba looks for
    np.row_stack, np.in1d, np.trapz = np.vstack, np.isin, np.trapezoid
from numba import cuda, float32


@cuda.jit
def axpy(f, x, y):
    i = cuda.grid(1)
    if i < x.size:
        y[i] += f * x[i]


@cuda.jit
def block_sums(x, out):
    shared = cuda.shared.array(128, float32)
    t = cuda.threadIdx.x
    shared[t] = x[cuda.grid(1)]
    cuda.syncthreads()
    step = 64
    while step > 0:
        if t < step:
            shared[t] += shared[t + step]
        cuda.syncthreads()
        step //= 2
    if t == 0:
        cuda.atomic.add(out, 0, shared[0])


@cuda.jit
def two_phases(x, out):
    g = cuda.cg.this_grid()
    x[cuda.grid(1)] += 1
    g.sync()
    if cuda.grid(1) == 0:
        total = 0.0
        for i in range(x.size):
            total += x[i]
        out[0] = total


x = np.arange(1024, dtype=np.float32)
d, y = cuda.to_device(x), cuda.to_device(np.ones(1024, np.float32))
axpy[8, 128](2.0, d, y)
print(f"axpy: {y.copy_to_host().sum():.0f}")
out = cuda.to_device(np.zeros(1, np.float32))
block_sums[8, 128](d, out)
print(f"block_sums: {out.copy_to_host()[0]:.0f}")
z = cuda.to_device(np.zeros(1024, np.float32))
two_phases[8, 128](z, out)
print(f"cooperative: {out.copy_to_host()[0]:.0f}")
stream = cuda.stream()
with cuda.pinned(x):
    e = cuda.to_device(x, stream=stream)
    axpy[8, 128, stream](1.0, d, e)
    host = e.copy_to_host(stream=stream)
stream.synchronize()
print(f"pinned_stream: {host.sum():.0f}")
mapped = cuda.mapped_array(1024, np.float32)
mapped[:] = 1
axpy[8, 128](1.0, d, mapped)
cuda.synchronize()
print(f"mapped: {mapped.sum():.0f}")
managed = cuda.managed_array(1024, np.float32)
managed[:] = 2
axpy[8, 128](1.0, d, managed)
cuda.synchronize()
print(f"managed: {managed.sum():.0f}")
