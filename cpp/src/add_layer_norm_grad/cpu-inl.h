// The algorithm of the CPU kernel, compiled once for each instruction set. Knows vectors; knows nothing of dispatch.
//
// A row takes two sweeps: the first sums g and g * xhat along the row and adds dy * xhat and dy to the block's sums,
// the second writes dx. The second finds dy, x1 and x2 in the cache; only dsum and dx are new.
//
// Elements are worked on in groups of two vectors of floats, `a` and `b`. For float and float16 `a` holds the first half of a group
// and `b` the second; for bfloat16 `a` holds the even elements and `b` the odd ones, because a bfloat16 is the upper
// half of a float: two shifts or masks widen a whole vector of them, with no shuffle. Sums over rows stay in that order until
// the blocks are combined.

// A per-target include guard, as Highway asks for.
#if defined(ORT_OPS_ADD_LAYER_NORM_GRAD_CPU_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef ORT_OPS_ADD_LAYER_NORM_GRAD_CPU_INL_H_
#undef ORT_OPS_ADD_LAYER_NORM_GRAD_CPU_INL_H_
#else
#define ORT_OPS_ADD_LAYER_NORM_GRAD_CPU_INL_H_
#endif

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>

#include "add_layer_norm_grad/plan.h"
#include "add_layer_norm_grad/problem.h"
#include "hwy/cache_control.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace ort_ops::add_layer_norm_grad {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

using D = hn::ScalableTag<float>;
using DU32 = hn::RebindToUnsigned<D>;
using V = hn::Vec<D>;
constexpr int64_t kLanes = static_cast<int64_t>(hn::MaxLanes(D()));
constexpr int64_t kGroup = 2 * kLanes;

struct Pair {
  V a;
  V b;
};

// ---------------------------------------------------------------- element types

// How a group of T is read, written and rounded. LaneOf says where in a Pair (a's lanes, then b's) an element is.
template <class T>
struct Elements;

template <>
struct Elements<float> {
  static constexpr bool kInterleaved = false;
  static HWY_INLINE Pair Load(const float* p) { return {hn::LoadU(D(), p), hn::LoadU(D(), p + kLanes)}; }
  static HWY_INLINE Pair Round(Pair v) { return v; }
  static HWY_INLINE void Store(Pair v, float* p) {
    hn::StoreU(v.a, D(), p);
    hn::StoreU(v.b, D(), p + kLanes);
  }
  static HWY_INLINE void Stream(Pair v, float* p) {
    hn::Stream(v.a, D(), p);
    hn::Stream(v.b, D(), p + kLanes);
  }
};

template <>
struct Elements<hwy::float16_t> {
  static constexpr bool kInterleaved = false;
  using DHalf = hn::Rebind<hwy::float16_t, D>;
  static HWY_INLINE Pair Load(const hwy::float16_t* p) {
    return {hn::PromoteTo(D(), hn::LoadU(DHalf(), p)), hn::PromoteTo(D(), hn::LoadU(DHalf(), p + kLanes))};
  }
  static HWY_INLINE Pair Round(Pair v) {
    return {hn::PromoteTo(D(), hn::DemoteTo(DHalf(), v.a)), hn::PromoteTo(D(), hn::DemoteTo(DHalf(), v.b))};
  }
  static HWY_INLINE void Store(Pair v, hwy::float16_t* p) {
    hn::StoreU(hn::DemoteTo(DHalf(), v.a), DHalf(), p);
    hn::StoreU(hn::DemoteTo(DHalf(), v.b), DHalf(), p + kLanes);
  }
  static HWY_INLINE void Stream(Pair v, hwy::float16_t* p) {
    hn::Stream(hn::DemoteTo(DHalf(), v.a), DHalf(), p);
    hn::Stream(hn::DemoteTo(DHalf(), v.b), DHalf(), p + kLanes);
  }
};

template <>
struct Elements<hwy::bfloat16_t> {
  static constexpr bool kInterleaved = true;
  using DU16 = hn::Repartition<uint16_t, D>;
  static HWY_INLINE Pair Load(const hwy::bfloat16_t* p) {
    const auto bits = hn::BitCast(DU32(), hn::LoadU(DU16(), reinterpret_cast<const uint16_t*>(p)));
    return {hn::BitCast(D(), hn::ShiftLeft<16>(bits)), hn::BitCast(D(), hn::And(bits, UpperHalf()))};
  }
  static HWY_INLINE Pair Round(Pair v) {
    return {hn::BitCast(D(), hn::And(RoundedBits(v.a), UpperHalf())),
            hn::BitCast(D(), hn::And(RoundedBits(v.b), UpperHalf()))};
  }
  static HWY_INLINE void Store(Pair v, hwy::bfloat16_t* p) {
    hn::StoreU(Packed(v), DU16(), reinterpret_cast<uint16_t*>(p));
  }
  static HWY_INLINE void Stream(Pair v, hwy::bfloat16_t* p) {
    hn::Stream(Packed(v), DU16(), reinterpret_cast<uint16_t*>(p));
  }

 private:
  static HWY_INLINE hn::Vec<DU32> UpperHalf() { return hn::Set(DU32(), 0xFFFF0000u); }
  // To nearest, ties to even, in the upper 16 bits. Carries a NaN over into infinity or zero only if its payload fills the lower half;
  // no such NaN comes here, because rows' statistics and float gammas are made canonical before (Canonical).
  static HWY_INLINE hn::Vec<DU32> RoundedBits(V v) {
    const auto bits = hn::BitCast(DU32(), v);
    const auto is_odd = hn::And(hn::ShiftRight<16>(bits), hn::Set(DU32(), 1));
    return hn::Add(hn::Add(bits, hn::Set(DU32(), 0x7FFF)), is_odd);
  }
  static HWY_INLINE hn::Vec<DU16> Packed(Pair v) {
    const auto even = hn::ShiftRight<16>(RoundedBits(v.a));
    return hn::OddEven(hn::BitCast(DU16(), RoundedBits(v.b)), hn::BitCast(DU16(), even));
  }
};

HWY_INLINE V Canonical(V v) {
  return hn::IfThenElse(hn::IsNaN(v), hn::Set(D(), std::numeric_limits<float>::quiet_NaN()), v);
}

// gamma, in the order of T's groups; canonical where T's rounding needs it.
template <class T, class TGamma>
HWY_INLINE Pair LoadGamma(const TGamma* p) {
  const Pair v = Elements<TGamma>::Load(p);
  if constexpr (Elements<T>::kInterleaved && !Elements<TGamma>::kInterleaved) {
    return {Canonical(hn::ConcatEven(D(), v.b, v.a)), Canonical(hn::ConcatOdd(D(), v.b, v.a))};
  }
  return v;
}

template <class T>
constexpr int64_t LaneOf(int64_t element) {
  if (!Elements<T>::kInterleaved) return element;
  return element / 2 + (element % 2) * kLanes;
}

HWY_INLINE float Canonical(float value) {
  return value == value ? value : std::numeric_limits<float>::quiet_NaN();
}

// ---------------------------------------------------------------- one group

struct RowStatistics {
  V mean;
  V rstd;
};

// One row's sums over columns, kept apart for a and b.
struct RowSums {
  Pair g;
  Pair g_xhat;
};

template <class T>
HWY_INLINE Pair RoundedSum(const T* x1, const T* x2) {
  const Pair x = Elements<T>::Load(x1);
  if (x2 == nullptr) return x;
  const Pair y = Elements<T>::Load(x2);
  return Elements<T>::Round({hn::Add(x.a, y.a), hn::Add(x.b, y.b)});
}

HWY_INLINE Pair Xhat(Pair x, const RowStatistics& row) {
  return {hn::Mul(hn::Sub(x.a, row.mean), row.rstd), hn::Mul(hn::Sub(x.b, row.mean), row.rstd)};
}

HWY_INLINE void AddToRowSums(Pair dy, Pair xhat, Pair gamma, RowSums& sums) {
  const Pair g = {hn::Mul(dy.a, gamma.a), hn::Mul(dy.b, gamma.b)};
  sums.g = {hn::Add(sums.g.a, g.a), hn::Add(sums.g.b, g.b)};
  sums.g_xhat = {hn::MulAdd(g.a, xhat.a, sums.g_xhat.a), hn::MulAdd(g.b, xhat.b, sums.g_xhat.b)};
}

// dx = (g + (x - mean) * scale + shift) * rstd. Multiplying by rstd last keeps the exact cancellation of the bracket: with
// one column dx is 0, not the rounding error of two large terms.
struct DxCoefficients {
  V mean;
  V rstd;
  V scale;  // -rstd * sum(g * xhat) / cols
  V shift;  // -sum(g) / cols
};

HWY_INLINE V DxOf(V dy, V x, V gamma, V dsum, const DxCoefficients& row) {
  const V bracket = hn::Add(hn::Mul(dy, gamma), hn::MulAdd(hn::Sub(x, row.mean), row.scale, row.shift));
  return hn::MulAdd(bracket, row.rstd, dsum);
}

HWY_INLINE Pair DxOf(Pair dy, Pair x, Pair gamma, Pair dsum, const DxCoefficients& row) {
  return {DxOf(dy.a, x.a, gamma.a, dsum.a, row), DxOf(dy.b, x.b, gamma.b, dsum.b, row)};
}

// ---------------------------------------------------------------- the last, incomplete group of a row

// A copy of the row's last elements in a whole group, zeros behind them.
template <class T>
struct TailCopy {
  HWY_INLINE TailCopy(const T* from, int64_t count) {
    std::memset(elements, 0, sizeof(elements));
    std::memcpy(elements, from, static_cast<size_t>(count) * sizeof(T));
  }
  T elements[kGroup];
};

// The lanes of `v` that hold the tail's elements; 0 in the others, whatever was there (0 * Inf would be NaN).
template <class T>
HWY_INLINE Pair OnlyTail(Pair v, int64_t count) {
  const int64_t in_a = Elements<T>::kInterleaved ? (count + 1) / 2 : std::min(count, kLanes);
  return {hn::IfThenElseZero(hn::FirstN(D(), static_cast<size_t>(in_a)), v.a),
          hn::IfThenElseZero(hn::FirstN(D(), static_cast<size_t>(count - in_a)), v.b)};
}

// Adds the tail's elements of `v` to sums in their natural order: a whole group would not fit behind the last full one.
template <class T>
HWY_INLINE void AddTailTo(float* sums, Pair v, int64_t count) {
  HWY_ALIGN float lanes[kGroup];
  hn::Store(v.a, D(), lanes);
  hn::Store(v.b, D(), lanes + kLanes);
  for (int64_t i = 0; i < count; ++i) sums[i] += lanes[LaneOf<T>(i)];
}

// ---------------------------------------------------------------- one row

template <class T, class TGamma>
struct BlockInputs {
  const T* dy;
  const T* x1;
  const T* x2;  // null: x = x1
  const T* dsum;  // null: 0
  const TGamma* gamma;
  int64_t cols;
  int64_t full_cols;  // cols in whole groups
};

HWY_INLINE void AddTo(float* sums, Pair v) {
  hn::StoreU(hn::Add(hn::LoadU(D(), sums), v.a), D(), sums);
  hn::StoreU(hn::Add(hn::LoadU(D(), sums + kLanes), v.b), D(), sums + kLanes);
}

HWY_INLINE void AddProductTo(float* sums, Pair u, Pair v) {
  hn::StoreU(hn::MulAdd(u.a, v.a, hn::LoadU(D(), sums)), D(), sums);
  hn::StoreU(hn::MulAdd(u.b, v.b, hn::LoadU(D(), sums + kLanes)), D(), sums + kLanes);
}

// The first sweep. dgamma and dbeta are the block's sums, null where not wanted.
template <class T, class TGamma>
HWY_NOINLINE RowSums SumRow(const BlockInputs<T, TGamma>& in, int64_t row, const RowStatistics& statistics,
                            float* HWY_RESTRICT dgamma, float* HWY_RESTRICT dbeta) {
  const T* dy = in.dy + row * in.cols;
  const T* x1 = in.x1 + row * in.cols;
  const T* x2 = in.x2 == nullptr ? nullptr : in.x2 + row * in.cols;
  const T* dsum = in.dsum == nullptr ? dy : in.dsum + row * in.cols;
  RowSums sums = {{hn::Zero(D()), hn::Zero(D())}, {hn::Zero(D()), hn::Zero(D())}};
  int64_t i = 0;
  for (; i < in.full_cols; i += kGroup) {
    hwy::Prefetch(dsum + i);  // the second sweep will read it: memory is idle otherwise while this sweep computes
    const Pair dy_i = Elements<T>::Load(dy + i);
    const Pair xhat = Xhat(RoundedSum(x1 + i, x2 == nullptr ? nullptr : x2 + i), statistics);
    AddToRowSums(dy_i, xhat, LoadGamma<T>(in.gamma + i), sums);
    if (dgamma != nullptr) AddProductTo(dgamma + i, dy_i, xhat);
    if (dbeta != nullptr) AddTo(dbeta + i, dy_i);
  }
  if (i < in.cols) {
    const int64_t count = in.cols - i;
    const Pair dy_i = Elements<T>::Load(TailCopy<T>(dy + i, count).elements);
    const TailCopy<T> x1_i(x1 + i, count);
    const TailCopy<T> x2_i(x2 == nullptr ? x1 + i : x2 + i, count);
    const Pair x = RoundedSum(x1_i.elements, x2 == nullptr ? nullptr : x2_i.elements);
    const Pair xhat = OnlyTail<T>(Xhat(x, statistics), count);
    AddToRowSums(dy_i, xhat, LoadGamma<T>(TailCopy<TGamma>(in.gamma + i, count).elements), sums);
    if (dgamma != nullptr) AddTailTo<T>(dgamma + i, {hn::Mul(dy_i.a, xhat.a), hn::Mul(dy_i.b, xhat.b)}, count);
    if (dbeta != nullptr) AddTailTo<T>(dbeta + i, dy_i, count);
  }
  return sums;
}

// The second sweep.
template <class T, class TGamma, bool kStream>
HWY_NOINLINE void WriteDxRow(const BlockInputs<T, TGamma>& in, int64_t row, bool has_next_row,
                             const DxCoefficients& coefficients, T* dx_all) {
  const T* dy = in.dy + row * in.cols;
  const T* x1 = in.x1 + row * in.cols;
  const T* x2 = in.x2 == nullptr ? nullptr : in.x2 + row * in.cols;
  const T* dsum = in.dsum == nullptr ? nullptr : in.dsum + row * in.cols;
  const int64_t next = has_next_row ? in.cols : 0;
  T* dx = dx_all + row * in.cols;
  const Pair zero = {hn::Zero(D()), hn::Zero(D())};
  int64_t i = 0;
  for (; i < in.full_cols; i += kGroup) {
    hwy::Prefetch(dy + next + i);
    hwy::Prefetch(x1 + next + i);
    if (x2 != nullptr) hwy::Prefetch(x2 + next + i);
    const Pair dy_i = Elements<T>::Load(dy + i);
    const Pair x = RoundedSum(x1 + i, x2 == nullptr ? nullptr : x2 + i);
    const Pair dsum_i = dsum == nullptr ? zero : Elements<T>::Load(dsum + i);
    const Pair dx_i = DxOf(dy_i, x, LoadGamma<T>(in.gamma + i), dsum_i, coefficients);
    if constexpr (kStream) {
      Elements<T>::Stream(dx_i, dx + i);
    } else {
      Elements<T>::Store(dx_i, dx + i);
    }
  }
  if (i < in.cols) {
    const int64_t count = in.cols - i;
    const Pair dy_i = Elements<T>::Load(TailCopy<T>(dy + i, count).elements);
    const TailCopy<T> x1_i(x1 + i, count);
    const TailCopy<T> x2_i(x2 == nullptr ? x1 + i : x2 + i, count);
    const Pair x = RoundedSum(x1_i.elements, x2 == nullptr ? nullptr : x2_i.elements);
    const Pair dsum_i = dsum == nullptr ? zero : Elements<T>::Load(TailCopy<T>(dsum + i, count).elements);
    const Pair gamma = LoadGamma<T>(TailCopy<TGamma>(in.gamma + i, count).elements);
    T out[kGroup];
    Elements<T>::Store(DxOf(dy_i, x, gamma, dsum_i, coefficients), out);
    std::memcpy(dx + i, out, static_cast<size_t>(count) * sizeof(T));
  }
}

// ---------------------------------------------------------------- one block of rows

// Beyond this many bytes the tensors do not stay in a last-level cache, and writing dx past the caches saves reading its lines first
// (8 to 18 % of the time); below it, dx had better stay in the cache for its reader.
constexpr int64_t kStreamAboveBytes = int64_t{24} << 20;

template <class T>
bool ShouldStream(const Problem& problem) {
  const int64_t row_bytes = problem.cols * static_cast<int64_t>(sizeof(T));
  const bool whole_lines = (reinterpret_cast<uintptr_t>(problem.dx) | static_cast<uintptr_t>(row_bytes)) % 64 == 0;
  return whole_lines && 5 * problem.rows * row_bytes > kStreamAboveBytes;
}

// Short rows are taken several at a time, so that the sums along one row, a chain of dependent instructions, overlap with
// the others': 5 to 15 % at 64 columns, nothing from 512 up.
constexpr int64_t kMaxRowsAtOnce = 8;
constexpr int64_t kColsAtOnce = 512;

template <class T, class TGamma>
void RunRows(const Problem& problem, int64_t first_row, int64_t end_row, float* dgamma, float* dbeta) {
  const BlockInputs<T, TGamma> in = {static_cast<const T*>(problem.dy),
                                     static_cast<const T*>(problem.x1),
                                     static_cast<const T*>(problem.x2),
                                     static_cast<const T*>(problem.dsum),
                                     static_cast<const TGamma*>(problem.gamma),
                                     problem.cols,
                                     problem.cols / kGroup * kGroup};
  T* const dx = static_cast<T*>(problem.dx);
  const bool stream = ShouldStream<T>(problem);
  const int64_t rows_at_once = std::clamp<int64_t>(kColsAtOnce / problem.cols, 1, kMaxRowsAtOnce);
  const float inverse_cols = 1.0f / static_cast<float>(problem.cols);
  for (int64_t row = first_row; row < end_row; row += rows_at_once) {
    const int64_t count = std::min(rows_at_once, end_row - row);
    RowSums sums[kMaxRowsAtOnce];
    for (int64_t k = 0; k < count; ++k) {
      const RowStatistics statistics = {hn::Set(D(), Canonical(problem.mean[row + k])),
                                        hn::Set(D(), Canonical(problem.rstd[row + k]))};
      sums[k] = SumRow(in, row + k, statistics, dgamma, dbeta);
    }
    if (dx == nullptr) continue;
    for (int64_t k = 0; k < count; ++k) {
      const float rstd = Canonical(problem.rstd[row + k]);
      const float sum_g = hn::ReduceSum(D(), hn::Add(sums[k].g.a, sums[k].g.b));
      const float sum_g_xhat = hn::ReduceSum(D(), hn::Add(sums[k].g_xhat.a, sums[k].g_xhat.b));
      const DxCoefficients coefficients = {hn::Set(D(), Canonical(problem.mean[row + k])), hn::Set(D(), rstd),
                                           hn::Set(D(), -rstd * (sum_g_xhat * inverse_cols)),
                                           hn::Set(D(), -(sum_g * inverse_cols))};
      const bool has_next_row = row + k + rows_at_once < end_row;
      if (stream) {
        WriteDxRow<T, TGamma, true>(in, row + k, has_next_row, coefficients, dx);
      } else {
        WriteDxRow<T, TGamma, false>(in, row + k, has_next_row, coefficients, dx);
      }
    }
  }
  if (stream) hwy::FlushStream();
}

// Puts one group of sums over rows into its natural order.
template <class T>
HWY_INLINE Pair NaturalOrder(Pair v) {
  if constexpr (Elements<T>::kInterleaved) {
    return {hn::InterleaveWholeLower(D(), v.a, v.b), hn::InterleaveWholeUpper(D(), v.a, v.b)};
  }
  return v;
}

template <class T>
void MakeNaturalOrder(float* sums, int64_t cols) {
  if (!Elements<T>::kInterleaved || sums == nullptr) return;
  for (int64_t i = 0; i + kGroup <= cols; i += kGroup) {
    Elements<float>::Store(NaturalOrder<T>(Elements<float>::Load(sums + i)), sums + i);
  }
}

// The block's sums for dgamma (which = 0) or dbeta (which = 1).
inline float* PartialSums(const Plan& plan, float* partials, int64_t block, int64_t which) {
  return partials + (2 * block + which) * plan.partial_stride;
}

template <class T, class TGamma>
void RunBlockOf(const Problem& problem, const Plan& plan, float* partials, int64_t block) {
  float* sums[2] = {problem.dgamma, problem.dbeta};
  for (int64_t which = 0; which < 2; ++which) {
    if (sums[which] == nullptr) continue;
    if (!plan.sums_in_outputs) sums[which] = PartialSums(plan, partials, block, which);
    std::fill_n(sums[which], problem.cols, 0.0f);
  }
  const int64_t first_row = block * plan.rows_per_block;
  const int64_t end_row = std::min(problem.rows, first_row + plan.rows_per_block);
  RunRows<T, TGamma>(problem, first_row, end_row, sums[0], sums[1]);
  if (plan.sums_in_outputs) {
    MakeNaturalOrder<T>(sums[0], problem.cols);
    MakeNaturalOrder<T>(sums[1], problem.cols);
  }
}

void RunBlock(const Problem& problem, const Plan& plan, float* partials, int64_t block) {
  const bool float_gamma = problem.gamma_type == ORT_OPS_FLOAT;
  switch (problem.type) {
    case ORT_OPS_FLOAT:
      return RunBlockOf<float, float>(problem, plan, partials, block);
    case ORT_OPS_FLOAT16:
      return float_gamma ? RunBlockOf<hwy::float16_t, float>(problem, plan, partials, block)
                         : RunBlockOf<hwy::float16_t, hwy::float16_t>(problem, plan, partials, block);
    case ORT_OPS_BFLOAT16:
      return float_gamma ? RunBlockOf<hwy::bfloat16_t, float>(problem, plan, partials, block)
                         : RunBlockOf<hwy::bfloat16_t, hwy::bfloat16_t>(problem, plan, partials, block);
  }
}

// ---------------------------------------------------------------- adding the blocks' sums

// Adds column i of every block, in double precision: the sum of many float32 sums must not round like one of them.
template <class T>
void CombineColumns(const Plan& plan, const float* partials, int64_t which, int64_t begin, int64_t end, float* out) {
  constexpr hn::Repartition<double, D> dd;
  constexpr hn::Half<D> half;
  constexpr int64_t kHalf = kLanes / 2;
  const float* first = partials + which * plan.partial_stride;
  const int64_t stride = 2 * plan.partial_stride;
  int64_t i = begin;
  for (; i + kGroup <= end; i += kGroup) {
    auto s0 = hn::Zero(dd), s1 = hn::Zero(dd), s2 = hn::Zero(dd), s3 = hn::Zero(dd);
    for (int64_t block = 0; block < plan.blocks; ++block) {
      const float* p = first + block * stride + i;
      s0 = hn::Add(s0, hn::PromoteTo(dd, hn::LoadU(half, p)));
      s1 = hn::Add(s1, hn::PromoteTo(dd, hn::LoadU(half, p + kHalf)));
      s2 = hn::Add(s2, hn::PromoteTo(dd, hn::LoadU(half, p + 2 * kHalf)));
      s3 = hn::Add(s3, hn::PromoteTo(dd, hn::LoadU(half, p + 3 * kHalf)));
    }
    const Pair sums = {hn::Combine(D(), hn::DemoteTo(half, s1), hn::DemoteTo(half, s0)),
                       hn::Combine(D(), hn::DemoteTo(half, s3), hn::DemoteTo(half, s2))};
    Elements<float>::Store(NaturalOrder<T>(sums), out + i);
  }
  for (; i < end; ++i) {
    double sum = 0.0;
    for (int64_t block = 0; block < plan.blocks; ++block) sum += first[block * stride + i];
    out[i] = static_cast<float>(sum);
  }
}

void CombineTile(const Problem& problem, const Plan& plan, const float* partials, int64_t tile) {
  const int64_t begin = tile * plan.cols_per_tile;
  const int64_t end = std::min(problem.cols, begin + plan.cols_per_tile);
  float* const outputs[2] = {problem.dgamma, problem.dbeta};
  for (int64_t which = 0; which < 2; ++which) {
    if (outputs[which] == nullptr) continue;
    if (problem.type == ORT_OPS_BFLOAT16) {
      CombineColumns<hwy::bfloat16_t>(plan, partials, which, begin, end, outputs[which]);
    } else {
      CombineColumns<float>(plan, partials, which, begin, end, outputs[which]);
    }
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace ort_ops::add_layer_norm_grad
HWY_AFTER_NAMESPACE();

#endif  // ORT_OPS_ADD_LAYER_NORM_GRAD_CPU_INL_H_
