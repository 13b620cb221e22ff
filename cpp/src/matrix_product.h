// Products of float matrices, for the operators whose work they are.
#ifndef ORT_OPS_MATRIX_PRODUCT_H_
#define ORT_OPS_MATRIX_PRODUCT_H_

#include <cstddef>
#include <cstdint>

#include "executor.h"

namespace ort_ops {

// Element (i, j) is at data[i * row + j * column]. One of the strides should be 1: other matrices are read one element at a
// time.
struct StridedMatrix {
  const float* data;
  int64_t row;
  int64_t column;
};

inline StridedMatrix Transposed(StridedMatrix matrix) { return {matrix.data, matrix.column, matrix.row}; }

// What is left of the matrix from a row and a column on.
inline StridedMatrix Part(StridedMatrix matrix, int64_t row, int64_t column) {
  return {matrix.data + row * matrix.row + column * matrix.column, matrix.row, matrix.column};
}

// C = A * B + bias with A [rows, depth], B [depth, columns], bias [columns] for every row, or null, and C
// [rows, columns], whose rows lie behind one another.
struct MatrixProduct {
  int64_t rows;
  int64_t columns;
  int64_t depth;
  StridedMatrix a;
  StridedMatrix b;
  const float* bias;
  float* c;
};

// What Multiply needs; at most 9 MiB. A multiple of a cache line.
size_t MultiplyWorkspaceBytes(const MatrixProduct& product);

// The order in which products are summed depends on `depth` alone, and so the bits do not on the number of threads. The
// instruction set is chosen inside.
OrtOpsStatus Multiply(const MatrixProduct& product, void* workspace, const OrtOpsParallelFor* parallel_for);

}  // namespace ort_ops

#endif  // ORT_OPS_MATRIX_PRODUCT_H_
