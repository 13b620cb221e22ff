// The CUDA kernels of AddLayerNormGrad: device code only. Which one runs, on how many threads, with which
// workspace: cuda_plan.h.
//
// Every sum has one order, fixed by the plan; there are no atomic operations. Row sums go over the lanes of a
// warp and then over the warps, sums over rows within a thread, then over the rows that a block takes at a
// time, then over the blocks.
#ifndef ORT_OPS_ADD_LAYER_NORM_GRAD_CUDA_KERNELS_CUH_
#define ORT_OPS_ADD_LAYER_NORM_GRAD_CUDA_KERNELS_CUH_

#include <cuda_pipeline_primitives.h>

#include "add_layer_norm_grad/cuda_limits.h"
#include "cuda_elements.cuh"
#include "cuda_group.cuh"

namespace ort_ops::add_layer_norm_grad {

// A tensor that is null was left out. T is the kernel's.
struct KernelTensors {
  const void* dy;
  const void* x1;
  const void* x2;
  const float* rstd;
  const float* mean;
  const void* gamma;
  const void* dsum;
  void* dx;
  int64_t rows;
  int64_t cols;
  float inverse_cols;
  bool float_gamma;  // else T
};

// Where the sums over the rows of part i go: `stride` floats behind those of part i - 1. Null where nobody
// wants them.
struct PartialSums {
  float* dgamma;
  float* dbeta;
  int64_t stride;
};

struct RowsInSharedArguments {
  KernelTensors tensors;
  PartialSums partials;
  int threads_per_row;
  int stages;
  int staged_tensors;  // of dy, x1, x2, dsum, in this order; the rest is read directly
};

struct RowSumsArguments {
  KernelTensors tensors;
  float2* row_sums;  // [rows][splits]: sums of g and of g * xhat
  int threads_per_sum;
  int64_t splits;
  int64_t cols_per_split;
};

struct ColumnTilesArguments {
  KernelTensors tensors;
  PartialSums partials;
  const float2* row_sums;
  int64_t splits;
  int64_t rows_per_part;
};

struct AddPartsArguments {
  const float* partials;  // [parts][2][cols]
  float* dgamma;
  float* dbeta;
  int64_t parts;
  int64_t cols;
};

constexpr int kMaxPartRuns = 32;  // warps of a block that adds partial sums

template <class T, int kCount>
__device__ void LoadGamma(const KernelTensors& tensors, int64_t col, float (&values)[kCount]) {
  if (!tensors.float_gamma) {
    Load(static_cast<const T*>(tensors.gamma) + col, values);
  } else if constexpr (kCount == 1) {
    values[0] = static_cast<const float*>(tensors.gamma)[col];
  } else {
    for (int i = 0; i < kCount; i += 4) {
      const float4 four =
          *reinterpret_cast<const float4*>(static_cast<const float*>(tensors.gamma) + col + i);
      values[i] = four.x;
      values[i + 1] = four.y;
      values[i + 2] = four.z;
      values[i + 3] = four.w;
    }
  }
}

// ---------------------------------------------------------------- one row's formula

struct RowStatistics {
  float mean;
  float rstd;
};

__device__ inline float Xhat(float x, RowStatistics row) { return (x - row.mean) * row.rstd; }

// Sums of g and of g * xhat along a row.
__device__ inline void AddToRowSums(float g, float xhat, float2& sums) {
  sums.x += g;
  sums.y += g * xhat;
}

// `means`: the row sums divided by cols.
__device__ inline float DxWithoutDsum(float g, float xhat, float2 means, float rstd) {
  return rstd * (g - (means.x + xhat * means.y));
}

// ---------------------------------------------------------------- whole rows in shared memory

// A thread's own places in the shared memory: nobody else reads or writes them, so that they need no barrier.
// Those of a warp's threads lie side by side, so that one access of the warp meets every bank equally often
// and the distances are known in advance.
struct OwnVectors {
  Vector* first;

  __device__ Vector& operator[](int index) const { return first[index * kWarpThreads]; }
  __device__ OwnVectors From(int index) const { return {first + index * kWarpThreads}; }
};

enum StagedTensor { kStagedDy, kStagedX, kStagedX2, kStagedDsum };

// Waits for all groups of this thread's copies but the `newer` latest ones.
__device__ inline void WaitForCopies(int newer) {
  __pipeline_wait_prior(newer);
  asm volatile("" ::: "memory");  // the primitive itself lets the compiler read what was copied before it
}

// gamma is kept as float, whatever its type.
template <int kCount>
__device__ void KeepGamma(const OwnVectors& gamma, const float (&values)[kCount]) {
  for (int i = 0; i < kCount / 4; ++i) {
    const float four[4] = {values[4 * i], values[4 * i + 1], values[4 * i + 2], values[4 * i + 3]};
    gamma[i] = Elements<float>::Pack(four);
  }
}

template <int kCount>
__device__ void KeptGamma(const OwnVectors& gamma, float (&values)[kCount]) {
  for (int i = 0; i < kCount / 4; ++i) {
    float four[4];
    Elements<float>::Unpack(gamma[i], four);
    for (int j = 0; j < 4; ++j) values[4 * i + j] = four[j];
  }
}

// Adds the threads' sums over rows, of the rows that the block takes at a time in their order, and writes
// them in whole lines.
template <int kCount, int kItems>
__device__ void WritePartialSums(const float (&sums)[kItems][kCount], int threads_per_row, int cols,
                                 float* memory, float* out) {
  const int lane = static_cast<int>(threadIdx.x) % threads_per_row;
  const int slot = static_cast<int>(threadIdx.x) / threads_per_row;
  __syncthreads();  // the memory was used for something else before
#pragma unroll
  for (int item = 0; item < kItems; ++item) {
    const int col = (lane + item * threads_per_row) * kCount;
    if (col >= cols) continue;
#pragma unroll
    for (int i = 0; i < kCount; i += 4) {
      *reinterpret_cast<float4*>(memory + slot * cols + col + i) =
          make_float4(sums[item][i], sums[item][i + 1], sums[item][i + 2], sums[item][i + 3]);
    }
  }
  __syncthreads();
  const int slots = static_cast<int>(blockDim.x) / threads_per_row;
  for (int col = static_cast<int>(threadIdx.x); col < cols; col += static_cast<int>(blockDim.x)) {
    float sum = memory[col];
    for (int other = 1; other < slots; ++other) sum += memory[other * cols + col];
    out[col] = sum;
  }
}

// A block takes blockDim.x / threads_per_row rows at a time, one for each slot of threads, and goes through
// the rows in steps of the whole grid. While it uses the rows of one stage, those of the next stages are on
// their way, and a piece of a stage is asked for again as soon as its thread has used it.
template <class T, int kColsPerThread>
__global__ void __launch_bounds__(LimitsFor(kColsPerThread).max_threads, LimitsFor(kColsPerThread).min_blocks)
    RowsInShared(const __grid_constant__ RowsInSharedArguments arguments) {
  constexpr int kCount = Elements<T>::kPerVector;
  constexpr int kItems = kColsPerThread / kCount;
  const KernelTensors& tensors = arguments.tensors;
  const int cols = static_cast<int>(tensors.cols);
  const int threads_per_row = arguments.threads_per_row;
  const int slots = static_cast<int>(blockDim.x) / threads_per_row;
  const int slot = static_cast<int>(threadIdx.x) / threads_per_row;
  const int first_col = static_cast<int>(threadIdx.x) % threads_per_row * kCount;
  const int item_cols = threads_per_row * kCount;
  const int64_t row_step = static_cast<int64_t>(gridDim.x) * slots;
  float2* const warp_sums = reinterpret_cast<float2*>(shared_memory);
  const int warps = static_cast<int>(blockDim.x) / kWarpThreads;
  const int warp = static_cast<int>(threadIdx.x) / kWarpThreads;
  // Behind two float2 for each warp, which are a multiple of 16 bytes.
  Vector* const memory = shared_memory + warps;
  constexpr int kGammaVectors = kColsPerThread / 4;
  const int stage_vectors = arguments.staged_tensors * kItems;
  const OwnVectors own = {memory + warp * (kGammaVectors + arguments.stages * stage_vectors) * kWarpThreads +
                          threadIdx.x % kWarpThreads};
  const OwnVectors staged = own.From(kGammaVectors);
  const T* const dy = static_cast<const T*>(tensors.dy);
  const T* const x1 = static_cast<const T*>(tensors.x1);
  const T* const x2 = static_cast<const T*>(tensors.x2);
  const T* const dsum = static_cast<const T*>(tensors.dsum);
  T* const dx = static_cast<T*>(tensors.dx);
  const bool has_x2 = x2 != nullptr;
  const bool has_dsum = dsum != nullptr && dx != nullptr;
  const bool stages_x2 = arguments.staged_tensors > kStagedX2;
  const bool stages_dsum = arguments.staged_tensors > kStagedDsum;

  // One group of copies for each item, empty where there is nothing to copy, so that they can be counted.
  const auto stage_item = [&](int64_t row, OwnVectors stage, int item) {
    const int col = first_col + item * item_cols;
    if (row < tensors.rows && col < cols) {
      const int64_t offset = row * tensors.cols + col;
      __pipeline_memcpy_async(&stage[kStagedDy * kItems + item], dy + offset, sizeof(Vector));
      __pipeline_memcpy_async(&stage[kStagedX * kItems + item], x1 + offset, sizeof(Vector));
      if (has_x2 && stages_x2)
        __pipeline_memcpy_async(&stage[kStagedX2 * kItems + item], x2 + offset, sizeof(Vector));
      if (has_dsum && stages_dsum)
        __pipeline_memcpy_async(&stage[kStagedDsum * kItems + item], dsum + offset, sizeof(Vector));
    }
    __pipeline_commit();
  };
  const auto statistics_of = [&](int64_t row) {
    return row < tensors.rows ? RowStatistics{tensors.mean[row], tensors.rstd[row]}
                              : RowStatistics{0.0f, 0.0f};
  };

  int64_t row = static_cast<int64_t>(blockIdx.x) * slots + slot;
  for (int ahead = 0; ahead < arguments.stages; ++ahead) {
    const OwnVectors stage = staged.From(ahead * stage_vectors);
    for (int item = 0; item < kItems; ++item) stage_item(row + ahead * row_step, stage, item);
  }
  RowStatistics next_statistics = statistics_of(row);
  for (int item = 0; item < kItems; ++item) {
    const int col = first_col + item * item_cols;
    if (col >= cols) continue;
    float gamma_i[kCount];
    LoadGamma<T>(tensors, col, gamma_i);
    KeepGamma(own.From(item * (kCount / 4)), gamma_i);
  }
  float dgamma[kItems][kCount] = {};
  float dbeta[kItems][kCount] = {};
  int stage_index = 0;
  int parity = 0;
  // Counted by the block's first row, so that all its threads meet at every barrier.
  for (int64_t first_row = row - slot; first_row < tensors.rows; first_row += row_step) {
    const RowStatistics statistics = next_statistics;
    next_statistics = statistics_of(row + row_step);
    const bool has_row = row < tensors.rows;
    const int64_t offset = row * tensors.cols + first_col;
    const OwnVectors stage = staged.From(stage_index * stage_vectors);

    float2 sums = make_float2(0.0f, 0.0f);
#pragma unroll
    for (int item = 0; item < kItems; ++item) {
      // Newer than this item's copies: the rest of this row's and the other stages'.
      WaitForCopies(arguments.stages * kItems - 1 - item);
      const int col = first_col + item * item_cols;
      if (!has_row || col >= cols) continue;
      float dy_i[kCount];
      float x_i[kCount];
      float gamma_i[kCount];
      Elements<T>::Unpack(stage[kStagedDy * kItems + item], dy_i);
      Elements<T>::Unpack(stage[kStagedX * kItems + item], x_i);
      if (has_x2) {
        float x2_i[kCount];
        const Vector packed =
            stages_x2 ? Vector(stage[kStagedX2 * kItems + item]) : VectorAt(x2 + offset + item * item_cols);
        Elements<T>::Unpack(packed, x2_i);
        AddRounded<T>(x_i, x2_i);
        stage[kStagedX * kItems + item] = Elements<T>::Pack(x_i);
      }
      KeptGamma(own.From(item * (kCount / 4)), gamma_i);
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        const float xhat = Xhat(x_i[i], statistics);
        AddToRowSums(dy_i[i] * gamma_i[i], xhat, sums);
        dgamma[item][i] += dy_i[i] * xhat;
        dbeta[item][i] += dy_i[i];
      }
    }

    sums = OverGroup<Sum>(sums, threads_per_row, warp_sums + parity * warps);
    parity ^= 1;
    const float2 means = make_float2(sums.x * tensors.inverse_cols, sums.y * tensors.inverse_cols);

// Unrolled further, some instantiations have no registers left and spill.
#pragma unroll(kItems <= 2 ? kItems : 1)
    for (int item = 0; item < kItems; ++item) {
      const int col = first_col + item * item_cols;
      if (dx != nullptr && has_row && col < cols) {
        float dy_i[kCount];
        float x_i[kCount];
        float gamma_i[kCount];
        float dx_i[kCount] = {};
        if (has_dsum) {
          const Vector packed = stages_dsum ? Vector(stage[kStagedDsum * kItems + item])
                                            : VectorAt(dsum + offset + item * item_cols);
          Elements<T>::Unpack(packed, dx_i);
        }
        Elements<T>::Unpack(stage[kStagedDy * kItems + item], dy_i);
        Elements<T>::Unpack(stage[kStagedX * kItems + item], x_i);
        KeptGamma(own.From(item * (kCount / 4)), gamma_i);
#pragma unroll
        for (int i = 0; i < kCount; ++i) {
          const float xhat = Xhat(x_i[i], statistics);
          dx_i[i] += DxWithoutDsum(dy_i[i] * gamma_i[i], xhat, means, statistics.rstd);
        }
        Store(dx + offset + item * item_cols, dx_i);
      }
      stage_item(row + arguments.stages * row_step, stage, item);
    }
    stage_index = stage_index + 1 == arguments.stages ? 0 : stage_index + 1;
    row += row_step;
  }

  float* const sums_memory = reinterpret_cast<float*>(memory);
  const int64_t part_offset = blockIdx.x * arguments.partials.stride;
  if (arguments.partials.dgamma != nullptr) {
    WritePartialSums(dgamma, threads_per_row, cols, sums_memory, arguments.partials.dgamma + part_offset);
  }
  if (arguments.partials.dbeta != nullptr) {
    WritePartialSums(dbeta, threads_per_row, cols, sums_memory, arguments.partials.dbeta + part_offset);
  }
}

// ---------------------------------------------------------------- two reads

// Sums along one piece of one row for each group of threads.
template <class T, int kCount>
__global__ void RowSums(const __grid_constant__ RowSumsArguments arguments) {
  const KernelTensors& tensors = arguments.tensors;
  const T* const dy = static_cast<const T*>(tensors.dy);
  const T* const x1 = static_cast<const T*>(tensors.x1);
  const T* const x2 = static_cast<const T*>(tensors.x2);
  float2* const warp_sums = reinterpret_cast<float2*>(shared_memory);
  const int group = arguments.threads_per_sum;
  const int groups = static_cast<int>(blockDim.x) / group;
  const int lane = static_cast<int>(threadIdx.x) % group;
  const int warps = static_cast<int>(blockDim.x) / kWarpThreads;
  const int64_t count = tensors.rows * arguments.splits;
  int parity = 0;
  for (int64_t first = static_cast<int64_t>(blockIdx.x) * groups; first < count;
       first += static_cast<int64_t>(gridDim.x) * groups) {
    const int64_t index = first + static_cast<int>(threadIdx.x) / group;
    float2 sums = make_float2(0.0f, 0.0f);
    if (index < count) {
      const int64_t row = index / arguments.splits;
      const int64_t begin = index % arguments.splits * arguments.cols_per_split;
      const int64_t end = min(tensors.cols, begin + arguments.cols_per_split);
      const RowStatistics statistics = {tensors.mean[row], tensors.rstd[row]};
#pragma unroll 2
      for (int64_t col = begin + lane * kCount; col < end; col += group * kCount) {
        const int64_t offset = row * tensors.cols + col;
        float dy_i[kCount];
        float x_i[kCount];
        float gamma_i[kCount];
        Load(dy + offset, dy_i);
        Load(x1 + offset, x_i);
        if (x2 != nullptr) {
          float x2_i[kCount];
          Load(x2 + offset, x2_i);
          AddRounded<T>(x_i, x2_i);
        }
        LoadGamma<T>(tensors, col, gamma_i);
        for (int i = 0; i < kCount; ++i) AddToRowSums(dy_i[i] * gamma_i[i], Xhat(x_i[i], statistics), sums);
      }
    }
    sums = OverGroup<Sum>(sums, group, warp_sums + parity * warps);
    parity ^= 1;
    if (lane == 0 && index < count) arguments.row_sums[index] = sums;
  }
}

// What a row's elements need to know of it.
struct alignas(16) RowCoefficients {
  RowStatistics statistics;
  float2 means;
};

__device__ inline RowCoefficients CoefficientsOf(const ColumnTilesArguments& arguments, int64_t row) {
  const float2* pieces = arguments.row_sums + row * arguments.splits;
  float2 sums = pieces[0];
  for (int64_t split = 1; split < arguments.splits; ++split) {
    sums.x += pieces[split].x;
    sums.y += pieces[split].y;
  }
  const float inverse_cols = arguments.tensors.inverse_cols;
  return {{arguments.tensors.mean[row], arguments.tensors.rstd[row]},
          make_float2(sums.x * inverse_cols, sums.y * inverse_cols)};
}

// One element or vector of one row.
template <int kCount>
struct TilePiece {
  float dy[kCount];
  float x[kCount];
  float dsum[kCount];
};

// dx, and the sums over the rows of one part, for one tile of columns: blockIdx.x the tile, blockIdx.y the
// part.
template <class T, int kCount>
__global__ void ColumnTiles(const __grid_constant__ ColumnTilesArguments arguments) {
  constexpr int kRowsAtOnce = 2;
  const KernelTensors& tensors = arguments.tensors;
  const T* const dy = static_cast<const T*>(tensors.dy);
  const T* const x1 = static_cast<const T*>(tensors.x1);
  const T* const x2 = static_cast<const T*>(tensors.x2);
  const T* const dsum = static_cast<const T*>(tensors.dsum);
  T* const dx = static_cast<T*>(tensors.dx);
  const int64_t col = (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) * kCount;
  const bool has_col = col < tensors.cols;
  const int64_t first_row = blockIdx.y * arguments.rows_per_part;
  const int64_t end_row = min(tensors.rows, first_row + arguments.rows_per_part);
  RowCoefficients* const coefficients = reinterpret_cast<RowCoefficients*>(shared_memory);

  float gamma[kCount] = {};
  float dgamma[kCount] = {};
  float dbeta[kCount] = {};
  if (has_col) LoadGamma<T>(tensors, col, gamma);

  const auto load = [&](int64_t row, TilePiece<kCount>& piece) {
    const int64_t offset = row * tensors.cols + col;
    Load(dy + offset, piece.dy);
    Load(x1 + offset, piece.x);
    if (x2 != nullptr) {
      float x2_i[kCount];
      Load(x2 + offset, x2_i);
      AddRounded<T>(piece.x, x2_i);
    }
    for (int i = 0; i < kCount; ++i) piece.dsum[i] = 0.0f;
    if (dsum != nullptr) Load(dsum + offset, piece.dsum);
  };
  const auto use = [&](int64_t row, const RowCoefficients& of_row, const TilePiece<kCount>& piece) {
    float dx_i[kCount];
    for (int i = 0; i < kCount; ++i) {
      const float xhat = Xhat(piece.x[i], of_row.statistics);
      dx_i[i] =
          DxWithoutDsum(piece.dy[i] * gamma[i], xhat, of_row.means, of_row.statistics.rstd) + piece.dsum[i];
      dgamma[i] += piece.dy[i] * xhat;
      dbeta[i] += piece.dy[i];
    }
    if (dx != nullptr) Store(dx + row * tensors.cols + col, dx_i);
  };

  for (int64_t chunk = first_row; chunk < end_row; chunk += blockDim.x) {
    const int count = static_cast<int>(min(end_row - chunk, static_cast<int64_t>(blockDim.x)));
    __syncthreads();  // the last chunk's coefficients are still being read
    const int thread = static_cast<int>(threadIdx.x);
    if (thread < count) coefficients[thread] = CoefficientsOf(arguments, chunk + thread);
    __syncthreads();
    if (!has_col) continue;
    int k = 0;
    for (; k + kRowsAtOnce <= count; k += kRowsAtOnce) {
      // All loads before the first store, which the compiler must take for a change of what is still to be
      // loaded.
      TilePiece<kCount> pieces[kRowsAtOnce];
#pragma unroll
      for (int j = 0; j < kRowsAtOnce; ++j) load(chunk + k + j, pieces[j]);
#pragma unroll
      for (int j = 0; j < kRowsAtOnce; ++j) use(chunk + k + j, coefficients[k + j], pieces[j]);
    }
    for (; k < count; ++k) {
      TilePiece<kCount> piece;
      load(chunk + k, piece);
      use(chunk + k, coefficients[k], piece);
    }
  }

  if (!has_col) return;
  const int64_t part_offset = blockIdx.y * arguments.partials.stride + col;
  for (int i = 0; i < kCount; ++i) {
    if (arguments.partials.dgamma != nullptr) arguments.partials.dgamma[part_offset + i] = dgamma[i];
    if (arguments.partials.dbeta != nullptr) arguments.partials.dbeta[part_offset + i] = dbeta[i];
  }
}

// ---------------------------------------------------------------- adding the parts' sums

// blockIdx.x: 32 columns; blockIdx.y: 0 for dgamma, 1 for dbeta. Of R warps, warp y adds every Rth part, from
// part y on; then the first warp adds the R results.
__global__ void __launch_bounds__(kWarpThreads* kMaxPartRuns)
    AddParts(const __grid_constant__ AddPartsArguments arguments) {
  float* const out = blockIdx.y == 0 ? arguments.dgamma : arguments.dbeta;
  if (out == nullptr) return;  // the whole block
  float* const run_sums = reinterpret_cast<float*>(shared_memory);
  const int runs = static_cast<int>(blockDim.x) / kWarpThreads;
  const int x = static_cast<int>(threadIdx.x) % kWarpThreads;
  const int y = static_cast<int>(threadIdx.x) / kWarpThreads;
  const int64_t col = static_cast<int64_t>(blockIdx.x) * kWarpThreads + x;
  const bool has_col = col < arguments.cols;
  float sum = 0.0f;
  if (has_col) {
    const float* const column = arguments.partials + blockIdx.y * arguments.cols + col;
#pragma unroll 8
    for (int64_t part = y; part < arguments.parts; part += runs) sum += column[part * 2 * arguments.cols];
  }
  run_sums[threadIdx.x] = sum;
  __syncthreads();
  if (y != 0 || !has_col) return;
  for (int run = 1; run < runs; ++run) sum += run_sums[run * kWarpThreads + x];
  out[col] = sum;
}

}  // namespace ort_ops::add_layer_norm_grad

#endif  // ORT_OPS_ADD_LAYER_NORM_GRAD_CUDA_KERNELS_CUH_
