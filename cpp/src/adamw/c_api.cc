// Phase one of AdamW, and what its executor hands to the caller's threads.
#include <cstring>
#include <memory>

#include "adamw/problem.h"
#include "elementwise.h"
#include "executor.h"
#include "ort_ops/adamw.h"
#include "tensor_checks.h"

namespace ort_ops::adamw {
namespace {

void CopyPiece(const float* from, float* to, int64_t begin, int64_t end) {
  if (from != to) std::memcpy(to + begin, from + begin, static_cast<size_t>(end - begin) * sizeof(float));
}

class Executor final : public ExecutorOf<Problem> {
 public:
  explicit Executor(const Problem& its_problem) : ExecutorOf(its_problem, 0) {}

  OrtOpsStatus Run(void*, const OrtOpsParallelFor* parallel_for) const override {
    if (problem.update != nullptr && !*problem.update) return KeepAll(parallel_for);
    return ForEachPiece(parallel_for, problem.count,
                        [&](int64_t begin, int64_t end) { RunPiece(problem, begin, end); });
  }

 private:
  OrtOpsStatus KeepAll(const OrtOpsParallelFor* parallel_for) const {
    return ForEachPiece(parallel_for, problem.count, [&](int64_t begin, int64_t end) {
      CopyPiece(problem.parameter, problem.parameter_updated, begin, end);
      CopyPiece(problem.first_moment, problem.first_moment_updated, begin, end);
      CopyPiece(problem.second_moment, problem.second_moment_updated, begin, end);
    });
  }
};

struct Named {
  const char* name;
  const OrtOpsTensor* tensor;
};

OrtOpsStatus CheckForm(const char* form) {
  if (form == nullptr) return Fail(ORT_OPS_NULL_POINTER, "form is required; got a null pointer");
  if (std::strcmp(form, "pytorch") == 0 || std::strcmp(form, "hugging_face") == 0) return ORT_OPS_SUCCESS;
  return Fail(ORT_OPS_INVALID_PARAMETER, "form must be pytorch or hugging_face; got %s", form);
}

const float* Floats(const OrtOpsTensor* tensor) { return static_cast<const float*>(DataOrNull(tensor)); }

}  // namespace
}  // namespace ort_ops::adamw

extern "C" OrtOpsStatus ort_ops_adamw_get_workspace_size(
    const OrtOpsTensor* parameter, const OrtOpsTensor* gradient, const OrtOpsTensor* first_moment,
    const OrtOpsTensor* second_moment, const OrtOpsTensor* gradient_weight, const OrtOpsTensor* square_weight,
    const OrtOpsTensor* step_size, const OrtOpsTensor* inverse_root, const OrtOpsTensor* decay,
    const OrtOpsTensor* update, const OrtOpsTensor* parameter_updated, const OrtOpsTensor* first_moment_updated,
    const OrtOpsTensor* second_moment_updated, const char* form, float beta1, float beta2, float epsilon,
    size_t* workspace_bytes, OrtOpsExecutor** executor) {
  using namespace ort_ops;
  using namespace ort_ops::adamw;
  return PhaseOne(workspace_bytes, executor, [&](std::unique_ptr<OrtOpsExecutor>& made) {
    if (const auto status = CheckTensor("parameter", parameter, 0)) return status;
    if (const auto status = CheckType("parameter", *parameter, ORT_OPS_FLOAT, "")) return status;
    for (const auto& [name, tensor] : {Named{"gradient", gradient}, Named{"first_moment", first_moment},
                                       Named{"second_moment", second_moment},
                                       Named{"parameter_updated", parameter_updated},
                                       Named{"first_moment_updated", first_moment_updated},
                                       Named{"second_moment_updated", second_moment_updated}}) {
      if (const auto status = CheckLike(name, tensor, "parameter", *parameter)) return status;
    }
    for (const auto& [name, tensor] : {Named{"gradient_weight", gradient_weight},
                                       Named{"square_weight", square_weight}, Named{"step_size", step_size}}) {
      if (const auto status = CheckScalar(name, tensor, ORT_OPS_FLOAT)) return status;
    }
    for (const auto& [name, tensor] : {Named{"inverse_root", inverse_root}, Named{"decay", decay}}) {
      if (tensor == nullptr) continue;
      if (const auto status = CheckScalar(name, tensor, ORT_OPS_FLOAT)) return status;
    }
    if (update != nullptr) {
      if (const auto status = CheckScalar("update", update, ORT_OPS_BOOL)) return status;
    }
    if (const auto status = CheckForm(form)) return status;
    const Problem problem = {ElementCount(*parameter),
                             Floats(parameter),
                             Floats(gradient),
                             Floats(first_moment),
                             Floats(second_moment),
                             Floats(gradient_weight),
                             Floats(square_weight),
                             Floats(step_size),
                             Floats(inverse_root),
                             Floats(decay),
                             static_cast<const bool*>(DataOrNull(update)),
                             static_cast<float*>(parameter_updated->data),
                             static_cast<float*>(first_moment_updated->data),
                             static_cast<float*>(second_moment_updated->data),
                             std::strcmp(form, "hugging_face") == 0,
                             beta1,
                             beta2,
                             epsilon};
    made = std::make_unique<Executor>(problem);
    return ORT_OPS_SUCCESS;
  });
}
