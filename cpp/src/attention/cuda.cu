// ScaledDotProductAttention and its gradient on CUDA, in float arithmetic: tiles of queries against tiles of keys in shared
// memory, with the softmax carried on from tile to tile, so that no scores reach the device's memory (Dao et al. 2022).
//
// The gradients of key and value are summed over the queries by one kernel, those of query over the keys by another, each
// in one fixed order; so scores are computed twice, and there are no atomic operations on floats.
#include <algorithm>

#include "attention/problem.h"
#include "cuda_elements.cuh"
#include "cuda_group.cuh"
#include "cuda_launch.cuh"

namespace ort_ops::attention {

constexpr int kThreads = 128;
constexpr int kWarps = kThreads / kWarpThreads;
constexpr int kMaxTile = kWarpThreads;  // queries, or keys: a lane for each key of a tile
constexpr int kRowsPerWarp = kMaxTile / kWarps;
constexpr float kNan = __builtin_nanf("");
constexpr float kInfinity = __builtin_inff();

template <class Call>
struct Arguments {
  Call call;
  int tile;  // kMaxTile, or less where heads are large
  int64_t tiles;
};

// Rows of shared memory have an odd number of floats: so a column's elements lie in different banks.
__host__ __device__ constexpr int RowFloats(int count) { return count | 1; }

struct Matrix {
  float* data;
  int row;

  __device__ float& operator()(int i, int j) const { return data[i * row + j]; }
};

// Element (i, j) is data[i * row + j * column].
struct Operand {
  const float* data;
  int row;
  int column;
};

__device__ inline Operand AsIs(Matrix m) { return {m.data, m.row, 1}; }
__device__ inline Operand Transposed(Matrix m) { return {m.data, 1, m.row}; }

// Hands out the shared memory.
class Scratch {
 public:
  __device__ explicit Scratch(int tile) : next_(reinterpret_cast<float*>(shared_memory)), tile_(tile) {}
  __device__ Matrix Take(int columns) {
    const Matrix matrix = {next_, RowFloats(columns)};
    next_ += tile_ * matrix.row;
    return matrix;
  }
  __device__ float* TakeColumn() {
    float* const column = next_;
    next_ += tile_;
    return column;
  }

 private:
  float* next_;
  const int tile_;
};

// Calls write(i, j, sum over k of a(i, k) * b(k, j)) for i in [0, rows) and j in [0, columns), always by the same thread for
// an element of a matrix as long as kColumns is the same; rows: at most kMaxTile.
template <int kColumns, class Write>
__device__ void Multiply(int rows, int columns, int depth, Operand a, Operand b, const Write& write) {
  constexpr int kAcross = 16;
  constexpr int kDown = kThreads / kAcross;
  constexpr int kRows = kMaxTile / kDown;
  const int x = static_cast<int>(threadIdx.x) % kAcross;
  const int y = static_cast<int>(threadIdx.x) / kAcross;
  const float* left[kRows];
#pragma unroll
  for (int r = 0; r < kRows; ++r) left[r] = a.data + min(y + r * kDown, rows - 1) * a.row;
  for (int first = 0; first < columns; first += kColumns * kAcross) {
    const float* right[kColumns];
#pragma unroll
    for (int c = 0; c < kColumns; ++c) right[c] = b.data + min(first + x + c * kAcross, columns - 1) * b.column;
    float sums[kRows][kColumns] = {};
#pragma unroll 2
    for (int k = 0; k < depth; ++k) {
      float row[kColumns];
#pragma unroll
      for (int c = 0; c < kColumns; ++c) row[c] = right[c][k * b.row];
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        const float value = left[r][k * a.column];
#pragma unroll
        for (int c = 0; c < kColumns; ++c) sums[r][c] += value * row[c];
      }
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
        const int i = y + r * kDown;
        const int j = first + x + c * kAcross;
        if (i < rows && j < columns) write(i, j, sums[r][c]);
      }
    }
  }
}

constexpr int kScoreColumns = 2;
constexpr int kHeadColumns = 4;

template <class T>
__device__ T* TokensOf(const Heads<T>& heads, int64_t b, int64_t h, int64_t token) {
  return heads.data + b * heads.batch + h * heads.head + token * heads.token;
}

// Calls body(i) for the rows of the calling warp.
template <class Body>
__device__ void ForEachRowOfWarp(int rows, const Body& body) {
  for (int i = static_cast<int>(threadIdx.x) / kWarpThreads; i < rows; i += kWarps) body(i);
}

__device__ inline int Lane() { return static_cast<int>(threadIdx.x) % kWarpThreads; }

__device__ inline void Read(const float* from, int64_t token, int rows, int size, Matrix to) {
  ForEachRowOfWarp(rows, [&](int i) {
    for (int d = Lane(); d < size; d += kWarpThreads) to(i, d) = from[i * token + d];
  });
}

__device__ inline void Write(Matrix from, int rows, int size, float* to, int64_t token) {
  ForEachRowOfWarp(rows, [&](int i) {
    for (int d = Lane(); d < size; d += kWarpThreads) to[i * token + d] = from(i, d);
  });
}

__device__ inline void Clear(Matrix m, int rows) {
  for (int i = static_cast<int>(threadIdx.x); i < rows * m.row; i += kThreads) m.data[i] = 0.0f;
}

// What one block works on: a tile of one head of one batch entry.
struct Place {
  int64_t b;
  int64_t h;
  int64_t first;  // query, or key
  int count;
};

template <class Call>
__device__ Place PlaceOf(const Arguments<Call>& arguments, int64_t task, int64_t tokens) {
  const int64_t unit = task / arguments.tiles;
  const int64_t first = task % arguments.tiles * arguments.tile;
  return {unit / arguments.call.heads, unit % arguments.call.heads, first,
          static_cast<int>(min(int64_t{arguments.tile}, tokens - first))};
}

// scale * product + mask; -inf for a key that the query must not see.
__device__ inline float Score(const Problem& problem, const Place& place, int64_t query, int64_t key, float product) {
  if (problem.causal && key > query) return -kInfinity;
  const float score = problem.scale * product;
  const Mask& mask = problem.mask;
  if (mask.data == nullptr) return score;
  return score + mask.data[place.b * mask.batch + place.h * mask.head + query * mask.query + key * mask.key];
}

// How many of the keys the queries before `end` see.
__device__ inline int64_t KeysSeen(const Problem& problem, int64_t end) {
  return problem.causal ? min(problem.keys, end) : problem.keys;
}

__global__ void __launch_bounds__(kThreads) Attention(const __grid_constant__ Arguments<Forward> arguments) {
  const Forward& call = arguments.call;
  const int size = static_cast<int>(call.size);
  Scratch memory(arguments.tile);
  const Matrix query = memory.Take(size);
  const Matrix key = memory.Take(size);
  const Matrix value = memory.Take(size);
  const Matrix sums = memory.Take(size);
  const Matrix scores = memory.Take(arguments.tile);
  float* const factors = memory.TakeColumn();
  for (int64_t task = blockIdx.x; task < call.batch * call.heads * arguments.tiles; task += gridDim.x) {
    const Place place = PlaceOf(arguments, task, call.queries);
    const int64_t seen = KeysSeen(call, place.first + place.count);
    // Of the warp's rows, the same in all its lanes: the largest score so far, and the sum of exp(score - largest).
    float largest[kRowsPerWarp];
    float total[kRowsPerWarp];
    for (int i = 0; i < kRowsPerWarp; ++i) {
      largest[i] = -kInfinity;
      total[i] = 0.0f;
    }
    __syncthreads();  // the last task's matrices are still being read
    Read(TokensOf(call.query, place.b, place.h, place.first), call.query.token, place.count, size, query);
    Clear(sums, place.count);
    for (int64_t first = 0; first < seen; first += arguments.tile) {
      const int count = static_cast<int>(min(int64_t{arguments.tile}, seen - first));
      __syncthreads();
      Read(TokensOf(call.key, place.b, place.h, first), call.key.token, count, size, key);
      Read(TokensOf(call.value, place.b, place.h, first), call.value.token, count, size, value);
      __syncthreads();
      Multiply<kScoreColumns>(place.count, count, size, AsIs(query), Transposed(key), [&](int i, int j, float product) {
        scores(i, j) = Score(call, place, place.first + i, first + j, product);
      });
      __syncthreads();
#pragma unroll
      for (int r = 0; r < kRowsPerWarp; ++r) {
        const int i = static_cast<int>(threadIdx.x) / kWarpThreads + r * kWarps;
        if (i >= place.count) continue;  // the whole warp
        const float score = Lane() < count ? scores(i, Lane()) : -kInfinity;
        const float new_largest = fmaxf(largest[r], OverWarp<Largest>(score));
        // While a query sees nothing, -inf - -inf would be NaN.
        const float shift = new_largest == -kInfinity ? 0.0f : new_largest;
        const float e = expf(score - shift);
        const float factor = expf(largest[r] - shift);
        total[r] = total[r] * factor + OverWarp<Sum>(e);
        largest[r] = new_largest;
        if (Lane() < count) scores(i, Lane()) = e;
        if (Lane() == 0) factors[i] = factor;
      }
      __syncthreads();
      Multiply<kHeadColumns>(place.count, size, count, AsIs(scores), AsIs(value), [&](int i, int d, float product) {
        sums(i, d) = sums(i, d) * factors[i] + product;
      });
    }
    __syncthreads();
    float* const y = TokensOf(call.y, place.b, place.h, place.first);
    float* const log_sum_exp = call.log_sum_exp + (place.b * call.heads + place.h) * call.queries + place.first;
#pragma unroll
    for (int r = 0; r < kRowsPerWarp; ++r) {
      const int i = static_cast<int>(threadIdx.x) / kWarpThreads + r * kWarps;
      if (i >= place.count) continue;
      // A query that sees nothing has no probabilities.
      const float inverse = total[r] == 0.0f ? kNan : 1.0f / total[r];
      for (int d = Lane(); d < size; d += kWarpThreads) y[i * call.y.token + d] = sums(i, d) * inverse;
      if (Lane() == 0) log_sum_exp[i] = total[r] == 0.0f ? kNan : largest[r] + logf(total[r]);
    }
  }
}

// What both kernels of the gradient read of a tile of queries.
struct Queries {
  Matrix query;
  Matrix dy;
  float* along;  // sum over the head of dy * y
  float* log_sum_exp;

  __device__ void ReadAll(const Backward& call, const Place& place, int64_t first, int count) const {
    const int size = static_cast<int>(call.size);
    const float* const dy_tokens = TokensOf(call.dy, place.b, place.h, first);
    const float* const y_tokens = TokensOf(call.y, place.b, place.h, first);
    Read(TokensOf(call.query, place.b, place.h, first), call.query.token, count, size, query);
    Read(dy_tokens, call.dy.token, count, size, dy);
    const float* const sums = call.log_sum_exp + (place.b * call.heads + place.h) * call.queries + first;
    ForEachRowOfWarp(count, [&](int i) {
      float sum = 0.0f;
      for (int d = Lane(); d < size; d += kWarpThreads) sum += dy_tokens[i * call.dy.token + d] * y_tokens[i * call.y.token + d];
      sum = OverWarp<Sum>(sum);
      if (Lane() != 0) return;
      along[i] = sum;
      log_sum_exp[i] = sums[i];
    });
  }
};

// For `queries` tokens from `query` on and `keys` from `key` on: dscores, and the probabilities unless their matrix is
// dscores itself. Each element is written by one thread, the same in both products.
__device__ inline void DifferentiateScores(const Backward& call, const Place& place, const Queries& of, Matrix key_tile,
                                           Matrix value_tile, int64_t query, int queries, int64_t key, int keys,
                                           Matrix probabilities, Matrix dscores) {
  const int size = static_cast<int>(call.size);
  Multiply<kScoreColumns>(queries, keys, size, AsIs(of.query), Transposed(key_tile), [&](int i, int j, float product) {
    probabilities(i, j) = expf(Score(call, place, query + i, key + j, product) - of.log_sum_exp[i]);
  });
  Multiply<kScoreColumns>(queries, keys, size, AsIs(of.dy), Transposed(value_tile), [&](int i, int j, float product) {
    dscores(i, j) = probabilities(i, j) * call.scale * (product - of.along[i]);
  });
}

__global__ void __launch_bounds__(kThreads) KeyAndValueGradients(const __grid_constant__ Arguments<Backward> arguments) {
  const Backward& call = arguments.call;
  const int size = static_cast<int>(call.size);
  Scratch memory(arguments.tile);
  const Matrix key = memory.Take(size);
  const Matrix value = memory.Take(size);
  const Matrix dkey = memory.Take(size);
  const Matrix dvalue = memory.Take(size);
  const Matrix probabilities = memory.Take(arguments.tile);
  const Matrix dscores = memory.Take(arguments.tile);
  const Queries queries = {memory.Take(size), memory.Take(size), memory.TakeColumn(), memory.TakeColumn()};
  for (int64_t task = blockIdx.x; task < call.batch * call.heads * arguments.tiles; task += gridDim.x) {
    const Place place = PlaceOf(arguments, task, call.keys);
    __syncthreads();  // the last task's matrices are still being read
    Read(TokensOf(call.key, place.b, place.h, place.first), call.key.token, place.count, size, key);
    Read(TokensOf(call.value, place.b, place.h, place.first), call.value.token, place.count, size, value);
    Clear(dkey, place.count);
    Clear(dvalue, place.count);
    // The queries before see none of these keys where attention is causal.
    for (int64_t first = call.causal ? place.first : 0; first < call.queries; first += arguments.tile) {
      const int count = static_cast<int>(min(int64_t{arguments.tile}, call.queries - first));
      __syncthreads();
      queries.ReadAll(call, place, first, count);
      __syncthreads();
      DifferentiateScores(call, place, queries, key, value, first, count, place.first, place.count, probabilities,
                          dscores);
      __syncthreads();
      Multiply<kHeadColumns>(place.count, size, count, Transposed(dscores), AsIs(queries.query),
                             [&](int j, int d, float product) { dkey(j, d) += product; });
      Multiply<kHeadColumns>(place.count, size, count, Transposed(probabilities), AsIs(queries.dy),
                             [&](int j, int d, float product) { dvalue(j, d) += product; });
    }
    __syncthreads();
    Write(dkey, place.count, size, TokensOf(call.dkey, place.b, place.h, place.first), call.dkey.token);
    Write(dvalue, place.count, size, TokensOf(call.dvalue, place.b, place.h, place.first), call.dvalue.token);
  }
}

__global__ void __launch_bounds__(kThreads) QueryGradients(const __grid_constant__ Arguments<Backward> arguments) {
  const Backward& call = arguments.call;
  const int size = static_cast<int>(call.size);
  Scratch memory(arguments.tile);
  const Matrix key = memory.Take(size);
  const Matrix value = memory.Take(size);
  const Matrix dquery = memory.Take(size);
  const Matrix dscores = memory.Take(arguments.tile);
  const Queries queries = {memory.Take(size), memory.Take(size), memory.TakeColumn(), memory.TakeColumn()};
  for (int64_t task = blockIdx.x; task < call.batch * call.heads * arguments.tiles; task += gridDim.x) {
    const Place place = PlaceOf(arguments, task, call.queries);
    const int64_t seen = KeysSeen(call, place.first + place.count);
    __syncthreads();  // the last task's matrices are still being read
    queries.ReadAll(call, place, place.first, place.count);
    Clear(dquery, place.count);
    for (int64_t first = 0; first < seen; first += arguments.tile) {
      const int count = static_cast<int>(min(int64_t{arguments.tile}, seen - first));
      __syncthreads();
      Read(TokensOf(call.key, place.b, place.h, first), call.key.token, count, size, key);
      Read(TokensOf(call.value, place.b, place.h, first), call.value.token, count, size, value);
      __syncthreads();
      DifferentiateScores(call, place, queries, key, value, place.first, place.count, first, count, dscores, dscores);
      __syncthreads();
      Multiply<kHeadColumns>(place.count, size, count, AsIs(dscores), AsIs(key),
                             [&](int i, int d, float product) { dquery(i, d) += product; });
    }
    __syncthreads();
    Write(dquery, place.count, size, TokensOf(call.dquery, place.b, place.h, place.first), call.dquery.token);
  }
}

// How many matrices with a head in each row, and how many with a score for each key.
struct Needs {
  int heads;
  int scores;
};
constexpr Needs kForwardNeeds = {4, 1};
constexpr Needs kKeyAndValueNeeds = {6, 2};
constexpr Needs kQueryNeeds = {5, 1};

// Two columns besides, of which the forward pass uses one.
int64_t SharedBytes(const Needs& needs, int64_t size, int tile) {
  const int64_t row = needs.heads * (size | 1) + needs.scores * RowFloats(tile) + 2;
  return tile * row * static_cast<int64_t>(sizeof(float));
}

// The largest tile that fits a block, or 0.
int TileFor(const Needs& needs, int64_t size, const CudaDevice& device) {
  int tile = kMaxTile;
  while (tile > 0 && SharedBytes(needs, size, tile) > device.shared_bytes_per_block) tile /= 2;
  return tile;
}

OrtOpsStatus Check(const Needs& needs, const Problem& problem, const CudaDevice& device) {
  if (TileFor(needs, problem.size, device) > 0) return ORT_OPS_SUCCESS;
  return Fail(ORT_OPS_INVALID_PARAMETER,
              "%d heads of one token must fit a block's shared memory, %d bytes on this device; got heads of %lld elements",
              needs.heads, device.shared_bytes_per_block, static_cast<long long>(problem.size));
}

OrtOpsStatus PlanCuda(const Forward& call, const CudaDevice& device, size_t* workspace_bytes) {
  *workspace_bytes = 0;
  return Check(kForwardNeeds, call, device);
}

OrtOpsStatus PlanCuda(const Backward& call, const CudaDevice& device, size_t* workspace_bytes) {
  *workspace_bytes = 0;
  return Check(kKeyAndValueNeeds, call, device);
}

template <class Call>
OrtOpsStatus StartTiles(void (*kernel)(Arguments<Call>), const char* name, const Needs& needs, const Call& call,
                        int64_t tokens, const CudaDevice& device, void* stream) {
  const int tile = TileFor(needs, call.size, device);
  const Arguments<Call> arguments = {call, tile, CeilDiv(tokens, tile)};
  const int64_t tasks = call.batch * call.heads * arguments.tiles;
  if (tasks == 0) return ORT_OPS_SUCCESS;
  if (const auto status = AllowSharedMemory(kernel, device.shared_bytes_per_block)) return status;
  // As many blocks as tasks, of which the device takes the next one whenever it has room: they are of unequal length.
  const Launch launch = {Grid(std::min<int64_t>(tasks, 0x7fffffff)), kThreads,
                         static_cast<size_t>(SharedBytes(needs, call.size, tile)), static_cast<cudaStream_t>(stream)};
  return Start(kernel, name, launch, arguments);
}

OrtOpsStatus LaunchCuda(const Forward& call, const CudaDevice& device, void*, void* stream) {
  return StartTiles(Attention, "Attention", kForwardNeeds, call, call.queries, device, stream);
}

OrtOpsStatus LaunchCuda(const Backward& call, const CudaDevice& device, void*, void* stream) {
  if (const auto status = StartTiles(KeyAndValueGradients, "KeyAndValueGradients", kKeyAndValueNeeds, call, call.keys,
                                     device, stream)) {
    return status;
  }
  return StartTiles(QueryGradients, "QueryGradients", kQueryNeeds, call, call.queries, device, stream);
}

}  // namespace ort_ops::attention
