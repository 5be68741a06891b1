// The kernels as functions of the host, for ctypes: a launch of each, grid by grid, block by block.
#include "sampler.cu"

namespace {

// An argument of a launch: eight bytes, of which a narrower type takes the first.
struct Slot {
  u64 bits;
  template <class T> operator T() const { T value; std::memcpy(&value, &bits, sizeof(T)); return value; }
};

template <class... T, size_t... I>
void call(void (*kernel)(T...), const Slot* slots, std::index_sequence<I...>) {
  kernel((T)slots[I]...);
}

template <class... T>
std::function<void()> bound(void (*kernel)(T...), const Slot* slots) {
  return [=] { call(kernel, slots, std::index_sequence_for<T...>()); };
}

}  // namespace

// 0 where there is no such kernel.
extern "C" int launch(const char* name, int width, int height, const u64* arguments, u64 order) {
  const Slot* slots = (const Slot*)arguments;
  std::function<void()> body;
#define KERNEL(kernel) if (!std::strcmp(name, #kernel)) body = bound(kernel, slots);
  KERNEL(process) KERNEL(propose) KERNEL(test_drafts) KERNEL(answer) KERNEL(tops)
  if (!body) return 0;
  fibers::body = body;
  for (int y = 0; y < height; ++y)
    for (int x = 0; x < width; ++x) {
      blockIdx = {(unsigned)x, (unsigned)y};
      fibers::run_block(THREADS, order > 1 ? order + x + 1000 * y : order);
    }
  return 1;
}
