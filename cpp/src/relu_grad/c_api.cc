// ReluGrad: its checks and its CPU kernel, which moves bits and so needs no arithmetic of any type, nor an instruction set of
// its own.
#include <cstdint>
#include <memory>

#include "elementwise.h"
#include "executor.h"
#include "ort_ops/relu_grad.h"
#include "relu_grad/problem.h"
#include "tensor_checks.h"

namespace ort_ops::relu_grad {
namespace {

// Numbers as their bits: dy passes where y is above 0, that is, positive as an integer, and where it is NaN (beyond
// infinity, of either sign), as in PyTorch.
template <class Bits, Bits kInfinity>
class Executor final : public ExecutorOf<Problem> {
 public:
  explicit Executor(const Problem& its_problem) : ExecutorOf(its_problem, 0) {}

  OrtOpsStatus Run(void*, const OrtOpsParallelFor* parallel_for) const override {
    const Bits* const dy = static_cast<const Bits*>(problem.dy);
    const Bits* const y = static_cast<const Bits*>(problem.y);
    Bits* const dx = static_cast<Bits*>(problem.dx);
    return ForEachPiece(parallel_for, problem.count, [&](int64_t begin, int64_t end) {
      constexpr Bits kMagnitude = static_cast<Bits>(~(Bits{1} << (8 * sizeof(Bits) - 1)));
      for (int64_t i = begin; i < end; ++i) {
        const bool passes = y[i] > 0 || (y[i] & kMagnitude) > kInfinity;
        dx[i] = static_cast<Bits>(dy[i] & -static_cast<Bits>(passes));
      }
    });
  }
};

}  // namespace
}  // namespace ort_ops::relu_grad

extern "C" OrtOpsStatus ort_ops_relu_grad_get_workspace_size(const OrtOpsTensor* dy, const OrtOpsTensor* y,
                                                             const OrtOpsTensor* dx, size_t* workspace_bytes,
                                                             OrtOpsExecutor** executor) {
  using namespace ort_ops;
  using namespace ort_ops::relu_grad;
  return PhaseOne(workspace_bytes, executor, [&](std::unique_ptr<OrtOpsExecutor>& made) {
    if (const auto status = CheckTensor("dy", dy, 1)) return status;
    if (const auto status = CheckTypeIsOneOf("dy", *dy, {ORT_OPS_FLOAT, ORT_OPS_FLOAT16, ORT_OPS_BFLOAT16})) {
      return status;
    }
    if (const auto status = CheckLike("y", y, "dy", *dy)) return status;
    if (const auto status = CheckLike("dx", dx, "dy", *dy)) return status;
    const Problem problem = {ElementCount(*dy), static_cast<OrtOpsDataType>(dy->data_type), dy->data, y->data, dx->data};
    if (problem.type == ORT_OPS_FLOAT) {
      made = std::make_unique<Executor<int32_t, 0x7F800000>>(problem);
    } else if (problem.type == ORT_OPS_FLOAT16) {
      made = std::make_unique<Executor<int16_t, 0x7C00>>(problem);
    } else {
      made = std::make_unique<Executor<int16_t, 0x7F80>>(problem);
    }
    return ORT_OPS_SUCCESS;
  });
}
