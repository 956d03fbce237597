// A register of 16 bytes: NEON with PMULL, which most 64-bit Arm CPUs have.
#include <arm_neon.h>

#include "crc32_fold.h"

namespace offload::crc {
namespace {

struct Narrow {
  static constexpr int bytes = 16;
  uint64x2_t x;

  static Narrow load(const uint8_t* p) { return {vreinterpretq_u64_u8(vld1q_u8(p))}; }
  static Narrow keys(Keys k) { return {vcombine_u64(vcreate_u64(k.high), vcreate_u64(k.low))}; }
  void store(uint8_t* p) const { vst1q_u8(p, vreinterpretq_u8_u64(x)); }
};

inline Narrow operator^(Narrow a, Narrow b) { return {veorq_u64(a.x, b.x)}; }
inline uint64x2_t multiply(uint64_t a, uint64_t b) {
  return vreinterpretq_u64_p128(vmull_p64(poly64_t(a), poly64_t(b)));
}
inline Narrow fold(Narrow a, Narrow k) {
  return {veorq_u64(multiply(vgetq_lane_u64(a.x, 0), vgetq_lane_u64(k.x, 0)),
                    multiply(vgetq_lane_u64(a.x, 1), vgetq_lane_u64(k.x, 1)))};
}

}  // namespace

uint32_t by_pmull(const void* data, int64_t bytes, uint32_t begin) { return crc32_folded<Narrow>(data, bytes, begin); }

}  // namespace offload::crc
