// Includes nothing of torch, so that nvcc is done in seconds; binding.cpp is what torch sees.

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "norm.h"

namespace rapid_infer_op_cuda {
namespace {

__device__ float widen(float x) { return x; }
__device__ float widen(__half x) { return __half2float(x); }
__device__ float widen(__nv_bfloat16 x) { return __bfloat162float(x); }

// Two at a time is one instruction; one alone would go through the slow unit for conversions.
__device__ void narrow(float x, float y, float* to) { to[0] = x, to[1] = y; }
__device__ void narrow(float x, float y, __half* to) { *reinterpret_cast<__half2*>(to) = __floats2half2_rn(x, y); }
__device__ void narrow(float x, float y, __nv_bfloat16* to) {
  *reinterpret_cast<__nv_bfloat162*>(to) = __floats2bfloat162_rn(x, y);
}

// WIDTH values that are loaded and stored by one instruction.
template <typename T, int WIDTH> struct alignas(sizeof(T) * WIDTH) Pack {
  T at[WIDTH];
};

template <typename T, int WIDTH> __device__ Pack<T, WIDTH> rounded(const float (&x)[WIDTH]) {
  Pack<T, WIDTH> result;
#pragma unroll
  for (int j = 0; j < WIDTH; j += 2) {
    alignas(2 * sizeof(T)) T two[2];
    narrow(x[j], j + 1 < WIDTH ? x[j + 1] : 0.0f, two);
    result.at[j] = two[0];
    if (j + 1 < WIDTH) result.at[j + 1] = two[1];
  }
  return result;
}

template <typename T, int WIDTH>
__device__ Pack<T, WIDTH> add(Pack<T, WIDTH> x, Pack<T, WIDTH> y, float& squares) {
  float wide[WIDTH];
#pragma unroll
  for (int j = 0; j < WIDTH; ++j) wide[j] = widen(x.at[j]) + widen(y.at[j]);
  const Pack<T, WIDTH> sum = rounded<T>(wide);
#pragma unroll
  for (int j = 0; j < WIDTH; ++j) squares += widen(sum.at[j]) * widen(sum.at[j]);
  return sum;
}

// Rounded before the weight is applied and after it, as in the reference.
template <typename T, int WIDTH>
__device__ Pack<T, WIDTH> weigh(Pack<T, WIDTH> x, Pack<T, WIDTH> weight, float scale) {
  float wide[WIDTH];
#pragma unroll
  for (int j = 0; j < WIDTH; ++j) wide[j] = widen(x.at[j]) * scale;
  x = rounded<T>(wide);
#pragma unroll
  for (int j = 0; j < WIDTH; ++j) wide[j] = widen(x.at[j]) * widen(weight.at[j]);
  return rounded<T>(wide);
}

// The same on all threads of the block. The order of the additions depends on blockDim, which depends on the size of a
// row alone: a row's result does not depend on how many there are.
__device__ float block_sum(float x) {
  __shared__ float of_warp[32];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(0xffffffffu, x, step);
  if (lane == 0) of_warp[warp] = x;
  __syncthreads();
  x = lane < blockDim.x / 32 ? of_warp[lane] : 0.0f;
  for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(0xffffffffu, x, step);
  return x;
}

constexpr int MAX_THREADS = 1024;

// A block for each row. A thread keeps its first pack in registers; of rows longer than MAX_THREADS packs it reads the
// others a second time.
template <typename T, int WIDTH>
__global__ void __launch_bounds__(MAX_THREADS)
    add_rms_norm_kernel(const T* x, T* residual, const T* weight, T* out, int size, float eps) {
  using P = Pack<T, WIDTH>;
  const int64_t row = static_cast<int64_t>(blockIdx.x) * size;
  const P* of_x = reinterpret_cast<const P*>(x + row);
  P* of_residual = reinterpret_cast<P*>(residual + row);
  const P* of_weight = reinterpret_cast<const P*>(weight);
  P* of_out = reinterpret_cast<P*>(out + row);
  const int packs = size / WIDTH, first = threadIdx.x, second = first + blockDim.x;
  const bool has_first = first < packs;
  const float share = 1.0f / size;
  float squares = 0.0f;
  P sum, first_weight;

  // Programmatic dependent launch: the next kernel may start, and this one did while the one before still ran; it may
  // read weights, but nothing else until that one is done.
  cudaTriggerProgrammaticLaunchCompletion();
  if (has_first) first_weight = of_weight[first];
  cudaGridDependencySynchronize();

  if (has_first) of_residual[first] = sum = add(of_residual[first], of_x[first], squares);
  for (int i = second; i < packs; i += blockDim.x) of_residual[i] = add(of_residual[i], of_x[i], squares);
  const float scale = rsqrtf(block_sum(squares) * share + eps);
  if (has_first) of_out[first] = weigh(sum, first_weight, scale);
  for (int i = second; i < packs; i += blockDim.x) of_out[i] = weigh(of_residual[i], of_weight[i], scale);
}

template <typename T, int WIDTH>
cudaError_t launch(const T* x, T* residual, const T* weight, T* out, int rows, int size, float eps,
                   cudaStream_t stream) {
  const int packs = size / WIDTH;
  cudaLaunchAttribute early{};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(rows));
  config.blockDim = dim3(packs < MAX_THREADS ? (packs + 31) / 32 * 32 : MAX_THREADS);
  config.stream = stream;
  config.attrs = &early;
  config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, add_rms_norm_kernel<T, WIDTH>, x, residual, weight, out, size, eps);
}

// By loads of 16 bytes where all rows are aligned to them.
template <typename T>
cudaError_t launch(const void* x, void* residual, const void* weight, void* out, int rows, int size, float eps,
                   cudaStream_t stream) {
  constexpr int widest = 16 / sizeof(T);
  const auto bits = reinterpret_cast<uintptr_t>(x) | reinterpret_cast<uintptr_t>(residual) |
                    reinterpret_cast<uintptr_t>(weight) | reinterpret_cast<uintptr_t>(out);
  const auto kernel = size % widest == 0 && bits % 16 == 0 ? launch<T, widest> : launch<T, 1>;
  return kernel(static_cast<const T*>(x), static_cast<T*>(residual), static_cast<const T*>(weight),
                static_cast<T*>(out), rows, size, eps, stream);
}

}  // namespace

cudaError_t add_rms_norm(DType dtype, const void* x, void* residual, const void* weight, void* out, int rows, int size,
                         float eps, cudaStream_t stream) {
  switch (dtype) {
    case DType::float32: return launch<float>(x, residual, weight, out, rows, size, eps, stream);
    case DType::float16: return launch<__half>(x, residual, weight, out, rows, size, eps, stream);
    default: return launch<__nv_bfloat16>(x, residual, weight, out, rows, size, eps, stream);
  }
}

}  // namespace rapid_infer_op_cuda
