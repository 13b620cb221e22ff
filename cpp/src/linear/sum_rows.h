// The sum of a matrix's rows: the gradient of what was added to all of them.
#ifndef ORT_OPS_LINEAR_SUM_ROWS_H_
#define ORT_OPS_LINEAR_SUM_ROWS_H_

#include <cstddef>
#include <cstdint>

#include "executor.h"

namespace ort_ops::linear {

size_t SumRowsWorkspaceBytes(int64_t rows, int64_t columns);

// sums[j] = the sum over i of matrix[i * columns + j]. The order of the additions depends on `rows` alone.
OrtOpsStatus SumRows(const float* matrix, int64_t rows, int64_t columns, float* sums, float* workspace,
                     const OrtOpsParallelFor* parallel_for);

}  // namespace ort_ops::linear

#endif  // ORT_OPS_LINEAR_SUM_ROWS_H_
