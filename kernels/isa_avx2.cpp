// 8 lanes: AVX2, FMA, F16C.
#include <immintrin.h>

#include "kernels.h"

#define OFFLOAD_ISA_NAME "avx2"
namespace offload::avx2 {
#include "scalar.h"

struct Vec {
  static constexpr int width = 8;
  __m256 x;
  static Vec set(float s) { return {_mm256_set1_ps(s)}; }
};

static inline Vec load(const float* p, Vec) { return {_mm256_loadu_ps(p)}; }
static inline Vec load(const bf16* p, Vec) {
  const __m128i half = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16))};
}
static inline Vec load(const f16* p, Vec) {
  return {_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))};
}

static inline void store(float* p, Vec v) { _mm256_storeu_ps(p, v.x); }
// The bits of bf16, to nearest even, each in a word of 32.
static inline __m256i bf16_bits(Vec v) {
  const __m256i u = _mm256_castps_si256(v.x), high = _mm256_srli_epi32(u, 16);
  const __m256i even = _mm256_and_si256(high, _mm256_set1_epi32(1));
  const __m256i rounded = _mm256_srli_epi32(_mm256_add_epi32(_mm256_add_epi32(u, _mm256_set1_epi32(0x7fff)), even), 16);
  const __m256i quiet = _mm256_or_si256(high, _mm256_set1_epi32(0x40));
  const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(v.x, v.x, _CMP_UNORD_Q));
  return _mm256_blendv_epi8(rounded, quiet, nan);
}
static inline void store(bf16* p, Vec v) {
  const __m256i words = bf16_bits(v);
  const __m128i packed = _mm_packus_epi32(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), packed);
}
static inline __m128i f16_bits(Vec v) { return _mm256_cvtps_ph(v.x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
static inline void store(f16* p, Vec v) { _mm_storeu_si128(reinterpret_cast<__m128i*>(p), f16_bits(v)); }

static inline Vec rounded(Vec v, const bf16*) { return {_mm256_castsi256_ps(_mm256_slli_epi32(bf16_bits(v), 16))}; }
static inline Vec rounded(Vec v, const f16*) { return {_mm256_cvtph_ps(f16_bits(v))}; }
static inline Vec where_same(Vec a, Vec b, Vec x, Vec y) {
  const __m256i same = _mm256_cmpeq_epi32(_mm256_castps_si256(a.x), _mm256_castps_si256(b.x));
  return {_mm256_blendv_ps(y.x, x.x, _mm256_castsi256_ps(same))};
}

static inline Vec operator+(Vec a, Vec b) { return {_mm256_add_ps(a.x, b.x)}; }
static inline Vec operator-(Vec a, Vec b) { return {_mm256_sub_ps(a.x, b.x)}; }
static inline Vec operator*(Vec a, Vec b) { return {_mm256_mul_ps(a.x, b.x)}; }
static inline Vec operator/(Vec a, Vec b) { return {_mm256_div_ps(a.x, b.x)}; }
static inline Vec fma(Vec a, Vec b, Vec c) { return {_mm256_fmadd_ps(a.x, b.x, c.x)}; }
static inline Vec at_least(Vec a, Vec b) { return {_mm256_max_ps(a.x, b.x)}; }
static inline Vec sqrt(Vec a) { return {_mm256_sqrt_ps(a.x)}; }
static inline Vec sign(Vec a) {
  const __m256 one = _mm256_or_ps(_mm256_and_ps(a.x, _mm256_set1_ps(-0.f)), _mm256_set1_ps(1.f));
  const __m256 value = _mm256_and_ps(one, _mm256_cmp_ps(a.x, _mm256_setzero_ps(), _CMP_NEQ_OQ));
  return {_mm256_blendv_ps(value, a.x, _mm256_cmp_ps(a.x, a.x, _CMP_UNORD_Q))};
}

#include "table.h"
}  // namespace offload::avx2
