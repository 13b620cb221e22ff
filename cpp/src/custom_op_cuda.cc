// A node on CUDA: the C interface with the stream and the device memory that the runtime gives.
#include <memory>
#include <string>

#include "custom_op.h"

namespace ort_ops {
namespace {

// Memory that the runtime hands to nobody else on another stream before this stream has passed the kernels
// that use it; so it can be given back as soon as they are enqueued.
OrtStatus* AllocateOnStream(const Kernel& kernel, OrtKernelContext* context, size_t bytes, void** memory) {
  const OrtMemoryInfo* info = nullptr;
  if (OrtStatus* status = kernel.api.AllocatorGetInfo(kernel.allocator.get(), &info)) return status;
  if (OrtStatus* status = kernel.api.KernelContext_GetScratchBuffer(context, info, bytes, memory)) return status;
  if (*memory != nullptr) return nullptr;
  return NodeError(kernel, ORT_RUNTIME_EXCEPTION,
                   "no memory for a workspace of " + std::to_string(bytes) + " bytes");
}

OrtStatus* RunOnStream(const Kernel& kernel, OrtKernelContext* context, size_t workspace_bytes,
                       const OrtOpsExecutor* executor) {
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
  return ToOrtStatus(kernel, ort_ops_run_on_cuda(workspace.get(), workspace_bytes, executor, stream));
}

OrtStatus* RunOnCuda(const Kernel& kernel, OrtKernelContext* context, const Call& call) {
  size_t workspace_bytes = 0;
  ExecutorPtr executor;
  if (OrtStatus* status = PlanCall(kernel, call, &workspace_bytes, executor)) return status;
  const OrtOpsStatus status = ort_ops_plan_on_cuda(executor.get(), &workspace_bytes);
  if (status != ORT_OPS_SUCCESS) return ToOrtStatus(kernel, status);
  return RunOnStream(kernel, context, workspace_bytes, executor.get());
}

}  // namespace

const Provider kCudaProvider = {"CUDAExecutionProvider", RunOnCuda};

}  // namespace ort_ops
