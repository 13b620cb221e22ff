// How element-by-element operators are cut into tasks: by the number of elements alone.
#ifndef ORT_OPS_ELEMENTWISE_H_
#define ORT_OPS_ELEMENTWISE_H_

#include <algorithm>
#include <cstdint>

#include "executor.h"

namespace ort_ops {

// A few ten microseconds of work; whole cache lines and whole vectors of any type and instruction set.
constexpr int64_t kElementsPerTask = 1 << 15;

// Calls task(begin, end) for pieces that together are the elements [0, count).
template <class Task>
OrtOpsStatus ForEachPiece(const OrtOpsParallelFor* parallel_for, int64_t count, const Task& task) {
  const int64_t pieces = count / kElementsPerTask + (count % kElementsPerTask != 0);
  return ParallelFor(parallel_for, pieces, [&](int64_t piece) {
    const int64_t begin = piece * kElementsPerTask;
    task(begin, std::min(count, begin + kElementsPerTask));
  });
}

}  // namespace ort_ops

#endif  // ORT_OPS_ELEMENTWISE_H_
