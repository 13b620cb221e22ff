// bfloat16 for the emulation: the bits, and conversions that round to nearest even and keep NaNs.
#ifndef ORT_OPS_TESTS_CUDA_EMULATION_CUDA_BF16_H_
#define ORT_OPS_TESTS_CUDA_EMULATION_CUDA_BF16_H_

#include "cuda_runtime.h"

struct __nv_bfloat16 {
  unsigned short bits;
};

inline unsigned short __bfloat16_as_ushort(__nv_bfloat16 value) { return value.bits; }
inline float __bfloat162float(__nv_bfloat16 value) {
  return __uint_as_float(static_cast<unsigned>(value.bits) << 16);
}

inline __nv_bfloat16 __float2bfloat16_rn(float value) {
  if (value != value) return {0x7fff};
  const unsigned bits = __float_as_uint(value);
  return {static_cast<unsigned short>((bits + 0x7fff + (bits >> 16 & 1)) >> 16)};
}

#endif  // ORT_OPS_TESTS_CUDA_EMULATION_CUDA_BF16_H_
