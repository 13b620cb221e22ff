// EmbeddingGrad on CUDA. An index out of range, which no kernel can report, is passed over.
//
// The table is cut into tiles of rows and columns, whose sums a block keeps in shared memory while it goes through all
// indices in their order; each of its threads owns a column of some of the tile's rows. So there are no atomic operations
// on floats and no workspace, the table is written once, zeros included, and the sums have the order of the indices,
// whatever the device. The price: every tile reads all indices, which costs less than reading dy and writing the table up
// to some hundred thousand indices; beyond, sorting them first would be the better way.
#include "cuda_elements.cuh"
#include "cuda_launch.cuh"
#include "embedding_grad/problem.h"

namespace ort_ops::embedding_grad {

constexpr int kMaxTileCols = 128;
constexpr int kMaxTileElements = 10 << 10;  // 40 KiB
constexpr int kIndicesPerThread = 4;
constexpr int kChunk = kBlockThreads * kIndicesPerThread;  // indices at a time
constexpr int kWarps = kBlockThreads / kWarpThreads;
constexpr int kRowsAtOnce = 4;  // of dy, so that several are on their way

struct Arguments {
  Problem problem;
  int tile_rows;
  int tile_cols;  // a power of two
  int64_t row_tiles;
  int64_t col_tiles;
};

struct SharedMemory {
  float sums[kMaxTileElements];
  // The chunk's indices into the tile, in order: the tile's row times kChunk, plus the place in the chunk.
  int found[kChunk];
  int counts[kIndicesPerThread * kWarps];
};

// Lists the indices [chunk, chunk + kChunk) that are rows [first_row, first_row + tile_rows) of the table; returns how many.
template <class Index>
__device__ int Find(const Problem& problem, int64_t chunk, int64_t first_row, int tile_rows, SharedMemory& shared) {
  const auto* const indices = static_cast<const Index*>(problem.indices);
  const int thread = static_cast<int>(threadIdx.x);
  const int warp = thread / kWarpThreads;
  const unsigned lanes_before = (1u << thread % kWarpThreads) - 1;
  int row[kIndicesPerThread];
  unsigned matches[kIndicesPerThread];
  for (int i = 0; i < kIndicesPerThread; ++i) {
    const int64_t place = chunk + i * kBlockThreads + thread;
    int64_t index = place < problem.count ? static_cast<int64_t>(indices[place]) : problem.rows;
    if (index < 0) index += problem.rows;
    const bool is_found = index >= first_row && index < first_row + tile_rows && index < problem.rows;
    row[i] = is_found ? static_cast<int>(index - first_row) : -1;
    matches[i] = __ballot_sync(kAllLanes, is_found);
    if (thread % kWarpThreads == 0) shared.counts[i * kWarps + warp] = __popc(matches[i]);
  }
  __syncthreads();  // for the counts; and what was found in the last chunk is no longer read
  int before = 0;
  for (int i = 0; i < kIndicesPerThread; ++i) {
    for (int other = 0; other < kWarps; ++other) {
      if (other == warp && row[i] >= 0) {
        shared.found[before + __popc(matches[i] & lanes_before)] = row[i] * kChunk + i * kBlockThreads + thread;
      }
      before += shared.counts[i * kWarps + other];
    }
  }
  __syncthreads();
  return before;
}

template <class Index>
__global__ void __launch_bounds__(kBlockThreads) EmbeddingGrad(const __grid_constant__ Arguments arguments) {
  const Problem& problem = arguments.problem;
  SharedMemory& shared = *reinterpret_cast<SharedMemory*>(shared_memory);
  const int tile_cols = arguments.tile_cols;
  const int tile_rows = arguments.tile_rows;
  // The threads of group g own the rows g, g + groups, ... of the tile.
  const int groups = kBlockThreads / tile_cols;
  const int group = static_cast<int>(threadIdx.x) / tile_cols;
  const int tile_col = static_cast<int>(threadIdx.x) % tile_cols;
  float* const sums = shared.sums + tile_col;
  for (int64_t tile = blockIdx.x; tile < arguments.row_tiles * arguments.col_tiles; tile += gridDim.x) {
    const int64_t first_row = tile / arguments.col_tiles * tile_rows;
    const int64_t col = tile % arguments.col_tiles * tile_cols + tile_col;
    const bool has_col = col < problem.cols;
    for (int row = group; row < tile_rows; row += groups) sums[row * tile_cols] = 0.0f;
    for (int64_t chunk = 0; chunk < problem.count; chunk += kChunk) {
      const int count = Find<Index>(problem, chunk, first_row, tile_rows, shared);
      for (int first = 0; has_col && first < count; first += kRowsAtOnce) {
        int row[kRowsAtOnce];
        float values[kRowsAtOnce] = {};
#pragma unroll
        for (int i = 0; i < kRowsAtOnce; ++i) {
          const int found = first + i < count ? shared.found[first + i] : 0;
          const bool is_own = first + i < count && found / kChunk % groups == group;
          row[i] = is_own ? found / kChunk : -1;
          if (is_own) values[i] = problem.dy[(chunk + found % kChunk) * problem.cols + col];
        }
#pragma unroll
        for (int i = 0; i < kRowsAtOnce; ++i) {
          if (row[i] >= 0) sums[row[i] * tile_cols] += values[i];
        }
      }
    }
    for (int row = group; has_col && row < tile_rows && first_row + row < problem.rows; row += groups) {
      problem.dtable[(first_row + row) * problem.cols + col] = sums[row * tile_cols];
    }
  }
}

OrtOpsStatus LaunchCuda(const Problem& problem, const CudaDevice& device, void*, void* stream) {
  if (problem.rows == 0 || problem.cols == 0) return ORT_OPS_SUCCESS;
  int tile_cols = 1;
  while (tile_cols < std::min<int64_t>(problem.cols, kMaxTileCols)) tile_cols *= 2;
  const int64_t col_tiles = CeilDiv(problem.cols, tile_cols);
  // Small tables are cut finer, so that every multiprocessor has a few tiles.
  const int64_t wanted_rows = CeilDiv(problem.rows * col_tiles, int64_t{4} * device.multiprocessors);
  const auto tile_rows = static_cast<int>(std::min<int64_t>(wanted_rows, kMaxTileElements / tile_cols));
  const int64_t row_tiles = CeilDiv(problem.rows, tile_rows);
  const Arguments arguments = {problem, tile_rows, tile_cols, row_tiles, col_tiles};
  const Launch launch = {GridFor(device, row_tiles * col_tiles), kBlockThreads, sizeof(SharedMemory),
                         static_cast<cudaStream_t>(stream)};
  const auto kernel = problem.index_type == ORT_OPS_INT64 ? EmbeddingGrad<int64_t> : EmbeddingGrad<int32_t>;
  return Start(kernel, "EmbeddingGrad", launch, arguments);
}

}  // namespace ort_ops::embedding_grad
