// Phase one of BatchNormGrad, and what its executor hands to the caller's threads.
#include <memory>

#include "batch_norm_grad/problem.h"
#include "executor.h"
#include "ort_ops/batch_norm_grad.h"
#include "tensor_checks.h"

namespace ort_ops::batch_norm_grad {
namespace {

class Executor final : public ExecutorOf<Problem> {
 public:
  explicit Executor(const Problem& its_problem) : ExecutorOf(its_problem, 0) {}

  OrtOpsStatus Run(void*, const OrtOpsParallelFor* parallel_for) const override {
    return ParallelFor(parallel_for, problem.channels, [&](int64_t channel) { RunChannel(problem, channel); });
  }
};

OrtOpsStatus CheckPerChannel(const char* name, const OrtOpsTensor* tensor, const OrtOpsTensor& dy) {
  if (const auto status = CheckTensor(name, tensor, 1)) return status;
  if (const auto status = CheckType(name, *tensor, ORT_OPS_FLOAT, "")) return status;
  if (tensor->rank == 1 && tensor->dims[0] == dy.dims[1]) return ORT_OPS_SUCCESS;
  return Fail(ORT_OPS_INVALID_PARAMETER, "%s must be %s, the channels of dy %s; got %s", name,
              ShapeText(dy.dims + 1, 1).c_str(), ShapeText(dy).c_str(), ShapeText(*tensor).c_str());
}

}  // namespace
}  // namespace ort_ops::batch_norm_grad

extern "C" OrtOpsStatus ort_ops_batch_norm_grad_get_workspace_size(
    const OrtOpsTensor* dy, const OrtOpsTensor* x, const OrtOpsTensor* scale, const OrtOpsTensor* dx,
    const OrtOpsTensor* dscale, const OrtOpsTensor* dbias, float epsilon, size_t* workspace_bytes,
    OrtOpsExecutor** executor) {
  using namespace ort_ops;
  using namespace ort_ops::batch_norm_grad;
  return PhaseOne(workspace_bytes, executor, [&](std::unique_ptr<OrtOpsExecutor>& made) {
    if (const auto status = CheckTensor("dy", dy, 2)) return status;
    if (const auto status = CheckType("dy", *dy, ORT_OPS_FLOAT, "")) return status;
    if (const auto status = CheckLike("x", x, "dy", *dy)) return status;
    if (const auto status = CheckPerChannel("scale", scale, *dy)) return status;
    if (const auto status = CheckLike("dx", dx, "dy", *dy)) return status;
    if (const auto status = CheckPerChannel("dscale", dscale, *dy)) return status;
    if (const auto status = CheckPerChannel("dbias", dbias, *dy)) return status;
    const Problem problem = {dy->dims[0],
                             dy->dims[1],
                             ElementCount(dy->dims + 2, dy->rank - 2),
                             epsilon,
                             static_cast<const float*>(dy->data),
                             static_cast<const float*>(x->data),
                             static_cast<const float*>(scale->data),
                             static_cast<float*>(dx->data),
                             static_cast<float*>(dscale->data),
                             static_cast<float*>(dbias->data)};
    made = std::make_unique<Executor>(problem);
    return ORT_OPS_SUCCESS;
  });
}
