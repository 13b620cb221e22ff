// Phase one of Linear and LinearGrad, and their products on the caller's threads.
#include "ort_ops/linear.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <vector>

#include "executor.h"
#include "linear/problem.h"
#include "linear/sum_rows.h"
#include "matrix_product.h"
#include "tensor_checks.h"

namespace ort_ops::linear {
namespace {

StridedMatrix RowMajor(const float* data, int64_t columns) { return {data, columns, 1}; }

// [in, out], however it lies.
StridedMatrix Weight(const Layer& layer) {
  return layer.w_is_transposed ? Transposed(RowMajor(layer.w, layer.in)) : RowMajor(layer.w, layer.out);
}

MatrixProduct ForY(const Forward& call) {
  return {call.rows, call.out, call.in, RowMajor(call.x, call.in), Weight(call), call.b, call.y};
}

MatrixProduct ForDx(const Backward& call) {
  return {call.rows, call.in, call.out, RowMajor(call.dy, call.out), Transposed(Weight(call)), nullptr, call.dx};
}

MatrixProduct ForDw(const Backward& call) {
  const StridedMatrix x = RowMajor(call.x, call.in);
  const StridedMatrix dy = RowMajor(call.dy, call.out);
  if (call.w_is_transposed) return {call.out, call.in, call.rows, Transposed(dy), x, nullptr, call.dw};
  return {call.in, call.out, call.rows, Transposed(x), dy, nullptr, call.dw};
}

class ForwardExecutor final : public OrtOpsExecutor {
 public:
  explicit ForwardExecutor(const Forward& call)
      : OrtOpsExecutor(MultiplyWorkspaceBytes(ForY(call))), product_(ForY(call)) {}

  OrtOpsStatus Run(void* workspace, const OrtOpsParallelFor* parallel_for) const override {
    return Multiply(product_, workspace, parallel_for);
  }

 private:
  const MatrixProduct product_;
};

class BackwardExecutor final : public OrtOpsExecutor {
 public:
  explicit BackwardExecutor(const Backward& call) : OrtOpsExecutor(WorkspaceBytes(call)), call_(call) {}

  OrtOpsStatus Run(void* workspace, const OrtOpsParallelFor* parallel_for) const override {
    if (call_.db != nullptr) {
      const OrtOpsStatus status =
          SumRows(call_.dy, call_.rows, call_.out, call_.db, static_cast<float*>(workspace), parallel_for);
      if (status != ORT_OPS_SUCCESS) return status;
    }
    if (const OrtOpsStatus status = Multiply(ForDw(call_), workspace, parallel_for)) return status;
    return call_.dx == nullptr ? ORT_OPS_SUCCESS : Multiply(ForDx(call_), workspace, parallel_for);
  }

 private:
  // One thing is computed after the other.
  static size_t WorkspaceBytes(const Backward& call) {
    size_t bytes = MultiplyWorkspaceBytes(ForDw(call));
    if (call.db != nullptr) bytes = std::max(bytes, SumRowsWorkspaceBytes(call.rows, call.out));
    if (call.dx != nullptr) bytes = std::max(bytes, MultiplyWorkspaceBytes(ForDx(call)));
    return bytes;
  }

  const Backward call_;
};

OrtOpsStatus CheckFloat(const char* name, const OrtOpsTensor* tensor, int min_rank) {
  if (const auto status = CheckTensor(name, tensor, min_rank)) return status;
  return CheckType(name, *tensor, ORT_OPS_FLOAT, "");
}

OrtOpsStatus CheckShape(const char* name, const OrtOpsTensor* tensor, const std::vector<int64_t>& dims,
                        const char* whose) {
  if (const auto status = CheckFloat(name, tensor, 1)) return status;
  if (std::equal(dims.begin(), dims.end(), tensor->dims, tensor->dims + tensor->rank)) return ORT_OPS_SUCCESS;
  return Fail(ORT_OPS_INVALID_PARAMETER, "%s must be %s%s; got %s", name,
              ShapeText(dims.data(), static_cast<int>(dims.size())).c_str(), whose, ShapeText(*tensor).c_str());
}

// x, w and their layout.
OrtOpsStatus ReadLayer(const OrtOpsTensor* x, const OrtOpsTensor* w, const char* weight_layout, Layer& layer) {
  if (const auto status = CheckFloat("x", x, 2)) return status;
  if (const auto status = CheckFloat("w", w, 2)) return status;
  if (w->rank != 2) {
    return Fail(ORT_OPS_INVALID_PARAMETER, "w must have rank 2; got %s", ShapeText(*w).c_str());
  }
  if (weight_layout == nullptr) return Fail(ORT_OPS_NULL_POINTER, "weight_layout is required; got a null pointer");
  layer.w_is_transposed = std::strcmp(weight_layout, "out_in") == 0;
  if (!layer.w_is_transposed && std::strcmp(weight_layout, "in_out") != 0) {
    return Fail(ORT_OPS_INVALID_PARAMETER, "weight_layout must be in_out or out_in; got %s", weight_layout);
  }
  layer.in = x->dims[x->rank - 1];
  layer.out = w->dims[layer.w_is_transposed ? 0 : 1];
  layer.rows = ElementCount(x->dims, x->rank - 1);
  layer.w = static_cast<const float*>(w->data);
  if (w->dims[layer.w_is_transposed ? 1 : 0] == layer.in) return ORT_OPS_SUCCESS;
  return Fail(ORT_OPS_INVALID_PARAMETER, "w must be %s with x's last axis, %lld, as in; got %s",
              layer.w_is_transposed ? "[out,in]" : "[in,out]", static_cast<long long>(layer.in), ShapeText(*w).c_str());
}

std::vector<int64_t> ShapeOfY(const OrtOpsTensor& x, const Layer& layer) {
  std::vector<int64_t> dims(x.dims, x.dims + x.rank);
  dims.back() = layer.out;
  return dims;
}

OrtOpsStatus PlanForward(const OrtOpsTensor* x, const OrtOpsTensor* w, const OrtOpsTensor* b, const OrtOpsTensor* y,
                         const char* weight_layout, std::unique_ptr<OrtOpsExecutor>& made) {
  Forward call = {};
  if (const auto status = ReadLayer(x, w, weight_layout, call)) return status;
  if (b != nullptr) {
    if (const auto status = CheckShape("b", b, {call.out}, ", as many as w has outputs")) return status;
  }
  if (const auto status = CheckShape("y", y, ShapeOfY(*x, call), "")) return status;
  call.x = static_cast<const float*>(x->data);
  call.b = static_cast<const float*>(DataOrNull(b));
  call.y = static_cast<float*>(y->data);
  made = std::make_unique<ForwardExecutor>(call);
  return ORT_OPS_SUCCESS;
}

OrtOpsStatus PlanBackward(const OrtOpsTensor* dy, const OrtOpsTensor* x, const OrtOpsTensor* w, const OrtOpsTensor* dx,
                          const OrtOpsTensor* db, const OrtOpsTensor* dw, const char* weight_layout,
                          std::unique_ptr<OrtOpsExecutor>& made) {
  Backward call = {};
  if (const auto status = ReadLayer(x, w, weight_layout, call)) return status;
  if (const auto status = CheckShape("dy", dy, ShapeOfY(*x, call), ", x's rows by w's outputs")) return status;
  if (dx != nullptr) {
    if (const auto status = CheckLike("dx", dx, "x", *x)) return status;
  }
  if (db != nullptr) {
    if (const auto status = CheckShape("db", db, {call.out}, "")) return status;
  }
  if (const auto status = CheckLike("dw", dw, "w", *w)) return status;
  call.dy = static_cast<const float*>(dy->data);
  call.x = static_cast<const float*>(x->data);
  call.dx = static_cast<float*>(DataOrNull(dx));
  call.db = static_cast<float*>(DataOrNull(db));
  call.dw = static_cast<float*>(dw->data);
  made = std::make_unique<BackwardExecutor>(call);
  return ORT_OPS_SUCCESS;
}

}  // namespace
}  // namespace ort_ops::linear

extern "C" OrtOpsStatus ort_ops_linear_get_workspace_size(const OrtOpsTensor* x, const OrtOpsTensor* w,
                                                          const OrtOpsTensor* b, const OrtOpsTensor* y,
                                                          const char* weight_layout, size_t* workspace_bytes,
                                                          OrtOpsExecutor** executor) {
  return ort_ops::PhaseOne(workspace_bytes, executor, [&](std::unique_ptr<OrtOpsExecutor>& made) {
    return ort_ops::linear::PlanForward(x, w, b, y, weight_layout, made);
  });
}

extern "C" OrtOpsStatus ort_ops_linear_grad_get_workspace_size(
    const OrtOpsTensor* dy, const OrtOpsTensor* x, const OrtOpsTensor* w, const OrtOpsTensor* dx,
    const OrtOpsTensor* db, const OrtOpsTensor* dw, const char* weight_layout, size_t* workspace_bytes,
    OrtOpsExecutor** executor) {
  return ort_ops::PhaseOne(workspace_bytes, executor, [&](std::unique_ptr<OrtOpsExecutor>& made) {
    return ort_ops::linear::PlanBackward(dy, x, w, dx, db, dw, weight_layout, made);
  });
}
