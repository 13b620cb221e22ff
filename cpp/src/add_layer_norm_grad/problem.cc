// The rules for types, ranks and shapes, each with the sentence that tells who broke it and what was got.
#include "add_layer_norm_grad/problem.h"

#include <algorithm>
#include <new>
#include <string>

#include "last_error.h"

namespace ort_ops::add_layer_norm_grad {
namespace {

constexpr int kMaxRank = 8;

std::string ShapeText(const int64_t* dims, int rank) {
  std::string text = "[";
  for (int i = 0; i < rank; ++i) {
    if (i != 0) text += ',';
    text += std::to_string(dims[i]);
  }
  return text + "]";
}

std::string ShapeText(const OrtOpsTensor& tensor) { return ShapeText(tensor.dims, tensor.rank); }

const char* TypeName(int32_t type) {
  switch (type) {
    case ORT_OPS_FLOAT:
      return "float";
    case ORT_OPS_FLOAT16:
      return "float16";
    case ORT_OPS_BFLOAT16:
      return "bfloat16";
    default:
      return nullptr;
  }
}

std::string TypeText(int32_t type) {
  const char* name = TypeName(type);
  return name != nullptr ? name : "ONNX data type " + std::to_string(type);
}

// A tensor by itself: rank, dims, and data wherever there are elements.
OrtOpsStatus CheckTensor(const char* name, const OrtOpsTensor& tensor, int min_rank) {
  if (tensor.rank < min_rank || tensor.rank > kMaxRank) {
    return Fail(ORT_OPS_INVALID_PARAMETER, "%s must have rank %d to %d; got rank %d", name, min_rank, kMaxRank,
                tensor.rank);
  }
  if (tensor.rank > 0 && tensor.dims == nullptr) {
    return Fail(ORT_OPS_NULL_POINTER, "%s has rank %d, but its dims are a null pointer", name, tensor.rank);
  }
  int64_t elements = 1;
  bool too_large = false;
  for (int i = 0; i < tensor.rank; ++i) {
    const int64_t dim = tensor.dims[i];
    if (dim < 0) {
      return Fail(ORT_OPS_INVALID_PARAMETER, "%s must have no negative dim; got %s", name,
                  ShapeText(tensor).c_str());
    }
    // 2^59 elements of 4 bytes leave room for every offset and sum in 64 bits.
    too_large |= dim != 0 && elements > (int64_t{1} << 59) / dim;
    elements = too_large ? 1 : elements * dim;
  }
  too_large &= std::find(tensor.dims, tensor.dims + tensor.rank, 0) == tensor.dims + tensor.rank;
  if (too_large) {
    return Fail(ORT_OPS_INVALID_PARAMETER, "%s must have at most 2^59 elements; got %s", name,
                ShapeText(tensor).c_str());
  }
  if (elements != 0 && tensor.data == nullptr) {
    return Fail(ORT_OPS_NULL_POINTER, "%s has elements, but its data is a null pointer", name);
  }
  return ORT_OPS_SUCCESS;
}

OrtOpsStatus CheckType(const char* name, const OrtOpsTensor& tensor, int32_t type, const char* rule) {
  if (tensor.data_type == type) return ORT_OPS_SUCCESS;
  return Fail(ORT_OPS_INVALID_PARAMETER, "%s must be %s%s; got %s", name, TypeText(type).c_str(), rule,
              TypeText(tensor.data_type).c_str());
}

OrtOpsStatus CheckSameShape(const char* name, const OrtOpsTensor& tensor, const char* model_name,
                            const OrtOpsTensor& model) {
  if (tensor.rank == model.rank && std::equal(model.dims, model.dims + model.rank, tensor.dims)) {
    return ORT_OPS_SUCCESS;
  }
  return Fail(ORT_OPS_INVALID_PARAMETER, "%s must have the shape of %s, %s; got %s", name, model_name,
              ShapeText(model).c_str(), ShapeText(tensor).c_str());
}

// A tensor that must be like dy in type and shape.
OrtOpsStatus CheckLikeDy(const char* name, const OrtOpsTensor& tensor, const OrtOpsTensor& dy) {
  if (const auto status = CheckTensor(name, tensor, 1)) return status;
  if (const auto status = CheckType(name, tensor, dy.data_type, ", the type of dy")) return status;
  return CheckSameShape(name, tensor, "dy", dy);
}

OrtOpsStatus CheckGamma(const OrtOpsTensor& gamma, const OrtOpsTensor& dy) {
  if (const auto status = CheckTensor("gamma", gamma, 1)) return status;
  if (gamma.data_type != dy.data_type && gamma.data_type != ORT_OPS_FLOAT) {
    return Fail(ORT_OPS_INVALID_PARAMETER, "gamma must be %s, the type of dy, or float; got %s",
                TypeName(dy.data_type), TypeText(gamma.data_type).c_str());
  }
  const int64_t* norm = dy.dims + std::max(dy.rank - gamma.rank, 0);
  if (gamma.rank > dy.rank || !std::equal(norm, dy.dims + dy.rank, gamma.dims)) {
    const int axes = std::min(gamma.rank, dy.rank);
    const std::string last = axes == 1 ? "the last axis" : "the last " + std::to_string(axes) + " axes";
    return Fail(ORT_OPS_INVALID_PARAMETER, "gamma must be %s, %s of dy %s; got %s",
                ShapeText(dy.dims + dy.rank - axes, axes).c_str(), last.c_str(), ShapeText(dy).c_str(),
                ShapeText(gamma).c_str());
  }
  if (std::find(gamma.dims, gamma.dims + gamma.rank, 0) != gamma.dims + gamma.rank) {
    return Fail(ORT_OPS_INVALID_PARAMETER, "gamma must have at least one element; got %s", ShapeText(gamma).c_str());
  }
  return ORT_OPS_SUCCESS;
}

OrtOpsStatus CheckStatistic(const char* name, const OrtOpsTensor& tensor, const OrtOpsTensor& dy, int norm_rank) {
  if (const auto status = CheckTensor(name, tensor, 0)) return status;
  if (const auto status = CheckType(name, tensor, ORT_OPS_FLOAT, "")) return status;
  const int lead_rank = dy.rank - norm_rank;
  const bool rank_fits = tensor.rank == lead_rank || tensor.rank == dy.rank;
  if (rank_fits && std::equal(dy.dims, dy.dims + lead_rank, tensor.dims) &&
      std::all_of(tensor.dims + lead_rank, tensor.dims + tensor.rank, [](int64_t dim) { return dim == 1; })) {
    return ORT_OPS_SUCCESS;
  }
  int64_t expected[kMaxRank];
  std::copy(dy.dims, dy.dims + lead_rank, expected);
  std::fill(expected + lead_rank, expected + dy.rank, 1);
  return Fail(ORT_OPS_INVALID_PARAMETER, "%s must be %s, one value for each row of dy %s, or the same without the trailing ones; got %s",
              name, ShapeText(expected, dy.rank).c_str(), ShapeText(dy).c_str(), ShapeText(tensor).c_str());
}

OrtOpsStatus CheckParameterGradient(const char* name, const OrtOpsTensor& tensor, const OrtOpsTensor& gamma) {
  if (const auto status = CheckTensor(name, tensor, 1)) return status;
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
  if (const auto status = CheckTensor("dy", *t.dy, 1)) return status;
  if (TypeName(t.dy->data_type) == nullptr) {
    return Fail(ORT_OPS_INVALID_PARAMETER, "dy must be float, float16 or bfloat16; got %s",
                TypeText(t.dy->data_type).c_str());
  }
  const struct {
    const char* name;
    const OrtOpsTensor* tensor;
  } like_dy[] = {{"x1", t.x1}, {"x2", t.x2}, {"dsum", t.dsum}, {"dx", t.dx}};
  for (const auto& [name, tensor] : like_dy) {
    if (tensor == nullptr) continue;
    if (const auto status = CheckLikeDy(name, *tensor, *t.dy)) return status;
  }
  if (const auto status = CheckGamma(*t.gamma, *t.dy)) return status;
  if (const auto status = CheckStatistic("rstd", *t.rstd, *t.dy, t.gamma->rank)) return status;
  if (const auto status = CheckStatistic("mean", *t.mean, *t.dy, t.gamma->rank)) return status;
  if (t.dgamma != nullptr) {
    if (const auto status = CheckParameterGradient("dgamma", *t.dgamma, *t.gamma)) return status;
  }
  if (t.dbeta != nullptr) {
    if (const auto status = CheckParameterGradient("dbeta", *t.dbeta, *t.gamma)) return status;
  }
  return ORT_OPS_SUCCESS;
}

int64_t Product(const int64_t* begin, const int64_t* end) {
  int64_t product = 1;
  for (const int64_t* dim = begin; dim != end; ++dim) product *= *dim;
  return product;
}

void* DataOrNull(const OrtOpsTensor* tensor) { return tensor == nullptr ? nullptr : tensor->data; }

}  // namespace

OrtOpsStatus MakeProblem(const Tensors& t, Problem* problem) {
  try {
    if (const auto status = CheckAll(t)) return status;
  } catch (const std::bad_alloc&) {
    return Fail(ORT_OPS_OUT_OF_MEMORY, "no memory for the sentence that would say what is wrong with the arguments");
  }
  const OrtOpsTensor& dy = *t.dy;
  const OrtOpsTensor& gamma = *t.gamma;
  // An empty tensor may have other dims as large as it likes: where any dim is 0 there are no rows.
  const bool empty = std::find(dy.dims, dy.dims + dy.rank, 0) != dy.dims + dy.rank;
  problem->rows = empty ? 0 : Product(dy.dims, dy.dims + dy.rank - gamma.rank);
  problem->cols = Product(gamma.dims, gamma.dims + gamma.rank);
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
