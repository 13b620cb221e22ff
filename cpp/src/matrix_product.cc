// A matrix product on the caller's threads: B is packed block by block, then each thread takes blocks of rows.
#include "cpu_target.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "matrix_product.cc"
#include "hwy/foreach_target.h"  // must come before highway.h
//
#include "matrix_product-inl.h"
#include "matrix_product.h"
#include "rounding.h"

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

constexpr int64_t kBlockDepth = 1536;
constexpr int64_t kBlockColumns = 1536;
constexpr int64_t kWidestPanel = 32;   // columns, of the widest vectors
constexpr int64_t kMaxRowPanels = 8;    // of one task; with kPanelDepth they are 72 KiB, which its stack holds

constexpr int64_t kMinTasks = 8;
constexpr int64_t kEvenTasks = 4;       // a multiple of it: as much for each of two or four threads

struct Range {
  int64_t begin;
  int64_t end;
};

// Piece `index` of `pieces` that are as large as one another, or one larger.
constexpr Range Piece(int64_t size, int64_t index, int64_t pieces) {
  return {index * size / pieces, (index + 1) * size / pieces};
}

// The size of the pieces of `count`, at most `largest`, when they are as large as one another.
constexpr int64_t EvenSize(int64_t count, int64_t largest) { return CeilDiv(count, CeilDiv(count, largest)); }

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
  const int64_t panel_depth = EvenSize(product.depth, kPanelDepth);
  for (int64_t k = 0; k < product.depth; k += panel_depth) {
    const int64_t depth = std::min(panel_depth, product.depth - k);
    PackPanels<kTileColumns>(Transposed(Part(product.b, k, j)), std::min(kTileColumns, product.columns - j), depth,
                             block.packed_b + k * padded + j * depth);
  }
}

// A part of C: its panels of rows [begin, end), at most kMaxRowPanels, and of columns.
void MultiplyPart(const ProductBlock& block, Range row_panels, Range column_panels) {
  const MatrixProduct& product = block.product;
  HWY_ALIGN float packed_a[kMaxRowPanels * kTileRows * kPanelDepth];
  const int64_t i = row_panels.begin * kTileRows;
  const int64_t j = column_panels.begin * kTileColumns;
  const int64_t rows = std::min(row_panels.end * kTileRows, product.rows) - i;
  const int64_t columns = std::min(column_panels.end * kTileColumns, product.columns) - j;
  const int64_t padded = ColumnPanels(product.columns) * kTileColumns;
  float* c = product.c + i * block.c_row + j;
  const float* bias = product.bias == nullptr ? nullptr : product.bias + j;
  const int64_t panel_depth = EvenSize(product.depth, kPanelDepth);
  for (int64_t k = 0; k < product.depth; k += panel_depth) {
    const int64_t depth = std::min(panel_depth, product.depth - k);
    const StridedMatrix a = Part(product.a, i, k);
    const float* panels = block.packed_b + k * padded + j * depth;
    const Addend addend = block.is_first && k == 0 ? Addend{bias, 0} : Addend{c, block.c_row};
    if (a.column == 1) {
      MultiplyPanels<false>(rows, columns, depth, a, panels, addend, c, block.c_row);
    } else {
      PackPanels<kTileRows>(a, rows, depth, packed_a);
      MultiplyPanels<true>(rows, columns, depth, {packed_a, 1, kTileRows}, panels, addend, c, block.c_row);
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
HWY_EXPORT(MultiplyPart);

OrtOpsStatus RunBlock(const ProductBlock& block, const OrtOpsParallelFor* parallel_for) {
  const MatrixProduct& product = block.product;
  const OrtOpsStatus packed = ParallelFor(parallel_for, HWY_DYNAMIC_DISPATCH(ColumnPanels)(product.columns),
                                          [&](int64_t panel) { HWY_DYNAMIC_DISPATCH(PackPanel)(block, panel); });
  if (packed != ORT_OPS_SUCCESS) return packed;
  const int64_t row_panels = CeilDiv(product.rows, kTileRows);
  const int64_t column_panels = HWY_DYNAMIC_DISPATCH(ColumnPanels)(product.columns);
  int64_t row_pieces = CeilDiv(row_panels, kMaxRowPanels);
  int64_t column_pieces = 1;
  if (row_pieces < kMinTasks) {
    // Not thinner pieces of rows: each panel of B that a task loads should serve many of them.
    while (row_pieces * column_pieces < kMinTasks || row_pieces * column_pieces % kEvenTasks != 0) ++column_pieces;
    column_pieces = std::min(column_panels, column_pieces);
  } else {
    row_pieces = std::min(row_panels, CeilDiv(row_pieces, kMinTasks) * kMinTasks);
  }
  return ParallelFor(parallel_for, row_pieces * column_pieces, [&](int64_t task) {
    HWY_DYNAMIC_DISPATCH(MultiplyPart)(block, Piece(row_panels, task / column_pieces, row_pieces),
                                       Piece(column_panels, task % column_pieces, column_pieces));
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
  const int64_t columns = RoundUp(std::min(kBlockColumns, product.columns), kWidestPanel);
  return static_cast<size_t>(columns * std::min(kBlockDepth, product.depth)) * sizeof(float);
}

OrtOpsStatus Multiply(const MatrixProduct& product, void* workspace, const OrtOpsParallelFor* parallel_for) {
  if (product.rows == 0 || product.columns == 0) return ORT_OPS_SUCCESS;
  if (product.depth == 0) {
    FillWithBias(product);
    return ORT_OPS_SUCCESS;
  }
  const int64_t block_columns = EvenSize(product.columns, kBlockColumns);
  const int64_t block_depth = EvenSize(product.depth, kBlockDepth);
  for (int64_t j = 0; j < product.columns; j += block_columns) {
    const int64_t columns = std::min(block_columns, product.columns - j);
    for (int64_t k = 0; k < product.depth; k += block_depth) {
      const int64_t depth = std::min(block_depth, product.depth - k);
      const float* bias = product.bias == nullptr ? nullptr : product.bias + j;
      const ProductBlock block = {
          {product.rows, columns, depth, Part(product.a, 0, k), Part(product.b, k, j), bias, product.c + j},
          product.columns, k == 0, static_cast<float*>(workspace)};
      if (const OrtOpsStatus status = RunBlock(block, parallel_for)) return status;
    }
  }
  return ORT_OPS_SUCCESS;
}

}  // namespace ort_ops
#endif  // HWY_ONCE
