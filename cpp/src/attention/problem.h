// The checked description of one Attention or AttentionGrad call, and the work on one head of one batch entry,
// or on CUDA.
#ifndef ORT_OPS_ATTENTION_PROBLEM_H_
#define ORT_OPS_ATTENTION_PROBLEM_H_

#include <cstddef>
#include <cstdint>

#include "cuda_device.h"
#include "ort_ops/ort_ops.h"

namespace ort_ops::attention {

// Where the heads of a tensor lie: element d of head h of token t of batch entry b is at
// data[b * batch + t * token + h * head + d]. `data` is null for a tensor that is absent.
template <class T>
struct Heads {
  T* data;
  int64_t batch;
  int64_t token;
  int64_t head;

  T* At(int64_t b, int64_t h) const { return data + b * batch + h * head; }
};

// What is added to the scores, broadcast: a stride is 0 along an axis of size 1.
struct Mask {
  const float* data;  // null: nothing
  int64_t batch;
  int64_t head;
  int64_t query;
  int64_t key;
};

struct Problem {
  int64_t batch;
  int64_t heads;
  int64_t queries;  // tokens that look
  int64_t keys;     // tokens that are looked at
  int64_t size;     // of one head
  float scale;
  bool causal;  // query i sees keys 0 to i
  Heads<const float> query;
  Heads<const float> key;
  Heads<const float> value;
  Mask mask;
};

struct Forward : Problem {
  Heads<float> y;
  float* log_sum_exp;  // [batch, heads, queries]
};

struct Backward : Problem {
  Heads<const float> dy;
  Heads<const float> y;
  const float* log_sum_exp;
  Heads<float> dquery;
  Heads<float> dkey;
  Heads<float> dvalue;
};

// Floats of scratch memory for one unit of work, at the widest vectors.
int64_t ForwardScratch(const Problem& problem);
int64_t BackwardScratch(const Problem& problem);

// Head unit % heads of batch entry unit / heads. `scratch` is aligned to 64 bytes. The instruction set is chosen inside.
void RunForward(const Forward& problem, int64_t unit, float* scratch);
void RunBackward(const Backward& problem, int64_t unit, float* scratch);

// On CUDA (executor.h).
OrtOpsStatus PlanCuda(const Forward& call, const CudaDevice& device, size_t* workspace_bytes);
OrtOpsStatus PlanCuda(const Backward& call, const CudaDevice& device, size_t* workspace_bytes);
OrtOpsStatus LaunchCuda(const Forward& call, const CudaDevice& device, void* workspace, void* stream);
OrtOpsStatus LaunchCuda(const Backward& call, const CudaDevice& device, void* workspace, void* stream);

}  // namespace ort_ops::attention

#endif  // ORT_OPS_ATTENTION_PROBLEM_H_
