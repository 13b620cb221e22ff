// What phase one of the C interface hands to phase two, and what both phases of every operator have in common.
#ifndef ORT_OPS_EXECUTOR_H_
#define ORT_OPS_EXECUTOR_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>

#include "last_error.h"
#include "ort_ops/ort_ops.h"

// One checked and planned call on the CPU. Run is const: an executor may be run by several threads, each with its own
// workspace.
struct OrtOpsExecutor {
  explicit OrtOpsExecutor(size_t bytes) : workspace_bytes(bytes) {}
  virtual ~OrtOpsExecutor() = default;
  virtual OrtOpsStatus Run(void* workspace, const OrtOpsParallelFor* parallel_for) const = 0;

  const size_t workspace_bytes;
};

namespace ort_ops {

// Phase one of an operator: `plan(made)` checks the arguments and makes the executor, and may throw std::bad_alloc.
template <class Plan>
OrtOpsStatus PhaseOne(size_t* workspace_bytes, OrtOpsExecutor** executor, const Plan& plan) {
  if (workspace_bytes == nullptr || executor == nullptr) {
    return Fail(ORT_OPS_NULL_POINTER, "workspace_bytes and executor are required; got a null pointer");
  }
  std::unique_ptr<OrtOpsExecutor> made;
  try {
    if (const OrtOpsStatus status = plan(made)) return status;
  } catch (const std::bad_alloc&) {
    return Fail(ORT_OPS_OUT_OF_MEMORY, "no memory for the plan, or for the sentence that would say what is wrong");
  }
  *workspace_bytes = made->workspace_bytes;
  *executor = made.release();
  return ORT_OPS_SUCCESS;
}

// Calls task(i) for each i in [0, count), on the caller's threads where there are any.
template <class Task>
OrtOpsStatus ParallelFor(const OrtOpsParallelFor* parallel_for, int64_t count, const Task& task) {
  // One task is not worth waking another thread.
  if (parallel_for == nullptr || count <= 1) {
    for (int64_t i = 0; i < count; ++i) task(i);
    return ORT_OPS_SUCCESS;
  }
  const auto call = [](void* data, size_t index) { (*static_cast<const Task*>(data))(static_cast<int64_t>(index)); };
  if (parallel_for->run(parallel_for->context, static_cast<size_t>(count), call, const_cast<Task*>(&task)) != 0) {
    return Fail(ORT_OPS_PARALLEL_FOR_FAILED, "the caller's parallel-for did not run its %lld tasks",
                static_cast<long long>(count));
  }
  return ORT_OPS_SUCCESS;
}

}  // namespace ort_ops

#endif  // ORT_OPS_EXECUTOR_H_
