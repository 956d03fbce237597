// Passes without an update: gradient statistics, casts, checksums, the benchmarks' ceiling. Written once for all sets.

// Lanes of the sum of squares: element i of a block adds to lane i % 32, in order; then lanes are added pairwise.
// The order is part of the result, so every instruction set keeps it. Squares of fp32 are exact in double.
constexpr int stats_lanes = 32;

typedef double Double4 __attribute__((vector_size(32)));
typedef float Float4 __attribute__((vector_size(16)));

template <class T>
static double sum_squares_of(const T* grad, int64_t begin, int64_t end) {
  constexpr int quads = stats_lanes / 4;
  Double4 sums[quads] = {};
  int64_t i = begin;
  for (; i + stats_lanes <= end; i += stats_lanes) {
    alignas(64) float x[stats_lanes];
    for (int k = 0; k < stats_lanes; k += Vec::width) store(x + k, load(grad + i + k, Vec{}));
    for (int q = 0; q < quads; ++q) {
      Float4 f;
      __builtin_memcpy(&f, x + 4 * q, sizeof f);
      const Double4 d = __builtin_convertvector(f, Double4);
      sums[q] += d * d;
    }
  }
  double lanes[stats_lanes];
  __builtin_memcpy(lanes, sums, sizeof lanes);
  for (int lane = 0; i < end; ++i, ++lane) {
    const double d = load(grad + i, Lane{}).x;
    lanes[lane] += d * d;
  }
  for (int half = stats_lanes / 2; half > 0; half /= 2) {
    for (int k = 0; k < half; ++k) lanes[k] += lanes[k + half];
  }
  return lanes[0];
}

static double sum_squares(const void* grad, DType dtype, int64_t begin, int64_t end) {
  switch (dtype) {
    case DType::bf16: return sum_squares_of(static_cast<const bf16*>(grad), begin, end);
    case DType::f16: return sum_squares_of(static_cast<const f16*>(grad), begin, end);
    default: return sum_squares_of(static_cast<const float*>(grad), begin, end);
  }
}

template <class From, class To>
static void cast_range(const void* source, void* target, int64_t begin, int64_t end) {
  const From* from = static_cast<const From*>(source);
  To* to = static_cast<To*>(target);
  int64_t i = begin;
  for (; i + Vec::width <= end; i += Vec::width) store(to + i, load(from + i, Vec{}));
  for (; i < end; ++i) store(to + i, load(from + i, Lane{}));
}

// Between fp32 and a 16-bit type, either way.
static void cast(const void* source, DType from, void* target, DType to, int64_t begin, int64_t end) {
  if (from == DType::bf16) return cast_range<bf16, float>(source, target, begin, end);
  if (from == DType::f16) return cast_range<f16, float>(source, target, begin, end);
  if (to == DType::bf16) return cast_range<float, bf16>(source, target, begin, end);
  return cast_range<float, f16>(source, target, begin, end);
}

typedef uint32_t Words __attribute__((vector_size(4 * (Vec::width < 4 ? 4 : Vec::width))));

// The checksum of checksum.h. One step takes one word in each of 32 lanes and is a bijection of both the lane's state
// and the word, so that an error within one word of a lane can never be lost on the way.
struct Stripe {
  static constexpr int lanes = 32, width = sizeof(Words) / 4, vectors = lanes / width;
  Words mixed[vectors], sums[vectors];

  void add(const uint8_t* bytes) {
#pragma GCC unroll 8
    for (int k = 0; k < vectors; ++k) {
      Words w;
      __builtin_memcpy(&w, bytes + k * sizeof w, sizeof w);
      const Words x = (mixed[k] ^ w) * 0x9e3779b1u;
      mixed[k] = (x << 13) | (x >> 19);
      sums[k] += w;
    }
  }
};

static inline uint64_t fold(uint64_t total, uint32_t word) {
  total = (total ^ word) * 0x9e3779b97f4a7c15u;
  return total ^ (total >> 32);
}

static uint64_t checksum(const void* data, int64_t bytes) {
  constexpr int64_t stripe = 4 * Stripe::lanes;
  const auto* p = static_cast<const uint8_t*>(data);
  Stripe state;
  uint32_t words[Stripe::lanes];
  for (int lane = 0; lane < Stripe::lanes; ++lane) words[lane] = 0x85ebca6bu * uint32_t(lane + 1);
  __builtin_memcpy(state.mixed, words, sizeof words);
  __builtin_memset(state.sums, 0, sizeof state.sums);
  int64_t left = bytes;
  for (; left >= stripe; left -= stripe, p += stripe) state.add(p);
  if (left > 0) {
    uint8_t last[stripe] = {};
    __builtin_memcpy(last, p, left);
    state.add(last);
  }
  uint64_t total = uint64_t(bytes);
  __builtin_memcpy(words, state.mixed, sizeof words);
  for (uint32_t word : words) total = fold(total, word);
  __builtin_memcpy(words, state.sums, sizeof words);
  for (uint32_t word : words) total = fold(total, word);
  return total;
}

static void touch(float* p, const float* g, float* m, float* v, int64_t begin, int64_t end) {
  constexpr int width = sizeof(Words) / 4;
  int64_t i = begin;
  for (; i + turn <= end; i += turn) {
#pragma GCC unroll 4
    for (int k = 0; k < turn; k += width) {
      Words wp, wg, wm, wv;
      __builtin_memcpy(&wg, g + i + k, sizeof wg);
      __builtin_memcpy(&wp, p + i + k, sizeof wp);
      __builtin_memcpy(&wm, m + i + k, sizeof wm);
      __builtin_memcpy(&wv, v + i + k, sizeof wv);
      wp ^= wg, wm ^= wg, wv ^= wg;
      __builtin_memcpy(p + i + k, &wp, sizeof wp);
      __builtin_memcpy(m + i + k, &wm, sizeof wm);
      __builtin_memcpy(v + i + k, &wv, sizeof wv);
    }
  }
  for (; i < end; ++i) {
    const uint32_t w = bits_of(read(g + i));
    float* const written[] = {p, m, v};
    for (float* x : written) write(x + i, float_of(bits_of(read(x + i)) ^ w));
  }
}
