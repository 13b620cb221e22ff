// ReluGrad: its checks and its kernel, which moves bits and so needs no arithmetic of any type, nor an instruction set of
// its own.
#include <cstdint>
#include <memory>

#include "elementwise.h"
#include "executor.h"
#include "ort_ops/relu_grad.h"
#include "tensor_checks.h"

namespace ort_ops::relu_grad {
namespace {

// Numbers as their bits: dy passes where y is above 0, that is, positive as an integer, and where it is NaN (beyond
// infinity, of either sign), as in PyTorch.
template <class Bits, Bits kInfinity>
class Executor final : public OrtOpsExecutor {
 public:
  Executor(int64_t count, const void* dy, const void* y, void* dx)
      : OrtOpsExecutor(0),
        count_(count),
        dy_(static_cast<const Bits*>(dy)),
        y_(static_cast<const Bits*>(y)),
        dx_(static_cast<Bits*>(dx)) {}

  OrtOpsStatus Run(void*, const OrtOpsParallelFor* parallel_for) const override {
    return ForEachPiece(parallel_for, count_, [&](int64_t begin, int64_t end) {
      constexpr Bits kMagnitude = static_cast<Bits>(~(Bits{1} << (8 * sizeof(Bits) - 1)));
      for (int64_t i = begin; i < end; ++i) {
        const bool passes = y_[i] > 0 || (y_[i] & kMagnitude) > kInfinity;
        dx_[i] = static_cast<Bits>(dy_[i] & -static_cast<Bits>(passes));
      }
    });
  }

 private:
  const int64_t count_;
  const Bits* const dy_;
  const Bits* const y_;
  Bits* const dx_;
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
    const int64_t count = ElementCount(*dy);
    if (dy->data_type == ORT_OPS_FLOAT) {
      made = std::make_unique<Executor<int32_t, 0x7F800000>>(count, dy->data, y->data, dx->data);
    } else if (dy->data_type == ORT_OPS_FLOAT16) {
      made = std::make_unique<Executor<int16_t, 0x7C00>>(count, dy->data, y->data, dx->data);
    } else {
      made = std::make_unique<Executor<int16_t, 0x7F80>>(count, dy->data, y->data, dx->data);
    }
    return ORT_OPS_SUCCESS;
  });
}
