// Both phases of the C interface on CUDA, the same for every operator.
#include "executor.h"

using ort_ops::Fail;

extern "C" OrtOpsStatus ort_ops_plan_on_cuda(OrtOpsExecutor* executor, size_t* workspace_bytes) {
  if (executor == nullptr || workspace_bytes == nullptr) {
    return Fail(ORT_OPS_NULL_POINTER, "executor and workspace_bytes are required; got a null pointer");
  }
  ort_ops::CudaDevice device = {};
  if (const auto status = ort_ops::DescribeCudaDevice(&device)) return status;
  if (const auto status = executor->PlanOnCuda(device, &executor->cuda_workspace_bytes)) return status;
  executor->cuda_device = device;
  *workspace_bytes = executor->cuda_workspace_bytes;
  return ORT_OPS_SUCCESS;
}

extern "C" OrtOpsStatus ort_ops_run_on_cuda(void* workspace, size_t workspace_bytes, const OrtOpsExecutor* executor,
                                            void* stream) {
  if (executor == nullptr) return Fail(ORT_OPS_NULL_POINTER, "executor is required; got a null pointer");
  if (!executor->cuda_device) {
    return Fail(ORT_OPS_INVALID_PARAMETER, "executor must be planned by ort_ops_plan_on_cuda first; got one that is not");
  }
  const size_t needed = executor->cuda_workspace_bytes;
  if (workspace_bytes < needed) {
    return Fail(ORT_OPS_WORKSPACE_TOO_SMALL, "workspace must have %zu bytes; got %zu", needed, workspace_bytes);
  }
  if (needed != 0 && workspace == nullptr) {
    return Fail(ORT_OPS_NULL_POINTER, "workspace must have %zu bytes; got a null pointer", needed);
  }
  if (needed != 0 && reinterpret_cast<uintptr_t>(workspace) % 16 != 0) {
    return Fail(ORT_OPS_INVALID_PARAMETER, "workspace must be aligned to 16 bytes; got %p", workspace);
  }
  return executor->RunOnCuda(workspace, stream);
}
