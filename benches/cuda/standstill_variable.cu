// The part of standstill.cu that has a variable in device memory. In an image of its own: mpsshim loads an image
// without such a variable once for all clients, one with it for each.

#include <cuda_runtime.h>

namespace {

__device__ unsigned factors[4];

// The program replaces the digits before its first call; this literal is not read by the program itself.
__global__ void scale(unsigned *data, unsigned count) {
    const char *nonce = "standstill nonce 0000000000000000";
    const unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count) {
        data[i] = data[i] * factors[i % 4] + unsigned(nonce[i % 17]);
    }
}

} // namespace

// Sets the variable and launches a kernel that multiplies by it and adds the first letters of "standstill nonce ".
cudaError_t scale_by_variable(unsigned *data, unsigned count, const unsigned values[4]) {
    const cudaError_t status = cudaMemcpyToSymbol(factors, values, 4 * sizeof(unsigned));
    if (status != cudaSuccess) {
        return status;
    }
    scale<<<(count + 255) / 256, 256>>>(data, count);
    return cudaGetLastError();
}
