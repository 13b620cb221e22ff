#include "conv_grad/plan.h"

#include <algorithm>

namespace ort_ops::conv_grad {
namespace {

// A unit's scratch memory, so that it stays in the second-level cache.
constexpr int64_t kScratchFloats = 48 << 10;
// Units that there should be, for as many threads.
constexpr int64_t kWantedUnits = 16;
constexpr int64_t kPartialFloats = 1 << 20;
// So many positions in a sum, or more, that adding up the lanes of its vectors costs little.
constexpr int64_t kPositionsInSum = 1 << 10;
// Channels and filters of a unit: enough that sums cost more than copying what they are of. More of a small kernel's
// elements would leave room for fewer positions.
constexpr int64_t kKernelElements = 288;
constexpr int64_t kMaxChannels = 64;
constexpr int64_t kMaxFilters = 64;

int64_t FloorDivide(int64_t a, int64_t b) { return a / b - (a % b < 0); }

Cells MakeCells(const Axis& axis) {
  Cells cells;
  for (int64_t k = 0; k < axis.kernel; ++k) cells.residues.push_back(k * axis.dilation % axis.stride);
  std::sort(cells.residues.begin(), cells.residues.end());
  cells.residues.erase(std::unique(cells.residues.begin(), cells.residues.end()), cells.residues.end());
  for (int64_t k = 0; k < axis.kernel; ++k) {
    const auto found =
        std::lower_bound(cells.residues.begin(), cells.residues.end(), k * axis.dilation % axis.stride);
    cells.element_residue.push_back(found - cells.residues.begin());
    cells.element_cell.push_back(k * axis.dilation / axis.stride);
  }
  cells.reach = cells.element_cell.back();
  const int64_t seen = axis.positions + cells.reach;
  cells.begin = seen;
  cells.end = 0;
  for (const int64_t residue : cells.residues) {
    cells.begin = std::min(cells.begin, -FloorDivide(residue - axis.pad, axis.stride));
    cells.end = std::max(cells.end, FloorDivide(axis.pad + axis.size - 1 - residue, axis.stride) + 1);
  }
  cells.begin = std::clamp<int64_t>(cells.begin, 0, seen);
  cells.end = std::clamp<int64_t>(cells.end, cells.begin, seen);
  return cells;
}

// What the sizes of a unit's blocks are chosen from.
struct Blocking {
  Extent extent;
  int64_t channels;
  int64_t filters;

  // False where nothing can be made smaller. A block of many positions becomes one of fewer, its slowest axis first;
  // then there are fewer channels.
  bool MakeSmaller() {
    constexpr int64_t kManyPositions = 128;
    for (const int64_t enough : {kManyPositions, int64_t{1}}) {
      for (int64_t& length : extent) {
        if (Product(extent) > enough && Halve(length)) return true;
      }
      if (Halve(channels) || Halve(filters)) return true;
    }
    return false;
  }

 private:
  static bool Halve(int64_t& number) {
    if (number <= 1) return false;
    number = (number + 1) / 2;
    return true;
  }
};

// The largest blocks, of `total` positions or cells.
Blocking LargestBlocks(const Problem& problem, const Extent& total) {
  constexpr int64_t kRowsOfSums = 4;  // that the kernels work on at a time
  const int64_t channels = std::min(kMaxChannels, RoundUp(CeilDiv(kKernelElements, problem.KernelSize()), kRowsOfSums));
  return {total, std::min(channels, problem.channels), std::min(kMaxFilters, problem.filters)};
}

Extent ExtentOf(const Plan& plan, int64_t (*length)(const Axis&, const Cells&)) {
  Extent extent;
  for (size_t a = 0; a < kAxes; ++a) extent[a] = std::max<int64_t>(1, length(plan.problem.axes[a], plan.cells[a]));
  return extent;
}

Blocks BlocksOf(const Extent& total, const Extent& extent) {
  Blocks blocks;
  for (size_t a = 0; a < kAxes; ++a) {
    blocks.count[a] = CeilDiv(total[a], extent[a]);
    blocks.extent[a] = CeilDiv(total[a], blocks.count[a]);  // as equal as they can be
  }
  return blocks;
}

// Calls visit(element's number, residue of all axes, cells of each axis) for each element of the kernel.
template <class Visit>
void ForEachElement(const Plan& plan, const Visit& visit) {
  const auto& [slices, rows, columns] = plan.cells;
  int64_t number = 0;
  for (size_t i = 0; i < slices.element_cell.size(); ++i) {
    for (size_t j = 0; j < rows.element_cell.size(); ++j) {
      for (size_t k = 0; k < columns.element_cell.size(); ++k) {
        const int64_t slice_residue = slices.element_residue[i] * static_cast<int64_t>(rows.residues.size());
        const int64_t residue = (slice_residue + rows.element_residue[j]) *
                                    static_cast<int64_t>(columns.residues.size()) + columns.element_residue[k];
        visit(number++, residue, Extent{slices.element_cell[i], rows.element_cell[j], columns.element_cell[k]});
      }
    }
  }
}

// Everything that follows from the blocks and the images of an item.
void LayOut(const Plan& plan, WeightPlan& weight) {
  const Extent& extent = weight.positions.extent;
  const Cells& columns = plan.cells[2];
  const int64_t seen = extent[2] + columns.reach;
  int64_t before = 0;
  if (extent[2] == plan.problem.axes[2].positions) {
    // Padding before a row of cells is that behind the row before.
    before = columns.begin;
    weight.columns = columns.end - columns.begin;
    weight.pitch = std::max(weight.columns + std::max(before, seen - columns.end), extent[2]);
  } else {
    weight.columns = seen;
    weight.pitch = seen;
  }
  weight.first_cell = before;
  weight.margin = RoundUp(before, kFloatsPerLine);
  weight.cells = {extent[0] + plan.cells[0].reach, extent[1] + plan.cells[1].reach, weight.pitch};
  weight.run = RoundUp(extent[1] * weight.pitch, kFloatsPerLine);
  weight.element_offsets.clear();
  const Extent& cells = weight.cells;
  ForEachElement(plan, [&](int64_t, int64_t residue, const Extent& at) {
    weight.element_offsets.push_back(residue * Product(cells) + (at[0] * cells[1] + at[1]) * weight.pitch + at[2] -
                                     before);
  });
  const int64_t cell_floats = weight.images * weight.channels * plan.Residues() * Product(cells) + kFloatsPerLine;
  const int64_t position_floats = weight.images * weight.filters * extent[0] * weight.run + kFloatsPerLine;
  weight.scratch = weight.margin + RoundUp(cell_floats, kFloatsPerLine) + position_floats;
}

WeightPlan MakeWeightPlan(const Plan& plan) {
  const Problem& problem = plan.problem;
  const Extent total = ExtentOf(plan, [](const Axis& axis, const Cells&) { return axis.positions; });
  Blocking blocking = LargestBlocks(problem, total);
  WeightPlan weight = {};
  weight.images = 1;
  do {
    weight.channels = blocking.channels;
    weight.filters = blocking.filters;
    weight.positions = BlocksOf(total, blocking.extent);
    LayOut(plan, weight);
  } while (weight.scratch > kScratchFloats && blocking.MakeSmaller());
  weight.channel_blocks = CeilDiv(problem.channels, weight.channels);
  weight.filter_blocks = CeilDiv(problem.filters, weight.filters);
  const int64_t blocks = Product(weight.positions.count);
  const int64_t units = problem.groups * weight.filter_blocks * weight.channel_blocks;
  if (blocks == 1) {
    const int64_t wanted = std::min({CeilDiv(kPositionsInSum, Product(weight.positions.extent)),
                                     kScratchFloats / weight.scratch, CeilDiv(problem.batch * units, kWantedUnits)});
    weight.images = std::clamp<int64_t>(wanted, 1, std::max<int64_t>(1, problem.batch));
    LayOut(plan, weight);
  }
  weight.items = CeilDiv(problem.batch, weight.images) * blocks;
  const int64_t parts = std::min({weight.items, CeilDiv(kWantedUnits, units), kPartialFloats / problem.WeightSize()});
  weight.parts = std::max<int64_t>(1, parts);
  return weight;
}

void LayOut(const Plan& plan, InputPlan& input) {
  const Extent& extent = input.cells.extent;
  const Cells& columns = plan.cells[2];
  const int64_t positions = plan.problem.axes[2].positions;
  int64_t before = 0;
  if (input.cells.count[2] <= 1) {
    // No positions before a row of them are those behind the row before.
    before = std::max<int64_t>(0, columns.reach - columns.begin);
    input.first_position = -columns.begin;
    input.columns = positions;
    const int64_t behind = std::max<int64_t>(0, columns.end - positions);
    input.pitch = std::max(positions + std::max(before, behind), extent[2]);
  } else {
    input.first_position = -columns.reach;
    input.columns = extent[2] + columns.reach;
    input.pitch = input.columns;
  }
  input.margin = RoundUp(before, kFloatsPerLine);
  input.positions = {extent[0] + plan.cells[0].reach, extent[1] + plan.cells[1].reach, input.pitch};
  input.run = RoundUp(extent[1] * input.pitch, kFloatsPerLine);
  input.residue_elements.assign(static_cast<size_t>(plan.Residues()), {});
  ForEachElement(plan, [&](int64_t number, int64_t residue, const Extent& at) {
    const int64_t row = (plan.cells[0].reach - at[0]) * input.positions[1] + plan.cells[1].reach - at[1];
    input.residue_elements[static_cast<size_t>(residue)].push_back(
        {number, row * input.pitch - at[2] - input.first_position});
  });
  const int64_t position_floats = input.filters * Product(input.positions) + kFloatsPerLine;
  input.scratch = input.margin + RoundUp(position_floats, kFloatsPerLine) +
                  input.channels * plan.Residues() * extent[0] * input.run;
}

InputPlan MakeInputPlan(const Plan& plan) {
  const Problem& problem = plan.problem;
  const Extent total = ExtentOf(plan, [](const Axis&, const Cells& cells) { return cells.end - cells.begin; });
  Blocking blocking = LargestBlocks(problem, total);
  InputPlan input = {};
  do {
    input.channels = blocking.channels;
    input.filters = blocking.filters;
    input.cells = BlocksOf(total, blocking.extent);
    LayOut(plan, input);
  } while (input.scratch > kScratchFloats && blocking.MakeSmaller());
  input.channel_blocks = CeilDiv(problem.channels, input.channels);
  for (size_t a = 0; a < kAxes; ++a) {
    const Axis& axis = problem.axes[a];
    const Cells& cells = plan.cells[a];
    const bool sees_all = static_cast<int64_t>(cells.residues.size()) == axis.stride &&
                          (axis.pad + axis.size - 1) / axis.stride < axis.positions + cells.reach;
    input.is_sparse |= !sees_all;
  }
  return input;
}

}  // namespace

Plan MakePlan(const Problem& problem) {
  Plan plan = {problem, {}, {}, {}};
  for (size_t a = 0; a < kAxes; ++a) plan.cells[a] = MakeCells(problem.axes[a]);
  plan.weight = MakeWeightPlan(plan);
  if (problem.dx != nullptr) plan.input = MakeInputPlan(plan);
  return plan;
}

}  // namespace ort_ops::conv_grad
