// The sizes that the kernel of CudaPath::kRowsInShared is compiled for: its launch bounds, and what the plan
// may count on.
#ifndef ORT_OPS_ADD_LAYER_NORM_GRAD_CUDA_LIMITS_H_
#define ORT_OPS_ADD_LAYER_NORM_GRAD_CUDA_LIMITS_H_

namespace ort_ops::add_layer_norm_grad {

struct RowsInSharedLimits {
  int cols_per_thread;
  int max_threads;  // of a block
  int min_blocks;   // of that size on one multiprocessor: bounds the registers of a thread to 65536 /
                    // (max_threads * min_blocks)
};

// A thread keeps the sums for dgamma and dbeta of its columns in registers: 16, 32 or 64 of at most 64, 85 or
// 128. (With gamma in registers as well, the compiler spilled at 16 and 32 columns.)
constexpr RowsInSharedLimits kRowsInSharedLimits[] = {{8, 256, 4}, {16, 256, 3}, {32, 512, 1}};

constexpr RowsInSharedLimits LimitsFor(int cols_per_thread) {
  for (const RowsInSharedLimits& limits : kRowsInSharedLimits) {
    if (limits.cols_per_thread == cols_per_thread) return limits;
  }
  return {};
}

}  // namespace ort_ops::add_layer_norm_grad

#endif  // ORT_OPS_ADD_LAYER_NORM_GRAD_CUDA_LIMITS_H_
