// 16 lanes: AVX-512F alone, which every CPU with AVX-512 has.
#ifdef OFFLOAD_EMULATE_AVX512
#include "avx512_by_simde.h"
#else
#include <immintrin.h>
#endif

#include "kernels.h"

#define OFFLOAD_ISA_NAME "avx512"
namespace offload::avx512 {
#include "scalar.h"

struct Vec {
  static constexpr int width = 16;
  __m512 x;
  static Vec set(float s) { return {_mm512_set1_ps(s)}; }
};

static inline __m256i load_half(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
static inline void store_half(void* p, __m256i v) { _mm256_storeu_si256(static_cast<__m256i*>(p), v); }

static inline Vec load(const float* p, Vec) { return {_mm512_loadu_ps(p)}; }
static inline Vec load(const bf16* p, Vec) {
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(load_half(p)), 16))};
}
static inline Vec load(const f16* p, Vec) { return {_mm512_cvtph_ps(load_half(p))}; }

static inline void store(float* p, Vec v) { _mm512_storeu_ps(p, v.x); }
// The bits of bf16, to nearest even, each in a word of 32.
static inline __m512i bf16_bits(Vec v) {
  const __m512i u = _mm512_castps_si512(v.x), high = _mm512_srli_epi32(u, 16);
  const __m512i even = _mm512_and_si512(high, _mm512_set1_epi32(1));
  const __m512i rounded = _mm512_srli_epi32(_mm512_add_epi32(_mm512_add_epi32(u, _mm512_set1_epi32(0x7fff)), even), 16);
  const __m512i quiet = _mm512_or_si512(high, _mm512_set1_epi32(0x40));
  const __mmask16 nan = _mm512_cmp_ps_mask(v.x, v.x, _CMP_UNORD_Q);
  return _mm512_mask_blend_epi32(nan, rounded, quiet);
}
static inline void store(bf16* p, Vec v) { store_half(p, _mm512_cvtepi32_epi16(bf16_bits(v))); }
static inline __m256i f16_bits(Vec v) { return _mm512_cvtps_ph(v.x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
static inline void store(f16* p, Vec v) { store_half(p, f16_bits(v)); }

static inline Vec rounded(Vec v, const bf16*) { return {_mm512_castsi512_ps(_mm512_slli_epi32(bf16_bits(v), 16))}; }
static inline Vec rounded(Vec v, const f16*) { return {_mm512_cvtph_ps(f16_bits(v))}; }
static inline Vec where_same(Vec a, Vec b, Vec x, Vec y) {
  const __mmask16 same = _mm512_cmpeq_epi32_mask(_mm512_castps_si512(a.x), _mm512_castps_si512(b.x));
  return {_mm512_mask_blend_ps(same, y.x, x.x)};
}

static inline Vec operator+(Vec a, Vec b) { return {_mm512_add_ps(a.x, b.x)}; }
static inline Vec operator-(Vec a, Vec b) { return {_mm512_sub_ps(a.x, b.x)}; }
static inline Vec operator*(Vec a, Vec b) { return {_mm512_mul_ps(a.x, b.x)}; }
static inline Vec operator/(Vec a, Vec b) { return {_mm512_div_ps(a.x, b.x)}; }
static inline Vec fma(Vec a, Vec b, Vec c) { return {_mm512_fmadd_ps(a.x, b.x, c.x)}; }
static inline Vec at_least(Vec a, Vec b) { return {_mm512_max_ps(a.x, b.x)}; }
static inline Vec sqrt(Vec a) { return {_mm512_sqrt_ps(a.x)}; }
static inline Vec sign(Vec a) {
  const __mmask16 positive = _mm512_cmp_ps_mask(a.x, _mm512_setzero_ps(), _CMP_GT_OQ);
  const __mmask16 negative = _mm512_cmp_ps_mask(a.x, _mm512_setzero_ps(), _CMP_LT_OQ);
  const __mmask16 nan = _mm512_cmp_ps_mask(a.x, a.x, _CMP_UNORD_Q);
  __m512 value = _mm512_mask_blend_ps(positive, _mm512_setzero_ps(), _mm512_set1_ps(1.f));
  value = _mm512_mask_blend_ps(negative, value, _mm512_set1_ps(-1.f));
  return {_mm512_mask_blend_ps(nan, value, a.x)};
}

#include "table.h"
}  // namespace offload::avx512
