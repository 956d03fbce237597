// A register of 16 bytes: SSE with PCLMULQDQ.
#pragma once

#include <immintrin.h>

#include "crc32_fold.h"

namespace offload::crc {
namespace {

struct Narrow {
  static constexpr int bytes = 16;
  __m128i x;

  static Narrow load(const uint8_t* p) { return {_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))}; }
  static Narrow keys(Keys k) { return {_mm_set_epi64x(int64_t(k.low), int64_t(k.high))}; }
  void store(uint8_t* p) const { _mm_storeu_si128(reinterpret_cast<__m128i*>(p), x); }
};

inline Narrow operator^(Narrow a, Narrow b) { return {_mm_xor_si128(a.x, b.x)}; }
inline Narrow fold(Narrow a, Narrow k) {
  return {_mm_xor_si128(_mm_clmulepi64_si128(a.x, k.x, 0x00), _mm_clmulepi64_si128(a.x, k.x, 0x11))};
}

}  // namespace
}  // namespace offload::crc
