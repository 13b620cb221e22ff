// The operator as ONNX Runtime sees it: one OrtCustomOp for each provider and pair of types. What all have in
// common is in op.cc; how a provider runs one node is in cpu_op.cc and cuda_op.cc.
#ifndef ORT_OPS_ADD_LAYER_NORM_GRAD_OP_H_
#define ORT_OPS_ADD_LAYER_NORM_GRAD_OP_H_

#include <onnxruntime_c_api.h>

#include <memory>
#include <string>

#include "add_layer_norm_grad/problem.h"
#include "ort_ops/add_layer_norm_grad.h"

namespace ort_ops::add_layer_norm_grad {

struct Kernel;

struct Provider {
  const char* name;  // as the runtime calls it
  OrtStatus* (*run)(const Kernel& kernel, OrtKernelContext* context, const Tensors& tensors);
};

extern const Provider kCpuProvider;
extern const Provider kCudaProvider;  // not in a library built without CUDA

// T: dy, x1, x2, dsum and dx; gamma: T or float. Without `infers_shapes` the runtime knows dx's type but not
// its shape, and so never lets dx take over the buffer of a gradient.
struct Op : OrtCustomOp {
  Op(const Provider& provider, ONNXTensorElementDataType type, ONNXTensorElementDataType gamma_type,
     bool infers_shapes);

  const Provider& provider;
  ONNXTensorElementDataType type;
  ONNXTensorElementDataType gamma_type;
};

struct ReleaseAllocator {
  const OrtApi* api;
  void operator()(OrtAllocator* allocator) const { api->ReleaseAllocator(allocator); }
};

// One node of a session.
struct Kernel {
  const OrtApi& api;
  const Provider& provider;
  std::string node_name;
  std::unique_ptr<OrtAllocator, ReleaseAllocator> allocator;  // of the provider's own memory
};

OrtStatus* NodeError(const Kernel& kernel, OrtErrorCode code, const char* sentence);

// The C interface's status, and its sentence, as the runtime's.
OrtStatus* ToOrtStatus(const Kernel& kernel, OrtOpsStatus status);

}  // namespace ort_ops::add_layer_norm_grad

#endif  // ORT_OPS_ADD_LAYER_NORM_GRAD_OP_H_
