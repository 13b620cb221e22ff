// GeluGrad on CUDA. Both forms are written with the distribution's two tails, so that nothing cancels where x is far below
// zero.
#include "cuda_elements.cuh"
#include "cuda_launch.cuh"
#include "gelu_grad/problem.h"

namespace ort_ops::gelu_grad {

// Phi(x) + x * phi(x).
__device__ inline float ExactDerivative(float x) {
  const float distribution = 0.5f * erfcf(-0.7071067811865476f * x);
  const float density = 0.3989422804014327f * expf(-0.5f * x * x);
  return distribution + x * density;
}

// With u = sqrt(2 / pi) * (x + 0.044715 x^3): 0.5 * (1 + tanh(u)) is the logistic function s of 2u, and the derivative
// s + x * 2 s (1 - s) * du/dx. Beyond |x| = 13 both tails are 0 in float; x is held there inside of u, so that its
// powers stay finite, but not outside, so that an infinite x gives NaN as the formula does.
__device__ inline float TanhDerivative(float x) {
  const float near_x = fabsf(x) > 13.0f ? copysignf(13.0f, x) : x;
  const float square = near_x * near_x;
  const float twice_u = near_x * (square * 0.0713548162726f + 1.5957691216057308f);
  const float twice_slope = square * 0.2140644488178f + 1.5957691216057308f;
  const float e = expf(-fabsf(twice_u));
  const float upper = 1.0f / (1.0f + e);
  const float lower = e * upper;
  return (x < 0.0f ? lower : upper) + x * (lower * upper) * twice_slope;
}

template <class T>
__global__ void GeluGrad(const __grid_constant__ Problem problem) {
  const T* const dy = static_cast<const T*>(problem.dy);
  const T* const x = static_cast<const T*>(problem.x);
  T* const dx = static_cast<T*>(problem.dx);
  const int64_t before = ElementsBeforeVectors<T>(problem.count, dy, x, dx);
  ForEachPieceOfGrid<Elements<T>::kPerVector>(problem.count, before, [&](auto size, int64_t first) {
    float dy_i[size];
    float x_i[size];
    Load(dy + first, dy_i);
    Load(x + first, x_i);
    for (int i = 0; i < size; ++i) dy_i[i] *= problem.is_tanh ? TanhDerivative(x_i[i]) : ExactDerivative(x_i[i]);
    Store(dx + first, dy_i);
  });
}

OrtOpsStatus LaunchCuda(const Problem& problem, const CudaDevice& device, void*, void* stream) {
  const auto start = [&](auto kernel, int per_vector) {
    return StartForElements(kernel, "GeluGrad", device, problem.count, per_vector, stream, problem);
  };
  if (problem.type == ORT_OPS_FLOAT) return start(GeluGrad<float>, 4);
  return problem.type == ORT_OPS_FLOAT16 ? start(GeluGrad<__half>, 8) : start(GeluGrad<__nv_bfloat16>, 8);
}

}  // namespace ort_ops::gelu_grad
