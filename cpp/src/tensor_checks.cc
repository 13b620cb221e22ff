#include "tensor_checks.h"

#include <algorithm>

#include "last_error.h"

namespace ort_ops {
namespace {

const char* TypeName(int32_t type) {
  switch (type) {
    case ORT_OPS_FLOAT:
      return "float";
    case ORT_OPS_INT32:
      return "int32";
    case ORT_OPS_INT64:
      return "int64";
    case ORT_OPS_BOOL:
      return "bool";
    case ORT_OPS_FLOAT16:
      return "float16";
    case ORT_OPS_BFLOAT16:
      return "bfloat16";
    default:
      return nullptr;
  }
}

}  // namespace

std::string ShapeText(const int64_t* dims, int rank) {
  std::string text = "[";
  for (int i = 0; i < rank; ++i) {
    if (i != 0) text += ',';
    text += std::to_string(dims[i]);
  }
  return text + "]";
}

std::string ShapeText(const OrtOpsTensor& tensor) { return ShapeText(tensor.dims, tensor.rank); }

std::string TypeText(int32_t type) {
  const char* name = TypeName(type);
  return name != nullptr ? name : "ONNX data type " + std::to_string(type);
}

OrtOpsStatus CheckTensor(const char* name, const OrtOpsTensor* given, int min_rank) {
  if (given == nullptr) return Fail(ORT_OPS_NULL_POINTER, "%s is required; got a null pointer", name);
  const OrtOpsTensor& tensor = *given;
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

OrtOpsStatus CheckType(const char* name, const OrtOpsTensor& tensor, int32_t type, const char* whose) {
  if (tensor.data_type == type) return ORT_OPS_SUCCESS;
  return Fail(ORT_OPS_INVALID_PARAMETER, "%s must be %s%s; got %s", name, TypeText(type).c_str(), whose,
              TypeText(tensor.data_type).c_str());
}

OrtOpsStatus CheckTypeIsOneOf(const char* name, const OrtOpsTensor& tensor, std::initializer_list<int32_t> types) {
  if (std::find(types.begin(), types.end(), tensor.data_type) != types.end()) return ORT_OPS_SUCCESS;
  std::string allowed;
  for (const int32_t* type = types.begin(); type != types.end(); ++type) {
    if (type != types.begin()) allowed += type + 1 == types.end() ? " or " : ", ";
    allowed += TypeText(*type);
  }
  return Fail(ORT_OPS_INVALID_PARAMETER, "%s must be %s; got %s", name, allowed.c_str(),
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

OrtOpsStatus CheckLike(const char* name, const OrtOpsTensor* tensor, const char* model_name,
                       const OrtOpsTensor& model) {
  if (const auto status = CheckTensor(name, tensor, std::min(1, model.rank))) return status;
  const std::string whose = std::string(", the type of ") + model_name;
  if (const auto status = CheckType(name, *tensor, model.data_type, whose.c_str())) return status;
  return CheckSameShape(name, *tensor, model_name, model);
}

OrtOpsStatus CheckScalar(const char* name, const OrtOpsTensor* tensor, int32_t type) {
  if (const auto status = CheckTensor(name, tensor, 0)) return status;
  if (const auto status = CheckType(name, *tensor, type, "")) return status;
  if (ElementCount(*tensor) == 1) return ORT_OPS_SUCCESS;
  return Fail(ORT_OPS_INVALID_PARAMETER, "%s must have one element; got %s", name, ShapeText(*tensor).c_str());
}

int64_t ElementCount(const int64_t* dims, int rank) {
  if (std::find(dims, dims + rank, 0) != dims + rank) return 0;
  int64_t count = 1;
  for (int i = 0; i < rank; ++i) count *= dims[i];
  return count;
}

}  // namespace ort_ops
