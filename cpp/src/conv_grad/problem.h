// The checked description of one ConvGrad call.
#ifndef ORT_OPS_CONV_GRAD_PROBLEM_H_
#define ORT_OPS_CONV_GRAD_PROBLEM_H_

#include <array>
#include <cstddef>
#include <cstdint>

namespace ort_ops::conv_grad {

constexpr size_t kAxes = 3;  // convolutions over fewer have leading axes of length 1

struct Axis {
  int64_t size = 1;  // of x
  int64_t kernel = 1;
  int64_t stride = 1;
  int64_t dilation = 1;
  int64_t pad = 0;        // before
  int64_t positions = 1;  // of dy
};

struct Problem {
  int64_t batch;
  int64_t groups;
  int64_t channels;  // of x, in a group
  int64_t filters;   // channels of dy, in a group
  std::array<Axis, kAxes> axes;
  const float* dy;
  const float* x;
  const float* w;
  float* dx;  // null where it is not wanted
  float* dw;
  float* db;  // null where it is not wanted

  int64_t KernelSize() const { return axes[0].kernel * axes[1].kernel * axes[2].kernel; }
  int64_t ImageSize() const { return axes[0].size * axes[1].size * axes[2].size; }
  int64_t Positions() const { return axes[0].positions * axes[1].positions * axes[2].positions; }
  int64_t WeightSize() const { return groups * filters * channels * KernelSize(); }
};

}  // namespace ort_ops::conv_grad

#endif  // ORT_OPS_CONV_GRAD_PROBLEM_H_
