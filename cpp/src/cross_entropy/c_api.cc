// Phase one of CrossEntropy and CrossEntropyGrad, and what their executors hand to the caller's threads.
#include <algorithm>
#include <memory>

#include "cross_entropy/problem.h"
#include "elementwise.h"
#include "executor.h"
#include "ort_ops/cross_entropy.h"
#include "tensor_checks.h"

namespace ort_ops::cross_entropy {
namespace {

template <class Call>
class Executor final : public ExecutorOf<Call> {
 public:
  explicit Executor(const Call& call) : ExecutorOf<Call>(call, 0) {}

  OrtOpsStatus Run(void*, const OrtOpsParallelFor* parallel_for) const override {
    if (const auto status = CheckLabels()) return status;
    const Call& call = this->problem;
    const int64_t rows_per_task = std::max<int64_t>(1, kElementsPerTask / call.classes);
    const int64_t tasks = call.rows / rows_per_task + (call.rows % rows_per_task != 0);
    return ParallelFor(parallel_for, tasks, [&](int64_t task) {
      const int64_t begin = task * rows_per_task;
      RunRows(call, begin, std::min(call.rows, begin + rows_per_task));
    });
  }

 private:
  OrtOpsStatus CheckLabels() const {
    const Problem& call = this->problem;
    for (int64_t row = 0; row < call.rows; ++row) {
      const int64_t label = call.labels.At(row);
      if ((label >= 0 && label < call.classes) || label == call.labels.ignore_index) continue;
      return Fail(ORT_OPS_INVALID_PARAMETER,
                  "labels must be at least 0 and below %lld, the number of classes, or %lld, the ignore_index; got %lld "
                  "at place %lld",
                  static_cast<long long>(call.classes), static_cast<long long>(call.labels.ignore_index),
                  static_cast<long long>(label), static_cast<long long>(row));
    }
    return ORT_OPS_SUCCESS;
  }
};

OrtOpsStatus CheckScoresAndLabels(const OrtOpsTensor* scores, const OrtOpsTensor* labels) {
  if (const auto status = CheckTensor("scores", scores, 1)) return status;
  if (const auto status = CheckType("scores", *scores, ORT_OPS_FLOAT, "")) return status;
  if (scores->dims[scores->rank - 1] == 0) {
    return Fail(ORT_OPS_INVALID_PARAMETER, "scores must have at least one class, its last axis; got %s",
                ShapeText(*scores).c_str());
  }
  if (const auto status = CheckTensor("labels", labels, 0)) return status;
  if (const auto status = CheckTypeIsOneOf("labels", *labels, {ORT_OPS_INT32, ORT_OPS_INT64})) return status;
  if (labels->rank == scores->rank - 1 && std::equal(labels->dims, labels->dims + labels->rank, scores->dims)) {
    return ORT_OPS_SUCCESS;
  }
  return Fail(ORT_OPS_INVALID_PARAMETER, "labels must be %s, scores %s without the last axis; got %s",
              ShapeText(scores->dims, scores->rank - 1).c_str(), ShapeText(*scores).c_str(),
              ShapeText(*labels).c_str());
}

// A float for each row.
OrtOpsStatus CheckRowValue(const char* name, const OrtOpsTensor* tensor, const OrtOpsTensor& labels) {
  if (const auto status = CheckTensor(name, tensor, 0)) return status;
  if (const auto status = CheckType(name, *tensor, ORT_OPS_FLOAT, "")) return status;
  return CheckSameShape(name, *tensor, "labels", labels);
}

// What both passes read.
void ReadCommon(const OrtOpsTensor& scores, const OrtOpsTensor& labels, int64_t ignore_index, Problem& problem) {
  problem.rows = ElementCount(labels);
  problem.classes = scores.dims[scores.rank - 1];
  problem.scores = static_cast<const float*>(scores.data);
  problem.labels = {labels.data, labels.data_type == ORT_OPS_INT64, ignore_index};
}

}  // namespace
}  // namespace ort_ops::cross_entropy

using namespace ort_ops;
using namespace ort_ops::cross_entropy;

extern "C" OrtOpsStatus ort_ops_cross_entropy_get_workspace_size(
    const OrtOpsTensor* scores, const OrtOpsTensor* labels, const OrtOpsTensor* row_loss,
    const OrtOpsTensor* log_sum_exp, int64_t ignore_index, size_t* workspace_bytes, OrtOpsExecutor** executor) {
  return PhaseOne(workspace_bytes, executor, [&](std::unique_ptr<OrtOpsExecutor>& made) {
    if (const auto status = CheckScoresAndLabels(scores, labels)) return status;
    if (const auto status = CheckRowValue("row_loss", row_loss, *labels)) return status;
    if (const auto status = CheckRowValue("log_sum_exp", log_sum_exp, *labels)) return status;
    Forward call = {};
    ReadCommon(*scores, *labels, ignore_index, call);
    call.row_loss = static_cast<float*>(row_loss->data);
    call.log_sum_exp = static_cast<float*>(log_sum_exp->data);
    made = std::make_unique<Executor<Forward>>(call);
    return ORT_OPS_SUCCESS;
  });
}

extern "C" OrtOpsStatus ort_ops_cross_entropy_grad_get_workspace_size(
    const OrtOpsTensor* drow_loss, const OrtOpsTensor* scores, const OrtOpsTensor* labels,
    const OrtOpsTensor* log_sum_exp, const OrtOpsTensor* dscores, int64_t ignore_index, size_t* workspace_bytes,
    OrtOpsExecutor** executor) {
  return PhaseOne(workspace_bytes, executor, [&](std::unique_ptr<OrtOpsExecutor>& made) {
    if (const auto status = CheckScoresAndLabels(scores, labels)) return status;
    if (const auto status = CheckRowValue("drow_loss", drow_loss, *labels)) return status;
    if (const auto status = CheckRowValue("log_sum_exp", log_sum_exp, *labels)) return status;
    if (const auto status = CheckLike("dscores", dscores, "scores", *scores)) return status;
    Backward call = {};
    ReadCommon(*scores, *labels, ignore_index, call);
    call.drow_loss = static_cast<const float*>(drow_loss->data);
    call.log_sum_exp = static_cast<const float*>(log_sum_exp->data);
    call.dscores = static_cast<float*>(dscores->data);
    made = std::make_unique<Executor<Backward>>(call);
    return ORT_OPS_SUCCESS;
  });
}
