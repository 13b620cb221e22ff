// The C interface of AddLayerNormGrad on CUDA: checks and plans in phase one, enqueues kernels in phase two.
#include <new>

#include "add_layer_norm_grad/cuda_launch.h"
#include "add_layer_norm_grad/cuda_plan.h"
#include "add_layer_norm_grad/problem.h"
#include "cuda_device.h"
#include "last_error.h"
#include "ort_ops/add_layer_norm_grad.h"

struct OrtOpsAddLayerNormGradCudaExecutor {
  ort_ops::add_layer_norm_grad::Problem problem;
  ort_ops::add_layer_norm_grad::CudaPlan plan;
};

using ort_ops::Fail;
namespace alng = ort_ops::add_layer_norm_grad;

extern "C" OrtOpsStatus ort_ops_add_layer_norm_grad_cuda_get_workspace_size(
    const OrtOpsTensor* dy, const OrtOpsTensor* x1, const OrtOpsTensor* x2, const OrtOpsTensor* rstd,
    const OrtOpsTensor* mean, const OrtOpsTensor* gamma, const OrtOpsTensor* dsum, const OrtOpsTensor* dx,
    const OrtOpsTensor* dgamma, const OrtOpsTensor* dbeta, size_t* workspace_bytes,
    OrtOpsAddLayerNormGradCudaExecutor** executor) {
  if (workspace_bytes == nullptr || executor == nullptr) {
    return Fail(ORT_OPS_NULL_POINTER, "workspace_bytes and executor are required; got a null pointer");
  }
  alng::Problem problem;
  const alng::Tensors tensors = {dy, x1, x2, rstd, mean, gamma, dsum, dx, dgamma, dbeta};
  try {
    if (const auto status = alng::MakeProblem(tensors, &problem)) return status;
  } catch (const std::bad_alloc&) {
    return Fail(ORT_OPS_OUT_OF_MEMORY, "no memory for the sentence that would say what is wrong");
  }
  ort_ops::CudaDevice device = {};
  if (const auto status = ort_ops::DescribeCudaDevice(&device)) return status;
  alng::CudaPlan plan;
  if (const auto status = alng::MakeCudaPlan(problem, device, &plan)) return status;
  *executor = new (std::nothrow) OrtOpsAddLayerNormGradCudaExecutor{problem, plan};
  if (*executor == nullptr) return Fail(ORT_OPS_OUT_OF_MEMORY, "no memory for the executor");
  *workspace_bytes = plan.workspace_bytes;
  return ORT_OPS_SUCCESS;
}

extern "C" OrtOpsStatus ort_ops_add_layer_norm_grad_cuda(void* workspace, size_t workspace_bytes,
                                                         const OrtOpsAddLayerNormGradCudaExecutor* executor,
                                                         void* stream) {
  if (executor == nullptr) return Fail(ORT_OPS_NULL_POINTER, "executor is required; got a null pointer");
  const size_t needed = executor->plan.workspace_bytes;
  if (workspace_bytes < needed) {
    return Fail(ORT_OPS_WORKSPACE_TOO_SMALL, "workspace must have %zu bytes; got %zu", needed,
                workspace_bytes);
  }
  if (needed != 0 && workspace == nullptr) {
    return Fail(ORT_OPS_NULL_POINTER, "workspace must have %zu bytes; got a null pointer", needed);
  }
  if (reinterpret_cast<uintptr_t>(workspace) % 16 != 0) {
    return Fail(ORT_OPS_INVALID_PARAMETER, "workspace must be aligned to 16 bytes; got %p", workspace);
  }
  return alng::LaunchCuda(executor->problem, executor->plan, workspace, stream);
}

extern "C" void ort_ops_add_layer_norm_grad_cuda_destroy(OrtOpsAddLayerNormGradCudaExecutor* executor) {
  delete executor;
}
