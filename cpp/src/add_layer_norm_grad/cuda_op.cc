// A node on CUDA: the C interface with the stream and the device memory that the runtime gives.
#include <memory>
#include <string>

#include "add_layer_norm_grad/op.h"
#include "ort_ops/add_layer_norm_grad.h"

namespace ort_ops::add_layer_norm_grad {
namespace {

struct ReleaseExecutor {
  void operator()(OrtOpsAddLayerNormGradCudaExecutor* executor) const {
    ort_ops_add_layer_norm_grad_cuda_destroy(executor);
  }
};

// Memory that the runtime hands to nobody else on another stream before this stream has passed the kernels
// that use it; so it can be given back as soon as they are enqueued.
OrtStatus* AllocateOnStream(const Kernel& kernel, OrtKernelContext* context, size_t bytes, void** memory) {
  const OrtMemoryInfo* info = nullptr;
  if (OrtStatus* status = kernel.api.AllocatorGetInfo(kernel.allocator.get(), &info)) return status;
  if (OrtStatus* status = kernel.api.KernelContext_GetScratchBuffer(context, info, bytes, memory))
    return status;
  if (*memory != nullptr) return nullptr;
  return NodeError(kernel, ORT_RUNTIME_EXCEPTION,
                   "no memory for a workspace of " + std::to_string(bytes) + " bytes");
}

OrtStatus* RunOnStream(const Kernel& kernel, OrtKernelContext* context, size_t workspace_bytes,
                       const OrtOpsAddLayerNormGradCudaExecutor* executor) {
  void* stream = nullptr;
  if (OrtStatus* status = kernel.api.KernelContext_GetGPUComputeStream(context, &stream)) return status;
  OrtAllocator* allocator = kernel.allocator.get();
  const auto free_workspace = [allocator](void* p) { allocator->Free(allocator, p); };
  std::unique_ptr<void, decltype(free_workspace)> workspace(nullptr, free_workspace);
  if (workspace_bytes != 0) {
    void* memory = nullptr;
    if (OrtStatus* status = AllocateOnStream(kernel, context, workspace_bytes, &memory)) return status;
    workspace.reset(memory);
  }
  return ToOrtStatus(kernel,
                     ort_ops_add_layer_norm_grad_cuda(workspace.get(), workspace_bytes, executor, stream));
}

OrtStatus* RunOnCuda(const Kernel& kernel, OrtKernelContext* context, const Call& call) {
  size_t workspace_bytes = 0;
  OrtOpsAddLayerNormGradCudaExecutor* executor = nullptr;
  const auto& in = call.inputs;
  const auto& out = call.outputs;
  const OrtOpsStatus status = ort_ops_add_layer_norm_grad_cuda_get_workspace_size(
      in[kDy], in[kX1], in[kX2], in[kRstd], in[kMean], in[kGamma], in[kDsum], out[kDx], out[kDgamma], out[kDbeta],
      &workspace_bytes, &executor);
  if (status != ORT_OPS_SUCCESS) return ToOrtStatus(kernel, status);
  const std::unique_ptr<OrtOpsAddLayerNormGradCudaExecutor, ReleaseExecutor> owned(executor);
  return RunOnStream(kernel, context, workspace_bytes, executor);
}

}  // namespace

const Provider kCudaProvider = {"CUDAExecutionProvider", RunOnCuda};

}  // namespace ort_ops::add_layer_norm_grad
