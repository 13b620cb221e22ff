// The rules that the tensors of every operator keep, each with the sentence that tells who broke it and what was got.
// May throw std::bad_alloc, for the sentences; PhaseOne (executor.h) turns it into a status.
#ifndef ORT_OPS_TENSOR_CHECKS_H_
#define ORT_OPS_TENSOR_CHECKS_H_

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <string>

#include "ort_ops/ort_ops.h"

namespace ort_ops {

constexpr int kMaxRank = 8;

// "[8,128,768]"
std::string ShapeText(const int64_t* dims, int rank);
std::string ShapeText(const OrtOpsTensor& tensor);

// "float", or "ONNX data type 11" for one that no operator takes.
std::string TypeText(int32_t type);

// A required tensor: not null, rank min_rank to 8, no negative dim, at most 2^59 elements, and data wherever there are
// elements.
OrtOpsStatus CheckTensor(const char* name, const OrtOpsTensor* tensor, int min_rank);

// `whose`: e.g. ", the type of dy".
OrtOpsStatus CheckType(const char* name, const OrtOpsTensor& tensor, int32_t type, const char* whose);
OrtOpsStatus CheckTypeIsOneOf(const char* name, const OrtOpsTensor& tensor, std::initializer_list<int32_t> types);

OrtOpsStatus CheckSameShape(const char* name, const OrtOpsTensor& tensor, const char* model_name,
                            const OrtOpsTensor& model);

// CheckTensor, and the type and the shape of `model`.
OrtOpsStatus CheckLike(const char* name, const OrtOpsTensor* tensor, const char* model_name, const OrtOpsTensor& model);

// CheckTensor for a tensor of one element: rank 0, or all its dims 1.
OrtOpsStatus CheckScalar(const char* name, const OrtOpsTensor* tensor, int32_t type);

inline size_t ElementBytes(int32_t type) {
  switch (type) {
    case ORT_OPS_BOOL:
      return 1;
    case ORT_OPS_FLOAT16:
    case ORT_OPS_BFLOAT16:
      return 2;
    case ORT_OPS_INT64:
      return 8;
    default:
      return 4;
  }
}

// The number of elements in dims[0, rank), 0 where any dim is 0, however large the others are.
int64_t ElementCount(const int64_t* dims, int rank);
inline int64_t ElementCount(const OrtOpsTensor& tensor) { return ElementCount(tensor.dims, tensor.rank); }

inline void* DataOrNull(const OrtOpsTensor* tensor) { return tensor == nullptr ? nullptr : tensor->data; }

}  // namespace ort_ops

#endif  // ORT_OPS_TENSOR_CHECKS_H_
