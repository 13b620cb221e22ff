// The rules for types, ranks and shapes, each with the sentence that tells who broke it and what was got.
#include "add_layer_norm_grad/problem.h"

#include "last_error.h"
#include "layer_norm_checks.h"
#include "tensor_checks.h"

namespace ort_ops::add_layer_norm_grad {
namespace {

OrtOpsStatus CheckParameterGradient(const char* name, const OrtOpsTensor& tensor, const OrtOpsTensor& gamma) {
  if (const auto status = CheckTensor(name, &tensor, 1)) return status;
  if (const auto status = CheckType(name, tensor, ORT_OPS_FLOAT, "")) return status;
  return CheckSameShape(name, tensor, "gamma", gamma);
}

OrtOpsStatus CheckRequired(const Tensors& t) {
  const struct {
    const char* name;
    const OrtOpsTensor* tensor;
  } required[] = {{"dy", t.dy}, {"x1", t.x1}, {"rstd", t.rstd}, {"mean", t.mean}, {"gamma", t.gamma}};
  for (const auto& [name, tensor] : required) {
    if (tensor == nullptr) return Fail(ORT_OPS_NULL_POINTER, "%s is required; got a null pointer", name);
  }
  return ORT_OPS_SUCCESS;
}

OrtOpsStatus CheckAll(const Tensors& t) {
  if (const auto status = CheckRequired(t)) return status;
  if (const auto status = CheckTensor("dy", t.dy, 1)) return status;
  if (const auto status = CheckTypeIsOneOf("dy", *t.dy, {ORT_OPS_FLOAT, ORT_OPS_FLOAT16, ORT_OPS_BFLOAT16})) {
    return status;
  }
  const struct {
    const char* name;
    const OrtOpsTensor* tensor;
  } like_dy[] = {{"x1", t.x1}, {"x2", t.x2}, {"dsum", t.dsum}, {"dx", t.dx}};
  for (const auto& [name, tensor] : like_dy) {
    if (tensor == nullptr) continue;
    if (const auto status = CheckLike(name, tensor, "dy", *t.dy)) return status;
  }
  if (const auto status = CheckGamma(t.gamma, "dy", *t.dy)) return status;
  if (const auto status = CheckStatistic("rstd", t.rstd, "dy", *t.dy, t.gamma->rank)) return status;
  if (const auto status = CheckStatistic("mean", t.mean, "dy", *t.dy, t.gamma->rank)) return status;
  if (t.dgamma != nullptr) {
    if (const auto status = CheckParameterGradient("dgamma", *t.dgamma, *t.gamma)) return status;
  }
  if (t.dbeta != nullptr) {
    if (const auto status = CheckParameterGradient("dbeta", *t.dbeta, *t.gamma)) return status;
  }
  return ORT_OPS_SUCCESS;
}

}  // namespace

OrtOpsStatus MakeProblem(const Tensors& t, Problem* problem) {
  if (const auto status = CheckAll(t)) return status;
  const OrtOpsTensor& dy = *t.dy;
  const OrtOpsTensor& gamma = *t.gamma;
  problem->rows = ElementCount(dy.dims, dy.rank - gamma.rank);
  problem->cols = ElementCount(gamma);
  problem->type = static_cast<OrtOpsDataType>(dy.data_type);
  problem->gamma_type = static_cast<OrtOpsDataType>(gamma.data_type);
  problem->dy = dy.data;
  problem->x1 = t.x1->data;
  problem->x2 = DataOrNull(t.x2);
  problem->rstd = static_cast<const float*>(t.rstd->data);
  problem->mean = static_cast<const float*>(t.mean->data);
  problem->gamma = gamma.data;
  problem->dsum = DataOrNull(t.dsum);
  problem->dx = DataOrNull(t.dx);
  problem->dgamma = static_cast<float*>(DataOrNull(t.dgamma));
  problem->dbeta = static_cast<float*>(DataOrNull(t.dbeta));
  return ORT_OPS_SUCCESS;
}

}  // namespace ort_ops::add_layer_norm_grad
