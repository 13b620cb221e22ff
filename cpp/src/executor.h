// What phase one of the C interface hands to phase two, and what both phases of every operator have in common.
#ifndef ORT_OPS_EXECUTOR_H_
#define ORT_OPS_EXECUTOR_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>
#include <optional>

#include "cuda_device.h"
#include "last_error.h"
#include "ort_ops/ort_ops.h"

// One checked call, planned for the CPU, and with ort_ops_plan_on_cuda for a CUDA device. Run and RunOnCuda are const: an
// executor may be run by several threads, each with its own workspace.
struct OrtOpsExecutor {
  explicit OrtOpsExecutor(size_t bytes) : workspace_bytes(bytes) {}
  virtual ~OrtOpsExecutor() = default;
  virtual OrtOpsStatus Run(void* workspace, const OrtOpsParallelFor* parallel_for) const = 0;

  // For operators with CUDA kernels, which derive from ExecutorOf.
  virtual OrtOpsStatus PlanOnCuda(const ort_ops::CudaDevice&, size_t*) const { return HasNoCudaKernel(); }
  virtual OrtOpsStatus RunOnCuda(void*, void*) const { return HasNoCudaKernel(); }

  const size_t workspace_bytes;
  // Of the plan for a CUDA device; none yet.
  std::optional<ort_ops::CudaDevice> cuda_device;
  size_t cuda_workspace_bytes = 0;

 private:
  static OrtOpsStatus HasNoCudaKernel() {
    return ort_ops::Fail(ORT_OPS_INVALID_PARAMETER, "the operator must be one with CUDA kernels; got one without");
  }
};

namespace ort_ops {

// What a run on CUDA needs of the workspace, unless the operator declares a PlanCuda for its own Problem.
template <class Problem>
OrtOpsStatus PlanCuda(const Problem&, const CudaDevice&, size_t* workspace_bytes) {
  *workspace_bytes = 0;
  return ORT_OPS_SUCCESS;
}

// The executor of an operator with CUDA kernels. Its problem.h declares, for its cuda.cu to define,
//     OrtOpsStatus LaunchCuda(const Problem& problem, const CudaDevice& device, void* workspace, void* stream);
// which enqueues the kernels on `stream` (a cudaStream_t) and returns, with no allocation and no synchronisation.
template <class Problem>
struct ExecutorOf : OrtOpsExecutor {
  ExecutorOf(const Problem& its_problem, size_t bytes) : OrtOpsExecutor(bytes), problem(its_problem) {}
#ifdef ORT_OPS_WITH_CUDA
  OrtOpsStatus PlanOnCuda(const CudaDevice& device, size_t* bytes) const final {
    return PlanCuda(problem, device, bytes);
  }
  OrtOpsStatus RunOnCuda(void* workspace, void* stream) const final {
    return LaunchCuda(problem, *cuda_device, workspace, stream);
  }
#endif

  const Problem problem;
};

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
