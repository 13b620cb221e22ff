#include "layer_norm_checks.h"

#include <algorithm>
#include <string>

#include "last_error.h"
#include "tensor_checks.h"

namespace ort_ops {

OrtOpsStatus CheckGamma(const OrtOpsTensor* given, const char* data_name, const OrtOpsTensor& data) {
  if (const auto status = CheckTensor("gamma", given, 1)) return status;
  const OrtOpsTensor& gamma = *given;
  if (gamma.data_type != data.data_type && gamma.data_type != ORT_OPS_FLOAT) {
    return Fail(ORT_OPS_INVALID_PARAMETER, "gamma must be %s, the type of %s, or float; got %s",
                TypeText(data.data_type).c_str(), data_name, TypeText(gamma.data_type).c_str());
  }
  const int64_t* norm = data.dims + std::max(data.rank - gamma.rank, 0);
  if (gamma.rank > data.rank || !std::equal(norm, data.dims + data.rank, gamma.dims)) {
    const int axes = std::min(gamma.rank, data.rank);
    const std::string last = axes == 1 ? "the last axis" : "the last " + std::to_string(axes) + " axes";
    return Fail(ORT_OPS_INVALID_PARAMETER, "gamma must be %s, %s of %s %s; got %s",
                ShapeText(data.dims + data.rank - axes, axes).c_str(), last.c_str(), data_name, ShapeText(data).c_str(),
                ShapeText(gamma).c_str());
  }
  if (std::find(gamma.dims, gamma.dims + gamma.rank, 0) != gamma.dims + gamma.rank) {
    return Fail(ORT_OPS_INVALID_PARAMETER, "gamma must have at least one element; got %s", ShapeText(gamma).c_str());
  }
  return ORT_OPS_SUCCESS;
}

OrtOpsStatus CheckStatistic(const char* name, const OrtOpsTensor* given, const char* data_name,
                            const OrtOpsTensor& data, int norm_rank) {
  if (const auto status = CheckTensor(name, given, 0)) return status;
  const OrtOpsTensor& tensor = *given;
  if (const auto status = CheckType(name, tensor, ORT_OPS_FLOAT, "")) return status;
  const int lead_rank = data.rank - norm_rank;
  const bool rank_fits = tensor.rank == lead_rank || tensor.rank == data.rank;
  if (rank_fits && std::equal(data.dims, data.dims + lead_rank, tensor.dims) &&
      std::all_of(tensor.dims + lead_rank, tensor.dims + tensor.rank, [](int64_t dim) { return dim == 1; })) {
    return ORT_OPS_SUCCESS;
  }
  int64_t expected[kMaxRank];
  std::copy(data.dims, data.dims + lead_rank, expected);
  std::fill(expected + lead_rank, expected + data.rank, 1);
  return Fail(ORT_OPS_INVALID_PARAMETER, "%s must be %s, one value for each row of %s %s, or the same without the trailing ones; got %s",
              name, ShapeText(expected, data.rank).c_str(), data_name, ShapeText(data).c_str(), ShapeText(tensor).c_str());
}

}  // namespace ort_ops
