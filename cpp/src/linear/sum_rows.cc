// Each task adds up a block of rows, a few at a time so that the sums are read and written less often than the matrix;
// then the blocks' sums are added up.
#include "linear/sum_rows.h"

#include <algorithm>

#include "rounding.h"

namespace ort_ops::linear {
namespace {

constexpr int64_t kMinRowsPerBlock = 64;
constexpr int64_t kMaxBlocks = 64;
constexpr int64_t kRowsAtOnce = 4;

int64_t RowsPerBlock(int64_t rows) { return std::max(kMinRowsPerBlock, CeilDiv(rows, kMaxBlocks)); }

int64_t Blocks(int64_t rows) { return CeilDiv(rows, RowsPerBlock(rows)); }

void SumBlock(const float* matrix, int64_t rows, int64_t columns, float* sums) {
  std::fill_n(sums, columns, 0.0f);
  int64_t i = 0;
  for (; i + kRowsAtOnce <= rows; i += kRowsAtOnce) {
    const float* row = matrix + i * columns;
    for (int64_t j = 0; j < columns; ++j) {
      sums[j] += (row[j] + row[columns + j]) + (row[2 * columns + j] + row[3 * columns + j]);
    }
  }
  for (; i < rows; ++i) {
    for (int64_t j = 0; j < columns; ++j) sums[j] += matrix[i * columns + j];
  }
}

}  // namespace

size_t SumRowsWorkspaceBytes(int64_t rows, int64_t columns) {
  return static_cast<size_t>(Blocks(rows) * columns) * sizeof(float);
}

OrtOpsStatus SumRows(const float* matrix, int64_t rows, int64_t columns, float* sums, float* workspace,
                     const OrtOpsParallelFor* parallel_for) {
  const int64_t per_block = RowsPerBlock(rows);
  const OrtOpsStatus status = ParallelFor(parallel_for, Blocks(rows), [&](int64_t block) {
    const int64_t begin = block * per_block;
    SumBlock(matrix + begin * columns, std::min(per_block, rows - begin), columns, workspace + block * columns);
  });
  if (status != ORT_OPS_SUCCESS) return status;
  SumBlock(workspace, Blocks(rows), columns, sums);
  return ORT_OPS_SUCCESS;
}

}  // namespace ort_ops::linear
