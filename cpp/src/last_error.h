// The calling thread's last error, behind ort_ops_last_error.
#ifndef ORT_OPS_LAST_ERROR_H_
#define ORT_OPS_LAST_ERROR_H_

#include "ort_ops/ort_ops.h"

namespace ort_ops {

// Keeps the sentence (printf format; cut at 511 characters) and returns `status`, so that a caller writes
// `return Fail(ORT_OPS_INVALID_PARAMETER, "...")`.
#if defined(__GNUC__)
__attribute__((format(printf, 2, 3)))
#endif
OrtOpsStatus Fail(OrtOpsStatus status, const char* format, ...);

}  // namespace ort_ops

#endif  // ORT_OPS_LAST_ERROR_H_
