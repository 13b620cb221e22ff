// A node on the CPU: the C interface with the session's threads and the session's memory.
#include <memory>
#include <string>

#include "custom_op.h"

namespace ort_ops {
namespace {

constexpr size_t kWorkspaceAlignment = 64;

struct SessionThreads {
  const OrtApi& api;
  const OrtKernelContext* context;
  OrtStatus* status;

  static int Run(void* self, size_t count, void (*task)(void*, size_t), void* task_data) {
    auto& threads = *static_cast<SessionThreads*>(self);
    // One batch for each task: whichever thread is free takes the next.
    threads.status = threads.api.KernelContext_ParallelFor(threads.context, task, count, count, task_data);
    return threads.status == nullptr ? 0 : 1;
  }
};

OrtStatus* RunOnSessionThreads(const Kernel& kernel, OrtKernelContext* context, size_t workspace_bytes,
                               const OrtOpsExecutor* executor) {
  OrtAllocator* allocator = kernel.allocator.get();
  const auto free_workspace = [allocator](void* p) { allocator->Free(allocator, p); };
  std::unique_ptr<void, decltype(free_workspace)> memory(nullptr, free_workspace);
  void* workspace = nullptr;
  if (workspace_bytes != 0) {
    size_t room = workspace_bytes + kWorkspaceAlignment;
    memory.reset(allocator->Alloc(allocator, room));
    if (memory == nullptr) {
      return NodeError(kernel, ORT_RUNTIME_EXCEPTION,
                       "no memory for a workspace of " + std::to_string(workspace_bytes) + " bytes");
    }
    workspace = memory.get();
    workspace = std::align(kWorkspaceAlignment, workspace_bytes, workspace, room);
  }
  SessionThreads threads = {kernel.api, context, nullptr};
  const OrtOpsParallelFor parallel_for = {SessionThreads::Run, &threads};
  const OrtOpsStatus status = ort_ops_run_on_cpu(workspace, workspace_bytes, executor, &parallel_for);
  return threads.status != nullptr ? threads.status : ToOrtStatus(kernel, status);
}

OrtStatus* RunOnCpu(const Kernel& kernel, OrtKernelContext* context, const Call& call) {
  size_t workspace_bytes = 0;
  ExecutorPtr executor;
  if (OrtStatus* status = PlanCall(kernel, call, &workspace_bytes, executor)) return status;
  return RunOnSessionThreads(kernel, context, workspace_bytes, executor.get());
}

}  // namespace

const Provider kCpuProvider = {"CPUExecutionProvider", RunOnCpu};

}  // namespace ort_ops
