// Phase one of ConvGrad, and what its executor hands to the caller's threads.
#include <algorithm>
#include <atomic>
#include <memory>
#include <string>
#include <utility>

#include "conv_grad/plan.h"
#include "elementwise.h"
#include "executor.h"
#include "ort_ops/conv_grad.h"
#include "tensor_checks.h"

namespace ort_ops::conv_grad {
namespace {

// Units of work share pieces of scratch memory; that many are enough for as many threads.
constexpr int64_t kMaxTasks = 16;

// Hands out the pieces: a task takes the first that is free, because that is likely to be in the cache still.
class Pieces {
 public:
  int Take() {
    uint32_t taken = taken_.load(std::memory_order_relaxed);
    for (;;) {
      int piece = 0;
      while (taken >> piece & 1) ++piece;
      if (taken_.compare_exchange_weak(taken, taken | uint32_t{1} << piece, std::memory_order_acquire)) return piece;
    }
  }
  void Return(int piece) { taken_.fetch_and(~(uint32_t{1} << piece), std::memory_order_release); }

 private:
  std::atomic<uint32_t> taken_{0};
};

int64_t TasksFor(int64_t units) { return std::min(kMaxTasks, units); }

int64_t ScratchFloats(const Plan& plan) {
  const int64_t input = plan.problem.dx == nullptr ? 0 : plan.input.scratch;
  return RoundUp(std::max(plan.weight.scratch, input), kFloatsPerLine);
}

int64_t FilterCount(const Problem& problem) { return problem.groups * problem.filters; }

// Floats of the partial sums of dw; those of db are behind them.
int64_t PartialFloats(const Plan& plan) { return plan.weight.parts * plan.problem.WeightSize(); }

size_t WorkspaceBytes(const Plan& plan) {
  const int64_t input_units = plan.problem.dx == nullptr ? 0 : plan.input.Units(plan.problem);
  int64_t floats = TasksFor(std::max(plan.weight.Units(plan.problem), input_units)) * ScratchFloats(plan);
  if (plan.weight.parts > 1) floats += PartialFloats(plan) + plan.weight.parts * FilterCount(plan.problem);
  return static_cast<size_t>(floats) * sizeof(float);
}

// to = the sum of `parts` arrays of `count` floats that lie one behind the other, in order.
OrtOpsStatus AddParts(const OrtOpsParallelFor* parallel_for, const float* parts, int64_t number, int64_t count,
                      float* to) {
  return ForEachPiece(parallel_for, count, [&](int64_t begin, int64_t end) {
    std::copy(parts + begin, parts + end, to + begin);
    for (int64_t part = 1; part < number; ++part) {
      const float* addend = parts + part * count;
      for (int64_t i = begin; i < end; ++i) to[i] += addend[i];
    }
  });
}

class Executor final : public OrtOpsExecutor {
 public:
  explicit Executor(Plan plan) : OrtOpsExecutor(WorkspaceBytes(plan)), plan_(std::move(plan)) {}

  OrtOpsStatus Run(void* workspace, const OrtOpsParallelFor* parallel_for) const override {
    float* memory = static_cast<float*>(workspace);
    if (const auto status = RunWeights(memory, parallel_for)) return status;
    return plan_.problem.dx == nullptr ? ORT_OPS_SUCCESS : RunInputs(memory, parallel_for);
  }

 private:
  // Calls run(unit, scratch) for each unit.
  template <class Unit>
  OrtOpsStatus ForEachUnit(int64_t units, float* scratch, const OrtOpsParallelFor* parallel_for,
                           const Unit& run) const {
    const int64_t tasks = TasksFor(units);
    Pieces pieces;
    return ParallelFor(parallel_for, tasks, [&](int64_t task) {
      const int piece = pieces.Take();
      for (int64_t unit = task; unit < units; unit += tasks) run(unit, scratch + piece * ScratchFloats(plan_));
      pieces.Return(piece);
    });
  }

  OrtOpsStatus RunWeights(float* memory, const OrtOpsParallelFor* parallel_for) const {
    const Problem& problem = plan_.problem;
    const int64_t parts = plan_.weight.parts;
    const int64_t units = plan_.weight.Units(problem);
    Partials sums = {problem.dw, problem.db};
    if (parts > 1) {
      sums.dw = memory + TasksFor(units) * ScratchFloats(plan_);
      if (problem.db != nullptr) sums.db = sums.dw + PartialFloats(plan_);
    }
    const auto run = [&](int64_t unit, float* scratch) { RunWeightUnit(plan_, unit, sums, scratch); };
    if (const auto status = ForEachUnit(units, memory, parallel_for, run)) return status;
    if (parts == 1) return ORT_OPS_SUCCESS;
    if (const auto status = AddParts(parallel_for, sums.dw, parts, problem.WeightSize(), problem.dw)) return status;
    if (problem.db == nullptr) return ORT_OPS_SUCCESS;
    return AddParts(parallel_for, sums.db, parts, FilterCount(problem), problem.db);
  }

  OrtOpsStatus RunInputs(float* memory, const OrtOpsParallelFor* parallel_for) const {
    const Problem& problem = plan_.problem;
    if (plan_.input.is_sparse) {
      const int64_t count = problem.batch * problem.groups * problem.channels * problem.ImageSize();
      const auto clear = [&](int64_t begin, int64_t end) { std::fill(problem.dx + begin, problem.dx + end, 0.0f); };
      if (const auto status = ForEachPiece(parallel_for, count, clear)) return status;
    }
    const auto run = [&](int64_t unit, float* scratch) { RunInputUnit(plan_, unit, scratch); };
    return ForEachUnit(plan_.input.Units(problem), memory, parallel_for, run);
  }

  const Plan plan_;
};

// Far above any image's size, and small enough that no sum or product of these overflows.
constexpr int64_t kMaxNumber = int64_t{1} << 28;

OrtOpsStatus CheckNumbers(const char* name, const int64_t* numbers, int64_t count, int64_t least) {
  for (int64_t i = 0; i < count; ++i) {
    if (numbers[i] >= least && numbers[i] <= kMaxNumber) continue;
    return Fail(ORT_OPS_INVALID_PARAMETER, "%s must be at least %lld and at most 2^28; got %lld", name,
                static_cast<long long>(least), static_cast<long long>(numbers[i]));
  }
  return ORT_OPS_SUCCESS;
}

OrtOpsStatus CheckConvolution(const OrtOpsConvolution* convolution) {
  if (convolution == nullptr) return Fail(ORT_OPS_NULL_POINTER, "convolution is required; got a null pointer");
  const int32_t axes = convolution->axes;
  if (axes < 1 || axes > static_cast<int32_t>(kAxes)) {
    return Fail(ORT_OPS_INVALID_PARAMETER, "the convolution must have 1 to 3 axes; got %d", axes);
  }
  if (const auto status = CheckNumbers("strides", convolution->strides, axes, 1)) return status;
  if (const auto status = CheckNumbers("dilations", convolution->dilations, axes, 1)) return status;
  if (const auto status = CheckNumbers("pads", convolution->pads, 2 * axes, 0)) return status;
  return CheckNumbers("group", &convolution->groups, 1, 1);
}

OrtOpsStatus CheckFloats(const char* name, const OrtOpsTensor* tensor, int rank) {
  if (const auto status = CheckTensor(name, tensor, 1)) return status;
  if (const auto status = CheckType(name, *tensor, ORT_OPS_FLOAT, "")) return status;
  if (tensor->rank == rank) return CheckNumbers((std::string("the dims of ") + name).c_str(), tensor->dims, rank, 0);
  return Fail(ORT_OPS_INVALID_PARAMETER, "%s must have rank %d, two more than strides has numbers; got %s", name, rank,
              ShapeText(*tensor).c_str());
}

OrtOpsStatus ReadProblem(const OrtOpsTensor* dy, const OrtOpsTensor* x, const OrtOpsTensor* w,
                         const OrtOpsConvolution* convolution, Problem& problem) {
  if (const auto status = CheckConvolution(convolution)) return status;
  const int axes = convolution->axes;
  if (const auto status = CheckFloats("x", x, axes + 2)) return status;
  if (const auto status = CheckFloats("w", w, axes + 2)) return status;
  if (const auto status = CheckFloats("dy", dy, axes + 2)) return status;
  if (ElementCount(*w) == 0) {
    return Fail(ORT_OPS_INVALID_PARAMETER, "w must have no dim 0; got %s", ShapeText(*w).c_str());
  }
  const int64_t groups = convolution->groups;
  if (w->dims[0] % groups != 0) {
    return Fail(ORT_OPS_INVALID_PARAMETER, "the filters of w %s must be a multiple of group; got %lld",
                ShapeText(*w).c_str(), static_cast<long long>(groups));
  }
  if (x->dims[1] != w->dims[1] * groups) {
    return Fail(ORT_OPS_INVALID_PARAMETER, "x must have %lld channels, group times those of w %s; got %s",
                static_cast<long long>(w->dims[1] * groups), ShapeText(*w).c_str(), ShapeText(*x).c_str());
  }
  problem.batch = x->dims[0];
  problem.groups = groups;
  problem.channels = w->dims[1];
  problem.filters = w->dims[0] / groups;
  int64_t expected[kAxes + 2] = {x->dims[0], w->dims[0]};
  for (int i = 0; i < axes; ++i) {
    Axis& axis = problem.axes[kAxes - static_cast<size_t>(axes - i)];
    axis.size = x->dims[i + 2];
    axis.kernel = w->dims[i + 2];
    axis.stride = convolution->strides[i];
    axis.dilation = convolution->dilations[i];
    axis.pad = convolution->pads[i];
    const int64_t padded = axis.size + axis.pad + convolution->pads[axes + i];
    const int64_t reach = (axis.kernel - 1) * axis.dilation + 1;
    if (padded < reach) {
      return Fail(ORT_OPS_INVALID_PARAMETER, "x must be, padded, at least as large as the kernel of w %s; got %s",
                  ShapeText(*w).c_str(), ShapeText(*x).c_str());
    }
    axis.positions = (padded - reach) / axis.stride + 1;
    expected[i + 2] = axis.positions;
  }
  if (!std::equal(dy->dims, dy->dims + dy->rank, expected)) {
    return Fail(ORT_OPS_INVALID_PARAMETER, "dy must be %s, the shape of the convolution of x %s with w %s; got %s",
                ShapeText(expected, axes + 2).c_str(), ShapeText(*x).c_str(), ShapeText(*w).c_str(),
                ShapeText(*dy).c_str());
  }
  return ORT_OPS_SUCCESS;
}

OrtOpsStatus CheckBias(const OrtOpsTensor* db, const OrtOpsTensor& w) {
  if (db == nullptr) return ORT_OPS_SUCCESS;
  if (const auto status = CheckTensor("db", db, 1)) return status;
  if (const auto status = CheckType("db", *db, ORT_OPS_FLOAT, "")) return status;
  if (db->rank == 1 && db->dims[0] == w.dims[0]) return ORT_OPS_SUCCESS;
  return Fail(ORT_OPS_INVALID_PARAMETER, "db must be %s, the filters of w %s; got %s", ShapeText(w.dims, 1).c_str(),
              ShapeText(w).c_str(), ShapeText(*db).c_str());
}

}  // namespace
}  // namespace ort_ops::conv_grad

extern "C" OrtOpsStatus ort_ops_conv_grad_get_workspace_size(
    const OrtOpsTensor* dy, const OrtOpsTensor* x, const OrtOpsTensor* w, const OrtOpsTensor* dx,
    const OrtOpsTensor* db, const OrtOpsTensor* dw, const OrtOpsConvolution* convolution, size_t* workspace_bytes,
    OrtOpsExecutor** executor) {
  using namespace ort_ops;
  using namespace ort_ops::conv_grad;
  return PhaseOne(workspace_bytes, executor, [&](std::unique_ptr<OrtOpsExecutor>& made) {
    Problem problem = {};
    if (const auto status = ReadProblem(dy, x, w, convolution, problem)) return status;
    if (dx != nullptr) {
      if (const auto status = CheckLike("dx", dx, "x", *x)) return status;
    }
    if (const auto status = CheckBias(db, *w)) return status;
    if (const auto status = CheckLike("dw", dw, "w", *w)) return status;
    problem.dy = static_cast<const float*>(dy->data);
    problem.x = static_cast<const float*>(x->data);
    problem.w = static_cast<const float*>(w->data);
    problem.dx = static_cast<float*>(DataOrNull(dx));
    problem.dw = static_cast<float*>(dw->data);
    problem.db = static_cast<float*>(DataOrNull(db));
    made = std::make_unique<Executor>(MakePlan(problem));
    return ORT_OPS_SUCCESS;
  });
}
