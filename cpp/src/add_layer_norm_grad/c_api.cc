// The C interface of AddLayerNormGrad: checks and plans in phase one, hands the tasks to the caller's threads in phase two.
#include "ort_ops/add_layer_norm_grad.h"

#include <new>

#include "add_layer_norm_grad/cpu.h"
#include "add_layer_norm_grad/plan.h"
#include "add_layer_norm_grad/problem.h"
#include "last_error.h"

struct OrtOpsAddLayerNormGradExecutor {
  ort_ops::add_layer_norm_grad::Problem problem;
  ort_ops::add_layer_norm_grad::Plan plan;
};

namespace ort_ops::add_layer_norm_grad {
namespace {

struct Run {
  const Problem& problem;
  const Plan& plan;
  float* partials;
};

void RunBlockTask(void* data, size_t block) {
  const Run& run = *static_cast<const Run*>(data);
  RunBlock(run.problem, run.plan, run.partials, static_cast<int64_t>(block));
}

void CombineTileTask(void* data, size_t tile) {
  const Run& run = *static_cast<const Run*>(data);
  CombineTile(run.problem, run.plan, run.partials, static_cast<int64_t>(tile));
}

OrtOpsStatus ParallelFor(const OrtOpsParallelFor* parallel_for, int64_t count, void (*task)(void*, size_t), Run* run) {
  // One task is not worth waking another thread.
  if (parallel_for == nullptr || count <= 1) {
    for (int64_t i = 0; i < count; ++i) task(run, static_cast<size_t>(i));
    return ORT_OPS_SUCCESS;
  }
  if (parallel_for->run(parallel_for->context, static_cast<size_t>(count), task, run) != 0) {
    return Fail(ORT_OPS_PARALLEL_FOR_FAILED, "the caller's parallel-for did not run its %lld tasks",
                static_cast<long long>(count));
  }
  return ORT_OPS_SUCCESS;
}

}  // namespace
}  // namespace ort_ops::add_layer_norm_grad

using ort_ops::Fail;
namespace alng = ort_ops::add_layer_norm_grad;

extern "C" OrtOpsStatus ort_ops_add_layer_norm_grad_get_workspace_size(
    const OrtOpsTensor* dy, const OrtOpsTensor* x1, const OrtOpsTensor* x2, const OrtOpsTensor* rstd,
    const OrtOpsTensor* mean, const OrtOpsTensor* gamma, const OrtOpsTensor* dsum, const OrtOpsTensor* dx,
    const OrtOpsTensor* dgamma, const OrtOpsTensor* dbeta, size_t* workspace_bytes,
    OrtOpsAddLayerNormGradExecutor** executor) {
  if (workspace_bytes == nullptr || executor == nullptr) {
    return Fail(ORT_OPS_NULL_POINTER, "workspace_bytes and executor are required; got a null pointer");
  }
  alng::Problem problem;
  const alng::Tensors tensors = {dy, x1, x2, rstd, mean, gamma, dsum, dx, dgamma, dbeta};
  if (const auto status = alng::MakeProblem(tensors, &problem)) return status;
  const alng::Plan plan = alng::MakePlan(problem);
  *executor = new (std::nothrow) OrtOpsAddLayerNormGradExecutor{problem, plan};
  if (*executor == nullptr) return Fail(ORT_OPS_OUT_OF_MEMORY, "no memory for the executor");
  *workspace_bytes = plan.workspace_bytes;
  return ORT_OPS_SUCCESS;
}

extern "C" OrtOpsStatus ort_ops_add_layer_norm_grad_cpu(void* workspace, size_t workspace_bytes,
                                                        const OrtOpsAddLayerNormGradExecutor* executor,
                                                        const OrtOpsParallelFor* parallel_for) {
  if (executor == nullptr) return Fail(ORT_OPS_NULL_POINTER, "executor is required; got a null pointer");
  const alng::Problem& problem = executor->problem;
  const alng::Plan& plan = executor->plan;
  if (workspace_bytes < plan.workspace_bytes) {
    return Fail(ORT_OPS_WORKSPACE_TOO_SMALL, "workspace must have %zu bytes; got %zu", plan.workspace_bytes,
                workspace_bytes);
  }
  if (plan.workspace_bytes != 0 && workspace == nullptr) {
    return Fail(ORT_OPS_NULL_POINTER, "workspace must have %zu bytes; got a null pointer", plan.workspace_bytes);
  }
  if (plan.workspace_bytes != 0 && reinterpret_cast<uintptr_t>(workspace) % 64 != 0) {
    return Fail(ORT_OPS_INVALID_PARAMETER, "workspace must be aligned to 64 bytes; got %p", workspace);
  }
  alng::Run run = {problem, plan, static_cast<float*>(workspace)};
  if (const auto status = alng::ParallelFor(parallel_for, plan.blocks, alng::RunBlockTask, &run)) return status;
  const bool wants_sums = problem.dgamma != nullptr || problem.dbeta != nullptr;
  if (!wants_sums || plan.sums_in_outputs) return ORT_OPS_SUCCESS;
  return alng::ParallelFor(parallel_for, plan.tiles, alng::CombineTileTask, &run);
}

extern "C" void ort_ops_add_layer_norm_grad_destroy(OrtOpsAddLayerNormGradExecutor* executor) { delete executor; }
