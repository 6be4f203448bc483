// One step of an all-pairs gravity simulation, in float and in double.
//
// Each thread owns one body. A block loads the positions of blockDim.x bodies at a time into dynamic shared memory (a
// tile; blockDim.x * 4 * sizeof(T) bytes at launch) and every thread adds up the pull of that tile on its own body.
// A body is x, y, z and its mass. The number of bodies must be a multiple of blockDim.x.
//
// scripts/build-ptx.sh turns this file into nbody.ptx. Plain instructions only: the text also runs in softgpu.

extern __shared__ __align__(16) unsigned char shared_bytes[];

__device__ __forceinline__ float inverse_root(float x) { return rsqrtf(x); }

// sqrt and division have one correctly rounded PTX instruction each; rsqrt(double) is a library routine.
__device__ __forceinline__ double inverse_root(double x) { return 1.0 / sqrt(x); }

template <typename T, typename T4>
__device__ __forceinline__ void step(const T4 *__restrict__ positions, T4 *__restrict__ next_positions,
                                     T4 *__restrict__ velocities, unsigned first, unsigned bodies, T time_step,
                                     T damping, T softening_squared) {
    T4 *tile = reinterpret_cast<T4 *>(shared_bytes);
    const unsigned body = first + blockIdx.x * blockDim.x + threadIdx.x;
    T4 here = positions[body];
    T ax = 0, ay = 0, az = 0;

    for (unsigned start = 0; start < bodies; start += blockDim.x) {
        tile[threadIdx.x] = positions[start + threadIdx.x];
        __syncthreads();
#pragma unroll 32
        for (unsigned i = 0; i < blockDim.x; i++) {
            const T4 other = tile[i];
            const T dx = other.x - here.x, dy = other.y - here.y, dz = other.z - here.z;
            const T inverse = inverse_root(softening_squared + dx * dx + dy * dy + dz * dz);
            const T pull = other.w * (inverse * inverse * inverse);
            ax += dx * pull;
            ay += dy * pull;
            az += dz * pull;
        }
        __syncthreads();
    }

    T4 velocity = velocities[body];
    velocity.x = (velocity.x + ax * time_step) * damping;
    velocity.y = (velocity.y + ay * time_step) * damping;
    velocity.z = (velocity.z + az * time_step) * damping;
    here.x += velocity.x * time_step;
    here.y += velocity.y * time_step;
    here.z += velocity.z * time_step;
    next_positions[body] = here;
    velocities[body] = velocity;
}

// Moves the gridDim.x * blockDim.x bodies from `first` on; `bodies` is the number of all bodies.
extern "C" __global__ void __launch_bounds__(256)
nbody_step_f32(const float4 *positions, float4 *next_positions, float4 *velocities, unsigned first, unsigned bodies,
               float time_step, float damping, float softening_squared) {
    step<float, float4>(positions, next_positions, velocities, first, bodies, time_step, damping, softening_squared);
}

extern "C" __global__ void __launch_bounds__(256)
nbody_step_f64(const double4_16a *positions, double4_16a *next_positions, double4_16a *velocities, unsigned first,
               unsigned bodies, double time_step, double damping, double softening_squared) {
    step<double, double4_16a>(positions, next_positions, velocities, first, bodies, time_step, damping,
                              softening_squared);
}
