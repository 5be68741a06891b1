// The sampler of a device: drafts, judgements and log-probabilities over rows of logits that stay where they are.
//
// process      [B, R] blocks   bias, penalties and bans: a copy of the rows that have any
// propose      [B]             draws a draft token and keeps the probabilities that it was drawn from
// test_drafts  [B, R]          tests every position of every draft
// answer       [B]             counts what is kept, and draws the token that follows
// tops         [B, R]          log-probabilities of the emitted tokens and of the greatest
//
// One block a row of logits. Nothing is sorted but the few tokens at a cut, and no probabilities of the target are
// written: a row is described by its peak, its total and the place (value, id) at which it is cut, and whoever needs a
// probability computes it again.
//
// The same bits on every machine. Masses are integers in units of 2^-42, whose sums do not depend on the order of
// addition, and the floating point that remains is of single operations that IEEE 754 defines (compiled without
// contraction; exp and log are made of them below). So what tests show on a CPU, from this very source, holds on a GPU.
//
// Names, shapes and codes of the tensors: engines/accelerators/device/sampling/tensors.py.

#ifdef __CUDACC_RTC__
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;
#define INF __int_as_float(0x7f800000)
#else
#include "cuda_on_cpu.h"
#endif

#ifndef THREADS
#define THREADS 1024
#endif

namespace {

constexpr int kWarps = THREADS / 32;
constexpr int kTile = 1024;        // ids of which a warp keeps one sum
constexpr int kBins = 2048;        // of 1/64 in the exponent; the last holds all below e^-32, which has no mass
constexpr int kCandidates = 2048;  // in the bin in which a row is cut, before the slow way is taken; a power of two
constexpr int kPerThread = kBins / THREADS;
constexpr u64 kUnit = 1ull << 30;            // of top_p
constexpr u64 kSmallestResidual = 4398046;   // 1e-6 in units of 2^-42
constexpr int kRace = 6;                     // Purpose.RACE of the shared noise
constexpr int kNoToken = -1;
enum Rule { kMatch = 0, kRatio = 1, kRaceRule = 2, kGreedy = 3 };
enum Flag { kPointMass = 1, kAllowed = 2 };
enum Count { cRule, cGamma, cDepth, cKeepAt, cTopK, cTopP, cEndBanned, cFlags, kCounts };
enum Setting { sTemperature, sMinP, sUp, sDown, sPresence, sFrequency, sLenience, sGreedyLenience, kSettings };
constexpr int kAnswers = 4;
constexpr int kLimbs = 4;

}  // namespace

// What is known of a row of logits: enough to compute any of its probabilities again.
struct Cut {
  float peak, temperature, min_p, total;
  u32 key;  // of the last value kept
  int id;   // the last id kept among those of that value
  int best; // lowest id of the greatest value
  int is_finite;
};

// What a position of a draft was found to be.
struct Test {
  Cut cut;
  u64 overlap;
  int token;    // that follows if the draft ends here; not of a rejected position judged by ratio
  int is_kept;
};

namespace {

struct Shared {
  u64 mass[kBins];
  u32 count[kBins];
  u64 list[kCandidates];  // places of candidates, or sums of tiles
  u64 warp[32];
  u64 found[3];
  int at;
  u32 num;
};

// Of single operations, so that a compiler for a GPU and one for a CPU agree to the last bit.
__device__ float exp_of(float y) {  // y <= 0; 0 below 2^-42, which has no mass
  if (!(y > -29.2f)) return 0.0f;
  float n = rintf(__fmul_rn(y, 1.44269504f));
  float r = __fmaf_rn(n, -0.693359375f, y);
  r = __fmaf_rn(n, 2.12194440e-4f, r);
  float p = 1.9875691500e-4f;
  p = __fmaf_rn(p, r, 1.3981999507e-3f);
  p = __fmaf_rn(p, r, 8.3334519073e-3f);
  p = __fmaf_rn(p, r, 4.1665795894e-2f);
  p = __fmaf_rn(p, r, 1.6666665459e-1f);
  p = __fmaf_rn(p, r, 5.0000001201e-1f);
  p = __fmaf_rn(__fmul_rn(p, r), r, __fadd_rn(r, 1.0f));
  return __int_as_float(__float_as_int(p) + (int)((u32)(int)n << 23));
}

__device__ float log_of(float x) {  // x > 0, normal
  int bits = __float_as_int(x);
  int k = (bits >> 23) - 126;
  float m = __int_as_float((bits & 0x7fffff) | 0x3f000000);  // 1/2 .. 1
  if (m < 0.70710678f) { m = __fadd_rn(m, m); k -= 1; }
  float f = __fadd_rn(m, -1.0f), z = __fmul_rn(f, f);
  float p = 7.0376836292e-2f;
  p = __fmaf_rn(p, f, -1.1514610310e-1f);
  p = __fmaf_rn(p, f, 1.1676998740e-1f);
  p = __fmaf_rn(p, f, -1.2420140846e-1f);
  p = __fmaf_rn(p, f, 1.4249322787e-1f);
  p = __fmaf_rn(p, f, -1.6668057665e-1f);
  p = __fmaf_rn(p, f, 2.0000714765e-1f);
  p = __fmaf_rn(p, f, -2.4999993993e-1f);
  p = __fmaf_rn(p, f, 3.3333331174e-1f);
  float y = __fmul_rn(__fmul_rn(p, f), z);
  y = __fmaf_rn((float)k, -2.12194440e-4f, y);
  y = __fmaf_rn(z, -0.5f, y);
  return __fmaf_rn((float)k, 0.693359375f, __fadd_rn(f, y));
}

// Standard exponential of a word of 32 bits, as the host's noise has it: -log(1 - (word + 1/2) 2^-32).
__device__ float exponential(u32 word) {
  float x = __fmul_rn(__fadd_rn((float)word, 0.5f), -2.3283064365386963e-10f);
  x = fmaxf(x, 5.9604644775390625e-8f - 1.0f);
  if (x > -0.1f) {
    float s = 0.125f;
#pragma unroll 1
    for (int power = 7; power > 0; --power)
      s = __fadd_rn(__fmul_rn(__fmul_rn(x, s), -1.0f), __fdiv_rn(1.0f, (float)power));
    return -__fmul_rn(x, s);
  }
  return -log_of(__fadd_rn(x, 1.0f));
}

// Philox 4x64, ten rounds, as numpy's: four words for block ``block`` of a position's noise.
__device__ void philox(u64 seed, u64 position, u64 block, u64* out) {
  u64 x0 = block + 1, x1 = position, x2 = 0, x3 = 0, k0 = seed, k1 = kRace;
  for (int i = 0; i < 10; ++i) {
    u64 h0 = __umul64hi(0xD2E7470EE14C6C93ull, x0), l0 = 0xD2E7470EE14C6C93ull * x0;
    u64 h2 = __umul64hi(0xCA5A826395121157ull, x2), l2 = 0xCA5A826395121157ull * x2;
    x0 = h2 ^ x1 ^ k0; x1 = l2; x2 = h0 ^ x3 ^ k1; x3 = l0;
    k0 += 0x9E3779B97F4A7C15ull; k1 += 0xBB67AE8584CAA73Bull;
  }
  out[0] = x0; out[1] = x1; out[2] = x2; out[3] = x3;
}

__device__ u32 key_of(float x) {  // ordered as floats are; -0 is 0
  u32 bits = (u32)__float_as_int(__fadd_rn(x, 0.0f));
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

__device__ u64 fixed(float p) { return (u64)(i64)__fmul_rn(p, 4398046511104.0f); }

__device__ u64 scaled(u64 number, u64 uniform) {  // floor(number * uniform / 2^53)
  return (__umul64hi(number, uniform) << 11) | ((number * uniform) >> 53);
}

template <class T, class Op>
__device__ T over_block(T value, Shared& s, Op op) {
  for (int step = 16; step; step >>= 1) value = op(value, (T)__shfl_xor_sync(~0u, value, step));
  __syncthreads();
  if (threadIdx.x % 32 == 0) s.warp[threadIdx.x / 32] = (u64)value;
  __syncthreads();
  T result = (T)s.warp[0];
  for (int w = 1; w < kWarps; ++w) result = op(result, (T)s.warp[w]);
  return result;
}
struct Sum { __device__ u64 operator()(u64 a, u64 b) const { return a + b; } };
struct Max { __device__ u64 operator()(u64 a, u64 b) const { return a > b ? a : b; } };
struct Min { __device__ u64 operator()(u64 a, u64 b) const { return a < b ? a : b; } };

// Sum of the values of the threads before this one.
__device__ u64 before_thread(u64 value, Shared& s) {
  int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  u64 run = value;
  for (int step = 1; step < 32; step <<= 1) {
    u64 other = __shfl_up_sync(~0u, run, step);
    if (lane >= step) run += other;
  }
  __syncthreads();
  if (lane == 31) s.warp[warp] = run;
  __syncthreads();
  u64 sum = run - value;
  for (int w = 0; w < warp; ++w) sum += s.warp[w];
  return sum;
}

struct Logits {  // a row of the draft's or the target's; ids beyond it have no mass
  const float* row;
  int size;
  __device__ float at(int id) const { return id < size ? row[id] : -INF; }
};

// f(id, logit) for every id, four in a row to a thread.
template <class F>
__device__ void each(const Logits& l, int V, const F& f) {
  bool is_wide = ((u64)l.row & 15) == 0;
  for (int base = threadIdx.x * 4; base < V; base += THREADS * 4) {
    float x[4];
    if (is_wide && base + 4 <= l.size) {
      float4 four = *(const float4*)(l.row + base);
      x[0] = four.x; x[1] = four.y; x[2] = four.z; x[3] = four.w;
    } else {
      for (int i = 0; i < 4; ++i) x[i] = base + i < V ? l.at(base + i) : -INF;
    }
    for (int i = 0; i < 4; ++i) if (base + i < V) f(base + i, x[i]);
  }
}

__device__ float below_peak(const Cut& c, float x) {
  float y = __fadd_rn(x, -c.peak);
  return c.temperature == 1.0f ? y : __fdiv_rn(y, c.temperature);
}

__device__ float weight(const Cut& c, float x, int id) {
  if (!(x > -INF)) return 0.0f;
  u32 key = key_of(x);
  if (key < c.key || (key == c.key && id > c.id)) return 0.0f;
  float w = exp_of(below_peak(c, x));
  return w >= c.min_p ? w : 0.0f;
}

__device__ float prob(const Cut& c, float x, int id) {
  return c.is_finite ? __fdiv_rn(weight(c, x, id), c.total) : (id == 0 ? 1.0f : 0.0f);
}

// Places (value, id) are ordered by value, then by lower id; a place as one number, the greatest first.
__device__ u64 place(u32 key, int id) { return (u64)key << 32 | (u32)~id; }
__device__ float value_of(u32 key) {
  return __int_as_float((int)(key & 0x80000000u ? key & 0x7fffffffu : ~key));
}

__device__ int bin_of(const Cut& c, float x) {
  float y = __fmul_rn(-below_peak(c, x), 64.0f);
  return y < (float)(kBins - 1) ? (int)y : kBins - 1;
}
__device__ u64 mass_at(const Cut& c, u64 place) { return fixed(exp_of(below_peak(c, value_of((u32)(place >> 32))))); }

// Sorts the first ``num`` entries of the list, a power of two, the greatest first.
__device__ __noinline__ void sort_list(int num, Shared& s) {
  for (int size = 2; size <= num; size <<= 1)
    for (int step = size >> 1; step; step >>= 1) {
      __syncthreads();
      for (int i = threadIdx.x; i < num; i += THREADS) {
        int j = i ^ step;
        u64 a = s.list[i], b = s.list[j];
        if (j > i && (a < b) == ((i & size) == 0)) { s.list[i] = b; s.list[j] = a; }
      }
    }
  __syncthreads();
}

// The place at which the tokens of a bin, from the greatest on, reach ``wanted``, and their mass down to it.
__device__ __noinline__ u64 place_in_bin(const Cut& c, const Logits& l, int V, int bin, u64 wanted, bool by_mass, u64* mass,
                            Shared& s) {
  __syncthreads();
  if (threadIdx.x == 0) s.num = 0;
  __syncthreads();
  each(l, V, [&](int id, float x) {
    if (x > -INF && bin_of(c, x) == bin) {
      u32 n = atomicAdd(&s.num, 1u);
      if (n < kCandidates) s.list[n] = place(key_of(x), id);
    }
  });
  __syncthreads();
  int num = (int)s.num;
  if (num <= kCandidates) {
    int padded = 1;
    while (padded < num) padded <<= 1;
    for (int i = num + (int)threadIdx.x; i < padded; i += THREADS) s.list[i] = 0;
    sort_list(padded, s);
    int each_has = (padded + THREADS - 1) / THREADS, begin = (int)threadIdx.x * each_has;
    u64 own = 0;
    for (int i = begin; i < begin + each_has && i < num; ++i) own += mass_at(c, s.list[i]);
    u64 run = before_thread(own, s);
    for (int i = begin; i < begin + each_has && i < num; ++i) {
      u64 size = mass_at(c, s.list[i]);
      if (by_mass ? run < wanted && run + size >= wanted : (u64)i + 1 == wanted) {
        s.found[0] = s.list[i]; s.found[1] = run + size;
      }
      run += size;
    }
    __syncthreads();
    *mass = s.found[1];
    return s.found[0];
  }
  // Too many of nearly one value: bisect the place, one pass for each of its bits.
  u64 found = 0;
  *mass = 0;
#pragma unroll 1
  for (int bit = 63; bit >= 0; --bit) {
    u64 trial = found | 1ull << bit, number = 0, own = 0;
    each(l, V, [&](int id, float x) {
      if (x > -INF && bin_of(c, x) == bin && place(key_of(x), id) >= trial) { own += mass_at(c, place(key_of(x), id)); ++number; }
    });
    own = over_block(own, s, Sum());
    number = over_block(number, s, Sum());
    if ((by_mass ? own : number) >= wanted) { found = trial; *mass = own; }
  }
  return found;
}

// The first bin with which the counts or masses of all bins up to it reach ``wanted``, and what is before it.
__device__ __noinline__ int find_bin(u64 wanted, bool by_mass, u64* before, u64* mass_before, u64* all, Shared& s) {
  int begin = (int)threadIdx.x * kPerThread;
  u64 number = 0, mass = 0;
  for (int i = 0; i < kPerThread; ++i) { number += s.count[begin + i]; mass += s.mass[begin + i]; }
  u64 number_run = before_thread(number, s), mass_run = before_thread(mass, s);
  *all = over_block(mass_run + mass, s, Max());
  if (threadIdx.x == 0) s.at = kBins - 1;
  __syncthreads();
  for (int i = 0; i < kPerThread; ++i) {
    u64 run = by_mass ? mass_run : number_run, size = by_mass ? s.mass[begin + i] : s.count[begin + i];
    if (run < wanted && run + size >= wanted) { s.at = begin + i; s.found[0] = run; s.found[1] = mass_run; }
    number_run += s.count[begin + i]; mass_run += s.mass[begin + i];
  }
  __syncthreads();
  *before = s.found[0];
  *mass_before = s.found[1];
  return s.at;
}

// Peak of a row and, unless it is all that is wanted, its cut and total.
__device__ __noinline__ Cut adjust(const Logits& l, int V, const i64* counts, const float* settings, bool only_peak, Shared& s) {
  Cut c;
  c.key = 0; c.id = V; c.total = c.temperature = 1.0f; c.min_p = 0.0f;
  u64 top = 0; int wrong = 0;
  each(l, V, [&](int id, float x) {
    if (!(x < INF)) wrong = 1;
    else { u64 p = place(key_of(x), id); top = p > top ? p : top; }
  });
  wrong = (int)over_block((u64)wrong, s, Max());
  top = over_block(top, s, Max());
  c.best = (int)~(u32)top;
  c.peak = value_of((u32)(top >> 32));
  c.is_finite = !wrong && c.peak > -INF;
  if (!c.is_finite) c.best = 0;
  if (!c.is_finite || only_peak) return c;
  c.temperature = settings[sTemperature]; c.min_p = settings[sMinP];
  u64 top_k = (u64)counts[cTopK], top_p = (u64)counts[cTopP];
  bool has_k = top_k < (u64)V, has_p = top_p < kUnit;
  if (has_k || has_p) {
    for (int b = threadIdx.x; b < kBins; b += THREADS) { s.mass[b] = 0; s.count[b] = 0; }
    __syncthreads();
    each(l, V, [&](int id, float x) {
      if (!(x > -INF)) return;
      int bin = bin_of(c, x);
      atomicAdd(&s.count[bin], 1u);
      if (bin < kBins - 1) atomicAdd(&s.mass[bin], fixed(exp_of(below_peak(c, x))));
    });
    __syncthreads();
    u64 last = 0, before, mass_before, all, mass;  // ``last`` is the place of the last token kept
    if (has_k) {
      int bin = find_bin(top_k, false, &before, &mass_before, &all, s);
      if (bin < kBins - 1) {
        last = place_in_bin(c, l, V, bin, top_k - before, false, &mass, s);
        all = mass_before + mass;
      }
    }
    if (has_p) {
      u64 total;
      if (!has_k) { find_bin(0, true, &before, &mass_before, &all, s); }
      u64 wanted = (all / kUnit) * top_p + ((all % kUnit) * top_p + kUnit - 1) / kUnit;
      int bin = find_bin(wanted, true, &before, &mass_before, &total, s);
      if (bin < kBins - 1) {
        u64 p = place_in_bin(c, l, V, bin, wanted - mass_before, true, &mass, s);
        last = p > last ? p : last;
      }
    }
    if (last) { c.key = (u32)(last >> 32); c.id = (int)~(u32)last; }
  }
  u64 own = 0;
  each(l, V, [&](int id, float x) { own += fixed(weight(c, x, id)); });
  c.total = __fmul_rn((float)(i64)over_block(own, s, Sum()), 2.2737367544323206e-13f);
  return c;
}

// The token whose interval of the running sum of ``mass(id)`` holds the uniform number; and the sum.
template <class Mass>
__device__ int draw(const Mass& mass, int V, u64 uniform, u64* total, Shared& s) {
  int lane = threadIdx.x % 32, tiles = (V + kTile - 1) / kTile;
  __syncthreads();
  for (int t = threadIdx.x / 32; t < tiles; t += kWarps) {
    u64 own = 0;
#pragma unroll 4
    for (int i = lane; i < kTile; i += 32) if (t * kTile + i < V) own += mass(t * kTile + i);
    for (int step = 16; step; step >>= 1) own += __shfl_xor_sync(~0u, own, step);
    if (lane == 0) s.list[t] = own;
  }
  __syncthreads();
  u64 sum = 0;
  for (int t = 0; t < tiles; ++t) sum += s.list[t];
  u64 point = scaled(sum, uniform), before = 0;
  int t = 0;
  while (t < tiles - 1 && before + s.list[t] <= point) before += s.list[t++];
  // The first warp walks the tile.
  if (threadIdx.x < 32) {
    int found = V - 1; bool has = false;
#pragma unroll 1
    for (int i = lane; i < kTile; i += 32) {
      int id = t * kTile + i;
      u64 own = id < V ? mass(id) : 0, run = own;
      for (int step = 1; step < 32; step <<= 1) {
        u64 other = __shfl_up_sync(~0u, run, step);
        if (lane >= step) run += other;
      }
      if (!has && own && before + run > point && before + run - own <= point) { found = id; has = true; }
      before += __shfl_sync(~0u, run, 31);
    }
    u64 least = has ? (u64)found : ~0ull;
    for (int step = 16; step; step >>= 1) least = Min()(least, __shfl_xor_sync(~0u, least, step));
    if (lane == 0) s.at = least == ~0ull ? V - 1 : (int)least;
  }
  __syncthreads();
  *total = sum;
  return s.at;
}

__device__ u64 seed_of(const i64* limbs) {
  return (u64)limbs[0] | (u64)limbs[1] << 16 | (u64)limbs[2] << 32 | (u64)limbs[3] << 48;
}

// The token of least E(id) / p(id), ties by lower id.
__device__ __noinline__ int race(const Cut& c, const Logits& l, int V, u64 seed, u64 position, Shared& s) {
  u64 best = ~0ull;
  for (int block = threadIdx.x; block * 8 < V; block += THREADS) {
    u64 words[4];
    philox(seed, position, (u64)block, words);
#pragma unroll 1
    for (int i = 0; i < 8; ++i) {
      int id = block * 8 + i;
      float p = id < V ? prob(c, l.at(id), id) : 0.0f;
      if (!(p > 0.0f)) continue;
      float time = __fdiv_rn(exponential((u32)(words[i / 2] >> (i % 2 * 32))), p);
      u64 own = (u64)(u32)__float_as_int(time) << 32 | (u32)id;  // times are positive: their bits are ordered
      best = own < best ? own : best;
    }
  }
  return (int)(u32)over_block(best, s, Min());
}

}  // namespace

// A copy of the rows with bias, penalties and bans. Grid: width, B. A proposal has one row, at its own depth.
extern "C" __global__ void __launch_bounds__(THREADS)
process(const float* logits, i64 batch_stride, i64 row_stride, int given_vocab, int V, int R, int width,
        int is_proposal, const i64* counts, const float* settings, const i64* draft_tokens, const i64* seen_ids,
        const float* seen_counts, int num_seen, const i64* bias_ids, const float* bias_values, int num_biases,
        const i64* allowed_ids, int num_allowed, const i64* end_ids, int num_ends, const i64* bad_prefixes,
        const i64* bad_lasts, int num_bad, const i64* recent, int prefix, float* out) {
  __shared__ Shared s;
  int r = blockIdx.x, b = blockIdx.y;
  counts += b * kCounts; settings += b * kSettings; draft_tokens += b * R; recent += b * prefix;
  if (!is_proposal && r > (int)counts[cGamma]) return;
  int position = is_proposal ? (int)counts[cDepth] : r;
  Logits l = {logits + b * batch_stride + r * row_stride, given_vocab < V ? given_vocab : V};
  float* o = out + ((i64)b * width + r) * V;
  bool is_listed = counts[cFlags] & kAllowed;
  for (int id = threadIdx.x; id < V; id += THREADS) o[id] = is_listed ? -INF : l.at(id);
  __syncthreads();
  if (is_listed)
    for (int i = threadIdx.x; i < num_allowed; i += THREADS) {
      i64 id = allowed_ids[b * num_allowed + i];
      if (id < V) o[id] = l.at((int)id);
    }
  __syncthreads();
  for (int i = threadIdx.x; i < num_biases; i += THREADS) {
    i64 id = bias_ids[b * num_biases + i];
    if (id < V) o[id] = __fadd_rn(o[id], bias_values[b * num_biases + i]);
  }
  __syncthreads();
  float up = settings[sUp], down = settings[sDown], presence = settings[sPresence], frequency = settings[sFrequency];
  auto drafted = [&](i64 id) {
    int number = 0;
    for (int i = 0; i < position; ++i) number += draft_tokens[i] == id;
    return number;
  };
  auto penalise = [&](i64 id, float num_output) {
    float x = o[id];
    if (!(x > -INF && x < INF)) return;
    x = __fadd_rn(x, __fmul_rn(x, x > 0.0f ? up : down));
    if (num_output > 0.0f) x = __fadd_rn(x, -__fadd_rn(presence, __fmul_rn(frequency, num_output)));
    o[id] = x;
  };
  if (up != 0.0f || down != 0.0f || presence != 0.0f || frequency != 0.0f) {
    // Tokens that are in the draft alone; the others follow from the list.
    for (int i = 0; i < position; ++i) {
      i64 id = draft_tokens[i];
      u64 is_seen = id < 0 || id >= V;
      for (int j = 0; j < i; ++j) is_seen |= draft_tokens[j] == id;
      for (int j = threadIdx.x; j < num_seen; j += THREADS) is_seen |= seen_ids[b * num_seen + j] == id;
      if (!over_block(is_seen, s, Max()) && threadIdx.x == 0) penalise(id, (float)drafted(id));
    }
    for (int i = threadIdx.x; i < num_seen; i += THREADS) {
      i64 id = seen_ids[b * num_seen + i];
      if (id < V) penalise(id, __fadd_rn(fmaxf(seen_counts[b * num_seen + i] - 1.0f, 0.0f), (float)drafted(id)));
    }
  }
  __syncthreads();
  if (position < (int)counts[cEndBanned])
    for (int i = threadIdx.x; i < num_ends; i += THREADS) {
      i64 id = end_ids[b * num_ends + i];
      if (id < V) o[id] = -INF;
    }
  for (int i = threadIdx.x; i < num_bad; i += THREADS) {
    i64 last = bad_lasts[b * num_bad + i];
    const i64* wanted = bad_prefixes + ((i64)b * num_bad + i) * prefix;
    bool is_due = last < V;
    for (int j = 0; j < prefix && is_due; ++j) {
      int at = position + j;
      i64 token = at < prefix ? recent[at] : draft_tokens[at - prefix];
      is_due = wanted[j] == kNoToken || wanted[j] == token;
    }
    if (is_due) o[last] = -INF;
  }
}

// Draws one draft token per row, and keeps the probabilities that it was drawn from. Grid: B.
extern "C" __global__ void __launch_bounds__(THREADS)
propose(const float* logits, i64 batch_stride, int given_vocab, int V, int R, int D, const i64* counts,
        const float* settings, const i64* draws, const i64* seeds, const i64* positions, float* kept,
        const i64* draft_tokens, i64* next_tokens, i64* new_draft_tokens) {
  __shared__ Shared s;
  int b = blockIdx.x;
  counts += b * kCounts; settings += b * kSettings;
  Logits l = {logits + b * batch_stride, given_vocab < V ? given_vocab : V};
  int rule = (int)counts[cRule];
  Cut c = adjust(l, V, counts, settings, rule == kGreedy, s);
  int token = c.best;
  if (rule == kRaceRule) {
    token = race(c, l, V, seed_of(seeds + b * kLimbs), (u64)positions[b], s);
  } else if (rule != kGreedy) {
    float* row = kept + ((i64)b * D + counts[cKeepAt]) * V;
    u64 sum;
    each(l, V, [&](int id, float x) { row[id] = prob(c, x, id); });
    __syncthreads();
    token = draw([&](int id) { return fixed(row[id]); }, V, (u64)draws[b], &sum, s);
  }
  for (int r = threadIdx.x; r < R; r += THREADS)
    new_draft_tokens[b * R + r] = r == counts[cDepth] ? token : draft_tokens[b * R + r];
  if (threadIdx.x == 0) next_tokens[b] = token;
}

// Tests every position of every draft. Grid: R, B.
extern "C" __global__ void __launch_bounds__(THREADS)
test_drafts(const float* logits, int V, int R, int D, const i64* counts, const float* settings, const i64* draws,
            const i64* coins, const i64* seeds, const i64* positions, const float* kept, const i64* draft_tokens,
            Test* tests) {
  __shared__ Shared s;
  int r = blockIdx.x, b = blockIdx.y, at = b * R + r;
  counts += b * kCounts;
  if (settings) settings += b * kSettings;  // greedy rows do without
  int gamma = (int)counts[cGamma], rule = (int)counts[cRule];
  if (r > gamma) return;
  Logits l = {logits + (i64)at * V, V};
  Test test;
  Cut c = test.cut = adjust(l, V, counts, settings, rule == kGreedy, s);
  i64 drafted = r < gamma ? draft_tokens[at] : kNoToken;
  bool is_id = drafted >= 0 && drafted < V, is_point = counts[cFlags] & kPointMass;
  const float* q = kept + ((i64)b * D + r) * V;
  test.overlap = 0; test.token = c.best; test.is_kept = 0;
  u64 sum;
  if (!c.is_finite) {
  } else if (rule == kRaceRule) {
    test.token = race(c, l, V, seed_of(seeds + b * kLimbs), (u64)positions[at], s);
    test.is_kept = test.token == drafted;
  } else if (rule == kGreedy) {
    float lenience = settings ? settings[sGreedyLenience] : 0.0f;
    test.is_kept = c.best == drafted ||
        (lenience > 0.0f && is_id && exp_of(__fadd_rn(l.at((int)drafted), -c.peak)) >= lenience);
  } else if (rule == kMatch || r == gamma) {
    test.token = draw([&](int id) { return fixed(prob(c, l.at(id), id)); }, V, (u64)draws[at], &sum, s);
    test.is_kept = test.token == drafted;
  } else {
    float own_q = is_point ? (is_id ? 1.0f : 0.0f) : (is_id ? q[drafted] : 0.0f);
    u64 target = fixed(is_id ? prob(c, l.at((int)drafted), (int)drafted) : 0.0f);
    test.is_kept = scaled(fixed(__fmul_rn(own_q, settings[sLenience])), (u64)coins[at]) < target;
    if (!is_point) {
      u64 own = 0;
      each(l, V, [&](int id, float x) { own += fixed(fminf(prob(c, x, id), q[id])); });
      test.overlap = over_block(own, s, Sum());
    }
  }
  if (threadIdx.x == 0) { test.is_kept &= r < gamma; tests[at] = test; }
}

// Counts what is kept of every draft and finds the token that follows. Grid: B.
extern "C" __global__ void __launch_bounds__(THREADS)
answer(const float* logits, int V, int R, int D, const i64* counts, const i64* draws, const float* kept,
       const i64* draft_tokens, const Test* tests, i64* answers) {
  __shared__ Shared s;
  int b = blockIdx.x;
  counts += b * kCounts; tests += b * R; answers += b * (kAnswers + R);
  int gamma = (int)counts[cGamma], n = 0;
  while (n < gamma && tests[n].is_kept) ++n;
  const Test& test = tests[n];
  int token = test.token, fallback = 0;
  if (counts[cRule] == kRatio && n < gamma && test.cut.is_finite) {
    Cut c = test.cut;
    Logits l = {logits + (i64)(b * R + n) * V, V};
    bool is_point = counts[cFlags] & kPointMass;
    i64 drafted = draft_tokens[b * R + n];
    const float* q = kept + ((i64)b * D + n) * V;
    auto residual = [&](int id) {
      float own_q = is_point ? (id == drafted ? 1.0f : 0.0f) : q[id];
      return fixed(fmaxf(__fadd_rn(prob(c, l.at(id), id), -own_q), 0.0f));
    };
    u64 sum, uniform = (u64)draws[b * R + n];
    token = draw(residual, V, uniform, &sum, s);
    if (sum <= kSmallestResidual) {
      fallback = 1;
      token = draw([&](int id) { return fixed(prob(c, l.at(id), id)); }, V, uniform, &sum, s);
    }
  }
  for (int r = threadIdx.x; r < R; r += THREADS)
    answers[kAnswers + r] = r < gamma && r <= n ? (i64)tests[r].overlap : 0;
  if (threadIdx.x == 0) {
    answers[0] = n; answers[1] = token; answers[2] = test.cut.is_finite; answers[3] = fallback;
  }
}

// Log-probabilities under the softmax of raw logits, of the emitted tokens and of the N greatest. Grid: R, B.
extern "C" __global__ void __launch_bounds__(THREADS)
tops(const float* logits, int V, int R, int N, const i64* emitted, float* logprobs, i64* top_ids,
     float* top_logprobs) {
  __shared__ Shared s;
  int r = blockIdx.x, b = blockIdx.y, at = b * R + r;
  Logits l = {logits + (i64)at * V, V};
  Cut c = adjust(l, V, nullptr, nullptr, true, s);
  u64 own = 0;
  each(l, V, [&](int id, float x) { own += x > -INF ? fixed(exp_of(__fadd_rn(x, -c.peak))) : 0; });
  float norm = log_of(__fmul_rn((float)(i64)over_block(own, s, Sum()), 2.2737367544323206e-13f));
  auto logprob = [&](int id) { return __fadd_rn(__fadd_rn(l.at(id), -c.peak), -norm); };
  if (threadIdx.x == 0) logprobs[at] = logprob((int)emitted[at]);
  u64 last = ~0ull;
#pragma unroll 1
  for (int n = 0; n < N; ++n) {
    u64 top = 0;
    each(l, V, [&](int id, float x) {
      u64 p = place(key_of(x), id);
      if (p < last && p > top) top = p;
    });
    last = over_block(top, s, Max());
    int id = (int)~(u32)last;
    if (threadIdx.x == 0) { top_ids[(i64)at * N + n] = id; top_logprobs[(i64)at * N + n] = logprob(id); }
  }
}
