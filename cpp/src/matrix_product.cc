// A matrix product on the caller's threads: B is packed block by block, then each thread takes blocks of rows.
#include "cpu_target.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "matrix_product.cc"
#include "hwy/foreach_target.h"  // must come before highway.h
//
#include "matrix_product-inl.h"
#include "matrix_product.h"

// Once for all instruction sets.
#ifndef ORT_OPS_MATRIX_PRODUCT_BLOCKS_
#define ORT_OPS_MATRIX_PRODUCT_BLOCKS_
namespace ort_ops {

// A part of the product that shares one packed block of B.
struct ProductBlock {
  MatrixProduct product;  // of that part
  int64_t c_row;
  bool is_first;  // of those that share their part of C
  float* packed_b;
};

constexpr int64_t kBlockDepth = 1024;
constexpr int64_t kBlockColumns = 1024;
constexpr int64_t kWidestPanel = 32;   // columns, of the widest vectors
constexpr int64_t kMaxRowPanels = 8;    // of one task; with kPanelDepth they are 48 KiB, which its stack holds

constexpr int64_t CeilDiv(int64_t count, int64_t size) { return (count + size - 1) / size; }

}  // namespace ort_ops
#endif

HWY_BEFORE_NAMESPACE();
namespace ort_ops {
namespace HWY_NAMESPACE {

int64_t ColumnPanels(int64_t columns) { return CeilDiv(columns, kTileColumns); }

// Packs one panel of B, all of the block's depth.
void PackPanel(const ProductBlock& block, int64_t panel) {
  const MatrixProduct& product = block.product;
  const int64_t j = panel * kTileColumns;
  const int64_t padded = ColumnPanels(product.columns) * kTileColumns;
  for (int64_t k = 0; k < product.depth; k += kPanelDepth) {
    const int64_t depth = std::min(kPanelDepth, product.depth - k);
    PackPanels<kTileColumns>(Transposed(Part(product.b, k, j)), std::min(kTileColumns, product.columns - j), depth,
                             block.packed_b + k * padded + j * depth);
  }
}

// The rows of the panels [begin, end) of A, at most kMaxRowPanels.
void MultiplyRows(const ProductBlock& block, int64_t begin, int64_t end) {
  const MatrixProduct& product = block.product;
  HWY_ALIGN float packed_a[kMaxRowPanels * kTileRows * kPanelDepth];
  const int64_t i = begin * kTileRows;
  const int64_t rows = std::min(end * kTileRows, product.rows) - i;
  const int64_t padded = ColumnPanels(product.columns) * kTileColumns;
  float* c = product.c + i * block.c_row;
  for (int64_t k = 0; k < product.depth; k += kPanelDepth) {
    const int64_t depth = std::min(kPanelDepth, product.depth - k);
    const StridedMatrix a = Part(product.a, i, k);
    const float* panels = block.packed_b + k * padded;
    const Addend addend = block.is_first && k == 0 ? Addend{product.bias, 0} : Addend{c, block.c_row};
    if (a.column == 1) {
      MultiplyPanels<false>(rows, product.columns, depth, a, panels, addend, c, block.c_row);
    } else {
      PackPanels<kTileRows>(a, rows, depth, packed_a);
      MultiplyPanels<true>(rows, product.columns, depth, {packed_a, 1, kTileRows}, panels, addend, c, block.c_row);
    }
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace ort_ops
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace ort_ops {
namespace {

HWY_EXPORT(ColumnPanels);
HWY_EXPORT(PackPanel);
HWY_EXPORT(MultiplyRows);

OrtOpsStatus RunBlock(const ProductBlock& block, const OrtOpsParallelFor* parallel_for) {
  const MatrixProduct& product = block.product;
  const OrtOpsStatus packed = ParallelFor(parallel_for, HWY_DYNAMIC_DISPATCH(ColumnPanels)(product.columns),
                                          [&](int64_t panel) { HWY_DYNAMIC_DISPATCH(PackPanel)(block, panel); });
  if (packed != ORT_OPS_SUCCESS) return packed;
  // As even as can be for any small power of two of threads.
  const int64_t panels = CeilDiv(product.rows, kTileRows);
  const int64_t tasks = std::min(panels, CeilDiv(CeilDiv(panels, kMaxRowPanels), 8) * 8);
  return ParallelFor(parallel_for, tasks, [&](int64_t task) {
    HWY_DYNAMIC_DISPATCH(MultiplyRows)(block, task * panels / tasks, (task + 1) * panels / tasks);
  });
}

void FillWithBias(const MatrixProduct& product) {
  for (int64_t i = 0; i < product.rows; ++i) {
    float* row = product.c + i * product.columns;
    if (product.bias == nullptr) {
      std::fill_n(row, product.columns, 0.0f);
    } else {
      std::copy_n(product.bias, product.columns, row);
    }
  }
}

}  // namespace

size_t MultiplyWorkspaceBytes(const MatrixProduct& product) {
  const int64_t columns = CeilDiv(std::min(kBlockColumns, product.columns), kWidestPanel) * kWidestPanel;
  return static_cast<size_t>(columns * std::min(kBlockDepth, product.depth)) * sizeof(float);
}

OrtOpsStatus Multiply(const MatrixProduct& product, void* workspace, const OrtOpsParallelFor* parallel_for) {
  if (product.depth == 0) FillWithBias(product);
  for (int64_t j = 0; j < product.columns; j += kBlockColumns) {
    const int64_t columns = std::min(kBlockColumns, product.columns - j);
    for (int64_t k = 0; k < product.depth; k += kBlockDepth) {
      const int64_t depth = std::min(kBlockDepth, product.depth - k);
      const StridedMatrix a = {product.a.data + k * product.a.column, product.a.row, product.a.column};
      const StridedMatrix b = {product.b.data + k * product.b.row + j * product.b.column, product.b.row,
                               product.b.column};
      const float* bias = product.bias == nullptr ? nullptr : product.bias + j;
      const ProductBlock block = {{product.rows, columns, depth, a, b, bias, product.c + j},
                                  product.columns, k == 0, static_cast<float*>(workspace)};
      if (const OrtOpsStatus status = RunBlock(block, parallel_for)) return status;
    }
  }
  return ORT_OPS_SUCCESS;
}

}  // namespace ort_ops
#endif  // HWY_ONCE
