// Phase one of GeluGrad, and what its executor hands to the caller's threads.
#include <cstring>
#include <memory>

#include "elementwise.h"
#include "executor.h"
#include "gelu_grad/problem.h"
#include "ort_ops/gelu_grad.h"
#include "tensor_checks.h"

namespace ort_ops::gelu_grad {
namespace {

class Executor final : public ExecutorOf<Problem> {
 public:
  explicit Executor(const Problem& its_problem) : ExecutorOf(its_problem, 0) {}

  OrtOpsStatus Run(void*, const OrtOpsParallelFor* parallel_for) const override {
    return ForEachPiece(parallel_for, problem.count,
                        [&](int64_t begin, int64_t end) { RunPiece(problem, begin, end); });
  }
};

OrtOpsStatus Check(const OrtOpsTensor* dy, const OrtOpsTensor* x, const OrtOpsTensor* dx, const char* approximate) {
  if (const auto status = CheckTensor("dy", dy, 1)) return status;
  if (const auto status = CheckTypeIsOneOf("dy", *dy, {ORT_OPS_FLOAT, ORT_OPS_FLOAT16, ORT_OPS_BFLOAT16})) return status;
  if (const auto status = CheckLike("x", x, "dy", *dy)) return status;
  if (const auto status = CheckLike("dx", dx, "dy", *dy)) return status;
  if (approximate == nullptr) return Fail(ORT_OPS_NULL_POINTER, "approximate is required; got a null pointer");
  if (std::strcmp(approximate, "none") != 0 && std::strcmp(approximate, "tanh") != 0) {
    return Fail(ORT_OPS_INVALID_PARAMETER, "approximate must be none or tanh; got %s", approximate);
  }
  return ORT_OPS_SUCCESS;
}

}  // namespace
}  // namespace ort_ops::gelu_grad

extern "C" OrtOpsStatus ort_ops_gelu_grad_get_workspace_size(const OrtOpsTensor* dy, const OrtOpsTensor* x,
                                                             const OrtOpsTensor* dx, const char* approximate,
                                                             size_t* workspace_bytes, OrtOpsExecutor** executor) {
  using namespace ort_ops::gelu_grad;
  return ort_ops::PhaseOne(workspace_bytes, executor, [&](std::unique_ptr<OrtOpsExecutor>& made) {
    if (const auto status = Check(dy, x, dx, approximate)) return status;
    made = std::make_unique<Executor>(Problem{ort_ops::ElementCount(*dy), static_cast<OrtOpsDataType>(dy->data_type),
                                              std::strcmp(approximate, "tanh") == 0, dy->data, x->data, dx->data});
    return ORT_OPS_SUCCESS;
  });
}
