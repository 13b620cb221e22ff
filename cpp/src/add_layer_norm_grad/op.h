// The operator as ONNX Runtime sees it: one OrtCustomOp for each pair of types.
#ifndef ORT_OPS_ADD_LAYER_NORM_GRAD_OP_H_
#define ORT_OPS_ADD_LAYER_NORM_GRAD_OP_H_

#include <onnxruntime_c_api.h>

namespace ort_ops::add_layer_norm_grad {

// T: dy, x1, x2, dsum and dx; gamma: T or float.
struct CpuOp : OrtCustomOp {
  CpuOp(ONNXTensorElementDataType type, ONNXTensorElementDataType gamma_type);

  ONNXTensorElementDataType type;
  ONNXTensorElementDataType gamma_type;
};

}  // namespace ort_ops::add_layer_norm_grad

#endif  // ORT_OPS_ADD_LAYER_NORM_GRAD_OP_H_
