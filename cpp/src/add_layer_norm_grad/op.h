// The operator as ONNX Runtime sees it: one OrtCustomOp for each pair of types.
#ifndef ORT_OPS_ADD_LAYER_NORM_GRAD_OP_H_
#define ORT_OPS_ADD_LAYER_NORM_GRAD_OP_H_

#include <onnxruntime_c_api.h>

namespace ort_ops::add_layer_norm_grad {

// T: dy, x1, x2, dsum and dx; gamma: T or float. Without `infers_shapes` the runtime knows dx's type but not
// its shape, and so never lets dx take over the buffer of a gradient.
struct CpuOp : OrtCustomOp {
  CpuOp(ONNXTensorElementDataType type, ONNXTensorElementDataType gamma_type, bool infers_shapes);

  ONNXTensorElementDataType type;
  ONNXTensorElementDataType gamma_type;
};

}  // namespace ort_ops::add_layer_norm_grad

#endif  // ORT_OPS_ADD_LAYER_NORM_GRAD_OP_H_
