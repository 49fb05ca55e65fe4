#pragma once

#include <cstdint>

#include <cuda_runtime_api.h>

namespace rapid_infer_op_cuda {

enum class DType { float32, float16, bfloat16 };

// residual += x; out = residual / sqrt(mean(residual^2) + eps) * weight.
// x, residual, out [rows, size], weight [size]: contiguous, of one dtype, on the device of the stream.
cudaError_t add_rms_norm(DType dtype, const void* x, void* residual, const void* weight, void* out, int rows, int size,
                         float eps, cudaStream_t stream);

}  // namespace rapid_infer_op_cuda
