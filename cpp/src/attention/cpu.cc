// The CPU kernels of Attention and AttentionGrad: one head of one batch entry at a time, in blocks of queries whose scores
// stay in the cache. A causal head's keys behind a block's last query are not looked at, which saves half of the work.
#include "cpu_target.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "attention/cpu.cc"
#include "hwy/foreach_target.h"  // must come before highway.h
//
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "attention/problem.h"
#include "hwy/contrib/math/math-inl.h"
#include "hwy/highway.h"

// Once for all instruction sets.
#ifndef ORT_OPS_ATTENTION_LAYOUT_
#define ORT_OPS_ATTENTION_LAYOUT_
namespace ort_ops::attention {

constexpr int64_t kBlock = 32;      // queries at a time
constexpr int64_t kAlignment = 16;  // floats of the widest vector; rows of scratch matrices are padded to it

constexpr int64_t Padded(int64_t count) { return (count + kAlignment - 1) / kAlignment * kAlignment; }

// A matrix in memory: element (i, j) at data[i * row + j * column].
struct Operand {
  const float* data;
  int64_t row;
  int64_t column;
};

// A row-major scratch matrix whose rows have a padded number of elements.
struct Matrix {
  float* data;
  int64_t row;
};

// Hands out pieces of scratch memory.
class Scratch {
 public:
  explicit Scratch(float* memory) : next_(memory) {}
  Matrix Take(int64_t rows, int64_t columns) {
    const Matrix matrix = {next_, Padded(columns)};
    next_ += rows * matrix.row;
    return matrix;
  }

 private:
  float* next_;
};

}  // namespace ort_ops::attention
#endif

HWY_BEFORE_NAMESPACE();
namespace ort_ops::attention {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;
using D = hn::CappedTag<float, kAlignment>;
using V = hn::Vec<D>;

// C[0, rows)[0, vectors) (+)= A * B for a piece of C that fits the registers.
template <int kRows, int kVectors>
HWY_INLINE void Tile(int64_t depth, Operand a, const float* HWY_RESTRICT b, int64_t b_row, float* HWY_RESTRICT c,
                     int64_t c_row, bool accumulate) {
  const D d;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  V sums[kRows][kVectors];
  for (int r = 0; r < kRows; ++r) {
    for (int v = 0; v < kVectors; ++v) {
      sums[r][v] = accumulate ? hn::LoadU(d, c + r * c_row + v * lanes) : hn::Zero(d);
    }
  }
  for (int64_t k = 0; k < depth; ++k) {
    V right[kVectors];
    for (int v = 0; v < kVectors; ++v) right[v] = hn::LoadU(d, b + k * b_row + v * lanes);
    for (int r = 0; r < kRows; ++r) {
      const V left = hn::Set(d, a.data[r * a.row + k * a.column]);
      for (int v = 0; v < kVectors; ++v) sums[r][v] = hn::MulAdd(left, right[v], sums[r][v]);
    }
  }
  for (int r = 0; r < kRows; ++r) {
    for (int v = 0; v < kVectors; ++v) hn::StoreU(sums[r][v], d, c + r * c_row + v * lanes);
  }
}

template <int kVectors>
HWY_INLINE void Columns(int64_t rows, int64_t depth, Operand a, const float* b, int64_t b_row, float* c, int64_t c_row,
                        bool accumulate) {
  int64_t r = 0;
  const auto next = [&](int64_t count) {
    a.data += count * a.row;
    c += count * c_row;
    r += count;
  };
  for (; r + 6 <= rows; next(6)) Tile<6, kVectors>(depth, a, b, b_row, c, c_row, accumulate);
  for (; r + 2 <= rows; next(2)) Tile<2, kVectors>(depth, a, b, b_row, c, c_row, accumulate);
  if (r < rows) Tile<1, kVectors>(depth, a, b, b_row, c, c_row, accumulate);
}

// C (+)= A * B with A [rows, depth], B [depth, columns], C [rows, columns]. Whole vectors of B and C are read and written,
// so both have rows padded to them.
HWY_NOINLINE void MultiplyAdd(int64_t rows, int64_t columns, int64_t depth, Operand a, Matrix b, Matrix c,
                              bool accumulate) {
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(D()));
  int64_t j = 0;
  for (; j + 2 * lanes <= columns; j += 2 * lanes) {
    Columns<2>(rows, depth, a, b.data + j, b.row, c.data + j, c.row, accumulate);
  }
  for (; j < columns; j += lanes) {
    Columns<1>(rows, depth, a, b.data + j, b.row, c.data + j, c.row, accumulate);
  }
}

// Rows of a head, padded with zeros.
HWY_NOINLINE void CopyRows(const float* from, int64_t token, int64_t rows, int64_t size, Matrix to) {
  for (int64_t t = 0; t < rows; ++t) {
    std::memcpy(to.data + t * to.row, from + t * token, static_cast<size_t>(size) * sizeof(float));
    std::fill(to.data + t * to.row + size, to.data + (t + 1) * to.row, 0.0f);
  }
}

// The same, [size, rows]. A few rows at a time: their cache lines are read once.
HWY_NOINLINE void CopyTransposed(const float* from, int64_t token, int64_t rows, int64_t size, Matrix to) {
  for (int64_t begin = 0; begin < rows; begin += kAlignment) {
    const int64_t end = std::min(rows, begin + kAlignment);
    for (int64_t i = 0; i < size; ++i) {
      float* row = to.data + i * to.row;
      for (int64_t t = begin; t < end; ++t) row[t] = from[t * token + i];
    }
  }
  for (int64_t i = 0; i < size; ++i) std::fill(to.data + i * to.row + rows, to.data + (i + 1) * to.row, 0.0f);
}

HWY_NOINLINE void WriteRows(Matrix from, int64_t rows, int64_t size, float* to, int64_t token) {
  for (int64_t t = 0; t < rows; ++t) {
    std::memcpy(to + t * token, from.data + t * from.row, static_cast<size_t>(size) * sizeof(float));
  }
}

// scores = scale * scores + mask; -inf for keys that query `query` must not see, and in the padding.
HWY_NOINLINE void MaskRow(const Problem& problem, const float* mask, int64_t query, int64_t keys, int64_t padded,
                          float* scores) {
  const D d;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  const V scale = hn::Set(d, problem.scale);
  const int64_t seen = problem.causal ? std::min(keys, query + 1) : keys;
  for (int64_t k = 0; k < padded; k += lanes) hn::StoreU(hn::Mul(hn::LoadU(d, scores + k), scale), d, scores + k);
  if (mask != nullptr) {
    for (int64_t k = 0; k < seen; ++k) scores[k] += mask[k * problem.mask.key];
  }
  std::fill(scores + seen, scores + padded, -std::numeric_limits<float>::infinity());
}

// scores = exp(scores - largest) and returns their sum.
HWY_NOINLINE float Exponentials(float* scores, int64_t padded, float largest) {
  const D d;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  const V shift = hn::Set(d, largest);
  V sum = hn::Zero(d);
  for (int64_t k = 0; k < padded; k += lanes) {
    const V exponent = hn::Sub(hn::LoadU(d, scores + k), shift);
    const V e = hn::IfThenElse(hn::IsNaN(exponent), exponent, hn::Exp(d, exponent));  // Highway's makes 0 of NaN
    hn::StoreU(e, d, scores + k);
    sum = hn::Add(sum, e);
  }
  return hn::ReduceSum(d, sum);
}

HWY_NOINLINE float Largest(const float* scores, int64_t padded) {
  const D d;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  V largest = hn::LoadU(d, scores);
  auto has_nan = hn::IsNaN(largest);
  for (int64_t k = lanes; k < padded; k += lanes) {
    const V v = hn::LoadU(d, scores + k);
    has_nan = hn::Or(has_nan, hn::IsNaN(v));
    largest = hn::Max(largest, v);
  }
  return hn::AllFalse(d, has_nan) ? hn::ReduceMax(d, largest) : std::numeric_limits<float>::quiet_NaN();
}

HWY_NOINLINE void ScaleRow(float* row, int64_t padded, float factor) {
  const D d;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  for (int64_t k = 0; k < padded; k += lanes) {
    hn::StoreU(hn::Mul(hn::LoadU(d, row + k), hn::Set(d, factor)), d, row + k);
  }
}

const float* MaskOf(const Problem& problem, int64_t b, int64_t h, int64_t query) {
  const Mask& mask = problem.mask;
  return mask.data == nullptr ? nullptr : mask.data + b * mask.batch + h * mask.head + query * mask.query;
}

// How many of the keys the queries before `end` see.
int64_t KeysSeen(const Problem& problem, int64_t end) {
  return problem.causal ? std::min(problem.keys, end) : problem.keys;
}

void RunForward(const Forward& problem, int64_t unit, float* scratch) {
  const int64_t b = unit / problem.heads;
  const int64_t h = unit % problem.heads;
  const int64_t size = problem.size;
  Scratch memory(scratch);
  const Matrix keys = memory.Take(size, problem.keys);  // transposed
  const Matrix values = memory.Take(problem.keys, size);
  const Matrix scores = memory.Take(kBlock, problem.keys);
  const Matrix rows = memory.Take(kBlock, size);
  CopyTransposed(problem.key.At(b, h), problem.key.token, problem.keys, size, keys);
  CopyRows(problem.value.At(b, h), problem.value.token, problem.keys, size, values);
  float* log_sum_exp = problem.log_sum_exp + unit * problem.queries;
  for (int64_t begin = 0; begin < problem.queries; begin += kBlock) {
    const int64_t count = std::min(kBlock, problem.queries - begin);
    const int64_t seen = KeysSeen(problem, begin + count);
    const int64_t padded = Padded(seen);
    const Operand query = {problem.query.At(b, h) + begin * problem.query.token, problem.query.token, 1};
    MultiplyAdd(count, padded, size, query, keys, scores, false);
    float inverse[kBlock];
    for (int64_t i = 0; i < count; ++i) {
      float* row = scores.data + i * scores.row;
      MaskRow(problem, MaskOf(problem, b, h, begin + i), begin + i, seen, padded, row);
      const float largest = Largest(row, padded);
      const float sum = Exponentials(row, padded, largest);
      log_sum_exp[begin + i] = largest + std::log(sum);
      inverse[i] = 1.0f / sum;
    }
    MultiplyAdd(count, size, seen, {scores.data, scores.row, 1}, values, rows, false);
    for (int64_t i = 0; i < count; ++i) ScaleRow(rows.data + i * rows.row, rows.row, inverse[i]);
    WriteRows(rows, count, size, problem.y.At(b, h) + begin * problem.y.token, problem.y.token);
  }
}

HWY_NOINLINE float Dot(const float* x, const float* y, int64_t count) {
  const D d;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  V sum = hn::Zero(d);
  int64_t k = 0;
  for (; k + lanes <= count; k += lanes) sum = hn::MulAdd(hn::LoadU(d, x + k), hn::LoadU(d, y + k), sum);
  float total = hn::ReduceSum(d, sum);
  for (; k < count; ++k) total += x[k] * y[k];
  return total;
}

// dscores = probabilities * (dprobabilities - along) * scale, in the place of dprobabilities.
HWY_NOINLINE void ScoreGradients(const float* probabilities, float along, float scale, int64_t padded,
                                 float* gradients) {
  const D d;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  for (int64_t k = 0; k < padded; k += lanes) {
    const V p = hn::Mul(hn::LoadU(d, probabilities + k), hn::Set(d, scale));
    hn::StoreU(hn::Mul(p, hn::Sub(hn::LoadU(d, gradients + k), hn::Set(d, along))), d, gradients + k);
  }
}

void RunBackward(const Backward& problem, int64_t unit, float* scratch) {
  const int64_t b = unit / problem.heads;
  const int64_t h = unit % problem.heads;
  const int64_t size = problem.size;
  Scratch memory(scratch);
  const Matrix keys = memory.Take(problem.keys, size);
  const Matrix keys_t = memory.Take(size, problem.keys);
  const Matrix values_t = memory.Take(size, problem.keys);
  const Matrix dkeys = memory.Take(problem.keys, size);
  const Matrix dvalues = memory.Take(problem.keys, size);
  const Matrix probabilities = memory.Take(kBlock, problem.keys);
  const Matrix gradients = memory.Take(kBlock, problem.keys);
  const Matrix queries = memory.Take(kBlock, size);
  const Matrix dy = memory.Take(kBlock, size);
  const Matrix dqueries = memory.Take(kBlock, size);
  CopyRows(problem.key.At(b, h), problem.key.token, problem.keys, size, keys);
  CopyTransposed(problem.key.At(b, h), problem.key.token, problem.keys, size, keys_t);
  CopyTransposed(problem.value.At(b, h), problem.value.token, problem.keys, size, values_t);
  std::fill(dkeys.data, dkeys.data + problem.keys * dkeys.row, 0.0f);
  std::fill(dvalues.data, dvalues.data + problem.keys * dvalues.row, 0.0f);
  const float* log_sum_exp = problem.log_sum_exp + unit * problem.queries;
  for (int64_t begin = 0; begin < problem.queries; begin += kBlock) {
    const int64_t count = std::min(kBlock, problem.queries - begin);
    const int64_t seen = KeysSeen(problem, begin + count);
    const int64_t padded = Padded(seen);
    const float* y = problem.y.At(b, h) + begin * problem.y.token;
    CopyRows(problem.query.At(b, h) + begin * problem.query.token, problem.query.token, count, size, queries);
    CopyRows(problem.dy.At(b, h) + begin * problem.dy.token, problem.dy.token, count, size, dy);
    MultiplyAdd(count, padded, size, {queries.data, queries.row, 1}, keys_t, probabilities, false);
    MultiplyAdd(count, padded, size, {dy.data, dy.row, 1}, values_t, gradients, false);
    for (int64_t i = 0; i < count; ++i) {
      float* row = probabilities.data + i * probabilities.row;
      MaskRow(problem, MaskOf(problem, b, h, begin + i), begin + i, seen, padded, row);
      Exponentials(row, padded, log_sum_exp[begin + i]);
      const float along = Dot(dy.data + i * dy.row, y + i * problem.y.token, size);
      ScoreGradients(row, along, problem.scale, padded, gradients.data + i * gradients.row);
    }
    MultiplyAdd(count, size, seen, {gradients.data, gradients.row, 1}, keys, dqueries, false);
    WriteRows(dqueries, count, size, problem.dquery.At(b, h) + begin * problem.dquery.token, problem.dquery.token);
    MultiplyAdd(seen, size, count, {gradients.data, 1, gradients.row}, queries, dkeys, true);
    MultiplyAdd(seen, size, count, {probabilities.data, 1, probabilities.row}, dy, dvalues, true);
  }
  WriteRows(dkeys, problem.keys, size, problem.dkey.At(b, h), problem.dkey.token);
  WriteRows(dvalues, problem.keys, size, problem.dvalue.At(b, h), problem.dvalue.token);
}

}  // namespace HWY_NAMESPACE
}  // namespace ort_ops::attention
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace ort_ops::attention {

HWY_EXPORT(RunForward);
HWY_EXPORT(RunBackward);

int64_t ForwardScratch(const Problem& problem) {
  const int64_t keys = Padded(problem.keys);
  const int64_t size = Padded(problem.size);
  return problem.size * keys + problem.keys * size + kBlock * (keys + size);
}

int64_t BackwardScratch(const Problem& problem) {
  const int64_t keys = Padded(problem.keys);
  const int64_t size = Padded(problem.size);
  return 3 * problem.keys * size + 2 * problem.size * keys + kBlock * (2 * keys + 3 * size);
}

void RunForward(const Forward& problem, int64_t unit, float* scratch) {
  HWY_DYNAMIC_DISPATCH(RunForward)(problem, unit, scratch);
}

void RunBackward(const Backward& problem, int64_t unit, float* scratch) {
  HWY_DYNAMIC_DISPATCH(RunBackward)(problem, unit, scratch);
}

}  // namespace ort_ops::attention
#endif  // HWY_ONCE
