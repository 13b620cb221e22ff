// The rules that LayerNorm's forward and backward pass have in common.
#ifndef ORT_OPS_LAYER_NORM_CHECKS_H_
#define ORT_OPS_LAYER_NORM_CHECKS_H_

#include "ort_ops/ort_ops.h"

namespace ort_ops {

// gamma: of the type of `data` or float, and the shape of its last axes, with at least one element.
OrtOpsStatus CheckGamma(const OrtOpsTensor* gamma, const char* data_name, const OrtOpsTensor& data);

// A float for each row of `data`, of which the last `norm_rank` axes are normalised.
OrtOpsStatus CheckStatistic(const char* name, const OrtOpsTensor* tensor, const char* data_name,
                            const OrtOpsTensor& data, int norm_rank);

}  // namespace ort_ops

#endif  // ORT_OPS_LAYER_NORM_CHECKS_H_
