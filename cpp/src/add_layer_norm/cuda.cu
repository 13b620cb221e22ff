// AddLayerNorm on CUDA: each row by a group of threads, which keep it in shared memory between the three sweeps where it
// fits there, and read it again where not.
#include "add_layer_norm/problem.h"
#include "cuda_elements.cuh"
#include "cuda_group.cuh"
#include "cuda_launch.cuh"
#include "tensor_checks.h"

namespace ort_ops::add_layer_norm {

struct Arguments {
  Problem problem;
  int threads_per_row;
  int kept_vectors;  // of shared memory for each row; 0: rows are read again
};

// Elements of one row, each thread's own: nobody else reads what it keeps.
template <class T>
struct Row {
  const T* x1;
  const T* x2;  // or null
  T* kept;      // or null

  template <int kCount>
  __device__ void ReadAndKeep(int64_t col, float (&x)[kCount]) const {
    Load(x1 + col, x);
    if (x2 != nullptr) {
      float x2_i[kCount];
      Load(x2 + col, x2_i);
      AddRounded<T>(x, x2_i);
    }
    if (kept == nullptr) return;
    if constexpr (kCount == 1) {
      kept[col] = Elements<T>::FromFloat(x[0]);
    } else {
      *reinterpret_cast<Vector*>(kept + col) = Elements<T>::Pack(x);
    }
  }

  template <int kCount>
  __device__ void Again(int64_t col, float (&x)[kCount]) const {
    if (kept == nullptr) return ReadAndKeep(col, x);
    Load(kept + col, x);
  }
};

template <class T, int kCount>
__device__ void LoadParameter(const void* parameter, bool is_float, int64_t col, float (&values)[kCount]) {
  if (is_float) {
    LoadAnywhere(static_cast<const float*>(parameter) + col, values);
  } else {
    LoadAnywhere(static_cast<const T*>(parameter) + col, values);
  }
}

template <class T>
__global__ void AddLayerNorm(const __grid_constant__ Arguments arguments) {
  constexpr int kPerVector = Elements<T>::kPerVector;
  const Problem& problem = arguments.problem;
  const int64_t cols = problem.cols;
  const int group = arguments.threads_per_row;
  const int slots = static_cast<int>(blockDim.x) / group;
  const int slot = static_cast<int>(threadIdx.x) / group;
  const int lane = static_cast<int>(threadIdx.x) % group;
  const int warps = static_cast<int>(blockDim.x + kWarpThreads - 1) / kWarpThreads;
  float* const warp_sums = reinterpret_cast<float*>(shared_memory);
  float* const warp_squares = warp_sums + warps;
  // Behind the two floats of at most kBlockThreads / kWarpThreads warps.
  T* const memory = reinterpret_cast<T*>(shared_memory + kSumVectors + slot * arguments.kept_vectors);
  const bool float_parameters = problem.gamma_type == ORT_OPS_FLOAT;
  const auto count = static_cast<float>(cols);

  // Counted by the block's first row, so that all its threads meet at every barrier.
  for (int64_t first = static_cast<int64_t>(blockIdx.x) * slots; first < problem.rows;
       first += static_cast<int64_t>(gridDim.x) * slots) {
    const int64_t row = first + slot;
    const int64_t offset = row * cols;
    const int64_t end = row < problem.rows ? cols : 0;
    const T* const x1 = static_cast<const T*>(problem.x1) + offset;
    const T* const x2 = problem.x2 == nullptr ? nullptr : static_cast<const T*>(problem.x2) + offset;
    T* const y = static_cast<T*>(problem.y) + offset;
    T* const x_out = problem.x == nullptr ? nullptr : static_cast<T*>(problem.x) + offset;
    const int64_t before = min(ElementsBeforeVectors<T>(cols, x1, x2, y, x_out), end);
    // The first vector must lie at a boundary in shared memory too.
    const int64_t shift = (kPerVector - before % kPerVector) % kPerVector;
    const Row<T> kept = {x1, x2, arguments.kept_vectors == 0 ? nullptr : memory + shift};
    const auto for_each_piece = [&](const auto& body) { ForEachPiece<kPerVector>(end, before, lane, group, body); };

    float sum = 0.0f;
    for_each_piece([&](auto size, int64_t col) {
      float x[size];
      kept.ReadAndKeep(col, x);
      for (int i = 0; i < size; ++i) sum += x[i];
    });
    const float mean = OverGroup<Sum>(sum, group, warp_sums) / count;
    // The mean comes first: a sum of squares less a square of sums would cancel.
    float squares = 0.0f;
    for_each_piece([&](auto size, int64_t col) {
      float x[size];
      kept.Again(col, x);
      for (int i = 0; i < size; ++i) squares += (x[i] - mean) * (x[i] - mean);
    });
    const float variance = OverGroup<Sum>(squares, group, warp_squares) / count;
    const float rstd = 1.0f / sqrtf(variance + problem.epsilon);
    // An element is read before y or x, which may share its buffer, is written.
    for_each_piece([&](auto size, int64_t col) {
      float x[size];
      float gamma[size];
      float y_i[size] = {};
      kept.Again(col, x);
      LoadParameter<T>(problem.gamma, float_parameters, col, gamma);
      if (problem.beta != nullptr) LoadParameter<T>(problem.beta, float_parameters, col, y_i);
      for (int i = 0; i < size; ++i) y_i[i] += (x[i] - mean) * rstd * gamma[i];
      if (x_out != nullptr) Store(x_out + col, x);
      Store(y + col, y_i);
    });
    if (lane != 0 || row >= problem.rows) continue;
    if (problem.mean != nullptr) problem.mean[row] = mean;
    if (problem.rstd != nullptr) problem.rstd[row] = rstd;
  }
}

OrtOpsStatus LaunchCuda(const Problem& problem, const CudaDevice& device, void*, void* stream) {
  if (problem.rows == 0) return ORT_OPS_SUCCESS;
  const auto per_vector = static_cast<int64_t>(sizeof(Vector) / ElementBytes(problem.type));
  const RowGroups groups = GroupsFor(CeilDiv(problem.cols, per_vector));
  // One more than the row has, for the shift.
  const int64_t vectors = CeilDiv(problem.cols, per_vector) + 1;
  const int64_t kept = (kSumVectors + vectors * groups.rows_per_block) * static_cast<int64_t>(sizeof(Vector));
  const bool fits = kept <= kSharedBytesUnasked;
  const Arguments arguments = {problem, groups.threads_per_row, fits ? static_cast<int>(vectors) : 0};
  const Launch launch = {GridFor(device, CeilDiv(problem.rows, groups.rows_per_block)), groups.Threads(),
                         fits ? static_cast<size_t>(kept) : kSumVectors * sizeof(Vector),
                         static_cast<cudaStream_t>(stream)};
  const auto kernel = problem.type == ORT_OPS_FLOAT     ? AddLayerNorm<float>
                      : problem.type == ORT_OPS_FLOAT16 ? AddLayerNorm<__half>
                                                        : AddLayerNorm<__nv_bfloat16>;
  return Start(kernel, "AddLayerNorm", launch, arguments);
}

}  // namespace ort_ops::add_layer_norm
