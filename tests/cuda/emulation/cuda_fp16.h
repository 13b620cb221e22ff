// float16 for the emulation: the bits, and conversions that round to nearest even.
#ifndef ORT_OPS_TESTS_CUDA_EMULATION_CUDA_FP16_H_
#define ORT_OPS_TESTS_CUDA_EMULATION_CUDA_FP16_H_

#include "cuda_runtime.h"

struct __half {
  unsigned short bits;
};

inline __half __ushort_as_half(unsigned short bits) { return {bits}; }
inline unsigned short __half_as_ushort(__half value) { return value.bits; }

inline float __half2float(__half value) {
  _Float16 half;
  std::memcpy(&half, &value, sizeof(half));
  return static_cast<float>(half);
}

inline __half __float2half_rn(float value) {
  const _Float16 half = static_cast<_Float16>(value);
  __half result;
  std::memcpy(&result, &half, sizeof(result));
  return result;
}

#endif  // ORT_OPS_TESTS_CUDA_EMULATION_CUDA_FP16_H_
