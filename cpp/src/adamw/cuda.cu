// AdamW on CUDA: no fused multiply-adds, so that it gives the same bits as a chain of standard operators.
#include "adamw/problem.h"
#include "cuda_elements.cuh"
#include "cuda_launch.cuh"

namespace ort_ops::adamw {

struct State {
  float parameter;
  float first_moment;
  float second_moment;
};

// The numbers of a step, which lie in the device's memory.
struct Scalars {
  float gradient_weight;
  float square_weight;
  float step_size;
  float inverse_root;
  float decay_first;
  float decay_last;
};

__device__ inline float ValueOrOne(const float* scalar) { return scalar == nullptr ? 1.0f : *scalar; }

__device__ inline Scalars ReadScalars(const Problem& problem) {
  const float decay = ValueOrOne(problem.decay);
  return {*problem.gradient_weight,
          *problem.square_weight,
          *problem.step_size,
          ValueOrOne(problem.inverse_root),
          problem.decays_last ? 1.0f : decay,
          problem.decays_last ? decay : 1.0f};
}

__device__ inline State Updated(const Problem& problem, const Scalars& s, const State& old, float gradient) {
  const float first = __fadd_rn(__fmul_rn(old.first_moment, problem.beta1), __fmul_rn(gradient, s.gradient_weight));
  const float second = __fadd_rn(__fmul_rn(old.second_moment, problem.beta2),
                                 __fmul_rn(__fmul_rn(gradient, gradient), s.square_weight));
  const float root = __fadd_rn(__fmul_rn(__fsqrt_rn(second), s.inverse_root), problem.epsilon);
  const float move = __fmul_rn(__fdiv_rn(first, root), s.step_size);
  // A multiplication by 1 changes no bit, so one line serves both forms.
  const float parameter = __fmul_rn(__fsub_rn(__fmul_rn(old.parameter, s.decay_first), move), s.decay_last);
  return {parameter, first, second};
}

__global__ void AdamW(const __grid_constant__ Problem problem) {
  const bool updates = problem.update == nullptr || *problem.update;
  const Scalars scalars = ReadScalars(problem);
  const int64_t before = ElementsBeforeVectors<float>(
      problem.count, problem.parameter, problem.gradient, problem.first_moment, problem.second_moment,
      problem.parameter_updated, problem.first_moment_updated, problem.second_moment_updated);
  ForEachPieceOfGrid<Elements<float>::kPerVector>(problem.count, before, [&](auto size, int64_t at) {
    float parameter[size];
    float gradient[size];
    float first[size];
    float second[size];
    Load(problem.parameter + at, parameter);
    Load(problem.gradient + at, gradient);
    Load(problem.first_moment + at, first);
    Load(problem.second_moment + at, second);
    for (int i = 0; updates && i < size; ++i) {
      const State updated = Updated(problem, scalars, {parameter[i], first[i], second[i]}, gradient[i]);
      parameter[i] = updated.parameter;
      first[i] = updated.first_moment;
      second[i] = updated.second_moment;
    }
    Store(problem.parameter_updated + at, parameter);
    Store(problem.first_moment_updated + at, first);
    Store(problem.second_moment_updated + at, second);
  });
}

OrtOpsStatus LaunchCuda(const Problem& problem, const CudaDevice& device, void*, void* stream) {
  return StartForElements(AdamW, "AdamW", device, problem.count, 4, stream, problem);
}

}  // namespace ort_ops::adamw
