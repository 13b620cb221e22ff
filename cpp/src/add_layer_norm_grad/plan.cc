#include "add_layer_norm_grad/plan.h"

#include <algorithm>

#include "rounding.h"
#include "tensor_checks.h"

namespace ort_ops::add_layer_norm_grad {
namespace {

// Enough blocks for this many threads where there are rows for it; more would only add partial sums.
constexpr int64_t kBlocksForBalance = 64;
// A block below this many elements costs more in scheduling and partial sums than another thread brings
// (1024 x 768 float32 on 2 threads: 22 rows a block were 6 % slower than 43).
constexpr int64_t kMinElementsPerBlock = 32768;
// A running float32 sum over more rows than this would show in the accuracy of dgamma.
constexpr int64_t kMaxRowsPerBlock = 256;
constexpr int64_t kMinWorkspaceLimitBytes = int64_t{4} << 20;
constexpr int64_t kDyBytesPerWorkspaceByte = 50;  // 2 %
constexpr int64_t kPartialAlignment = 64;         // floats: whole cache lines and two vectors of any instruction set
// Partial sums per task of the second step: below it, starting another thread costs more than it saves.
constexpr int64_t kBytesPerTile = 256 << 10;

int64_t MaxPartialBlocks(const Problem& problem, int64_t block_bytes) {
  const int64_t dy_bytes = problem.rows * problem.cols * static_cast<int64_t>(ElementBytes(problem.type));
  return std::max(kMinWorkspaceLimitBytes, dy_bytes / kDyBytesPerWorkspaceByte) / block_bytes;
}

}  // namespace

Plan MakePlan(const Problem& problem) {
  Plan plan;
  plan.partial_stride = RoundUp(problem.cols, kPartialAlignment);
  const int64_t block_bytes = 2 * plan.partial_stride * static_cast<int64_t>(sizeof(float));
  const int64_t max_blocks = std::max<int64_t>(1, MaxPartialBlocks(problem, block_bytes));
  const int64_t wanted_rows = std::max(CeilDiv(problem.rows, kBlocksForBalance), CeilDiv(kMinElementsPerBlock, problem.cols));
  plan.rows_per_block = std::max(std::min(wanted_rows, kMaxRowsPerBlock), CeilDiv(problem.rows, max_blocks));
  plan.blocks = CeilDiv(problem.rows, plan.rows_per_block);
  plan.sums_in_outputs = plan.blocks == 1;
  const int64_t partial_bytes = plan.sums_in_outputs ? 0 : plan.blocks * block_bytes;
  plan.workspace_bytes = static_cast<size_t>(partial_bytes);
  const int64_t wanted_tiles = std::max<int64_t>(1, CeilDiv(partial_bytes, kBytesPerTile));
  plan.cols_per_tile = RoundUp(CeilDiv(problem.cols, wanted_tiles), kPartialAlignment);
  plan.tiles = CeilDiv(problem.cols, plan.cols_per_tile);
  return plan;
}

}  // namespace ort_ops::add_layer_norm_grad
