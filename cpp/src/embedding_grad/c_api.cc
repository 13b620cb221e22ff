// EmbeddingGrad: its checks, its plan, and its CPU kernel, which is so bound by memory that it needs no instruction set of
// its own.
//
// The table is cut into blocks of rows and columns; whoever has a block goes through all indices in their order. So each
// element is written by one thread, and its additions have a fixed order.
#include <algorithm>
#include <memory>

#include "embedding_grad/problem.h"
#include "executor.h"
#include "ort_ops/embedding_grad.h"
#include "rounding.h"
#include "tensor_checks.h"

namespace ort_ops::embedding_grad {
namespace {

// Narrow enough that several threads share the work of an index that nearly all rows have, wide enough to be whole
// cache lines one after another.
constexpr int64_t kColsPerBlock = 128;
// 1 MiB of the table: going through the indices costs little beside clearing that much.
constexpr int64_t kElementsPerBlock = 1 << 18;

template <class Index>
class Executor final : public ExecutorOf<Problem> {
 public:
  explicit Executor(const Problem& its_problem)
      : ExecutorOf(its_problem, 0),
        rows_per_block_(std::max<int64_t>(1, kElementsPerBlock / kColsPerBlock)),
        row_blocks_(CeilDiv(problem.rows, rows_per_block_)),
        col_blocks_(CeilDiv(problem.cols, kColsPerBlock)) {}

  OrtOpsStatus Run(void*, const OrtOpsParallelFor* parallel_for) const override {
    if (const auto status = CheckIndices()) return status;
    return ParallelFor(parallel_for, row_blocks_ * col_blocks_,
                       [&](int64_t block) { RunBlock(block / col_blocks_, block % col_blocks_); });
  }

 private:
  OrtOpsStatus CheckIndices() const {
    const auto* indices = static_cast<const Index*>(problem.indices);
    for (int64_t i = 0; i < problem.count; ++i) {
      const int64_t index = indices[i];
      if (index >= -problem.rows && index < problem.rows) continue;
      return Fail(ORT_OPS_INVALID_PARAMETER,
                  "indices must be at least %lld and below %lld, the number of rows of table; got %lld at place %lld",
                  static_cast<long long>(-problem.rows), static_cast<long long>(problem.rows),
                  static_cast<long long>(index), static_cast<long long>(i));
    }
    return ORT_OPS_SUCCESS;
  }

  void RunBlock(int64_t row_block, int64_t col_block) const {
    const int64_t first_row = row_block * rows_per_block_;
    const int64_t end_row = std::min(problem.rows, first_row + rows_per_block_);
    const int64_t first_col = col_block * kColsPerBlock;
    const int64_t cols = std::min(problem.cols, first_col + kColsPerBlock) - first_col;
    for (int64_t row = first_row; row < end_row; ++row) {
      std::fill_n(problem.dtable + row * problem.cols + first_col, cols, 0.0f);
    }
    const auto* indices = static_cast<const Index*>(problem.indices);
    for (int64_t i = 0; i < problem.count; ++i) {
      const int64_t row = indices[i] < 0 ? indices[i] + problem.rows : indices[i];
      if (row < first_row || row >= end_row) continue;
      const float* from = problem.dy + i * problem.cols + first_col;
      float* to = problem.dtable + row * problem.cols + first_col;
      for (int64_t col = 0; col < cols; ++col) to[col] += from[col];
    }
  }

  const int64_t rows_per_block_;
  const int64_t row_blocks_;
  const int64_t col_blocks_;
};

OrtOpsStatus CheckDy(const OrtOpsTensor* dy, const OrtOpsTensor& indices, const OrtOpsTensor& table) {
  const int rank = indices.rank + table.rank - 1;
  if (const auto status = CheckTensor("dy", dy, 0)) return status;
  if (const auto status = CheckType("dy", *dy, ORT_OPS_FLOAT, "")) return status;
  if (dy->rank == rank && std::equal(indices.dims, indices.dims + indices.rank, dy->dims) &&
      std::equal(table.dims + 1, table.dims + table.rank, dy->dims + indices.rank)) {
    return ORT_OPS_SUCCESS;
  }
  int64_t expected[2 * kMaxRank];
  std::copy(indices.dims, indices.dims + indices.rank, expected);
  std::copy(table.dims + 1, table.dims + table.rank, expected + indices.rank);
  return Fail(ORT_OPS_INVALID_PARAMETER, "dy must be %s, the shape of indices and that of a row of table; got %s",
              ShapeText(expected, rank).c_str(), ShapeText(*dy).c_str());
}

OrtOpsStatus Check(const OrtOpsTensor* dy, const OrtOpsTensor* indices, const OrtOpsTensor* table,
                   const OrtOpsTensor* dtable) {
  if (const auto status = CheckTensor("indices", indices, 0)) return status;
  if (const auto status = CheckTypeIsOneOf("indices", *indices, {ORT_OPS_INT32, ORT_OPS_INT64})) return status;
  if (const auto status = CheckTensor("table", table, 1)) return status;
  if (const auto status = CheckType("table", *table, ORT_OPS_FLOAT, "")) return status;
  if (const auto status = CheckDy(dy, *indices, *table)) return status;
  return CheckLike("dtable", dtable, "table", *table);
}

}  // namespace
}  // namespace ort_ops::embedding_grad

extern "C" OrtOpsStatus ort_ops_embedding_grad_get_workspace_size(const OrtOpsTensor* dy, const OrtOpsTensor* indices,
                                                                  const OrtOpsTensor* table,
                                                                  const OrtOpsTensor* dtable, size_t* workspace_bytes,
                                                                  OrtOpsExecutor** executor) {
  using namespace ort_ops;
  using namespace ort_ops::embedding_grad;
  return PhaseOne(workspace_bytes, executor, [&](std::unique_ptr<OrtOpsExecutor>& made) {
    if (const auto status = Check(dy, indices, table, dtable)) return status;
    const Problem problem = {table->dims[0],
                             ElementCount(table->dims + 1, table->rank - 1),
                             ElementCount(*indices),
                             static_cast<OrtOpsDataType>(indices->data_type),
                             indices->data,
                             static_cast<const float*>(dy->data),
                             static_cast<float*>(dtable->data)};
    if (indices->data_type == ORT_OPS_INT64) {
      made = std::make_unique<Executor<int64_t>>(problem);
    } else {
      made = std::make_unique<Executor<int32_t>>(problem);
    }
    return ORT_OPS_SUCCESS;
  });
}
