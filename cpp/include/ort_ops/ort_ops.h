/* Types and functions shared by every operator of the C interface.
 *
 * The interface needs no ONNX Runtime. An operator is called in two phases: NAME_get_workspace_size checks every
 * argument and makes an executor (the plan); ort_ops_run_on_cpu runs it. On CUDA ort_ops_plan_on_cuda plans the executor
 * for the device, and ort_ops_run_on_cuda runs it. All functions return an OrtOpsStatus and never throw.
 */
#ifndef ORT_OPS_ORT_OPS_H_
#define ORT_OPS_ORT_OPS_H_

#include <stddef.h>
#include <stdint.h>

#if defined(_WIN32)
#define ORT_OPS_EXPORT __declspec(dllexport)
#else
#define ORT_OPS_EXPORT __attribute__((visibility("default")))
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* 161001 and 161002 keep the meaning that CANN gives them; the others are this project's own. */
typedef enum OrtOpsStatus {
  ORT_OPS_SUCCESS = 0,
  ORT_OPS_WORKSPACE_TOO_SMALL = 1001,
  ORT_OPS_OUT_OF_MEMORY = 1002,
  ORT_OPS_PARALLEL_FOR_FAILED = 1003,
  ORT_OPS_CUDA_FAILED = 1004,        /* the CUDA runtime reported an error; the sentence has its name */
  ORT_OPS_CUDA_NOT_BUILT = 1005,     /* the library was built without CUDA */
  ORT_OPS_NULL_POINTER = 161001,     /* a required pointer is null */
  ORT_OPS_INVALID_PARAMETER = 161002 /* a type, rank or shape is not supported */
} OrtOpsStatus;

/* Element types, numbered as in ONNX's TensorProto.DataType. */
typedef enum OrtOpsDataType {
  ORT_OPS_FLOAT = 1,
  ORT_OPS_INT32 = 6,
  ORT_OPS_INT64 = 7,
  ORT_OPS_BOOL = 9,
  ORT_OPS_FLOAT16 = 10,
  ORT_OPS_BFLOAT16 = 16
} OrtOpsDataType;

/* A dense row-major tensor. `dims` and the struct itself are read during phase one only; `data` (of any alignment) must
 * stay valid until the last run of the executor. `data` may be null where the tensor has no elements. */
typedef struct OrtOpsTensor {
  void* data;
  const int64_t* dims;
  int32_t rank;
  int32_t data_type; /* OrtOpsDataType */
} OrtOpsTensor;

/* The caller's thread pool: calls task(task_data, i) once for each i in [0, count), in any order, on any threads, and
 * returns when all are done: 0, or anything else if some were not run. */
typedef struct OrtOpsParallelFor {
  int (*run)(void* context, size_t count, void (*task)(void* task_data, size_t index), void* task_data);
  void* context;
} OrtOpsParallelFor;

/* A checked and planned call, made by an operator's NAME_get_workspace_size. */
typedef struct OrtOpsExecutor OrtOpsExecutor;

/* Phase two, on the CPU: runs the plan on the caller's threads (parallel_for NULL: on the calling thread alone). The same bits
 * whatever the number of threads. May be repeated; `workspace` (64-byte aligned, of the size that phase one said, NULL
 * where that is 0) is scratch of no lasting content. */
ORT_OPS_EXPORT OrtOpsStatus ort_ops_run_on_cpu(void* workspace, size_t workspace_bytes, const OrtOpsExecutor* executor,
                                               const OrtOpsParallelFor* parallel_for);

/* On CUDA, where the tensors' data are pointers into the device's memory. Plans the call for the calling thread's current
 * device and writes the bytes of workspace that a run there needs, instead of those that phase one said. Fails with
 * ORT_OPS_CUDA_NOT_BUILT in a library without CUDA. */
ORT_OPS_EXPORT OrtOpsStatus ort_ops_plan_on_cuda(OrtOpsExecutor* executor, size_t* workspace_bytes);

/* Phase two, on CUDA: enqueues the kernels on `stream` (a cudaStream_t, NULL for the default one) of the device of
 * ort_ops_plan_on_cuda and returns; it neither allocates nor waits, and may be captured into a CUDA graph. `workspace`
 * (device memory, 16-byte aligned) must stay until the kernels have run. The same bits for the same inputs at equally
 * aligned addresses on the same kind of device, run after run.
 *
 * Numbers in tensors are not checked there: labels and indices out of range, which make a run on the CPU fail, have
 * results that each operator's header tells, and touch no memory out of bounds. */
ORT_OPS_EXPORT OrtOpsStatus ort_ops_run_on_cuda(void* workspace, size_t workspace_bytes, const OrtOpsExecutor* executor,
                                                void* stream);

/* Frees an executor, which no enqueued kernel needs any more; NULL is allowed. */
ORT_OPS_EXPORT void ort_ops_destroy_executor(OrtOpsExecutor* executor);

/* The last error of the calling thread as a sentence without the operator's name, e.g.
 * "gamma must be [768], the last axis of dy [8,128,768]; got [512]". Valid until the thread's next failing call. */
ORT_OPS_EXPORT const char* ort_ops_last_error(void);

/* The version of this library, e.g. "0.1.0". */
ORT_OPS_EXPORT const char* ort_ops_version(void);

/* The instruction sets that the CPU kernels were compiled for and that this processor has, best first, separated by
 * commas, e.g. "AVX2,SSE2"; the first is in use unless ort_ops_use_cpu_target says otherwise. */
ORT_OPS_EXPORT const char* ort_ops_cpu_targets(void);

/* The instruction set in use. */
ORT_OPS_EXPORT const char* ort_ops_cpu_target(void);

/* Makes the kernels use one of ort_ops_cpu_targets, for the whole process; NULL goes back to the best. For tests and
 * for finding out what an instruction set is worth; not while a kernel runs. */
ORT_OPS_EXPORT OrtOpsStatus ort_ops_use_cpu_target(const char* name);

/* The architectures that the CUDA kernels were compiled for, separated by commas, e.g. "sm_80,sm_90,compute_90"
 * (the last one: a form that the driver compiles for newer devices). Empty in a library built without CUDA. */
ORT_OPS_EXPORT const char* ort_ops_cuda_architectures(void);

/* The operators with kernels for CUDA, as ONNX Runtime knows them, separated by commas, e.g. "AdamW,GeluGrad". Empty
 * likewise. */
ORT_OPS_EXPORT const char* ort_ops_cuda_operators(void);

/* Writes the name of the calling thread's current CUDA device, or fails where there is none that can run this library's
 * kernels, e.g. because there is no driver. */
ORT_OPS_EXPORT OrtOpsStatus ort_ops_cuda_device(char* description, size_t description_bytes);

#ifdef __cplusplus
}
#endif
#endif /* ORT_OPS_ORT_OPS_H_ */
