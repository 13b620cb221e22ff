// How a ConvGrad call is cut into units of work, and how a unit lays out what it copies.
//
// The padded input is taken apart by its index modulo the stride: index = cell * stride + residue. Element k of the kernel
// at position o then sees cell o + Reach(k) of one residue, so in memory it lies at a fixed distance from the place of o,
// whatever o is, if rows of positions and rows of cells have the same pitch. Sums over positions and sums into cells so
// become sums over contiguous memory, with neither a column matrix nor its folding back. Where a row of positions is
// shorter than the pitch, dy is filled up with zeros.
#ifndef ORT_OPS_CONV_GRAD_PLAN_H_
#define ORT_OPS_CONV_GRAD_PLAN_H_

#include <array>
#include <cstdint>
#include <vector>

#include "conv_grad/problem.h"
#include "rounding.h"

namespace ort_ops::conv_grad {

using Extent = std::array<int64_t, kAxes>;

constexpr int64_t kFloatsPerLine = 16;  // and the lanes of the widest vector

inline int64_t Product(const Extent& extent) { return extent[0] * extent[1] * extent[2]; }

// Where on one axis a unit's block begins, and what is known of the axis.
struct Cells {
  int64_t reach;  // cells from the first that a position sees to the last
  int64_t begin;  // of the cells that hold an element of x that some position sees
  int64_t end;
  std::vector<int64_t> residues;         // those that positions see
  std::vector<int64_t> element_residue;  // for each element of the kernel, which of `residues`
  std::vector<int64_t> element_cell;     // and how many cells behind the position
};

// Where a kernel's element lies.
struct Element {
  int64_t number;  // in the kernel
  int64_t offset;  // floats from the place of a position, or of a cell
};

// A block along one axis or three, and how many there are.
struct Blocks {
  Extent extent;
  Extent count;
};

// dw and db. A unit is a part of the items (blocks of positions of some images) for some filters and some channels.
struct WeightPlan {
  int64_t channels;  // of a unit
  int64_t filters;
  int64_t channel_blocks;
  int64_t filter_blocks;
  Blocks positions;
  int64_t images;  // of an item
  int64_t items;
  int64_t parts;

  int64_t pitch;
  int64_t first_cell;  // the first column stored of a row of cells, from the block's first position
  int64_t columns;     // stored of a row of cells; the rest of the pitch is zero
  int64_t margin;      // zeros before the first row of cells
  Extent cells;        // of a block: slices, rows, pitch
  int64_t run;         // floats of a slice of positions
  std::vector<int64_t> element_offsets;  // within a channel
  int64_t scratch;                       // floats of a unit

  int64_t Units(const Problem& problem) const { return parts * problem.groups * filter_blocks * channel_blocks; }
};

// dx. A unit is a block of cells of one image, for some channels.
struct InputPlan {
  int64_t channels;  // of a unit
  int64_t filters;   // at a time
  int64_t channel_blocks;
  Blocks cells;
  bool is_sparse;  // no position sees some elements of x

  int64_t pitch;
  int64_t first_position;  // the first column stored of a row of positions, from the block's first cell
  int64_t columns;         // stored of a row of positions; the rest of the pitch is zero
  int64_t margin;          // zeros before the first row of positions
  Extent positions;        // of a block: slices, rows, pitch
  int64_t run;             // floats of a slice of cells
  std::vector<std::vector<Element>> residue_elements;  // for each residue, of all three axes, in order
  int64_t scratch;                                     // floats of a unit

  int64_t Units(const Problem& problem) const {
    return problem.batch * problem.groups * channel_blocks * Product(cells.count);
  }
};

struct Plan {
  Problem problem;
  std::array<Cells, kAxes> cells;
  WeightPlan weight;
  InputPlan input;  // where dx is wanted

  int64_t Residues() const {
    return static_cast<int64_t>(cells[0].residues.size() * cells[1].residues.size() * cells[2].residues.size());
  }
};

// May throw std::bad_alloc.
Plan MakePlan(const Problem& problem);

// The work; the instruction set is chosen inside. `partials`: [parts, filters, channels, kernel] and
// [parts, filters], which AddPartials adds up, or dw and db themselves where there is one part.
struct Partials {
  float* dw;
  float* db;
};
void RunWeightUnit(const Plan& plan, int64_t unit, Partials partials, float* scratch);
void RunInputUnit(const Plan& plan, int64_t unit, float* scratch);

}  // namespace ort_ops::conv_grad

#endif  // ORT_OPS_CONV_GRAD_PLAN_H_
