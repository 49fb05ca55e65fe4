// Checks what comes from Python and hands it to the kernel, on torch's current stream, so that a CUDA graph records it.

#include <limits>

#include <ATen/core/Tensor.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

#include "norm.h"

namespace rapid_infer_op_cuda {
namespace {

DType dtype_of(const at::Tensor& x) {
  switch (x.scalar_type()) {
    case at::kFloat: return DType::float32;
    case at::kHalf: return DType::float16;
    case at::kBFloat16: return DType::bfloat16;
    default: TORCH_CHECK(false, "add_rms_norm: got x of another dtype than float32, float16 and bfloat16");
  }
}

void add_rms_norm_on_gpu(const at::Tensor& x, const at::Tensor& residual, const at::Tensor& weight, double eps,
                         const at::Tensor& out) {
  constexpr int64_t limit = std::numeric_limits<int>::max();
  const DType dtype = dtype_of(x);
  TORCH_CHECK(x.dim() > 0 && x.size(-1) > 0 && x.size(-1) <= limit && x.numel() / x.size(-1) <= limit,
              "add_rms_norm: expected x [..., size], with fewer than 2^31 rows and values in a row");
  const int size = static_cast<int>(x.size(-1)), rows = static_cast<int>(x.numel() / size);
  // Messages without numbers: some compilers link a second C++ library into the extension, and printing one crashes.
  TORCH_CHECK(residual.sizes() == x.sizes() && out.sizes() == x.sizes() && weight.dim() == 1 && weight.size(0) == size,
              "add_rms_norm: expected residual and out in the shape of x [..., size], and weight [size]");
  for (const at::Tensor* one : {&x, &residual, &weight, &out})
    TORCH_CHECK(one->is_contiguous() && one->scalar_type() == x.scalar_type() && one->device() == x.device(),
                "add_rms_norm: expected contiguous tensors of one dtype on one device");
  if (rows == 0) return;
  const c10::cuda::CUDAGuard guard(x.device());
  C10_CUDA_CHECK(add_rms_norm(dtype, x.const_data_ptr(), residual.mutable_data_ptr(), weight.const_data_ptr(),
                              out.mutable_data_ptr(), rows, size, static_cast<float>(eps),
                              c10::cuda::getCurrentCUDAStream()));
}

TORCH_LIBRARY(rapid_infer_op_cuda, library) {
  library.def("add_rms_norm(Tensor x, Tensor(a!) residual, Tensor weight, float eps, Tensor(b!) out) -> ()");
}

TORCH_LIBRARY_IMPL(rapid_infer_op_cuda, CUDA, library) { library.impl("add_rms_norm", &add_rms_norm_on_gpu); }

}  // namespace
}  // namespace rapid_infer_op_cuda
