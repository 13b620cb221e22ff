// How one call is cut into CUDA blocks, and how much workspace that takes: a value, from the problem and
// three numbers of the device, so that a machine without one can compute, print and test every launch.
//
// Two ways, both without atomic operations:
// - kRowsInShared: a thread block copies whole rows into shared memory, 16 bytes at a time and ahead of their
// use, so that every
//   tensor is read once and dx written once. dgamma and dbeta stay in registers until the block has seen all
//   its rows.
// - kTwoReads, for rows that do not fit or are not made of aligned 16-byte pieces: one kernel sums along the
// rows (wide rows
//   are split over several blocks), a second one reads everything again, in tiles of columns.
// Either leaves one row of partial sums for dgamma and dbeta per part of the rows; a last kernel adds those
// in a fixed order.
#ifndef ORT_OPS_ADD_LAYER_NORM_GRAD_CUDA_PLAN_H_
#define ORT_OPS_ADD_LAYER_NORM_GRAD_CUDA_PLAN_H_

#include <cstddef>
#include <cstdint>

#include "add_layer_norm_grad/problem.h"
#include "cuda_device.h"

namespace ort_ops::add_layer_norm_grad {

enum class CudaPath { kNoRows, kRowsInShared, kTwoReads };

struct RowsInSharedConfig {
  int cols_per_thread;  // 8, 16 or 32: each is a kernel of its own, with its columns' sums in registers
  int threads_per_row;
  int rows_per_block;  // at a time
  int stages;          // rows being copied or used at a time
  int staged_tensors;  // of dy, x1, x2 and dsum, in this order; the rest is read directly, to leave shared
                       // memory for the others
  int64_t blocks;
  size_t shared_bytes;
  int shared_bytes_limit;  // the device's
};

struct TwoReadsConfig {
  int elements_per_access;  // 16 bytes' worth, or 1
  // The first kernel: sums along `splits` pieces of each row.
  int threads_per_sum;
  int sums_per_block;  // at a time
  int64_t splits;
  int64_t cols_per_split;
  int64_t sum_blocks;
  size_t sum_shared_bytes;
  // The second kernel: tiles of columns, parts of rows.
  int tile_threads;
  int64_t tiles;
  int64_t rows_per_part;
  size_t tile_shared_bytes;
};

struct CudaPlan {
  CudaPath path;
  RowsInSharedConfig rows_in_shared;  // of the two, the one that `path` names
  TwoReadsConfig two_reads;
  int64_t parts;           // rows of partial sums
  bool sums_in_outputs;    // one part sums straight into dgamma and dbeta
  size_t row_sums_offset;  // bytes into the workspace, behind the partial sums; kTwoReads only
  size_t workspace_bytes;
};

// Fails with ORT_OPS_INVALID_PARAMETER where a launch would exceed what CUDA's grids can count.
OrtOpsStatus MakeCudaPlan(const Problem& problem, const CudaDevice& device, CudaPlan* plan);

}  // namespace ort_ops::add_layer_norm_grad

#endif  // ORT_OPS_ADD_LAYER_NORM_GRAD_CUDA_PLAN_H_
