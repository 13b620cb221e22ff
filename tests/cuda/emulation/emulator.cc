// Runs the blocks of a launch, one after the other, each block's threads as fibers.
#include <cxxabi.h>
#include <dlfcn.h>
#include <setjmp.h>
#include <sys/mman.h>
#include <ucontext.h>

#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "cuda_runtime.h"

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#else
#define ASAN_POISON_MEMORY_REGION(address, bytes) ((void)(address), (void)(bytes))
#define ASAN_UNPOISON_MEMORY_REGION(address, bytes) ((void)(address), (void)(bytes))
#endif

dim3 threadIdx;
dim3 blockIdx;
dim3 blockDim;
dim3 gridDim;

namespace cuda_emulation {

Settings settings;

namespace {

constexpr int kWarp = 32;
constexpr unsigned kMaxThreads = 1024;
constexpr size_t kStackBytes = 256 << 10;
constexpr size_t kUnaskedSharedBytes = 48 << 10;
constexpr size_t kGuardBytes = 4096;     // behind the launch's shared memory
constexpr unsigned char kPoison = 0xff;  // NaN in every type
constexpr unsigned char kGuard = 0xa5;
constexpr size_t kMaxCountedGroups = 8;  // __pipeline_wait_prior counts no further

enum class State { kReady, kAtBarrier, kAtShuffle, kDone };

struct Copy {
  void* to;
  const void* from;
  size_t bytes;
};

// Where something was left, to go on there: swapcontext would ask the kernel twice for each change of fibers.
struct Place {
  jmp_buf registers;
  ucontext_t start;
  bool started = true;
};

struct Fiber {
  Place place;
  dim3 index;
  State state;
  std::vector<std::vector<Copy>> copy_groups;  // the last one is still open
};

enum class ExchangeKind { kXor, kBallot };

// A shuffle or a ballot of one warp: it happens when all lanes of the mask have come.
struct Exchange {
  ExchangeKind kind = ExchangeKind::kXor;
  unsigned mask = 0;
  unsigned arrived = 0;
  unsigned values[kWarp] = {};
  int lane_masks[kWarp] = {};
  unsigned results[kWarp] = {};
};

struct Shared {
  unsigned char* memory = nullptr;
  size_t bytes = 0;
};

Shared shared;
std::map<const void*, size_t> asked_shared_bytes;
std::string launches;
std::string failure;

// The block that is running.
Place scheduler;
std::vector<Fiber> fibers;
std::vector<Exchange> exchanges;
Fiber* running = nullptr;
size_t dynamic_bytes = 0;
const std::function<void()>* body = nullptr;

unsigned ThreadNumber() { return static_cast<unsigned>(running - fibers.data()); }

__attribute__((format(printf, 1, 2))) void Fail(const char* format, ...) {
  if (!failure.empty()) return;
  char text[512];
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(text, sizeof(text), format, arguments);
  va_end(arguments);
  failure = text;
}

__attribute__((noinline)) void Switch(Place& from, Place& to) {
  if (_setjmp(from.registers) != 0) return;
  if (to.started) _longjmp(to.registers, 1);
  to.started = true;
  setcontext(&to.start);
}

void Yield(State state) {
  running->state = state;
  Switch(running->place, scheduler);
}

// Ends the block: the scheduler abandons all fibers.
[[noreturn]] void Trap() {
  Yield(State::kDone);
  std::abort();
}

void FiberMain() {
  (*body)();
  for (const auto& group : running->copy_groups) {
    if (!group.empty()) Fail("thread %u ended with copies that nobody waited for", ThreadNumber());
  }
  Yield(State::kDone);
  std::abort();
}

char* StackOf(size_t fiber) {
  static char* const stacks =
      static_cast<char*>(mmap(nullptr, kMaxThreads * kStackBytes, PROT_READ | PROT_WRITE,
                              MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
  return stacks + fiber * kStackBytes;
}

void StartFibers() {
  const size_t count = size_t{blockDim.x} * blockDim.y * blockDim.z;
  static const ucontext_t fresh = [] {
    ucontext_t context;
    getcontext(&context);
    return context;
  }();
  fibers.resize(count);
  exchanges.assign((count + kWarp - 1) / kWarp, {});
  for (size_t i = 0; i < count; ++i) {
    Fiber& fiber = fibers[i];
    const auto number = static_cast<unsigned>(i);
    fiber.index =
        dim3(number % blockDim.x, number / blockDim.x % blockDim.y, number / blockDim.x / blockDim.y);
    fiber.state = State::kReady;
    fiber.copy_groups.assign(1, {});
    fiber.place.started = false;
    fiber.place.start = fresh;
    fiber.place.start.uc_stack.ss_sp = StackOf(i);
    fiber.place.start.uc_stack.ss_size = kStackBytes;
    fiber.place.start.uc_link = nullptr;
    makecontext(&fiber.place.start, FiberMain, 0);
  }
}

size_t Count(State state) {
  return static_cast<size_t>(std::count_if(fibers.begin(), fibers.end(),
                                           [state](const Fiber& fiber) { return fiber.state == state; }));
}

void ReleaseBarrier() {
  for (Fiber& fiber : fibers) fiber.state = State::kReady;
}

// Nobody can go on: either all have met at the barrier, or some never will.
void ResolveWait() {
  const size_t at_barrier = Count(State::kAtBarrier);
  if (at_barrier == fibers.size()) return ReleaseBarrier();
  const size_t at_shuffle = Count(State::kAtShuffle);
  if (at_barrier != 0) {
    Fail(
        "divergent barrier: in block (%u,%u) %zu of %zu threads wait at __syncthreads, %zu at a shuffle, %zu "
        "have ended",
        blockIdx.x, blockIdx.y, at_barrier, fibers.size(), at_shuffle, Count(State::kDone));
  } else {
    Fail("divergent shuffle: in block (%u,%u) %zu of %zu threads wait for lanes that never come", blockIdx.x,
         blockIdx.y, at_shuffle, fibers.size());
  }
}

// Runs those that are ready, of the fibers with these numbers, each until it waits or ends; whether there
// were any.
bool RunReady(const size_t* begin, const size_t* end) {
  bool any_ran = false;
  for (const size_t* i = begin; i != end && failure.empty(); ++i) {
    if (fibers[*i].state != State::kReady) continue;
    any_ran = true;
    running = &fibers[*i];
    threadIdx = running->index;
    Switch(scheduler, running->place);
  }
  return any_ran;
}

bool RunWarpsAhead(const std::vector<size_t>& numbers, std::mt19937& random) {
  std::vector<size_t> warps(exchanges.size());
  std::iota(warps.begin(), warps.end(), size_t{0});
  std::shuffle(warps.begin(), warps.end(), random);
  bool any_ran = false;
  for (const size_t warp : warps) {
    const size_t* begin = numbers.data() + warp * kWarp;
    const size_t* end = numbers.data() + std::min((warp + 1) * kWarp, numbers.size());
    while (RunReady(begin, end)) any_ran = true;
  }
  return any_ran;
}

void RunFibers(std::mt19937& random) {
  std::vector<size_t> numbers(fibers.size());
  std::iota(numbers.begin(), numbers.end(), size_t{0});
  if (settings.order == Order::kReverse) std::reverse(numbers.begin(), numbers.end());
  while (failure.empty() && Count(State::kDone) != fibers.size()) {
    if (settings.order == Order::kRandom) std::shuffle(numbers.begin(), numbers.end(), random);
    const bool any_ran = settings.order == Order::kWarpAhead
                             ? RunWarpsAhead(numbers, random)
                             : RunReady(numbers.data(), numbers.data() + numbers.size());
    if (!any_ran) ResolveWait();
  }
}

void RunBlock(std::mt19937& random) {
  const size_t guard_bytes = std::min(kGuardBytes, shared.bytes - dynamic_bytes);
  ASAN_UNPOISON_MEMORY_REGION(shared.memory, shared.bytes);
  std::fill_n(shared.memory, dynamic_bytes, kPoison);
  std::fill_n(shared.memory + dynamic_bytes, guard_bytes, kGuard);
  ASAN_POISON_MEMORY_REGION(shared.memory + dynamic_bytes, shared.bytes - dynamic_bytes);
  StartFibers();
  RunFibers(random);
  ASAN_UNPOISON_MEMORY_REGION(shared.memory, shared.bytes);
  for (size_t i = 0; i < guard_bytes; ++i) {
    if (shared.memory[dynamic_bytes + i] != kGuard) {
      return Fail("block (%u,%u) wrote to its shared memory at byte %zu of %zu", blockIdx.x, blockIdx.y,
                  dynamic_bytes + i, dynamic_bytes);
    }
  }
}

std::string KernelName(const void* kernel) {
  Dl_info info = {};
  if (dladdr(kernel, &info) == 0 || info.dli_sname == nullptr) return "?";
  int status = 0;
  const std::unique_ptr<char, void (*)(void*)> name(
      abi::__cxa_demangle(info.dli_sname, nullptr, nullptr, &status), std::free);
  return status == 0 ? name.get() : info.dli_sname;
}

cudaError_t CheckConfiguration(const void* kernel, const cudaLaunchConfig_t& config) {
  const dim3 grid = config.gridDim;
  const dim3 block = config.blockDim;
  const uint64_t threads = uint64_t{block.x} * block.y * block.z;
  const auto asked = asked_shared_bytes.find(kernel);
  const size_t allowed = asked == asked_shared_bytes.end() ? kUnaskedSharedBytes : asked->second;
  if (grid.x == 0 || grid.y == 0 || grid.z == 0 || grid.x > 0x7fffffffu || grid.y > 65535 || grid.z > 65535) {
    Fail("a grid of (%u,%u,%u) blocks", grid.x, grid.y, grid.z);
  } else if (threads == 0 || threads > kMaxThreads) {
    Fail("a block of (%u,%u,%u) threads", block.x, block.y, block.z);
  } else if (config.dynamicSmemBytes > allowed || config.dynamicSmemBytes > shared.bytes) {
    Fail("%zu bytes of shared memory where %zu are allowed", config.dynamicSmemBytes,
         std::min(allowed, shared.bytes));
  }
  return failure.empty() ? cudaSuccess : cudaErrorInvalidConfiguration;
}

void Complete(Fiber& fiber, size_t groups) {
  for (size_t i = 0; i < groups; ++i) {
    for (const Copy& copy : fiber.copy_groups[i]) std::memcpy(copy.to, copy.from, copy.bytes);
  }
  fiber.copy_groups.erase(fiber.copy_groups.begin(),
                          fiber.copy_groups.begin() + static_cast<std::ptrdiff_t>(groups));
}

}  // namespace

SharedMemory::SharedMemory(void* memory, size_t bytes) {
  shared = {static_cast<unsigned char*>(memory), bytes};
}

void UseAnotherDevice() { asked_shared_bytes.clear(); }

const char* TakeLaunches() {
  static std::string taken;
  taken.swap(launches);
  launches.clear();
  return taken.c_str();
}

cudaError_t Launch(const void* kernel, const cudaLaunchConfig_t& config, const std::function<void()>& call) {
  failure.clear();
  char text[128];
  std::snprintf(text, sizeof(text), " grid %ux%u block %u shared %zu\n", config.gridDim.x, config.gridDim.y,
                config.blockDim.x, config.dynamicSmemBytes);
  launches += KernelName(kernel) + text;
  if (const cudaError_t error = CheckConfiguration(kernel, config)) return error;
  gridDim = config.gridDim;
  blockDim = config.blockDim;
  dynamic_bytes = config.dynamicSmemBytes;
  body = &call;
  std::mt19937 random(settings.seed);
  const int64_t blocks = int64_t{gridDim.x} * gridDim.y * gridDim.z;
  for (int64_t i = std::max<int64_t>(0, blocks - settings.last_blocks); i < blocks && failure.empty(); ++i) {
    blockIdx = dim3(static_cast<unsigned>(i % gridDim.x), static_cast<unsigned>(i / gridDim.x % gridDim.y),
                    static_cast<unsigned>(i / gridDim.x / gridDim.y));
    RunBlock(random);
  }
  return failure.empty() ? cudaSuccess : cudaErrorLaunchFailure;
}

}  // namespace cuda_emulation

using namespace cuda_emulation;

void __syncthreads() {
  running->state = State::kAtBarrier;
  // The last one to come goes on at once: nothing makes it wait for the others to leave.
  if (Count(State::kAtBarrier) == fibers.size()) {
    ReleaseBarrier();
  } else {
    Yield(State::kAtBarrier);
  }
}

namespace {

unsigned ExchangeInWarp(ExchangeKind kind, unsigned mask, unsigned value, int lane_mask) {
  const unsigned thread = ThreadNumber();
  const unsigned lane = thread % kWarp;
  Exchange& exchange = exchanges[thread / kWarp];
  if ((mask >> lane & 1) == 0) {
    Fail("thread %u takes part in a shuffle whose mask 0x%08x leaves it out", thread, mask);
    Trap();
  }
  if (exchange.arrived == 0) {
    exchange.mask = mask;
    exchange.kind = kind;
  }
  if (exchange.mask != mask || exchange.kind != kind) {
    Fail("thread %u comes to a shuffle with mask 0x%08x, others with 0x%08x, or to another kind of shuffle", thread,
         mask, exchange.mask);
    Trap();
  }
  exchange.values[lane] = value;
  exchange.lane_masks[lane] = lane_mask;
  exchange.arrived |= 1u << lane;
  if (exchange.arrived != mask) {
    Yield(State::kAtShuffle);
    return exchange.results[lane];
  }
  exchange.arrived = 0;
  unsigned ballot = 0;
  for (unsigned i = 0; i < kWarp; ++i) {
    if ((mask >> i & 1) != 0 && exchange.values[i] != 0) ballot |= 1u << i;
  }
  for (unsigned i = 0; i < kWarp; ++i) {
    if ((mask >> i & 1) == 0) continue;
    const unsigned source = i ^ static_cast<unsigned>(exchange.lane_masks[i]);
    if (source >= kWarp || (mask >> source & 1) == 0) {
      Fail("lane %u asks for the value of lane %u, which the mask 0x%08x leaves out", i, source, mask);
      Trap();
    }
    exchange.results[i] = kind == ExchangeKind::kBallot ? ballot : exchange.values[source];
    Fiber& fiber = fibers[thread / kWarp * kWarp + i];
    if (&fiber != running) fiber.state = State::kReady;
  }
  return exchange.results[lane];
}

}  // namespace

float __shfl_xor_sync(unsigned mask, float value, int lane_mask) {
  return __uint_as_float(ExchangeInWarp(ExchangeKind::kXor, mask, __float_as_uint(value), lane_mask));
}

unsigned __ballot_sync(unsigned mask, int predicate) {
  return ExchangeInWarp(ExchangeKind::kBallot, mask, predicate != 0, 0);
}

void __syncwarp(unsigned mask) { __shfl_xor_sync(mask, 0.0f, 0); }

void __pipeline_memcpy_async(void* to, const void* from, size_t bytes) {
  const auto offset = static_cast<size_t>(static_cast<unsigned char*>(to) - shared.memory);
  const bool inside = static_cast<unsigned char*>(to) >= shared.memory && offset + bytes <= dynamic_bytes;
  if (!inside || (bytes != 4 && bytes != 8 && bytes != 16) || offset % bytes != 0 ||
      reinterpret_cast<uintptr_t>(from) % bytes != 0) {
    Fail("thread %u copies %zu bytes from %p to byte %zu of %zu of shared memory", ThreadNumber(), bytes,
         from, offset, dynamic_bytes);
    Trap();
  }
  if (settings.copy_time == CopyTime::kAtIssue) {
    std::memcpy(to, from, bytes);
    return;
  }
  std::memset(to, kPoison, bytes);
  running->copy_groups.back().push_back({to, from, bytes});
}

void __pipeline_commit() { running->copy_groups.emplace_back(); }

void __pipeline_wait_prior(size_t groups) {
  const size_t committed = running->copy_groups.size() - 1;
  const size_t left = std::min(groups, kMaxCountedGroups);
  if (committed > left) Complete(*running, committed - left);
}

const char* cudaGetErrorName(cudaError_t error) {
  switch (error) {
    case cudaSuccess:
      return "cudaSuccess";
    case cudaErrorInvalidValue:
      return "cudaErrorInvalidValue";
    case cudaErrorInvalidConfiguration:
      return "cudaErrorInvalidConfiguration";
    case cudaErrorLaunchFailure:
      return "cudaErrorLaunchFailure";
  }
  return "cudaErrorUnknown";
}

const char* cudaGetErrorString(cudaError_t error) {
  return error == cudaSuccess ? "no error" : failure.c_str();
}

cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  switch (attribute) {
    case cudaDevAttrMultiProcessorCount:
      *value = settings.multiprocessors;
      return cudaSuccess;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor:
      *value = settings.shared_bytes_per_multiprocessor;
      return cudaSuccess;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin:
      *value = settings.shared_bytes_per_block;
      return cudaSuccess;
  }
  return cudaErrorInvalidValue;
}

cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int) {
  *properties = {"emulated device", 0, 0};
  return cudaSuccess;
}

cudaError_t cudaFuncGetAttributes(cudaFuncAttributes*, const void*) { return cudaSuccess; }

cudaError_t cudaFuncSetAttribute(const void* kernel, cudaFuncAttribute, int value) {
  failure.clear();
  if (value > settings.shared_bytes_per_block) {
    Fail("%d bytes of shared memory of %d", value, settings.shared_bytes_per_block);
    return cudaErrorInvalidValue;
  }
  size_t& asked = asked_shared_bytes[kernel];
  if (static_cast<size_t>(value) < asked) {
    Fail("%d bytes of shared memory after %zu, which another thread may count on", value, asked);
    return cudaErrorInvalidValue;
  }
  asked = static_cast<size_t>(value);
  return cudaSuccess;
}

cudaError_t cudaMemsetAsync(void* memory, int value, size_t bytes, cudaStream_t) {
  std::memset(memory, value, bytes);
  return cudaSuccess;
}

cudaError_t cudaMalloc(void** memory, size_t bytes) {
  // As aligned as a device's.
  *memory = std::aligned_alloc(256, (bytes + 255) / 256 * 256);
  return *memory == nullptr ? cudaErrorInvalidValue : cudaSuccess;
}

cudaError_t cudaFree(void* memory) {
  std::free(memory);
  return cudaSuccess;
}
