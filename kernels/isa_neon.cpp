// 4 lanes: NEON, part of every 64-bit Arm.
#include <arm_neon.h>

#include "kernels.h"

#define OFFLOAD_ISA_NAME "neon"
namespace offload::neon {
#include "scalar.h"

struct Vec {
  static constexpr int width = 4;
  float32x4_t x;
  static Vec set(float s) { return {vdupq_n_f32(s)}; }
};

static inline const uint16_t* words(const void* p) { return static_cast<const uint16_t*>(p); }
static inline uint16_t* words(void* p) { return static_cast<uint16_t*>(p); }

static inline Vec load(const float* p, Vec) { return {vld1q_f32(p)}; }
static inline Vec load(const bf16* p, Vec) { return {vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(words(p)), 16))}; }
static inline Vec load(const f16* p, Vec) { return {vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(words(p))))}; }

static inline void store(float* p, Vec v) { vst1q_f32(p, v.x); }
// The bits of bf16, to nearest even, each in a word of 32.
static inline uint32x4_t bf16_bits(Vec v) {
  const uint32x4_t u = vreinterpretq_u32_f32(v.x), high = vshrq_n_u32(u, 16);
  const uint32x4_t even = vandq_u32(high, vdupq_n_u32(1));
  const uint32x4_t rounded = vshrq_n_u32(vaddq_u32(vaddq_u32(u, vdupq_n_u32(0x7fff)), even), 16);
  const uint32x4_t quiet = vorrq_u32(high, vdupq_n_u32(0x40));
  const uint32x4_t number = vceqq_f32(v.x, v.x);
  return vbslq_u32(number, rounded, quiet);
}
static inline void store(bf16* p, Vec v) { vst1_u16(words(p), vmovn_u32(bf16_bits(v))); }
static inline void store(f16* p, Vec v) { vst1_u16(words(p), vreinterpret_u16_f16(vcvt_f16_f32(v.x))); }

static inline Vec rounded(Vec v, const bf16*) { return {vreinterpretq_f32_u32(vshlq_n_u32(bf16_bits(v), 16))}; }
static inline Vec rounded(Vec v, const f16*) { return {vcvt_f32_f16(vcvt_f16_f32(v.x))}; }
static inline Vec where_same(Vec a, Vec b, Vec x, Vec y) {
  return {vbslq_f32(vceqq_u32(vreinterpretq_u32_f32(a.x), vreinterpretq_u32_f32(b.x)), x.x, y.x)};
}

static inline Vec operator+(Vec a, Vec b) { return {vaddq_f32(a.x, b.x)}; }
static inline Vec operator-(Vec a, Vec b) { return {vsubq_f32(a.x, b.x)}; }
static inline Vec operator*(Vec a, Vec b) { return {vmulq_f32(a.x, b.x)}; }
static inline Vec operator/(Vec a, Vec b) { return {vdivq_f32(a.x, b.x)}; }
static inline Vec fma(Vec a, Vec b, Vec c) { return {vfmaq_f32(c.x, a.x, b.x)}; }
static inline Vec at_least(Vec a, Vec b) { return {vmaxnmq_f32(a.x, b.x)}; }
static inline Vec sqrt(Vec a) { return {vsqrtq_f32(a.x)}; }
static inline Vec sign(Vec a) {
  const float32x4_t zero = vdupq_n_f32(0.f);
  float32x4_t value = vbslq_f32(vcgtq_f32(a.x, zero), vdupq_n_f32(1.f), zero);
  value = vbslq_f32(vcltq_f32(a.x, zero), vdupq_n_f32(-1.f), value);
  return {vbslq_f32(vceqq_f32(a.x, a.x), value, a.x)};
}

#include "table.h"
}  // namespace offload::neon
