// CrossEntropy and CrossEntropyGrad on CUDA: each row by a group of threads, in one pass over the scores. A label that is
// neither a class nor the ignore_index, which no kernel can report, makes its row NaN.
#include "cross_entropy/problem.h"
#include "cuda_elements.cuh"
#include "cuda_group.cuh"
#include "cuda_launch.cuh"

namespace ort_ops::cross_entropy {

template <class Call>
struct Arguments {
  Call call;
  int threads_per_row;
};

constexpr int kPerVector = Elements<float>::kPerVector;
constexpr float kNan = __builtin_nanf("");
constexpr float kInfinity = __builtin_inff();

__device__ inline int64_t LabelAt(const Labels& labels, int64_t row) {
  return labels.is_long ? static_cast<const int64_t*>(labels.data)[row] : static_cast<const int32_t*>(labels.data)[row];
}

// The largest score so far and the sum of exp(score - largest). Of a NaN the sum becomes NaN, the largest stays.
struct Exponentials {
  float largest = -kInfinity;
  float sum = 0.0f;

  __device__ void MoveTo(float new_largest) {
    if (new_largest == largest) return;
    sum *= expf(largest - new_largest);
    largest = new_largest;
  }

  template <int kCount>
  __device__ void Add(const float (&scores)[kCount]) {
    float new_largest = largest;
    for (int i = 0; i < kCount; ++i) new_largest = fmaxf(new_largest, scores[i]);
    MoveTo(new_largest);
    // Beside nothing but -inf, -inf - -inf would be NaN.
    for (int i = 0; i < kCount; ++i) sum += scores[i] == -kInfinity ? 0.0f : expf(scores[i] - largest);
  }
};

__global__ void CrossEntropy(const __grid_constant__ Arguments<Forward> arguments) {
  const Forward& call = arguments.call;
  const int group = arguments.threads_per_row;
  const int slots = static_cast<int>(blockDim.x) / group;
  const int lane = static_cast<int>(threadIdx.x) % group;
  const int warps = static_cast<int>(blockDim.x + kWarpThreads - 1) / kWarpThreads;
  float* const warp_largest = reinterpret_cast<float*>(shared_memory);
  float* const warp_sums = warp_largest + warps;
  // Counted by the block's first row, so that all its threads meet at every barrier.
  for (int64_t first = static_cast<int64_t>(blockIdx.x) * slots; first < call.rows;
       first += static_cast<int64_t>(gridDim.x) * slots) {
    const int64_t row = first + static_cast<int>(threadIdx.x) / group;
    const float* const scores = call.scores + row * call.classes;
    const int64_t end = row < call.rows ? call.classes : 0;
    Exponentials exponentials;
    ForEachPiece<kPerVector>(end, ElementsBeforeVectors<float>(end, scores), lane, group, [&](auto size, int64_t c) {
      float scores_c[size];
      Load(scores + c, scores_c);
      exponentials.Add(scores_c);
    });
    exponentials.MoveTo(OverGroup<Largest>(exponentials.largest, group, warp_largest));
    const float sum = OverGroup<Sum>(exponentials.sum, group, warp_sums);
    if (lane != 0 || row >= call.rows) continue;
    // 0 where all scores are -inf: no probabilities.
    const float rest = sum == 0.0f ? kNan : logf(sum);
    call.log_sum_exp[row] = exponentials.largest + rest;
    const int64_t label = LabelAt(call.labels, row);
    const bool is_class = label >= 0 && label < call.classes;
    // Not log_sum_exp - score, which would lose the digits of a small loss.
    call.row_loss[row] = label == call.labels.ignore_index ? 0.0f
                         : is_class                        ? rest - (scores[label] - exponentials.largest)
                                                           : kNan;
  }
}

__global__ void CrossEntropyGrad(const __grid_constant__ Arguments<Backward> arguments) {
  const Backward& call = arguments.call;
  const int group = arguments.threads_per_row;
  const int slots = static_cast<int>(blockDim.x) / group;
  const int lane = static_cast<int>(threadIdx.x) % group;
  for (int64_t row = static_cast<int64_t>(blockIdx.x) * slots + static_cast<int>(threadIdx.x) / group; row < call.rows;
       row += static_cast<int64_t>(gridDim.x) * slots) {
    const float* const scores = call.scores + row * call.classes;
    float* const dscores = call.dscores + row * call.classes;
    const int64_t label = LabelAt(call.labels, row);
    const bool is_ignored = label == call.labels.ignore_index;
    const bool is_class = label >= 0 && label < call.classes;
    const float scale = is_class ? call.drow_loss[row] : kNan;
    const float shift = call.log_sum_exp[row];
    const int64_t before = ElementsBeforeVectors<float>(call.classes, scores, dscores);
    ForEachPiece<kPerVector>(call.classes, before, lane, group, [&](auto size, int64_t c) {
      float values[size];
      Load(scores + c, values);
      for (int i = 0; i < size; ++i) {
        const float exponent = values[i] - shift;
        // expm1, because the label's probability may be near 1.
        values[i] = is_ignored ? 0.0f : scale * (c + i == label ? expm1f(exponent) : expf(exponent));
      }
      Store(dscores + c, values);
    });
  }
}

template <class Call>
OrtOpsStatus StartRows(void (*kernel)(Arguments<Call>), const char* name, const Call& call, const CudaDevice& device,
                       void* stream) {
  if (call.rows == 0) return ORT_OPS_SUCCESS;
  const RowGroups groups = GroupsFor(CeilDiv(call.classes, kPerVector));
  const Launch launch = {GridFor(device, CeilDiv(call.rows, groups.rows_per_block)), groups.Threads(),
                         kSumVectors * sizeof(Vector), static_cast<cudaStream_t>(stream)};
  return Start(kernel, name, launch, Arguments<Call>{call, groups.threads_per_row});
}

OrtOpsStatus LaunchCuda(const Forward& call, const CudaDevice& device, void*, void* stream) {
  return StartRows(CrossEntropy, "CrossEntropy", call, device, stream);
}

OrtOpsStatus LaunchCuda(const Backward& call, const CudaDevice& device, void*, void* stream) {
  return StartRows(CrossEntropyGrad, "CrossEntropyGrad", call, device, stream);
}

}  // namespace ort_ops::cross_entropy
