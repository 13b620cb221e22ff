// The instruction sets that CPU kernels are compiled for; included before any other Highway header by every file that
// dispatches, so that all dispatch tables hold the same sets.
//
// x86-64: AVX-512 (AVX3), AVX2 and the baseline SSE2; Arm: NEON. The sets between are left out because each costs a
// compilation of every kernel and processors that have them but not the next better one are rare. SVE and RISC-V vectors are
// left out because their vectors have no size at compile time and the kernels keep vectors in structs.
#ifndef ORT_OPS_CPU_TARGET_H_
#define ORT_OPS_CPU_TARGET_H_

#ifdef ORT_OPS_SANITIZE
// Instrumented kernels compile for minutes; the vector length is all that AVX-512 would add to what is checked.
#define ORT_OPS_TOO_SLOW_TO_COMPILE HWY_AVX3
#else
#define ORT_OPS_TOO_SLOW_TO_COMPILE 0
#endif

#define HWY_DISABLED_TARGETS \
  (ORT_OPS_TOO_SLOW_TO_COMPILE | HWY_SSSE3 | HWY_SSE4 | HWY_AVX3_DL | HWY_AVX3_ZEN4 | HWY_AVX3_SPR | HWY_NEON_BF16 | HWY_ALL_SVE | HWY_RVV)

#include "hwy/targets.h"

#endif  // ORT_OPS_CPU_TARGET_H_
