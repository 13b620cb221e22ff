// The CPU kernels of ConvGrad. plan.h says how what they copy lies in memory.
#include "cpu_target.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "conv_grad/cpu.cc"
#include "hwy/foreach_target.h"  // must come before highway.h
//
#include <algorithm>
#include <type_traits>
#include <vector>

#include "conv_grad/plan.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace ort_ops::conv_grad {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;
using D = hn::CappedTag<float, kFloatsPerLine>;
using V = hn::Vec<D>;
constexpr int64_t kLanes = static_cast<int64_t>(hn::MaxLanes(D()));

// ---------------------------------------------------------------- copying

// These two write whole vectors, up to kLanes - 1 floats too many: what lies behind is written later. The second tells
// how many floats are as they should be, where zeros are to follow.
HWY_INLINE void WriteZeros(float* to, int64_t count) {
  for (int64_t i = 0; i < count; i += kLanes) hn::StoreU(hn::Zero(D()), D(), to + i);
}

HWY_INLINE int64_t WriteCopy(const float* from, int64_t step, int64_t count, float* to) {
  int64_t i = 0;
  if (step == 2) {
    // The last load ends with the element behind its last, which is there where it is not the row's last.
    for (; i + kLanes < count; i += kLanes) {
      V wanted;
      V other;
      hn::LoadInterleaved2(D(), from + 2 * i, wanted, other);
      hn::StoreU(wanted, D(), to + i);
    }
  }
  if (step != 1) {
    for (; i < count; ++i) to[i] = from[i * step];
    return count;
  }
  for (; i + kLanes <= count; i += kLanes) hn::StoreU(hn::LoadU(D(), from + i), D(), to + i);
  if (i == count) return count;
  hn::StoreU(hn::LoadN(D(), from + i, static_cast<size_t>(count - i)), D(), to + i);
  return i + kLanes;
}

// The i in [0, count) for which start + i * step is in [0, size).
struct Range {
  int64_t begin;
  int64_t end;
};
HWY_INLINE Range Within(int64_t start, int64_t step, int64_t count, int64_t size) {
  const int64_t begin = start >= 0 ? 0 : (-start + step - 1) / step;
  const int64_t end = start >= size ? 0 : (size - start - 1) / step + 1;
  return {std::min(begin, count), std::max(std::min(begin, count), std::min(end, count))};
}

// One channel of x or dy.
struct Channel {
  const float* data;
  Extent size;
};

// Which of its elements: count[a] of them on axis a, from start[a], which may be outside, where there are zeros.
struct Sample {
  Extent start;
  Extent step;
  Extent count;
};

// Rows become `pitch` and slices `slice` floats long, filled up with zeros.
void Pack(const Channel& from, const Sample& sample, int64_t pitch, int64_t slice, float* to) {
  const auto& [start, step, counts] = sample;
  const Range columns = Within(start[2], step[2], counts[2], from.size[2]);
  for (int64_t i = 0; i < counts[0]; ++i) {
    const int64_t from_slice = start[0] + i * step[0];
    const bool has_slice = from_slice >= 0 && from_slice < from.size[0];
    float* row = to + i * slice;
    for (int64_t j = 0; j < counts[1]; ++j, row += pitch) {
      const int64_t from_row = start[1] + j * step[1];
      if (!has_slice || from_row < 0 || from_row >= from.size[1]) {
        WriteZeros(row, pitch);
        continue;
      }
      const float* source = from.data + (from_slice * from.size[1] + from_row) * from.size[2] + start[2];
      WriteZeros(row, columns.begin);
      const int64_t count = columns.end - columns.begin;
      const int64_t end =
          columns.begin + WriteCopy(source + columns.begin * step[2], step[2], count, row + columns.begin);
      WriteZeros(row + end, pitch - end);
    }
    WriteZeros(row, to + (i + 1) * slice - row);
  }
}

template <class AnyD>
HWY_INLINE void CopyVectors(AnyD d, const float* from, int64_t count, float* to) {
  constexpr int64_t kSome = static_cast<int64_t>(hn::MaxLanes(AnyD()));
  for (int64_t i = 0; i < count; i += kSome) {
    const int64_t at = std::min(i, count - kSome);
    hn::StoreU(hn::LoadU(d, from + at), d, to + at);
  }
}

// Writes no more than it should: others write what lies beside it at the same time.
HWY_INLINE void CopyTo(const float* from, int64_t count, float* to, int64_t step) {
  if (step == 1 && count >= kLanes) {
    CopyVectors(D(), from, count, to);
  } else if (step == 1 && count >= 4) {
    CopyVectors(hn::CappedTag<float, 4>(), from, count, to);
  } else {
    for (int64_t i = 0; i < count; ++i) to[i * step] = from[i];
  }
}

// ---------------------------------------------------------------- dw and db

// The positions of an item and what they see.
struct Item {
  int64_t images;
  int64_t slices;  // of positions, of an image
  int64_t length;  // floats of a slice that matter
  int64_t dy_image;
  int64_t dy_slice;
  int64_t x_image;
  int64_t x_slice;
};

// dw[r][c] += sum over the item of row r of dy times column c, which is x from x_columns[c] on.
template <int kRows, int kColumns>
HWY_INLINE void AddProducts(const Item& item, const float* dy, int64_t dy_row, const float* x,
                            const int64_t* x_columns, float* dw, int64_t dw_row) {
  const D d;
  V sums[kRows][kColumns];
  for (int r = 0; r < kRows; ++r) {
    for (int c = 0; c < kColumns; ++c) sums[r][c] = hn::Zero(d);
  }
  for (int64_t image = 0; image < item.images; ++image) {
    for (int64_t slice = 0; slice < item.slices; ++slice) {
      const float* HWY_RESTRICT left = dy + image * item.dy_image + slice * item.dy_slice;
      const float* HWY_RESTRICT right[kColumns];
      for (int c = 0; c < kColumns; ++c) right[c] = x + image * item.x_image + slice * item.x_slice + x_columns[c];
      for (int64_t i = 0; i < item.length; i += kLanes) {
        V seen[kColumns];
        for (int c = 0; c < kColumns; ++c) seen[c] = hn::LoadU(d, right[c] + i);
        for (int r = 0; r < kRows; ++r) {
          const V gradient = hn::LoadU(d, left + r * dy_row + i);
          for (int c = 0; c < kColumns; ++c) sums[r][c] = hn::MulAdd(gradient, seen[c], sums[r][c]);
        }
      }
    }
  }
  // Stored first: a loop that adds up lanes is not unrolled, and so would keep the sums in memory all the time.
  alignas(64) float lanes[kRows][kColumns][kLanes];
  for (int r = 0; r < kRows; ++r) {
    for (int c = 0; c < kColumns; ++c) hn::Store(sums[r][c], d, lanes[r][c]);
  }
  for (int r = 0; r < kRows; ++r) {
    for (int c = 0; c < kColumns; ++c) dw[r * dw_row + c] += hn::ReduceSum(d, hn::Load(d, lanes[r][c]));
  }
}

template <int kRows>
void AddRows(const Item& item, const float* dy, int64_t dy_row, const float* x, const std::vector<int64_t>& offsets,
             int64_t channels, int64_t x_channel, float* dw, int64_t dw_row) {
  const int64_t kernel = static_cast<int64_t>(offsets.size());
  const int64_t count = channels * kernel;
  int64_t channel = 0;
  int64_t element = 0;
  for (int64_t column = 0; column < count;) {
    int64_t x_columns[3];
    const int64_t together = std::min<int64_t>(3, count - column);
    for (int64_t c = 0; c < together; ++c) {
      x_columns[c] = channel * x_channel + offsets[static_cast<size_t>(element)];
      if (++element < kernel) continue;
      element = 0;
      ++channel;
    }
    float* to = dw + column;
    if (together == 3) {
      AddProducts<kRows, 3>(item, dy, dy_row, x, x_columns, to, dw_row);
    } else if (together == 2) {
      AddProducts<kRows, 2>(item, dy, dy_row, x, x_columns, to, dw_row);
    } else {
      AddProducts<kRows, 1>(item, dy, dy_row, x, x_columns, to, dw_row);
    }
    column += together;
  }
}

HWY_INLINE float SumOf(const float* values, int64_t count) {
  const D d;
  V sum = hn::Zero(d);
  for (int64_t i = 0; i < count; i += kLanes) sum = hn::Add(sum, hn::LoadU(d, values + i));
  return hn::ReduceSum(d, sum);
}

// Which block of `blocks` has this number, as its first index on each axis.
HWY_INLINE Extent StartOf(const Blocks& blocks, int64_t number) {
  const int64_t column = number % blocks.count[2];
  const int64_t row = number / blocks.count[2] % blocks.count[1];
  const int64_t slice = number / blocks.count[2] / blocks.count[1];
  return {slice * blocks.extent[0], row * blocks.extent[1], column * blocks.extent[2]};
}

void RunWeightUnit(const Plan& plan, int64_t unit, Partials partials, float* scratch) {
  const Problem& problem = plan.problem;
  const WeightPlan& weight = plan.weight;
  const int64_t first_channel = unit % weight.channel_blocks * weight.channels;
  unit /= weight.channel_blocks;
  const int64_t first_filter = unit % weight.filter_blocks * weight.filters;
  unit /= weight.filter_blocks;
  const int64_t group = unit % problem.groups;
  const int64_t part = unit / problem.groups;
  const int64_t channels = std::min(weight.channels, problem.channels - first_channel);
  const int64_t filters = std::min(weight.filters, problem.filters - first_filter);

  const int64_t kernel = problem.KernelSize();
  const int64_t dw_row = problem.channels * kernel;
  float* dw = partials.dw + part * problem.WeightSize() +
              (group * problem.filters + first_filter) * dw_row + first_channel * kernel;
  for (int64_t f = 0; f < filters; ++f) std::fill_n(dw + f * dw_row, channels * kernel, 0.0f);
  float* db = nullptr;  // of the units of the same filters, the first sums it up
  if (partials.db != nullptr && first_channel == 0) {
    db = partials.db + (part * problem.groups + group) * problem.filters + first_filter;
    std::fill_n(db, filters, 0.0f);
  }

  const Extent x_size = {problem.axes[0].size, problem.axes[1].size, problem.axes[2].size};
  const Extent y_size = {problem.axes[0].positions, problem.axes[1].positions, problem.axes[2].positions};
  const Extent& extent = weight.positions.extent;
  const Extent strides = {problem.axes[0].stride, problem.axes[1].stride, problem.axes[2].stride};
  const int64_t plane = Product(weight.cells);
  const int64_t x_channel = plan.Residues() * plane;
  Item item;
  item.dy_slice = weight.run;
  item.dy_image = filters * extent[0] * weight.run;
  item.x_slice = weight.cells[1] * weight.pitch;
  item.x_image = channels * x_channel;

  WriteZeros(scratch, weight.margin);
  float* cells = scratch + weight.margin;
  float* positions = scratch + weight.scratch - kFloatsPerLine - weight.images * weight.filters * extent[0] * weight.run;
  const int64_t blocks = Product(weight.positions.count);
  for (int64_t i = weight.items * part / weight.parts; i < weight.items * (part + 1) / weight.parts; ++i) {
    const Extent start = StartOf(weight.positions, i % blocks);
    const int64_t first_image = i / blocks * weight.images;
    item.images = std::min(weight.images, problem.batch - first_image);
    item.slices = std::min(extent[0], y_size[0] - start[0]);
    item.length = (std::min(extent[1], y_size[1] - start[1]) - 1) * weight.pitch +
                  std::min(extent[2], y_size[2] - start[2]);
    float* to = cells;
    for (int64_t n = 0; n < item.images; ++n) {
      for (int64_t c = 0; c < channels; ++c) {
        const int64_t channel = ((first_image + n) * problem.groups + group) * problem.channels + first_channel + c;
        const Channel from = {problem.x + channel * Product(x_size), x_size};
        for (const int64_t i0 : plan.cells[0].residues) {
          for (const int64_t i1 : plan.cells[1].residues) {
            for (const int64_t i2 : plan.cells[2].residues) {
              const Extent begin = {start[0] * strides[0] + i0 - problem.axes[0].pad,
                                    start[1] * strides[1] + i1 - problem.axes[1].pad,
                                    (start[2] + weight.first_cell) * strides[2] + i2 - problem.axes[2].pad};
              Pack(from, {begin, strides, {weight.cells[0], weight.cells[1], weight.columns}}, weight.pitch,
                   item.x_slice, to);
              to += plane;
            }
          }
        }
      }
    }
    WriteZeros(to, kFloatsPerLine);  // read behind the last cells, and multiplied by zeros
    to = positions;
    for (int64_t n = 0; n < item.images; ++n) {
      for (int64_t f = 0; f < filters; ++f) {
        const int64_t channel = ((first_image + n) * problem.groups + group) * problem.filters + first_filter + f;
        Pack({problem.dy + channel * Product(y_size), y_size}, {start, {1, 1, 1}, extent}, weight.pitch, weight.run, to);
        if (db != nullptr) db[f] += SumOf(to, extent[0] * weight.run);
        to += extent[0] * weight.run;
      }
    }
    const int64_t dy_row = extent[0] * weight.run;
    int64_t f = 0;
    for (; f + 4 <= filters; f += 4) {
      AddRows<4>(item, positions + f * dy_row, dy_row, cells, weight.element_offsets, channels, x_channel,
                 dw + f * dw_row, dw_row);
    }
    for (; f + 2 <= filters; f += 2) {
      AddRows<2>(item, positions + f * dy_row, dy_row, cells, weight.element_offsets, channels, x_channel,
                 dw + f * dw_row, dw_row);
    }
    if (f < filters) {
      AddRows<1>(item, positions + f * dy_row, dy_row, cells, weight.element_offsets, channels, x_channel,
                 dw + f * dw_row, dw_row);
    }
  }
}

// ---------------------------------------------------------------- dx

// Weights of some filters: element k of channel c of filter f at data[f * filter + c * channel + k].
struct Weights {
  const float* data;
  int64_t filters;
  int64_t filter;
  int64_t channel;
};

// sums[c][i] (+)= sum over the filters and the elements of weight times dy, for kVectors vectors of cells i.
template <int kRows, int kVectors>
HWY_INLINE void SumIntoCells(const Weights& w, const std::vector<Element>& elements, const float* dy, int64_t dy_filter,
                             float* sums_at, int64_t sums_row, bool accumulate) {
  const D d;
  V sums[kRows][kVectors];
  for (int r = 0; r < kRows; ++r) {
    for (int v = 0; v < kVectors; ++v) {
      sums[r][v] = accumulate ? hn::LoadU(d, sums_at + r * sums_row + v * kLanes) : hn::Zero(d);
    }
  }
  const Element* const end = elements.data() + elements.size();
  for (int64_t f = 0; f < w.filters; ++f) {
    const float* HWY_RESTRICT weights = w.data + f * w.filter;
    for (const Element* element = elements.data(); element != end; ++element) {
      const float* HWY_RESTRICT from = dy + f * dy_filter + element->offset;
      V gradients[kVectors];
      for (int v = 0; v < kVectors; ++v) gradients[v] = hn::LoadU(d, from + v * kLanes);
      for (int r = 0; r < kRows; ++r) {
        const V weight = hn::Set(d, weights[r * w.channel + element->number]);
        for (int v = 0; v < kVectors; ++v) sums[r][v] = hn::MulAdd(weight, gradients[v], sums[r][v]);
      }
    }
  }
  for (int r = 0; r < kRows; ++r) {
    for (int v = 0; v < kVectors; ++v) hn::StoreU(sums[r][v], d, sums_at + r * sums_row + v * kLanes);
  }
}

template <int kRows>
void SumRows(const Weights& w, const std::vector<Element>& elements, const float* dy, int64_t dy_filter,
             int64_t length, float* sums, int64_t sums_row, bool accumulate) {
  int64_t i = 0;
  for (; i + 2 * kLanes < length; i += 3 * kLanes) {
    SumIntoCells<kRows, 3>(w, elements, dy + i, dy_filter, sums + i, sums_row, accumulate);
  }
  if (i + kLanes < length) {
    SumIntoCells<kRows, 2>(w, elements, dy + i, dy_filter, sums + i, sums_row, accumulate);
  } else if (i < length) {
    SumIntoCells<kRows, 1>(w, elements, dy + i, dy_filter, sums + i, sums_row, accumulate);
  }
}

void RunInputUnit(const Plan& plan, int64_t unit, float* scratch) {
  const Problem& problem = plan.problem;
  const InputPlan& input = plan.input;
  const int64_t blocks = Product(input.cells.count);
  const Extent offset = StartOf(input.cells, unit % blocks);
  unit /= blocks;
  const int64_t first_channel = unit % input.channel_blocks * input.channels;
  unit /= input.channel_blocks;
  const int64_t group = unit % problem.groups;
  const int64_t image = unit / problem.groups;
  const int64_t channels = std::min(input.channels, problem.channels - first_channel);

  Extent start;   // the first cell
  Extent extent;  // how many cells
  Extent y_size;
  for (size_t a = 0; a < kAxes; ++a) {
    start[a] = plan.cells[a].begin + offset[a];
    extent[a] = std::min(input.cells.extent[a], plan.cells[a].end - start[a]);
    y_size[a] = problem.axes[a].positions;
  }
  const Sample seen = {{start[0] - plan.cells[0].reach, start[1] - plan.cells[1].reach,
                        start[2] + input.first_position},
                       {1, 1, 1},
                       {input.positions[0], input.positions[1], input.columns}};
  const int64_t slice = input.positions[1] * input.pitch;
  const int64_t plane = input.positions[0] * slice;
  const int64_t residues = plan.Residues();
  const int64_t sums_slices = input.cells.extent[0] * input.run;  // floats of one residue of a channel
  const int64_t length = (extent[1] - 1) * input.pitch + extent[2];
  const int64_t kernel = problem.KernelSize();

  WriteZeros(scratch, input.margin);
  float* positions = scratch + input.margin;
  float* sums = scratch + input.scratch - input.channels * residues * sums_slices;
  for (int64_t first = 0; first < problem.filters; first += input.filters) {
    const int64_t filters = std::min(input.filters, problem.filters - first);
    const int64_t filter = group * problem.filters + first;
    for (int64_t f = 0; f < filters; ++f) {
      const int64_t channel = image * problem.groups * problem.filters + filter + f;
      Pack({problem.dy + channel * Product(y_size), y_size}, seen, input.pitch, slice, positions + f * plane);
    }
    for (int64_t residue = 0; residue < residues; ++residue) {
      const auto& elements = input.residue_elements[static_cast<size_t>(residue)];
      for (int64_t z = 0; z < extent[0]; ++z) {
        const float* dy = positions + z * slice;
        const auto sum = [&](auto rows, int64_t c) HWY_ATTR {
          const Weights w = {problem.w + (filter * problem.channels + first_channel + c) * kernel, filters,
                             problem.channels * kernel, kernel};
          SumRows<decltype(rows)::value>(w, elements, dy, plane, length,
                                         sums + (c * residues + residue) * sums_slices + z * input.run,
                                         residues * sums_slices, first != 0);
        };
        int64_t c = 0;
        for (; c + 4 <= channels; c += 4) sum(std::integral_constant<int, 4>(), c);
        for (; c + 2 <= channels; c += 2) sum(std::integral_constant<int, 2>(), c);
        if (c < channels) sum(std::integral_constant<int, 1>(), c);
      }
    }
  }

  const auto& axes = problem.axes;
  const float* from = sums;
  for (int64_t c = 0; c < channels; ++c) {
    const int64_t channel = (image * problem.groups + group) * problem.channels + first_channel + c;
    float* dx = problem.dx + channel * problem.ImageSize();
    for (const int64_t i0 : plan.cells[0].residues) {
      for (const int64_t i1 : plan.cells[1].residues) {
        for (const int64_t i2 : plan.cells[2].residues) {
          const Range slices = Within(start[0] * axes[0].stride + i0 - axes[0].pad, axes[0].stride, extent[0], axes[0].size);
          const Range rows = Within(start[1] * axes[1].stride + i1 - axes[1].pad, axes[1].stride, extent[1], axes[1].size);
          const Range columns = Within(start[2] * axes[2].stride + i2 - axes[2].pad, axes[2].stride, extent[2], axes[2].size);
          for (int64_t z = slices.begin; z < slices.end; ++z) {
            const int64_t to_slice = (start[0] + z) * axes[0].stride + i0 - axes[0].pad;
            for (int64_t y = rows.begin; y < rows.end; ++y) {
              const int64_t to_row = (start[1] + y) * axes[1].stride + i1 - axes[1].pad;
              const int64_t to_column = (start[2] + columns.begin) * axes[2].stride + i2 - axes[2].pad;
              CopyTo(from + z * input.run + y * input.pitch + columns.begin, columns.end - columns.begin,
                     dx + (to_slice * axes[1].size + to_row) * axes[2].size + to_column, axes[2].stride);
            }
          }
          from += sums_slices;
        }
      }
    }
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace ort_ops::conv_grad
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace ort_ops::conv_grad {

HWY_EXPORT(RunWeightUnit);
HWY_EXPORT(RunInputUnit);

void RunWeightUnit(const Plan& plan, int64_t unit, Partials partials, float* scratch) {
  HWY_DYNAMIC_DISPATCH(RunWeightUnit)(plan, unit, partials, scratch);
}

void RunInputUnit(const Plan& plan, int64_t unit, float* scratch) {
  HWY_DYNAMIC_DISPATCH(RunInputUnit)(plan, unit, scratch);
}

}  // namespace ort_ops::conv_grad
#endif  // HWY_ONCE
