// The yardstick of `ort-ops bench`: how long reading four arrays and writing one takes at the least. No kernel with that traffic can
// be faster; the additions are only there so that what was read is used.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <thread>
#include <vector>

#include "cpu_target.h"
#include "ort_ops/ort_ops.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "benchmark/stream_floor.cc"
#include "hwy/foreach_target.h"  // must come before highway.h
//
#include "hwy/cache_control.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace ort_ops {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// arrays: four inputs, then the output, all aligned to 64 bytes. begin and end: multiples of 64 elements.
void AddFour(float* const* arrays, int64_t begin, int64_t end, bool stream) {
  const hn::ScalableTag<float> d;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  for (int64_t i = begin; i < end; i += lanes) {
    const auto sum = hn::Add(hn::Add(hn::Load(d, arrays[0] + i), hn::Load(d, arrays[1] + i)),
                             hn::Add(hn::Load(d, arrays[2] + i), hn::Load(d, arrays[3] + i)));
    if (stream) {
      hn::Stream(sum, d, arrays[4] + i);
    } else {
      hn::Store(sum, d, arrays[4] + i);
    }
  }
  if (stream) hwy::FlushStream();
}

}  // namespace HWY_NAMESPACE
}  // namespace ort_ops
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace ort_ops {

HWY_EXPORT(AddFour);

namespace {

class SpinBarrier {
 public:
  explicit SpinBarrier(int threads) : threads_(threads) {}
  void Wait() {
    const int goal = (arrived_.fetch_add(1) / threads_ + 1) * threads_;
    while (arrived_.load() < goal) {
    }
  }

 private:
  const int threads_;
  std::atomic<int> arrived_{0};
};

}  // namespace
}  // namespace ort_ops

// The seconds of one pass over five arrays of `count` floats (a multiple of 64; 64-byte aligned), as the mean of `passes` on `threads` threads.
// stream: whether the stores go past the caches.
extern "C" ORT_OPS_EXPORT double ort_ops_stream_floor_seconds(float* const* arrays, int64_t count, int threads,
                                                              int passes, int stream) {
  using Clock = std::chrono::steady_clock;
  ort_ops::SpinBarrier barrier(threads);
  const int64_t share = (count / 64 + threads - 1) / threads * 64;
  const auto work = [&](int thread) {
    const int64_t begin = std::min(count, thread * share);
    const int64_t end = std::min(count, begin + share);
    for (int pass = 0; pass < passes; ++pass) {
      HWY_DYNAMIC_DISPATCH(ort_ops::AddFour)(arrays, begin, end, stream != 0);
      barrier.Wait();
    }
  };
  std::vector<std::thread> others;
  for (int thread = 1; thread < threads; ++thread) {
    others.emplace_back([&, thread] {
      barrier.Wait();
      work(thread);
    });
  }
  barrier.Wait();
  const auto start = Clock::now();
  work(0);
  const std::chrono::duration<double> elapsed = Clock::now() - start;
  for (std::thread& other : others) other.join();
  return elapsed.count() / passes;
}
#endif  // HWY_ONCE
