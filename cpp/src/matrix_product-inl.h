// The pieces of a fast matrix product C = A * B, compiled once for each instruction set: B, and A where its rows do not lie
// along memory, are copied into panels that the processor reads from front to back, and a tile of C is held in
// registers while it runs along them. (Goto and van de Geijn, "Anatomy of High-Performance Matrix Multiplication", 2008.)

// A per-target include guard, as Highway asks for.
#if defined(ORT_OPS_MATRIX_PRODUCT_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef ORT_OPS_MATRIX_PRODUCT_INL_H_
#undef ORT_OPS_MATRIX_PRODUCT_INL_H_
#else
#define ORT_OPS_MATRIX_PRODUCT_INL_H_
#endif

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "elements-inl.h"
#include "hwy/cache_control.h"
#include "hwy/highway.h"
#include "matrix_product.h"

// Once for all instruction sets.
#ifndef ORT_OPS_MATRIX_PRODUCT_TILE_
#define ORT_OPS_MATRIX_PRODUCT_TILE_
namespace ort_ops {

constexpr int64_t kTileRows = 6;

// A panel of B of this depth, 24 KiB with AVX2, stays in the first cache while the tiles above one another use it. Measured:
// with 256 a training step takes 5 % longer, with 512 1 %.
constexpr int64_t kPanelDepth = 384;

}  // namespace ort_ops
#endif

HWY_BEFORE_NAMESPACE();
namespace ort_ops {
namespace HWY_NAMESPACE {

constexpr int64_t kTileVectors = 2;
constexpr int64_t kTileColumns = kTileVectors * kLanes;

// ---------------------------------------------------------------- panels

// Vectors of one or two blocks of four.
using DTurn = hn::CappedTag<float, 8>;
using VTurn = hn::Vec<DTurn>;
constexpr int64_t kTurnLanes = static_cast<int64_t>(hn::MaxLanes(DTurn()));

// Turns each block of four rows by four columns.
HWY_INLINE void TurnBlocks(VTurn& r0, VTurn& r1, VTurn& r2, VTurn& r3) {
  const DTurn d;
  const hn::Repartition<double, DTurn> pairs;
  const auto low01 = hn::BitCast(pairs, hn::InterleaveLower(d, r0, r1));
  const auto low23 = hn::BitCast(pairs, hn::InterleaveLower(d, r2, r3));
  const auto high01 = hn::BitCast(pairs, hn::InterleaveUpper(d, r0, r1));
  const auto high23 = hn::BitCast(pairs, hn::InterleaveUpper(d, r2, r3));
  r0 = hn::BitCast(d, hn::InterleaveLower(pairs, low01, low23));
  r1 = hn::BitCast(d, hn::InterleaveUpper(pairs, low01, low23));
  r2 = hn::BitCast(d, hn::InterleaveLower(pairs, high01, high23));
  r3 = hn::BitCast(d, hn::InterleaveUpper(pairs, high01, high23));
}

// The vector's blocks, one to `to` and one to four rows of a panel behind it.
template <int64_t kWidth>
HWY_INLINE void StoreBlocks(VTurn v, float* to) {
  if constexpr (kTurnLanes == 8) {
    const hn::Half<DTurn> half;
    hn::StoreU(hn::LowerHalf(half, v), half, to);
    hn::StoreU(hn::UpperHalf(half, v), half, to + 4 * kWidth);
  } else {
    hn::StoreU(v, DTurn(), to);
  }
}

// The whole vectors of four rows, turned: column k to panel[k * kWidth].
template <int64_t kWidth>
HWY_INLINE void TurnFourRows(const float* rows, int64_t row, int64_t depth, float* panel) {
  for (int64_t k = 0; k + kTurnLanes <= depth; k += kTurnLanes) {
    VTurn r0 = hn::LoadU(DTurn(), rows + k);
    VTurn r1 = hn::LoadU(DTurn(), rows + row + k);
    VTurn r2 = hn::LoadU(DTurn(), rows + 2 * row + k);
    VTurn r3 = hn::LoadU(DTurn(), rows + 3 * row + k);
    TurnBlocks(r0, r1, r2, r3);
    StoreBlocks<kWidth>(r0, panel + k * kWidth);
    StoreBlocks<kWidth>(r1, panel + (k + 1) * kWidth);
    StoreBlocks<kWidth>(r2, panel + (k + 2) * kWidth);
    StoreBlocks<kWidth>(r3, panel + (k + 3) * kWidth);
  }
}

// A whole panel out of kWidth rows that lie along memory.
template <int64_t kWidth>
HWY_INLINE void TurnRows(const float* rows, int64_t row, int64_t depth, float* panel) {
  constexpr int64_t kFours = kWidth / 4 * 4;
  for (int64_t r = 0; r < kFours; r += 4) TurnFourRows<kWidth>(rows + r * row, row, depth, panel + r);
  const int64_t turned = depth / kTurnLanes * kTurnLanes;
  for (int64_t k = 0; k < depth; ++k) {
    for (int64_t r = k < turned ? kFours : 0; r < kWidth; ++r) panel[k * kWidth + r] = rows[r * row + k];
  }
}

// Panels of kWidth rows of `matrix`, [row / kWidth][depth][row % kWidth]; zeros where the last one has no rows.
template <int64_t kWidth>
HWY_INLINE void PackPanels(StridedMatrix matrix, int64_t rows, int64_t depth, float* HWY_RESTRICT panels) {
  const int64_t whole = rows / kWidth * kWidth;
  if (matrix.row == 1) {
    // Column by column: the lines that a column shares with the next panels' are read once. The columns lie too far apart
    // for the processor to fetch the next ones by itself.
    constexpr int64_t kAhead = 16;
    constexpr int64_t kLine = 16;  // floats
    for (int64_t k = 0; k < depth; ++k) {
      const float* from = matrix.data + k * matrix.column;
      for (int64_t i = 0; i < whole && k + kAhead < depth; i += kLine) hwy::Prefetch(from + kAhead * matrix.column + i);
      for (int64_t i = 0; i < whole; i += kWidth) {
        std::memcpy(panels + i * depth + k * kWidth, from + i, kWidth * sizeof(float));
      }
    }
  } else if (matrix.column == 1) {
    for (int64_t i = 0; i < whole; i += kWidth) {
      TurnRows<kWidth>(matrix.data + i * matrix.row, matrix.row, depth, panels + i * depth);
    }
  } else {
    for (int64_t i = 0; i < whole; ++i) {
      float* to = panels + i / kWidth * kWidth * depth + i % kWidth;
      for (int64_t k = 0; k < depth; ++k) to[k * kWidth] = matrix.data[i * matrix.row + k * matrix.column];
    }
  }
  if (whole == rows) return;
  float* last = panels + whole * depth;
  for (int64_t k = 0; k < depth; ++k) {
    for (int64_t r = 0; r < kWidth; ++r) {
      last[k * kWidth + r] = whole + r < rows ? matrix.data[(whole + r) * matrix.row + k * matrix.column] : 0.0f;
    }
  }
}

// ---------------------------------------------------------------- tiles

// What is added to a tile of C: C itself, or a bias whose `row` is 0; `data` is null for nothing.
struct Addend {
  const float* data;
  int64_t row;

  HWY_INLINE Addend At(int64_t i, int64_t j) const { return data == nullptr ? *this : Addend{data + i * row + j, row}; }
};

// C = kRows rows of A times one panel of B, plus the addend. kPacked: A is a panel. `columns` of the panel are C's.
template <int kRows, bool kPacked>
HWY_INLINE void Tile(int64_t depth, StridedMatrix a, const float* HWY_RESTRICT panel, Addend addend, float* c,
                     int64_t c_row, int64_t columns) {
  const D d;
  V sums[kRows][kTileVectors];
  for (int r = 0; r < kRows; ++r) {
    for (int v = 0; v < kTileVectors; ++v) sums[r][v] = hn::Zero(d);
    hwy::Prefetch(c + r * c_row);
  }
  for (int64_t k = 0; k < depth; ++k) {
    V right[kTileVectors];
    for (int v = 0; v < kTileVectors; ++v) right[v] = hn::LoadU(d, panel + k * kTileColumns + v * kLanes);
    for (int r = 0; r < kRows; ++r) {
      const V left = hn::Set(d, kPacked ? a.data[k * kTileRows + r] : a.data[r * a.row + k]);
      for (int v = 0; v < kTileVectors; ++v) sums[r][v] = hn::MulAdd(left, right[v], sums[r][v]);
    }
  }
  if (columns == kTileColumns) {
    for (int r = 0; r < kRows; ++r) {
      for (int v = 0; v < kTileVectors; ++v) {
        const int64_t j = v * kLanes;
        if (addend.data != nullptr) sums[r][v] = hn::Add(hn::LoadU(d, addend.data + r * addend.row + j), sums[r][v]);
        hn::StoreU(sums[r][v], d, c + r * c_row + j);
      }
    }
    return;
  }
  for (int r = 0; r < kRows; ++r) {
    float row[kTileColumns];
    for (int v = 0; v < kTileVectors; ++v) hn::StoreU(sums[r][v], d, row + v * kLanes);
    for (int64_t j = 0; j < columns; ++j) {
      c[r * c_row + j] = addend.data == nullptr ? row[j] : addend.data[r * addend.row + j] + row[j];
    }
  }
}

// `rows` x `columns` of C = rows of A times panels of B, plus the addend. kPacked: A is panels of kTileRows rows; otherwise
// its rows lie along memory. depth is at most kPanelDepth where speed counts.
template <bool kPacked>
HWY_INLINE void MultiplyPanels(int64_t rows, int64_t columns, int64_t depth, StridedMatrix a, const float* panels,
                               Addend addend, float* c, int64_t c_row) {
  for (int64_t j = 0; j < columns; j += kTileColumns) {
    const float* panel = panels + j * depth;
    const int64_t width = std::min(kTileColumns, columns - j);
    int64_t i = 0;
    const auto tile = [&](auto count) {
      constexpr int kRows = count.value;
      const StridedMatrix left = kPacked
          ? StridedMatrix{a.data + i / kTileRows * kTileRows * depth + i % kTileRows, 1, kTileRows}
          : StridedMatrix{a.data + i * a.row, a.row, 1};
      Tile<kRows, kPacked>(depth, left, panel, addend.At(i, j), c + i * c_row + j, c_row, width);
      i += kRows;
    };
    while (i + 6 <= rows) tile(std::integral_constant<int, 6>());
    while (i + 2 <= rows) tile(std::integral_constant<int, 2>());
    if (i < rows) tile(std::integral_constant<int, 1>());
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace ort_ops
HWY_AFTER_NAMESPACE();

#endif  // ORT_OPS_MATRIX_PRODUCT_INL_H_
