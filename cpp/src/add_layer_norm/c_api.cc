// Phase one of AddLayerNorm, and what its executor hands to the caller's threads.
#include <algorithm>
#include <memory>

#include "add_layer_norm/problem.h"
#include "elementwise.h"
#include "executor.h"
#include "layer_norm_checks.h"
#include "ort_ops/add_layer_norm.h"
#include "tensor_checks.h"

namespace ort_ops::add_layer_norm {
namespace {

class Executor final : public ExecutorOf<Problem> {
 public:
  explicit Executor(const Problem& its_problem) : ExecutorOf(its_problem, 0) {}

  OrtOpsStatus Run(void*, const OrtOpsParallelFor* parallel_for) const override {
    const int64_t rows_per_task = std::max<int64_t>(1, kElementsPerTask / problem.cols);
    const int64_t tasks = problem.rows / rows_per_task + (problem.rows % rows_per_task != 0);
    return ParallelFor(parallel_for, tasks, [&](int64_t task) {
      const int64_t begin = task * rows_per_task;
      RunRows(problem, begin, std::min(problem.rows, begin + rows_per_task));
    });
  }
};

}  // namespace
}  // namespace ort_ops::add_layer_norm

extern "C" OrtOpsStatus ort_ops_add_layer_norm_get_workspace_size(
    const OrtOpsTensor* x1, const OrtOpsTensor* x2, const OrtOpsTensor* gamma, const OrtOpsTensor* beta,
    const OrtOpsTensor* y, const OrtOpsTensor* mean, const OrtOpsTensor* rstd, const OrtOpsTensor* x, float epsilon,
    size_t* workspace_bytes, OrtOpsExecutor** executor) {
  using namespace ort_ops;
  using namespace ort_ops::add_layer_norm;
  return PhaseOne(workspace_bytes, executor, [&](std::unique_ptr<OrtOpsExecutor>& made) {
    if (const auto status = CheckTensor("x1", x1, 1)) return status;
    if (const auto status = CheckTypeIsOneOf("x1", *x1, {ORT_OPS_FLOAT, ORT_OPS_FLOAT16, ORT_OPS_BFLOAT16})) {
      return status;
    }
    if (x2 != nullptr) {
      if (const auto status = CheckLike("x2", x2, "x1", *x1)) return status;
    }
    if (const auto status = CheckGamma(gamma, "x1", *x1)) return status;
    if (beta != nullptr) {
      if (const auto status = CheckLike("beta", beta, "gamma", *gamma)) return status;
    }
    if (const auto status = CheckLike("y", y, "x1", *x1)) return status;
    if (mean != nullptr) {
      if (const auto status = CheckStatistic("mean", mean, "x1", *x1, gamma->rank)) return status;
    }
    if (rstd != nullptr) {
      if (const auto status = CheckStatistic("rstd", rstd, "x1", *x1, gamma->rank)) return status;
    }
    if (x != nullptr) {
      if (const auto status = CheckLike("x", x, "x1", *x1)) return status;
    }
    const Problem problem = {ElementCount(x1->dims, x1->rank - gamma->rank),
                             ElementCount(*gamma),
                             static_cast<OrtOpsDataType>(x1->data_type),
                             static_cast<OrtOpsDataType>(gamma->data_type),
                             epsilon,
                             x1->data,
                             DataOrNull(x2),
                             gamma->data,
                             DataOrNull(beta),
                             y->data,
                             static_cast<float*>(DataOrNull(mean)),
                             static_cast<float*>(DataOrNull(rstd)),
                             DataOrNull(x)};
    made = std::make_unique<Executor>(problem);
    return ORT_OPS_SUCCESS;
  });
}
