// CUDA's words on a CPU: a block of threads as fibers of one thread of the host, which change at barriers and
// exchanges between lanes, and nowhere else.
//
// The order in which fibers go on is chosen by a number: 0 as they are numbered, 1 backwards, any other at random. So a
// missing barrier shows as other bits, and a barrier that not all reach ends the process. Shared memory begins as it was
// left behind.
#pragma once
#include <csetjmp>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <memory>
#include <ucontext.h>
#include <vector>

typedef uint32_t u32;
typedef unsigned long long u64;
typedef long long i64;
#define INF std::numeric_limits<float>::infinity()
#define __device__
#define __global__
#define __launch_bounds__(threads)
#define __noinline__ __attribute__((noinline))
#define __shared__ static

struct Index { unsigned x, y; };
struct float4 { float x, y, z, w; };
inline Index blockIdx, threadIdx;

namespace fibers {

constexpr int kStackBytes = 64 << 10;
enum State { kReady, kAtLane, kAtBlock, kDone };

struct Fiber {
  std::unique_ptr<char[]> stack{new char[kStackBytes]};
  ucontext_t begin;
  jmp_buf place;
  State state;
  bool has_begun;
  u64 value;  // what its lane exchanges
};

inline std::vector<Fiber> all;
inline jmp_buf scheduler;
inline int current;
inline std::function<void()> body;

// Leaves the running fiber until it is ready again. _setjmp leaves signals alone: swapcontext would ask the kernel.
inline void pause(State state) {
  all[current].state = state;
  if (!_setjmp(all[current].place)) _longjmp(scheduler, 1);
}

inline void run() {
  body();
  all[current].state = kDone;
  _longjmp(scheduler, 1);
}

inline void resume(int number) {
  Fiber& fiber = all[number];
  current = number;
  threadIdx.x = (unsigned)number;
  if (_setjmp(scheduler)) return;
  if (fiber.has_begun) _longjmp(fiber.place, 1);
  fiber.has_begun = true;
  setcontext(&fiber.begin);
}

// Lets the fibers of a group go on if all of them that are left wait for the same.
inline bool release(int begin, int end, State state) {
  bool any = false;
  for (int i = begin; i < end; ++i) {
    if (all[i].state != state && all[i].state != kDone) return false;
    any |= all[i].state == state;
  }
  for (int i = begin; i < end; ++i)
    if (all[i].state == state) all[i].state = kReady;
  return any;
}

inline void run_block(int threads, u64 order) {
  while ((int)all.size() < threads) all.emplace_back();
  for (int i = 0; i < threads; ++i) {
    Fiber& fiber = all[i];
    fiber.state = kReady;
    fiber.has_begun = false;
    getcontext(&fiber.begin);
    fiber.begin.uc_stack.ss_sp = fiber.stack.get();
    fiber.begin.uc_stack.ss_size = kStackBytes;
    fiber.begin.uc_link = nullptr;
    makecontext(&fiber.begin, run, 0);
  }
  u64 random = order * 0x9E3779B97F4A7C15ull + 1;
  std::vector<int> ready;
  for (;;) {
    ready.clear();
    int left = 0;
    for (int i = 0; i < threads; ++i) {
      left += all[i].state != kDone;
      if (all[i].state == kReady) ready.push_back(i);
    }
    if (!left) return;
    if (order == 1) std::reverse(ready.begin(), ready.end());
    for (size_t i = ready.size(); i > 1 && order > 1; --i) {
      random ^= random << 13; random ^= random >> 7; random ^= random << 17;
      std::swap(ready[i - 1], ready[random % i]);
    }
    for (int number : ready) resume(number);
    bool is_released = false;
    for (int warp = 0; warp < threads; warp += 32) is_released |= release(warp, warp + 32, kAtLane);
    is_released |= release(0, threads, kAtBlock);
    if (ready.empty() && !is_released) {
      std::fprintf(stderr, "a barrier is not reached by all threads\n");
      std::abort();
    }
  }
}

inline u64 exchange(u64 value, int lane) {
  int first = current / 32 * 32;
  all[current].value = value;
  pause(kAtLane);
  u64 found = all[first + lane].value;
  pause(kAtLane);
  return found;
}

}  // namespace fibers

inline void __syncthreads() { fibers::pause(fibers::kAtBlock); }
template <class T> T __shfl_sync(u32, T value, int lane) { return (T)fibers::exchange((u64)value, lane); }
template <class T> T __shfl_xor_sync(u32, T value, int step) {
  return (T)fibers::exchange((u64)value, (fibers::current % 32) ^ step);
}
template <class T> T __shfl_up_sync(u32, T value, int step) {
  int lane = fibers::current % 32;
  return (T)fibers::exchange((u64)value, lane >= step ? lane - step : lane);
}
template <class T> T atomicAdd(T* at, T value) { T old = *at; *at = old + value; return old; }

// Compiled without contraction of floating point: each of these is one operation of IEEE 754.
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fmaf_rn(float a, float b, float c) { return std::fmaf(a, b, c); }
inline int __float_as_int(float x) { int bits; std::memcpy(&bits, &x, 4); return bits; }
inline float __int_as_float(int bits) { float x; std::memcpy(&x, &bits, 4); return x; }
inline u64 __umul64hi(u64 a, u64 b) { return (u64)(((unsigned __int128)a * b) >> 64); }
