// An operator as ONNX Runtime sees it. What differs from operator to operator is data, an OpDescription; what all
// have in common is in custom_op.cc, and how a node runs in custom_op_cpu.cc and custom_op_cuda.cc.
#ifndef ORT_OPS_CUSTOM_OP_H_
#define ORT_OPS_CUSTOM_OP_H_

#include <onnxruntime_c_api.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <variant>
#include <vector>

#include "ort_ops/ort_ops.h"

namespace ort_ops {

constexpr size_t kMaxSlots = 12;

// A slot's element type: the kernel's type number `variable`, or the same type in all kernels.
struct SlotType {
  int variable;
  ONNXTensorElementDataType fixed;
};
constexpr SlotType Variable(int number) { return {number, ONNX_TENSOR_ELEMENT_DATA_TYPE_UNDEFINED}; }
constexpr SlotType Fixed(ONNXTensorElementDataType type) { return {-1, type}; }

struct InputSlot {
  SlotType type;
  bool optional;
};

constexpr int kOwnShape = -1;

struct OutputSlot {
  SlotType type;
  bool optional;
  int like;  // the input whose shape it has, or kOwnShape: then OpDescription::own_shape tells
};

using AttributeValue = std::variant<float, int64_t, std::string, std::vector<int64_t>>;

// An attribute of a node; the default's type is the attribute's.
struct AttributeDescription {
  const char* name;
  AttributeValue default_value;
};

// One run of a node. Absent inputs and outputs are null.
struct Call {
  std::array<const OrtOpsTensor*, kMaxSlots> inputs;
  std::array<const OrtOpsTensor*, kMaxSlots> outputs;
  const std::vector<AttributeValue>& attributes;

  float Number(size_t attribute) const { return std::get<float>(attributes[attribute]); }
  int64_t Integer(size_t attribute) const { return std::get<int64_t>(attributes[attribute]); }
  const char* Text(size_t attribute) const { return std::get<std::string>(attributes[attribute]).c_str(); }
  const std::vector<int64_t>& Integers(size_t attribute) const {
    return std::get<std::vector<int64_t>>(attributes[attribute]);
  }
};

struct OpDescription {
  const char* name;
  std::vector<InputSlot> inputs;
  std::vector<OutputSlot> outputs;
  std::vector<AttributeDescription> attributes;
  // Phase one of the C interface.
  OrtOpsStatus (*plan)(const Call& call, size_t* workspace_bytes, OrtOpsExecutor** executor);
  // Which outputs may take over which inputs' buffers (OrtCustomOp::GetMayInplace), or null for none.
  size_t (*may_inplace)(int** inputs, int** outputs);
  // The shape of an output of its own shape; called before the inputs were checked.
  std::vector<int64_t> (*own_shape)(const Call& call, size_t output);
};

struct Kernel;

struct Provider {
  const char* name;  // as the runtime calls it
  OrtStatus* (*run)(const Kernel& kernel, OrtKernelContext* context, const Call& call);
};

// Each runs any operator by its description's `plan`.
extern const Provider kCpuProvider;
extern const Provider kCudaProvider;  // not in a library built without CUDA; for operators with CUDA kernels (executor.h)

// The kernel of an operator for one provider and one choice of types. Without `infers_shapes` the runtime knows the
// outputs' types but not their shapes, and so never lets one take over an input's buffer.
struct Op : OrtCustomOp {
  Op(const OpDescription& description, const Provider& provider, std::vector<ONNXTensorElementDataType> types,
     bool infers_shapes);

  const OpDescription& description;
  const Provider& provider;
  const std::vector<ONNXTensorElementDataType> types;  // of Variable(0), Variable(1), ...
};

struct ReleaseAllocator {
  const OrtApi* api;
  void operator()(OrtAllocator* allocator) const { api->ReleaseAllocator(allocator); }
};

// One node of a session.
struct Kernel {
  const OrtApi& api;
  const Op& op;
  std::string node_name;
  std::vector<AttributeValue> attributes;
  std::unique_ptr<OrtAllocator, ReleaseAllocator> allocator;  // of the provider's own memory
};

OrtStatus* NodeError(const Kernel& kernel, OrtErrorCode code, const std::string& sentence);

// The C interface's status, and its sentence, as the runtime's.
OrtStatus* ToOrtStatus(const Kernel& kernel, OrtOpsStatus status);

struct DestroyExecutor {
  void operator()(OrtOpsExecutor* executor) const { ort_ops_destroy_executor(executor); }
};
using ExecutorPtr = std::unique_ptr<OrtOpsExecutor, DestroyExecutor>;

// Phase one of a call, on any provider.
OrtStatus* PlanCall(const Kernel& kernel, const Call& call, size_t* workspace_bytes, ExecutorPtr& executor);

}  // namespace ort_ops

#endif  // ORT_OPS_CUSTOM_OP_H_
