// AVX-512 on a CPU without it: SIMDe's portable intrinsics under their native names, and the few that the packaged
// version does not have, from AVX2 halves. For tests only.
#pragma once

#define SIMDE_ENABLE_NATIVE_ALIASES
#include <simde/x86/avx512.h>

static inline simde__m512i emulated_cvtepu16_epi32(__m256i words) {
  simde__m512i_private wide;
  wide.m256i[0] = _mm256_cvtepu16_epi32(_mm256_castsi256_si128(words));
  wide.m256i[1] = _mm256_cvtepu16_epi32(_mm256_extracti128_si256(words, 1));
  return simde__m512i_from_private(wide);
}
#define _mm512_cvtepu16_epi32 emulated_cvtepu16_epi32

static inline simde__m512 emulated_cvtph_ps(__m256i halves) {
  simde__m512_private wide;
  wide.m256[0] = _mm256_cvtph_ps(_mm256_castsi256_si128(halves));
  wide.m256[1] = _mm256_cvtph_ps(_mm256_extracti128_si256(halves, 1));
  return simde__m512_from_private(wide);
}
#define _mm512_cvtph_ps emulated_cvtph_ps

static inline __m256i emulated_cvtps_ph(simde__m512 floats) {
  const simde__m512_private wide = simde__m512_to_private(floats);
  return _mm256_set_m128i(_mm256_cvtps_ph(wide.m256[1], 0), _mm256_cvtps_ph(wide.m256[0], 0));
}
#undef _mm512_cvtps_ph
#define _mm512_cvtps_ph(floats, rounding) emulated_cvtps_ph(floats)

static inline __m256i emulated_cvtepi32_epi16(simde__m512i ints) {
  const simde__m512i_private wide = simde__m512i_to_private(ints);
  uint16_t low[16];
  for (int i = 0; i < 16; ++i) low[i] = uint16_t(wide.i32[i]);
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(low));
}
#define _mm512_cvtepi32_epi16 emulated_cvtepi32_epi16
