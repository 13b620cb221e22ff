// Which of Highway's instruction sets the CPU kernels use: named, listed and chosen through the C interface.
#include "cpu_target.h"

#include <stdio.h>
#include <string.h>

#include <algorithm>
#include <cstdint>

#include "last_error.h"

namespace ort_ops {
namespace {

// The sets that are both compiled in and present on this processor; a lower bit is a better set.
int64_t AvailableTargets() {
  static const int64_t targets = hwy::SupportedTargets() & HWY_TARGETS;
  return targets;
}

int64_t BestTarget(int64_t targets) { return targets & -targets; }

int64_t ChosenTarget() { return BestTarget(hwy::SupportedTargets() & HWY_TARGETS); }

}  // namespace
}  // namespace ort_ops

extern "C" const char* ort_ops_cpu_targets(void) {
  static char names[128] = "";
  static const bool written = [] {
    for (int64_t rest = ort_ops::AvailableTargets(); rest != 0; rest &= rest - 1) {
      const size_t length = strlen(names);
      snprintf(names + length, sizeof(names) - length, "%s%s", length ? "," : "",
               hwy::TargetName(ort_ops::BestTarget(rest)));
    }
    return true;
  }();
  (void)written;
  return names;
}

extern "C" const char* ort_ops_cpu_target(void) { return hwy::TargetName(ort_ops::ChosenTarget()); }

extern "C" OrtOpsStatus ort_ops_use_cpu_target(const char* name) {
  ort_ops::AvailableTargets();  // remembers the full set before it is narrowed
  if (name == nullptr) {
    hwy::SetSupportedTargetsForTest(0);
    hwy::GetChosenTarget().Update(hwy::SupportedTargets());
    return ORT_OPS_SUCCESS;
  }
  for (int64_t rest = ort_ops::AvailableTargets(); rest != 0; rest &= rest - 1) {
    const int64_t target = ort_ops::BestTarget(rest);
    if (strcmp(name, hwy::TargetName(target)) == 0) {
      hwy::SetSupportedTargetsForTest(target);
      hwy::GetChosenTarget().Update(target);
      return ORT_OPS_SUCCESS;
    }
  }
  return ort_ops::Fail(ORT_OPS_INVALID_PARAMETER, "the CPU target must be one of %s; got %s", ort_ops_cpu_targets(),
                       name);
}
