// Tensors' elements as vectors of floats, for the algorithms of every CPU kernel; compiled once for each instruction set.
//
// Elements are worked on in groups of two vectors of floats, `a` and `b`. For float and float16 `a` holds the
// first half of a group and `b` the second; for bfloat16 `a` holds the even elements and `b` the odd ones,
// because a bfloat16 is the upper half of a float: two shifts or masks widen a whole vector of them, with no
// shuffle.

// A per-target include guard, as Highway asks for.
#if defined(ORT_OPS_ELEMENTS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef ORT_OPS_ELEMENTS_INL_H_
#undef ORT_OPS_ELEMENTS_INL_H_
#else
#define ORT_OPS_ELEMENTS_INL_H_
#endif

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>

#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace ort_ops {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

using D = hn::ScalableTag<float>;
using DU32 = hn::RebindToUnsigned<D>;
using V = hn::Vec<D>;
constexpr int64_t kLanes = static_cast<int64_t>(hn::MaxLanes(D()));
constexpr int64_t kGroup = 2 * kLanes;

struct Pair {
  V a;
  V b;
};

// ---------------------------------------------------------------- element types

// How a group of T is read and written; RoundAndStore returns what it stored. LaneOf says where in a Pair
// (a's lanes, then b's) an element is.
template <class T>
struct Elements;

template <>
struct Elements<float> {
  static constexpr bool kInterleaved = false;
  static HWY_INLINE Pair Load(const float* p) { return {hn::LoadU(D(), p), hn::LoadU(D(), p + kLanes)}; }
    static HWY_INLINE void Store(Pair v, float* p) {
    hn::StoreU(v.a, D(), p);
    hn::StoreU(v.b, D(), p + kLanes);
  }
  static HWY_INLINE void Stream(Pair v, float* p) {
    hn::Stream(v.a, D(), p);
    hn::Stream(v.b, D(), p + kLanes);
  }
  static HWY_INLINE Pair Round(Pair v) { return v; }
  static HWY_INLINE Pair RoundAndStore(Pair v, float* p) {
    Store(v, p);
    return v;
  }
};

// float16 to float and back, to nearest even. Highway's own emulation, where the processor has no such
// instruction, loses infinity and NaN.
#if HWY_TARGET == HWY_SSE2
using DHalf = hn::Rebind<uint16_t, D>;

HWY_INLINE V FromHalf(hn::Vec<DHalf> half) {
  const DU32 du;
  const auto bits = hn::PromoteTo(du, half);
  const auto magnitude = hn::ShiftLeft<13>(hn::And(bits, hn::Set(du, 0x7FFF)));
  const auto sign = hn::ShiftLeft<16>(hn::And(bits, hn::Set(du, 0x8000)));
  // The exponent's bias is 15 there and 127 here; that of infinity and NaN is all ones in both.
  const auto rebiased = hn::Add(magnitude, hn::Set(du, (127 - 15) << 23));
  const auto is_special = hn::Ge(hn::BitCast(hn::RebindToSigned<DU32>(), magnitude),
                                 hn::Set(hn::RebindToSigned<DU32>(), 0x7C00 << 13));
  const auto special = hn::Add(rebiased, hn::Set(du, (128 - 16) << 23));
  // Subnormal: 2^-14 * (1 + fraction) - 2^-14.
  const auto smallest_normal = hn::Set(du, 113u << 23);
  const auto subnormal = hn::BitCast(du, hn::Sub(hn::BitCast(D(), hn::Add(magnitude, smallest_normal)),
                                                 hn::BitCast(D(), smallest_normal)));
  const auto is_subnormal = hn::Eq(hn::And(magnitude, hn::Set(du, 0x7C00 << 13)), hn::Zero(du));
  const auto finite = hn::IfThenElse(is_subnormal, subnormal, rebiased);
  const auto unsigned_result = hn::IfThenElse(hn::RebindMask(du, is_special), special, finite);
  return hn::BitCast(D(), hn::Or(unsigned_result, sign));
}

HWY_INLINE hn::Vec<DHalf> ToHalf(V v) {
  const DU32 du;
  const V magnitude = hn::Abs(v);
  const auto bits = hn::BitCast(du, magnitude);
  const auto sign = hn::And(hn::ShiftRight<16>(hn::BitCast(du, v)), hn::Set(du, 0x8000));
  // Normal: the new bias, half a unit in the last place, and one more bit where that makes the even
  // neighbour.
  const auto is_odd = hn::And(hn::ShiftRight<13>(bits), hn::Set(du, 1));
  const auto rounded = hn::Add(hn::Add(bits, hn::Set(du, (static_cast<uint32_t>(15 - 127) << 23) + 0xFFF)), is_odd);
  const auto normal = hn::ShiftRight<13>(rounded);
  // Subnormal: adding 0.5 leaves the fraction, rounded by the addition itself, in the last bits.
  const auto half_one = hn::Set(D(), 0.5f);
  const auto subnormal = hn::Sub(hn::BitCast(du, hn::Add(magnitude, half_one)), hn::BitCast(du, half_one));
  const auto is_subnormal = hn::Lt(magnitude, hn::Set(D(), 0x1p-14f));
  const auto finite = hn::IfThenElse(hn::RebindMask(du, is_subnormal), subnormal, normal);
  const auto is_large = hn::Ge(magnitude, hn::Set(D(), 65520.0f));
  const auto large = hn::IfThenElse(hn::RebindMask(du, is_large), hn::Set(du, 0x7C00), finite);
  const auto result = hn::IfThenElse(hn::RebindMask(du, hn::IsNaN(v)), hn::Set(du, 0x7E00), large);
  return hn::DemoteTo(DHalf(), hn::Or(result, sign));
}
#else
using DHalf = hn::Rebind<hwy::float16_t, D>;

HWY_INLINE V FromHalf(hn::Vec<DHalf> half) { return hn::PromoteTo(D(), half); }
HWY_INLINE hn::Vec<DHalf> ToHalf(V v) { return hn::DemoteTo(DHalf(), v); }
#endif

template <>
struct Elements<hwy::float16_t> {
  static constexpr bool kInterleaved = false;
  using DU16 = hn::Repartition<uint16_t, D>;
  using DU16Half = hn::Half<DU16>;
  static HWY_INLINE Pair Load(const hwy::float16_t* p) {
    const auto* half = reinterpret_cast<const hn::TFromD<DHalf>*>(p);
    return {FromHalf(hn::LoadU(DHalf(), half)), FromHalf(hn::LoadU(DHalf(), half + kLanes))};
  }
  static HWY_INLINE void Store(Pair v, hwy::float16_t* p) { hn::StoreU(Packed(v), DU16(), Bits(p)); }
  static HWY_INLINE void Stream(Pair v, hwy::float16_t* p) { hn::Stream(Packed(v), DU16(), Bits(p)); }
  static HWY_INLINE Pair Round(Pair v) { return {FromHalf(ToHalf(v.a)), FromHalf(ToHalf(v.b))}; }
  static HWY_INLINE Pair RoundAndStore(Pair v, hwy::float16_t* p) {
    Store(v, p);
    return Round(v);
  }

 private:
  static HWY_INLINE uint16_t* Bits(hwy::float16_t* p) { return reinterpret_cast<uint16_t*>(p); }
  static HWY_INLINE hn::Vec<DU16> Packed(Pair v) {
    return hn::Combine(DU16(), hn::BitCast(DU16Half(), ToHalf(v.b)), hn::BitCast(DU16Half(), ToHalf(v.a)));
  }
};

template <>
struct Elements<hwy::bfloat16_t> {
  static constexpr bool kInterleaved = true;
  using DU16 = hn::Repartition<uint16_t, D>;
  static HWY_INLINE Pair Load(const hwy::bfloat16_t* p) {
    return Widened(hn::LoadU(DU16(), reinterpret_cast<const uint16_t*>(p)));
  }
  static HWY_INLINE Pair Round(Pair v) {
    return {hn::BitCast(D(), hn::And(RoundedBits(v.a), UpperHalf())),
            hn::BitCast(D(), hn::And(RoundedBits(v.b), UpperHalf()))};
  }
  static HWY_INLINE Pair RoundAndStore(Pair v, hwy::bfloat16_t* p) {
    const auto packed = Packed(v);
    hn::StoreU(packed, DU16(), reinterpret_cast<uint16_t*>(p));
    return Widened(packed);
  }
  static HWY_INLINE void Store(Pair v, hwy::bfloat16_t* p) {
    hn::StoreU(Packed(v), DU16(), reinterpret_cast<uint16_t*>(p));
  }
  static HWY_INLINE void Stream(Pair v, hwy::bfloat16_t* p) {
    hn::Stream(Packed(v), DU16(), reinterpret_cast<uint16_t*>(p));
  }

 private:
  static HWY_INLINE Pair Widened(hn::Vec<DU16> v) {
    const auto bits = hn::BitCast(DU32(), v);
    return {hn::BitCast(D(), hn::ShiftLeft<16>(bits)), hn::BitCast(D(), hn::And(bits, UpperHalf()))};
  }
  static HWY_INLINE hn::Vec<DU32> UpperHalf() { return hn::Set(DU32(), 0xFFFF0000u); }
  // To nearest, ties to even, in the upper 16 bits. Carries a NaN over into infinity or zero only if its
  // payload fills the lower half; no such NaN comes here, because rows' statistics and float gammas are made
  // canonical before (Canonical).
  static HWY_INLINE hn::Vec<DU32> RoundedBits(V v) {
    const auto bits = hn::BitCast(DU32(), v);
    const auto is_odd = hn::And(hn::ShiftRight<16>(bits), hn::Set(DU32(), 1));
    return hn::Add(hn::Add(bits, hn::Set(DU32(), 0x7FFF)), is_odd);
  }
  static HWY_INLINE hn::Vec<DU16> Packed(Pair v) {
    const auto even = hn::ShiftRight<16>(RoundedBits(v.a));
    return hn::OddEven(hn::BitCast(DU16(), RoundedBits(v.b)), hn::BitCast(DU16(), even));
  }
};

HWY_INLINE V Canonical(V v) {
  return hn::IfThenElse(hn::IsNaN(v), hn::Set(D(), std::numeric_limits<float>::quiet_NaN()), v);
}

// A group of U in the order of T's groups; canonical where T's rounding needs it.
template <class T, class U>
HWY_INLINE Pair LoadInOrderOf(const U* p) {
  const Pair v = Elements<U>::Load(p);
  if constexpr (Elements<T>::kInterleaved && !Elements<U>::kInterleaved) {
    return {Canonical(hn::ConcatEven(D(), v.b, v.a)), Canonical(hn::ConcatOdd(D(), v.b, v.a))};
  }
  return v;
}

template <class T>
constexpr int64_t LaneOf(int64_t element) {
  if (!Elements<T>::kInterleaved) return element;
  return element / 2 + (element % 2) * kLanes;
}

HWY_INLINE float Canonical(float value) {
  return value == value ? value : std::numeric_limits<float>::quiet_NaN();
}

// ---------------------------------------------------------------- the last, incomplete group

// A copy of the row's last elements in a whole group, zeros behind them.
template <class T>
struct TailCopy {
  HWY_INLINE TailCopy(const T* from, int64_t count) {
    std::memset(elements, 0, sizeof(elements));
    std::memcpy(elements, from, static_cast<size_t>(count) * sizeof(T));
  }
  T elements[kGroup];
};

// The lanes of `v` that hold the tail's elements; 0 in the others, whatever was there (0 * Inf would be NaN).
template <class T>
HWY_INLINE Pair OnlyTail(Pair v, int64_t count) {
  const int64_t in_a = Elements<T>::kInterleaved ? (count + 1) / 2 : std::min(count, kLanes);
  return {hn::IfThenElseZero(hn::FirstN(D(), static_cast<size_t>(in_a)), v.a),
          hn::IfThenElseZero(hn::FirstN(D(), static_cast<size_t>(count - in_a)), v.b)};
}

}  // namespace HWY_NAMESPACE
}  // namespace ort_ops
HWY_AFTER_NAMESPACE();

#endif  // ORT_OPS_ELEMENTS_INL_H_
