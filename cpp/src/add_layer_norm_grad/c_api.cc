// Phase one of AddLayerNormGrad, and what its executor hands to the caller's threads.
#include <memory>

#include "add_layer_norm_grad/cpu.h"
#include "add_layer_norm_grad/plan.h"
#include "add_layer_norm_grad/problem.h"
#include "executor.h"
#include "ort_ops/add_layer_norm_grad.h"

namespace ort_ops::add_layer_norm_grad {
namespace {

class Executor final : public ExecutorOf<Problem> {
 public:
  Executor(const Problem& its_problem, const Plan& plan) : ExecutorOf(its_problem, plan.workspace_bytes), plan_(plan) {}

  OrtOpsStatus Run(void* workspace, const OrtOpsParallelFor* parallel_for) const override {
    float* const partials = static_cast<float*>(workspace);
    const auto run_block = [&](int64_t block) { RunBlock(problem, plan_, partials, block); };
    if (const auto status = ParallelFor(parallel_for, plan_.blocks, run_block)) return status;
    const bool wants_sums = problem.dgamma != nullptr || problem.dbeta != nullptr;
    if (!wants_sums || plan_.sums_in_outputs) return ORT_OPS_SUCCESS;
    const auto combine_tile = [&](int64_t tile) { CombineTile(problem, plan_, partials, tile); };
    return ParallelFor(parallel_for, plan_.tiles, combine_tile);
  }

 private:
  const Plan plan_;
};

}  // namespace
}  // namespace ort_ops::add_layer_norm_grad

extern "C" OrtOpsStatus ort_ops_add_layer_norm_grad_get_workspace_size(
    const OrtOpsTensor* dy, const OrtOpsTensor* x1, const OrtOpsTensor* x2, const OrtOpsTensor* rstd,
    const OrtOpsTensor* mean, const OrtOpsTensor* gamma, const OrtOpsTensor* dsum, const OrtOpsTensor* dx,
    const OrtOpsTensor* dgamma, const OrtOpsTensor* dbeta, size_t* workspace_bytes, OrtOpsExecutor** executor) {
  using namespace ort_ops::add_layer_norm_grad;
  return ort_ops::PhaseOne(workspace_bytes, executor, [&](std::unique_ptr<OrtOpsExecutor>& made) {
    Problem problem;
    const OrtOpsStatus status = MakeProblem({dy, x1, x2, rstd, mean, gamma, dsum, dx, dgamma, dbeta}, &problem);
    if (status == ORT_OPS_SUCCESS) made = std::make_unique<Executor>(problem, MakePlan(problem));
    return status;
  });
}

extern "C" OrtOpsStatus ort_ops_add_layer_norm_grad_cuda_get_workspace_size(
    const OrtOpsTensor* dy, const OrtOpsTensor* x1, const OrtOpsTensor* x2, const OrtOpsTensor* rstd,
    const OrtOpsTensor* mean, const OrtOpsTensor* gamma, const OrtOpsTensor* dsum, const OrtOpsTensor* dx,
    const OrtOpsTensor* dgamma, const OrtOpsTensor* dbeta, size_t* workspace_bytes,
    OrtOpsAddLayerNormGradCudaExecutor** executor) {
  if (const auto status = ort_ops_add_layer_norm_grad_get_workspace_size(dy, x1, x2, rstd, mean, gamma, dsum, dx,
                                                                         dgamma, dbeta, workspace_bytes, executor)) {
    return status;
  }
  const OrtOpsStatus status = ort_ops_plan_on_cuda(*executor, workspace_bytes);
  if (status == ORT_OPS_SUCCESS) return status;
  ort_ops_destroy_executor(*executor);
  *executor = nullptr;
  return status;
}

extern "C" OrtOpsStatus ort_ops_add_layer_norm_grad_cuda(void* workspace, size_t workspace_bytes,
                                                         const OrtOpsAddLayerNormGradCudaExecutor* executor,
                                                         void* stream) {
  return ort_ops_run_on_cuda(workspace, workspace_bytes, executor, stream);
}

extern "C" void ort_ops_add_layer_norm_grad_cuda_destroy(OrtOpsAddLayerNormGradCudaExecutor* executor) {
  ort_ops_destroy_executor(executor);
}
