// ReluGrad on CUDA: it moves bits, as on the CPU (c_api.cc).
#include "cuda_elements.cuh"
#include "cuda_launch.cuh"
#include "relu_grad/problem.h"

namespace ort_ops::relu_grad {

// All ones where dy passes, else 0: y is above 0, that is, positive as an integer, or NaN, beyond infinity.
template <class Bits, Bits kInfinity>
__device__ Bits Passing(Bits y) {
  constexpr Bits kMagnitude = static_cast<Bits>(~(Bits{1} << (8 * sizeof(Bits) - 1)));
  return static_cast<Bits>(-static_cast<Bits>(y > 0 || (y & kMagnitude) > kInfinity));
}

// The same for the numbers in a word.
template <class Bits, Bits kInfinity>
__device__ unsigned PassingInWord(unsigned y) {
  if constexpr (sizeof(Bits) == sizeof(unsigned)) {
    return static_cast<unsigned>(Passing<Bits, kInfinity>(static_cast<Bits>(y)));
  } else {
    const auto low = static_cast<unsigned short>(Passing<Bits, kInfinity>(static_cast<Bits>(y)));
    const auto high = static_cast<unsigned short>(Passing<Bits, kInfinity>(static_cast<Bits>(y >> 16)));
    return low | static_cast<unsigned>(high) << 16;
  }
}

template <class Bits, Bits kInfinity>
__global__ void ReluGrad(const __grid_constant__ Problem problem) {
  constexpr int kPerVector = sizeof(Vector) / sizeof(Bits);
  const Bits* const dy = static_cast<const Bits*>(problem.dy);
  const Bits* const y = static_cast<const Bits*>(problem.y);
  Bits* const dx = static_cast<Bits*>(problem.dx);
  const int64_t before = ElementsBeforeVectors<Bits>(problem.count, dy, y, dx);
  ForEachPieceOfGrid<kPerVector>(problem.count, before, [&](auto size, int64_t first) {
    if constexpr (size == 1) {
      dx[first] = static_cast<Bits>(dy[first] & Passing<Bits, kInfinity>(y[first]));
    } else {
      const Vector dy_i = VectorAt(dy + first);
      const Vector y_i = VectorAt(y + first);
      __stcs(reinterpret_cast<Vector*>(dx + first), Vector{dy_i.x & PassingInWord<Bits, kInfinity>(y_i.x),
                                                           dy_i.y & PassingInWord<Bits, kInfinity>(y_i.y),
                                                           dy_i.z & PassingInWord<Bits, kInfinity>(y_i.z),
                                                           dy_i.w & PassingInWord<Bits, kInfinity>(y_i.w)});
    }
  });
}

OrtOpsStatus LaunchCuda(const Problem& problem, const CudaDevice& device, void*, void* stream) {
  const auto start = [&](auto kernel, int per_vector) {
    return StartForElements(kernel, "ReluGrad", device, problem.count, per_vector, stream, problem);
  };
  if (problem.type == ORT_OPS_FLOAT) return start(ReluGrad<int32_t, 0x7F800000>, 4);
  return problem.type == ORT_OPS_FLOAT16 ? start(ReluGrad<int16_t, 0x7C00>, 8) : start(ReluGrad<int16_t, 0x7F80>, 8);
}

}  // namespace ort_ops::relu_grad
