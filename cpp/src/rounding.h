// Division and multiples, rounded up, of counts, which are not negative.
#ifndef ORT_OPS_ROUNDING_H_
#define ORT_OPS_ROUNDING_H_

#include <cstdint>

namespace ort_ops {

constexpr int64_t CeilDiv(int64_t count, int64_t size) { return count / size + (count % size != 0); }

constexpr int64_t RoundUp(int64_t count, int64_t unit) { return CeilDiv(count, unit) * unit; }

}  // namespace ort_ops

#endif  // ORT_OPS_ROUNDING_H_
