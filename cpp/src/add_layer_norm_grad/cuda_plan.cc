// The numbers of this file decide about speed alone; the results are right for any of them. They follow from
// the registers and the shared memory of today's devices and from what others published about similar kernels.
// None has been timed on a device yet: tests/cuda/device_check.py does that.
#include "add_layer_norm_grad/cuda_plan.h"

#include <algorithm>
#include <cstdint>

#include "add_layer_norm_grad/cuda_limits.h"
#include "last_error.h"
#include "rounding.h"
#include "tensor_checks.h"

namespace ort_ops::add_layer_norm_grad {
namespace {

constexpr int kAccessBytes = 16;
constexpr int kWarp = 32;
constexpr int kNarrowBlockThreads = 128;  // rows shorter than a block share one of this size
constexpr int kMaxStages = 3;
constexpr int kMinStagedTensors = 2;  // those that are read twice
constexpr int kMaxStagedTensors = 4;
constexpr int kReservedSharedBytes =
    1024;  // what the system takes of the shared memory for every resident block
constexpr size_t kRowSumsAlignment = 16;
// Up to this many rows per multiprocessor, and from this many columns on, most of the device would watch a
// few multiprocessors work: then the rows are split.
constexpr int64_t kMultiprocessorsPerSplitRow = 8;
constexpr int64_t kMinColsOfSplitRow = 4096;
constexpr int kSumThreads = 256;
constexpr int64_t kMaxSplits = 256;          // one thread adds up the pieces of a row
constexpr int kBlocksPerMultiprocessor = 4;  // of kSumThreads: enough bytes in flight to keep the memory busy
constexpr int64_t kMaxParts = 65535;         // CUDA's limit of a grid's second dimension
constexpr int64_t kMaxCols = int64_t{1} << 35;

int RoundUpToPowerOfTwo(int64_t value) {
  int power = 1;
  while (power < value) power *= 2;
  return power;
}

bool IsMadeOfAlignedPieces(const Problem& problem) {
  uintptr_t bits = static_cast<uintptr_t>(problem.cols) * ElementBytes(problem.type);
  for (const void* pointer : {problem.dy, problem.x1, problem.x2, problem.gamma, problem.dsum,
                              static_cast<const void*>(problem.dx)}) {
    bits |= reinterpret_cast<uintptr_t>(pointer);
  }
  return bits % kAccessBytes == 0;
}

// Chooses the threads; false where a row is too long for one block.
bool ChooseThreads(int64_t cols, RowsInSharedConfig* config, RowsInSharedLimits* limits) {
  for (const RowsInSharedLimits& candidate : kRowsInSharedLimits) {
    const int64_t threads = CeilDiv(cols, candidate.cols_per_thread);
    if (threads > candidate.max_threads) continue;
    config->cols_per_thread = candidate.cols_per_thread;
    config->threads_per_row =
        threads <= kWarp ? RoundUpToPowerOfTwo(threads) : static_cast<int>(RoundUp(threads, kWarp));
    config->rows_per_block = std::max(1, kNarrowBlockThreads / config->threads_per_row);
    *limits = candidate;
    return true;
  }
  return false;
}

// How many blocks of the kernel one multiprocessor holds at a time if each has this much shared memory; 0 if
// it is too much.
int ResidentBlocks(const CudaDevice& device, int max_blocks, int64_t shared_bytes) {
  if (shared_bytes > device.shared_bytes_per_block) return 0;
  const int64_t fit = device.shared_bytes_per_multiprocessor / (shared_bytes + kReservedSharedBytes);
  return static_cast<int>(std::min<int64_t>(max_blocks, fit));
}

// False where a row does not fit into a block.
bool PlanRowsInShared(const Problem& problem, const CudaDevice& device, CudaPlan* plan) {
  RowsInSharedConfig& config = plan->rows_in_shared;
  RowsInSharedLimits limits;
  if (!ChooseThreads(problem.cols, &config, &limits)) return false;
  const int threads = config.threads_per_row * config.rows_per_block;
  const int max_blocks = limits.max_threads * limits.min_blocks / threads;
  const int64_t block_cols = int64_t{threads} * limits.cols_per_thread;
  const int64_t sums_and_gamma_bytes = 2 * (threads / kWarp) * static_cast<int64_t>(2 * sizeof(float)) +
                                       block_cols * static_cast<int64_t>(sizeof(float));
  const int64_t tensor_bytes = block_cols * static_cast<int64_t>(ElementBytes(problem.type));
  int resident_blocks = 0;
  for (int tensors = kMinStagedTensors; tensors <= kMaxStagedTensors; ++tensors) {
    const int blocks = ResidentBlocks(device, max_blocks, sums_and_gamma_bytes + tensors * tensor_bytes);
    // More blocks keep more bytes in flight than more tensors of the same block.
    if (blocks == 0 || blocks < resident_blocks) break;
    config.staged_tensors = tensors;
    resident_blocks = blocks;
  }
  if (resident_blocks == 0) return false;
  const int64_t bytes_per_block =
      std::min<int64_t>(device.shared_bytes_per_multiprocessor / resident_blocks - kReservedSharedBytes,
                        device.shared_bytes_per_block);
  const int64_t stage_bytes = config.staged_tensors * tensor_bytes;
  config.stages =
      static_cast<int>(std::min<int64_t>((bytes_per_block - sums_and_gamma_bytes) / stage_bytes, kMaxStages));
  config.shared_bytes = static_cast<size_t>(config.stages * stage_bytes + sums_and_gamma_bytes);
  config.shared_bytes_limit = device.shared_bytes_per_block;
  config.blocks = std::min(CeilDiv(problem.rows, config.rows_per_block),
                           int64_t{device.multiprocessors} * resident_blocks);
  plan->path = CudaPath::kRowsInShared;
  plan->parts = config.blocks;
  return true;
}

void PlanTwoReads(const Problem& problem, const CudaDevice& device, bool aligned, CudaPlan* plan) {
  TwoReadsConfig& config = plan->two_reads;
  config.elements_per_access = aligned ? kAccessBytes / static_cast<int>(ElementBytes(problem.type)) : 1;
  const int64_t accesses = CeilDiv(problem.cols, config.elements_per_access);

  config.threads_per_sum =
      std::clamp(RoundUpToPowerOfTwo(std::min<int64_t>(accesses, kSumThreads)), kWarp, kSumThreads);
  config.sums_per_block = kSumThreads / config.threads_per_sum;
  const int64_t resident_blocks = int64_t{device.multiprocessors} * kBlocksPerMultiprocessor;
  const int64_t max_splits = std::min(kMaxSplits, CeilDiv(accesses, config.threads_per_sum));
  const int64_t wanted_splits =
      std::clamp<int64_t>(CeilDiv(resident_blocks * config.sums_per_block, problem.rows), 1, max_splits);
  config.cols_per_split = RoundUp(CeilDiv(problem.cols, wanted_splits), config.elements_per_access);
  config.splits = CeilDiv(problem.cols, config.cols_per_split);
  config.sum_blocks =
      std::min(CeilDiv(problem.rows * config.splits, config.sums_per_block), 2 * resident_blocks);
  config.sum_shared_bytes = 2 * (kSumThreads / kWarp) * 2 * sizeof(float);

  config.tile_threads = static_cast<int>(std::min<int64_t>(RoundUp(accesses, kWarp), kSumThreads));
  config.tiles = CeilDiv(accesses, config.tile_threads);
  const int64_t resident_tiles = resident_blocks * (kSumThreads / config.tile_threads);
  const int64_t wanted_parts = std::clamp<int64_t>(CeilDiv(resident_tiles, config.tiles), 1, kMaxParts);
  config.rows_per_part = CeilDiv(problem.rows, wanted_parts);
  config.tile_shared_bytes = static_cast<size_t>(config.tile_threads) * 4 * sizeof(float);
  plan->path = CudaPath::kTwoReads;
  plan->parts = CeilDiv(problem.rows, config.rows_per_part);
}

}  // namespace

OrtOpsStatus MakeCudaPlan(const Problem& problem, const CudaDevice& device, CudaPlan* plan) {
  *plan = {};
  if (problem.cols > kMaxCols) {
    return Fail(ORT_OPS_INVALID_PARAMETER, "gamma must have at most 2^35 elements on CUDA; got %lld",
                static_cast<long long>(problem.cols));
  }
  if (problem.rows == 0) {
    plan->path = CudaPath::kNoRows;
    return ORT_OPS_SUCCESS;
  }
  const bool aligned = IsMadeOfAlignedPieces(problem);
  const bool split = problem.rows * kMultiprocessorsPerSplitRow <= device.multiprocessors &&
                     problem.cols >= kMinColsOfSplitRow;
  if (!aligned || split || !PlanRowsInShared(problem, device, plan))
    PlanTwoReads(problem, device, aligned, plan);
  plan->sums_in_outputs = plan->parts == 1;
  const size_t partial_bytes =
      plan->sums_in_outputs ? 0 : static_cast<size_t>(plan->parts * 2 * problem.cols) * sizeof(float);
  plan->row_sums_offset =
      static_cast<size_t>(RoundUp(static_cast<int64_t>(partial_bytes), kRowSumsAlignment));
  const size_t row_sum_bytes =
      plan->path == CudaPath::kTwoReads
          ? static_cast<size_t>(problem.rows * plan->two_reads.splits) * 2 * sizeof(float)
          : 0;
  plan->workspace_bytes = plan->row_sums_offset + row_sum_bytes;
  return ORT_OPS_SUCCESS;
}

}  // namespace ort_ops::add_layer_norm_grad
