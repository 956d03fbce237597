// A register of 64 bytes: AVX-512 with VPCLMULQDQ, which multiplies in each 16 bytes on their own.
#include "crc32_pclmul.h"

namespace offload::crc {
namespace {

struct Wide {
  static constexpr int bytes = 64;
  __m512i x;

  static Wide load(const uint8_t* p) { return {_mm512_loadu_si512(p)}; }
  static Wide keys(Keys k) { return {_mm512_broadcast_i32x4(Narrow::keys(k).x)}; }
};

inline Wide operator^(Wide a, Wide b) { return {_mm512_xor_si512(a.x, b.x)}; }
inline Wide fold(Wide a, Wide k) {
  return {_mm512_xor_si512(_mm512_clmulepi64_epi128(a.x, k.x, 0x00), _mm512_clmulepi64_epi128(a.x, k.x, 0x11))};
}

// The four quarters, one behind the other, as one.
inline Narrow fold_quarters(Wide wide) {
  const Narrow near = Narrow::keys(keys_of<8 * Narrow::bytes>);
  const Narrow quarters[4] = {{_mm512_extracti32x4_epi32(wide.x, 0)},
                              {_mm512_extracti32x4_epi32(wide.x, 1)},
                              {_mm512_extracti32x4_epi32(wide.x, 2)},
                              {_mm512_extracti32x4_epi32(wide.x, 3)}};
  Narrow total = quarters[0];
  for (int k = 1; k < 4; ++k) total = fold(total, near) ^ quarters[k];
  return total;
}

}  // namespace

uint32_t by_vpclmul(const void* data, int64_t bytes, uint32_t begin) {
  if (bytes < 4 * Wide::bytes) return crc32_folded<Narrow>(data, bytes, begin);
  const uint8_t* p = static_cast<const uint8_t*>(data);
  const Wide total = fold_all(load_first<Wide>(p, begin), p, bytes);
  return finish(fold_quarters(total), p, bytes);
}

}  // namespace offload::crc
