// Phase two of the C interface on the CPU, the same for every operator.
#include "executor.h"

extern "C" OrtOpsStatus ort_ops_run_on_cpu(void* workspace, size_t workspace_bytes, const OrtOpsExecutor* executor,
                                           const OrtOpsParallelFor* parallel_for) {
  using ort_ops::Fail;
  if (executor == nullptr) return Fail(ORT_OPS_NULL_POINTER, "executor is required; got a null pointer");
  const size_t needed = executor->workspace_bytes;
  if (workspace_bytes < needed) {
    return Fail(ORT_OPS_WORKSPACE_TOO_SMALL, "workspace must have %zu bytes; got %zu", needed, workspace_bytes);
  }
  if (needed != 0 && workspace == nullptr) {
    return Fail(ORT_OPS_NULL_POINTER, "workspace must have %zu bytes; got a null pointer", needed);
  }
  if (needed != 0 && reinterpret_cast<uintptr_t>(workspace) % 64 != 0) {
    return Fail(ORT_OPS_INVALID_PARAMETER, "workspace must be aligned to 64 bytes; got %p", workspace);
  }
  return executor->Run(workspace, parallel_for);
}

extern "C" void ort_ops_destroy_executor(OrtOpsExecutor* executor) { delete executor; }
