// What the ONNX Runtime adapters share: the runtime's function table and ownership of its objects.
#ifndef ORT_OPS_OP_API_H_
#define ORT_OPS_OP_API_H_

#include <onnxruntime_c_api.h>

#include <memory>

namespace ort_ops {

// The newest version of the runtime's API that this library asks for: the oldest runtime it serves is 1.18, whatever headers it was
// built with.
constexpr uint32_t kOrtApiVersion = 18;

// The table that RegisterCustomOps was given; shape inference needs it before any kernel exists. Null until then.
const OrtApi* RegisteredApi();

struct ReleaseTypeInfo {
  void operator()(OrtTensorTypeAndShapeInfo* info) const { RegisteredApi()->ReleaseTensorTypeAndShapeInfo(info); }
};
using TypeInfoPtr = std::unique_ptr<OrtTensorTypeAndShapeInfo, ReleaseTypeInfo>;

}  // namespace ort_ops

#endif  // ORT_OPS_OP_API_H_
