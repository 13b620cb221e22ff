// A fixed buffer per thread: reporting an error must not itself allocate.
#include "last_error.h"

#include <stdarg.h>
#include <stdio.h>

namespace ort_ops {
namespace {

thread_local char last_error[512] = "";

}  // namespace

OrtOpsStatus Fail(OrtOpsStatus status, const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(last_error, sizeof(last_error), format, arguments);
  va_end(arguments);
  return status;
}

}  // namespace ort_ops

extern "C" const char* ort_ops_last_error(void) { return ort_ops::last_error; }

extern "C" const char* ort_ops_version(void) { return ORT_OPS_VERSION; }
