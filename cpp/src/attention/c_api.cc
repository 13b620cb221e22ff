// Phase one of Attention and AttentionGrad, and what their executors hand to the caller's threads.
#include <algorithm>
#include <array>
#include <cstring>
#include <memory>

#include "attention/problem.h"
#include "executor.h"
#include "ort_ops/attention.h"
#include "tensor_checks.h"

namespace ort_ops::attention {
namespace {

// Units of work share pieces of scratch memory; that many are enough for as many threads.
constexpr int64_t kMaxTasks = 32;
constexpr int64_t kFloatsPerLine = 16;

template <class Call>
class Executor final : public ExecutorOf<Call> {
 public:
  Executor(const Call& call, int64_t scratch, void (*run)(const Call&, int64_t, float*))
      : ExecutorOf<Call>(call, static_cast<size_t>(Tasks(call) * LineFloats(scratch)) * sizeof(float)),
        scratch_(LineFloats(scratch)),
        run_(run) {}

  OrtOpsStatus Run(void* workspace, const OrtOpsParallelFor* parallel_for) const override {
    const Call& call = this->problem;
    const int64_t tasks = Tasks(call);
    return ParallelFor(parallel_for, tasks, [&](int64_t task) {
      float* scratch = static_cast<float*>(workspace) + task * scratch_;
      for (int64_t unit = task; unit < call.batch * call.heads; unit += tasks) run_(call, unit, scratch);
    });
  }

 private:
  static int64_t Tasks(const Problem& problem) { return std::min(kMaxTasks, problem.batch * problem.heads); }
  static int64_t LineFloats(int64_t floats) { return (floats + kFloatsPerLine - 1) / kFloatsPerLine * kFloatsPerLine; }

  const int64_t scratch_;
  void (*const run_)(const Call&, int64_t, float*);
};

OrtOpsStatus CheckFloat(const char* name, const OrtOpsTensor* tensor, int rank) {
  if (const auto status = CheckTensor(name, tensor, 1)) return status;
  if (const auto status = CheckType(name, *tensor, ORT_OPS_FLOAT, "")) return status;
  if (tensor->rank == rank) return ORT_OPS_SUCCESS;
  return Fail(ORT_OPS_INVALID_PARAMETER, "%s must have rank %d; got %s", name, rank, ShapeText(*tensor).c_str());
}

// The tensors of a whole call. Absent ones are null.
struct Tensors {
  const OrtOpsTensor* query;
  const OrtOpsTensor* key;
  const OrtOpsTensor* value;
  const OrtOpsTensor* mask;
};

// Part 0, 1 or 2 of a tensor with all three, or a tensor of its own.
template <class T>
Heads<T> HeadsOf(const OrtOpsTensor& tensor, int part) {
  const int64_t* dims = tensor.dims + (tensor.rank - 2);  // heads, size
  const int64_t parts = tensor.rank == 5 ? 3 : 1;
  const int64_t token = parts * dims[0] * dims[1];
  T* data = static_cast<T*>(tensor.data);
  return {data == nullptr ? nullptr : data + part * dims[0] * dims[1], tensor.dims[1] * token, token, dims[1]};
}

OrtOpsStatus CheckShape(const char* name, const OrtOpsTensor* tensor, const int64_t* dims, int rank) {
  if (const auto status = CheckFloat(name, tensor, rank)) return status;
  if (std::equal(dims, dims + rank, tensor->dims)) return ORT_OPS_SUCCESS;
  return Fail(ORT_OPS_INVALID_PARAMETER, "%s must be %s; got %s", name, ShapeText(dims, rank).c_str(),
              ShapeText(*tensor).c_str());
}

OrtOpsStatus ReadMask(const OrtOpsTensor* tensor, const std::array<int64_t, 4>& scores, Mask& mask) {
  if (tensor == nullptr) return ORT_OPS_SUCCESS;
  if (const auto status = CheckTensor("mask", tensor, 1)) return status;
  if (const auto status = CheckType("mask", *tensor, ORT_OPS_FLOAT, "")) return status;
  std::array<int64_t, 4> strides = {};
  bool fits = tensor->rank <= 4;
  int64_t stride = 1;
  for (int i = tensor->rank - 1; fits && i >= 0; --i) {
    const size_t axis = static_cast<size_t>(4 - tensor->rank + i);
    if (tensor->dims[i] != 1 && tensor->dims[i] != scores[axis]) fits = false;
    strides[axis] = tensor->dims[i] == 1 ? 0 : stride;
    stride *= tensor->dims[i];
  }
  if (!fits) {
    return Fail(ORT_OPS_INVALID_PARAMETER, "mask must broadcast to the scores' shape %s; got %s",
                ShapeText(scores.data(), 4).c_str(), ShapeText(*tensor).c_str());
  }
  mask = {static_cast<const float*>(tensor->data), strides[0], strides[1], strides[2], strides[3]};
  return ORT_OPS_SUCCESS;
}

OrtOpsStatus ReadVisibility(const char* visibility, bool& causal) {
  if (visibility == nullptr) return Fail(ORT_OPS_NULL_POINTER, "visibility is required; got a null pointer");
  causal = std::strcmp(visibility, "causal") == 0;
  if (causal || std::strcmp(visibility, "all") == 0) return ORT_OPS_SUCCESS;
  return Fail(ORT_OPS_INVALID_PARAMETER, "visibility must be all or causal; got %s", visibility);
}

OrtOpsStatus ReadProblem(const Tensors& tensors, float scale, const char* visibility, Problem& problem) {
  const bool joined = tensors.key == nullptr && tensors.value == nullptr;
  if (const auto status = CheckFloat("query", tensors.query, joined ? 5 : 4)) return status;
  const int64_t* dims = tensors.query->dims;
  const int64_t heads = dims[joined ? 3 : 2];
  const int64_t size = dims[joined ? 4 : 3];
  if (joined && dims[2] != 3) {
    return Fail(ORT_OPS_INVALID_PARAMETER,
                "query must be [batch,tokens,3,heads,size] where key and value are absent; got %s",
                ShapeText(*tensors.query).c_str());
  }
  int64_t keys = dims[1];
  if (!joined) {
    if (const auto status = CheckFloat("key", tensors.key, 4)) return status;
    keys = tensors.key->dims[1];
    const int64_t expected[] = {dims[0], keys, heads, size};
    if (const auto status = CheckShape("key", tensors.key, expected, 4)) return status;
    if (const auto status = CheckShape("value", tensors.value, expected, 4)) return status;
  }
  if (keys == 0 || size == 0) {
    return Fail(ORT_OPS_INVALID_PARAMETER, "there must be at least one key and a head of at least one element; got %s",
                ShapeText(joined ? *tensors.query : *tensors.key).c_str());
  }
  problem.batch = dims[0];
  problem.heads = heads;
  problem.queries = dims[1];
  problem.keys = keys;
  problem.size = size;
  problem.scale = scale;
  problem.query = HeadsOf<const float>(*tensors.query, 0);
  problem.key = HeadsOf<const float>(joined ? *tensors.query : *tensors.key, joined ? 1 : 0);
  problem.value = HeadsOf<const float>(joined ? *tensors.query : *tensors.value, joined ? 2 : 0);
  if (const auto status = ReadVisibility(visibility, problem.causal)) return status;
  return ReadMask(tensors.mask, {problem.batch, heads, problem.queries, keys}, problem.mask);
}

OrtOpsStatus CheckResults(const Problem& problem, const OrtOpsTensor* y, const OrtOpsTensor* log_sum_exp) {
  const int64_t y_dims[] = {problem.batch, problem.queries, problem.heads, problem.size};
  if (const auto status = CheckShape("y", y, y_dims, 4)) return status;
  const int64_t sum_dims[] = {problem.batch, problem.heads, problem.queries};
  return CheckShape("log_sum_exp", log_sum_exp, sum_dims, 3);
}

OrtOpsStatus PlanForward(const Tensors& tensors, const OrtOpsTensor* y, const OrtOpsTensor* log_sum_exp, float scale,
                         const char* visibility, std::unique_ptr<OrtOpsExecutor>& made) {
  Forward call = {};
  if (const auto status = ReadProblem(tensors, scale, visibility, call)) return status;
  if (const auto status = CheckResults(call, y, log_sum_exp)) return status;
  call.y = HeadsOf<float>(*y, 0);
  call.log_sum_exp = static_cast<float*>(log_sum_exp->data);
  made = std::make_unique<Executor<Forward>>(call, ForwardScratch(call), RunForward);
  return ORT_OPS_SUCCESS;
}

// The gradients, null where their tensors are.
struct Gradients {
  const OrtOpsTensor* query;
  const OrtOpsTensor* key;
  const OrtOpsTensor* value;
};

OrtOpsStatus PlanBackward(const OrtOpsTensor* dy, const Tensors& tensors, const OrtOpsTensor* y,
                          const OrtOpsTensor* log_sum_exp, const Gradients& gradients, float scale,
                          const char* visibility, std::unique_ptr<OrtOpsExecutor>& made) {
  Backward call = {};
  if (const auto status = ReadProblem(tensors, scale, visibility, call)) return status;
  if (const auto status = CheckResults(call, y, log_sum_exp)) return status;
  if (const auto status = CheckLike("dy", dy, "y", *y)) return status;
  if (const auto status = CheckLike("dquery", gradients.query, "query", *tensors.query)) return status;
  const bool joined = tensors.key == nullptr;
  if (joined && (gradients.key != nullptr || gradients.value != nullptr)) {
    return Fail(ORT_OPS_INVALID_PARAMETER, "dkey and dvalue must be absent where key and value are, for dquery holds all three");
  }
  if (!joined) {
    if (const auto status = CheckLike("dkey", gradients.key, "key", *tensors.key)) return status;
    if (const auto status = CheckLike("dvalue", gradients.value, "value", *tensors.value)) return status;
  }
  call.dy = HeadsOf<const float>(*dy, 0);
  call.y = HeadsOf<const float>(*y, 0);
  call.log_sum_exp = static_cast<const float*>(log_sum_exp->data);
  call.dquery = HeadsOf<float>(*gradients.query, 0);
  call.dkey = HeadsOf<float>(joined ? *gradients.query : *gradients.key, joined ? 1 : 0);
  call.dvalue = HeadsOf<float>(joined ? *gradients.query : *gradients.value, joined ? 2 : 0);
  made = std::make_unique<Executor<Backward>>(call, BackwardScratch(call), RunBackward);
  return ORT_OPS_SUCCESS;
}

}  // namespace
}  // namespace ort_ops::attention

extern "C" OrtOpsStatus ort_ops_attention_get_workspace_size(const OrtOpsTensor* query, const OrtOpsTensor* key,
                                                             const OrtOpsTensor* value, const OrtOpsTensor* mask,
                                                             const OrtOpsTensor* y, const OrtOpsTensor* log_sum_exp,
                                                             float scale, const char* visibility,
                                                             size_t* workspace_bytes, OrtOpsExecutor** executor) {
  return ort_ops::PhaseOne(workspace_bytes, executor, [&](std::unique_ptr<OrtOpsExecutor>& made) {
    return ort_ops::attention::PlanForward({query, key, value, mask}, y, log_sum_exp, scale, visibility, made);
  });
}

extern "C" OrtOpsStatus ort_ops_attention_grad_get_workspace_size(
    const OrtOpsTensor* dy, const OrtOpsTensor* query, const OrtOpsTensor* key, const OrtOpsTensor* value,
    const OrtOpsTensor* mask, const OrtOpsTensor* y, const OrtOpsTensor* log_sum_exp, const OrtOpsTensor* dquery,
    const OrtOpsTensor* dkey, const OrtOpsTensor* dvalue, float scale, const char* visibility, size_t* workspace_bytes,
    OrtOpsExecutor** executor) {
  return ort_ops::PhaseOne(workspace_bytes, executor, [&](std::unique_ptr<OrtOpsExecutor>& made) {
    return ort_ops::attention::PlanBackward(dy, {query, key, value, mask}, y, log_sum_exp, {dquery, dkey, dvalue}, scale,
                                            visibility, made);
  });
}
