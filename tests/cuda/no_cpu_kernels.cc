// Stands in for the operators' CPU kernels, which need Highway, where only their CUDA kernels are built and called.
#include <cstdlib>

#include "adamw/problem.h"
#include "add_layer_norm/problem.h"
#include "add_layer_norm_grad/cpu.h"
#include "attention/problem.h"
#include "batch_norm_grad/problem.h"
#include "cross_entropy/problem.h"
#include "gelu_grad/problem.h"
#include "max_pool_grad/problem.h"

namespace ort_ops {

namespace add_layer_norm_grad {
void RunBlock(const Problem&, const Plan&, float*, int64_t) { std::abort(); }
void CombineTile(const Problem&, const Plan&, const float*, int64_t) { std::abort(); }
}  // namespace add_layer_norm_grad

namespace adamw {
void RunPiece(const Problem&, int64_t, int64_t) { std::abort(); }
}  // namespace adamw

namespace add_layer_norm {
void RunRows(const Problem&, int64_t, int64_t) { std::abort(); }
}  // namespace add_layer_norm

namespace attention {
int64_t ForwardScratch(const Problem&) { return 0; }
int64_t BackwardScratch(const Problem&) { return 0; }
void RunForward(const Forward&, int64_t, float*) { std::abort(); }
void RunBackward(const Backward&, int64_t, float*) { std::abort(); }
}  // namespace attention

namespace batch_norm_grad {
void RunChannel(const Problem&, int64_t) { std::abort(); }
}  // namespace batch_norm_grad

namespace cross_entropy {
void RunRows(const Forward&, int64_t, int64_t) { std::abort(); }
void RunRows(const Backward&, int64_t, int64_t) { std::abort(); }
}  // namespace cross_entropy

namespace gelu_grad {
void RunPiece(const Problem&, int64_t, int64_t) { std::abort(); }
}  // namespace gelu_grad

namespace max_pool_grad {
void RunPlane(const Problem&, int64_t) { std::abort(); }
}  // namespace max_pool_grad

}  // namespace ort_ops
