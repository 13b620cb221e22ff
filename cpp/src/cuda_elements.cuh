// Tensors' elements as vectors of floats, for the CUDA kernels of every operator; device code only. The host must be able
// to compile all kernels (tests/cuda), which therefore take no more from CUDA than its language and its runtime's header.
#ifndef ORT_OPS_CUDA_ELEMENTS_CUH_
#define ORT_OPS_CUDA_ELEMENTS_CUH_

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>

namespace ort_ops {

constexpr int kWarpThreads = 32;
constexpr unsigned kAllLanes = 0xffffffffu;

extern __shared__ uint4 shared_memory[];

// ---------------------------------------------------------------- elements

// 16 bytes, moved by one instruction. Passed by value: of a reference the compiler may read each word by
// itself.
using Vector = uint4;

template <class T>
struct Elements;

template <class TElements>
__device__ void UnpackWords(Vector vector, float (&values)[8]) {
  TElements::UnpackWord(vector.x, values[0], values[1]);
  TElements::UnpackWord(vector.y, values[2], values[3]);
  TElements::UnpackWord(vector.z, values[4], values[5]);
  TElements::UnpackWord(vector.w, values[6], values[7]);
}

template <class TElements>
__device__ Vector PackWords(const float (&values)[8]) {
  return {TElements::PackWord(values[0], values[1]), TElements::PackWord(values[2], values[3]),
          TElements::PackWord(values[4], values[5]), TElements::PackWord(values[6], values[7])};
}

template <>
struct Elements<float> {
  static constexpr int kPerVector = 4;
  static __device__ float ToFloat(float value) { return value; }
  static __device__ float FromFloat(float value) { return value; }
  static __device__ void Unpack(Vector vector, float (&values)[4]) {
    values[0] = __uint_as_float(vector.x);
    values[1] = __uint_as_float(vector.y);
    values[2] = __uint_as_float(vector.z);
    values[3] = __uint_as_float(vector.w);
  }
  static __device__ Vector Pack(const float (&values)[4]) {
    return {__float_as_uint(values[0]), __float_as_uint(values[1]), __float_as_uint(values[2]),
            __float_as_uint(values[3])};
  }
};

template <>
struct Elements<__half> {
  static constexpr int kPerVector = 8;
  static __device__ float ToFloat(__half value) { return __half2float(value); }
  static __device__ __half FromFloat(float value) { return __float2half_rn(value); }
  static __device__ void UnpackWord(unsigned word, float& low, float& high) {
    low = __half2float(__ushort_as_half(static_cast<unsigned short>(word)));
    high = __half2float(__ushort_as_half(static_cast<unsigned short>(word >> 16)));
  }
  static __device__ unsigned PackWord(float low, float high) {
    return __half_as_ushort(__float2half_rn(low)) |
           static_cast<unsigned>(__half_as_ushort(__float2half_rn(high))) << 16;
  }
  static __device__ void Unpack(Vector vector, float (&values)[8]) { UnpackWords<Elements>(vector, values); }
  static __device__ Vector Pack(const float (&values)[8]) { return PackWords<Elements>(values); }
};

template <>
struct Elements<__nv_bfloat16> {
  static constexpr int kPerVector = 8;
  static __device__ float ToFloat(__nv_bfloat16 value) { return __bfloat162float(value); }
  static __device__ __nv_bfloat16 FromFloat(float value) { return __float2bfloat16_rn(value); }
  static __device__ void UnpackWord(unsigned word, float& low, float& high) {
    low = __uint_as_float(word << 16);
    high = __uint_as_float(word & 0xffff0000u);
  }
  static __device__ unsigned PackWord(float low, float high) {
    return __bfloat16_as_ushort(__float2bfloat16_rn(low)) |
           static_cast<unsigned>(__bfloat16_as_ushort(__float2bfloat16_rn(high))) << 16;
  }
  static __device__ void Unpack(Vector vector, float (&values)[8]) { UnpackWords<Elements>(vector, values); }
  static __device__ Vector Pack(const float (&values)[8]) { return PackWords<Elements>(values); }
};

template <class T>
__device__ Vector VectorAt(const T* aligned) {
  return *reinterpret_cast<const Vector*>(aligned);
}

// Reads kCount elements: one, or a whole vector from an aligned address.
template <class T, int kCount>
__device__ void Load(const T* from, float (&values)[kCount]) {
  if constexpr (kCount == 1) {
    values[0] = Elements<T>::ToFloat(*from);
  } else {
    Elements<T>::Unpack(VectorAt(from), values);
  }
}

template <class T, int kCount>
__device__ void Store(T* to, const float (&values)[kCount]) {
  if constexpr (kCount == 1) {
    *to = Elements<T>::FromFloat(values[0]);
  } else {
    // Nobody here reads it again. (An assignment was compiled into four stores where its loop is not
    // unrolled.)
    __stcs(reinterpret_cast<Vector*>(to), Elements<T>::Pack(values));
  }
}

// Reads kCount elements from any address.
template <class T, int kCount>
__device__ void LoadAnywhere(const T* from, float (&values)[kCount]) {
  constexpr int kPerVector = Elements<T>::kPerVector;
  if constexpr (kCount % kPerVector == 0) {
    if (reinterpret_cast<uintptr_t>(from) % sizeof(Vector) == 0) {
      for (int i = 0; i < kCount; i += kPerVector) {
        float vector[kPerVector];
        Load(from + i, vector);
        for (int j = 0; j < kPerVector; ++j) values[i + j] = vector[j];
      }
      return;
    }
  }
  for (int i = 0; i < kCount; ++i) values[i] = Elements<T>::ToFloat(from[i]);
}

// x1 + x2 as the forward Add rounds it.
template <class T, int kCount>
__device__ void AddRounded(float (&x)[kCount], const float (&x2)[kCount]) {
  for (int i = 0; i < kCount; ++i) x[i] = Elements<T>::ToFloat(Elements<T>::FromFloat(x[i] + x2[i]));
}

// ---------------------------------------------------------------- all elements of a range

// A number as a type. (The standard library's has no functions for the device.)
template <int kCount>
struct Size {
  __device__ constexpr operator int() const { return kCount; }
};

// How many elements come before the first that lies at a 16-byte boundary in all tensors alike, `count` where there is no
// such place. Tensors that are null do not count.
template <class T, class... Tensors>
__device__ int64_t ElementsBeforeVectors(int64_t count, Tensors... tensors) {
  const uintptr_t addresses[] = {reinterpret_cast<uintptr_t>(tensors)...};
  unsigned misalignment = 0;
  bool has_any = false;
  for (const uintptr_t address : addresses) {
    if (address == 0) continue;
    const unsigned other = static_cast<unsigned>(address % sizeof(Vector));
    if (has_any && other != misalignment) return count;
    misalignment = other;
    has_any = true;
  }
  if (misalignment % sizeof(T) != 0) return count;
  const unsigned rest = misalignment == 0 ? 0 : static_cast<unsigned>(sizeof(Vector)) - misalignment;
  return min(count, static_cast<int64_t>(rest / sizeof(T)));
}

// Calls body(Size<n>(), first) for pieces of n elements that together are [0, count): n is kCount from element `before`
// on, and 1 before and for the rest. Thread number `thread` of `threads` takes every so manieth piece.
template <int kCount, class Body>
__device__ void ForEachPiece(int64_t count, int64_t before, int64_t thread, int64_t threads, const Body& body) {
  for (int64_t i = thread; i < before; i += threads) body(Size<1>(), i);
  const int64_t end = before + (count - before) / kCount * kCount;
  for (int64_t i = before + thread * kCount; i < end; i += threads * kCount) body(Size<kCount>(), i);
  for (int64_t i = end + thread; i < count; i += threads) body(Size<1>(), i);
}

// The same over all threads of the grid.
template <int kCount, class Body>
__device__ void ForEachPieceOfGrid(int64_t count, int64_t before, const Body& body) {
  ForEachPiece<kCount>(count, before, static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x,
                       static_cast<int64_t>(gridDim.x) * blockDim.x, body);
}

}  // namespace ort_ops

#endif  // ORT_OPS_CUDA_ELEMENTS_CUH_
