// What the tests need to steer the emulation, beside the product's own C interface in the same library.
#include <cuda_runtime.h>

#include <cstdio>

#include "add_layer_norm_grad/cuda_plan.h"

namespace ort_ops {

// Declared by the kernels; as large as the largest that a block of any device may have.
alignas(16) uint4 shared_memory[(227 << 10) / sizeof(uint4)];

namespace {

const cuda_emulation::SharedMemory named(shared_memory, sizeof(shared_memory));

}  // namespace
}  // namespace ort_ops

extern "C" void emulation_set_device(int multiprocessors, int shared_bytes_per_multiprocessor,
                                     int shared_bytes_per_block) {
  cuda_emulation::UseAnotherDevice();
  cuda_emulation::settings.multiprocessors = multiprocessors;
  cuda_emulation::settings.shared_bytes_per_multiprocessor = shared_bytes_per_multiprocessor;
  cuda_emulation::settings.shared_bytes_per_block = shared_bytes_per_block;
}

extern "C" void emulation_set_order(int order, unsigned seed, int copies_at_wait) {
  cuda_emulation::settings.order = static_cast<cuda_emulation::Order>(order);
  cuda_emulation::settings.seed = seed;
  cuda_emulation::settings.copy_time =
      copies_at_wait != 0 ? cuda_emulation::CopyTime::kAtWait : cuda_emulation::CopyTime::kAtIssue;
}

extern "C" void emulation_run_only_last_blocks(long long count) {
  cuda_emulation::settings.last_blocks = count;
}

extern "C" const char* emulation_take_launches() { return cuda_emulation::TakeLaunches(); }

// The plan for contiguous, aligned tensors of this shape on the current device, as "name=value" words; ""
// where there is none.
extern "C" const char* emulation_plan(long long rows, long long cols, int data_type, int misaligned) {
  namespace alng = ort_ops::add_layer_norm_grad;
  static char text[1024];
  alng::Problem problem = {};
  problem.rows = rows;
  problem.cols = cols;
  problem.type = static_cast<OrtOpsDataType>(data_type);
  problem.gamma_type = ORT_OPS_FLOAT;
  problem.dy = reinterpret_cast<const void*>(misaligned != 0 ? 4 : 16);
  ort_ops::CudaDevice device = {};
  alng::CudaPlan plan = {};
  if (ort_ops::DescribeCudaDevice(&device) != ORT_OPS_SUCCESS) return "";
  if (alng::MakeCudaPlan(problem, device, &plan) != ORT_OPS_SUCCESS) return "";
  const alng::RowsInSharedConfig& shared = plan.rows_in_shared;
  const alng::TwoReadsConfig& two = plan.two_reads;
  std::snprintf(text, sizeof(text),
                "path=%d parts=%lld sums_in_outputs=%d workspace_bytes=%zu row_sums_offset=%zu "
                "cols_per_thread=%d threads_per_row=%d "
                "rows_per_block=%d stages=%d staged_tensors=%d blocks=%lld shared_bytes=%zu "
                "elements_per_access=%d threads_per_sum=%d "
                "sums_per_block=%d splits=%lld cols_per_split=%lld sum_blocks=%lld tile_threads=%d "
                "tiles=%lld rows_per_part=%lld",
                static_cast<int>(plan.path), static_cast<long long>(plan.parts), plan.sums_in_outputs,
                plan.workspace_bytes, plan.row_sums_offset, shared.cols_per_thread, shared.threads_per_row,
                shared.rows_per_block, shared.stages, shared.staged_tensors,
                static_cast<long long>(shared.blocks), shared.shared_bytes, two.elements_per_access,
                two.threads_per_sum, two.sums_per_block, static_cast<long long>(two.splits),
                static_cast<long long>(two.cols_per_split), static_cast<long long>(two.sum_blocks),
                two.tile_threads, static_cast<long long>(two.tiles),
                static_cast<long long>(two.rows_per_part));
  return text;
}
