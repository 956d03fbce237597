// One element as a "vector" of width 1: the scalar instruction set, and the ends of ranges in all the others.
//
// Included inside the namespace of each instruction set, so that nothing compiled with wider instructions can be
// merged by the linker into code for a lesser CPU.

struct bf16 {
  uint16_t bits;
};
struct f16 {
  uint16_t bits;
};

static inline uint32_t bits_of(float x) {
  uint32_t u;
  __builtin_memcpy(&u, &x, 4);
  return u;
}
static inline float float_of(uint32_t u) {
  float x;
  __builtin_memcpy(&x, &u, 4);
  return x;
}

struct Lane {
  static constexpr int width = 1;
  float x;
  static Lane set(float s) { return {s}; }
};

// Addresses need no alignment, not even that of their type.
template <class T>
static inline T read(const T* p) {
  T value;
  __builtin_memcpy(&value, p, sizeof value);
  return value;
}
template <class T>
static inline void write(T* p, T value) {
  __builtin_memcpy(p, &value, sizeof value);
}

static inline Lane load(const float* p, Lane) { return {read(p)}; }
static inline Lane load(const bf16* p, Lane) { return {float_of(uint32_t(read(p).bits) << 16)}; }

static inline Lane load(const f16* p, Lane) {
  const uint32_t h = read(p).bits, sign = (h & 0x8000u) << 16, exponent = (h >> 10) & 31, mantissa = h & 0x3ffu;
  if (exponent == 31) {  // infinity, or NaN made quiet as the hardware does
    return {float_of(sign | 0x7f800000u | (mantissa << 13) | (mantissa ? 0x400000u : 0u))};
  }
  if (exponent == 0) {  // zero or denormal: exact in fp32
    const float magnitude = float(mantissa) * 0x1p-24f;
    return {float_of(sign | bits_of(magnitude))};
  }
  return {float_of(sign | ((exponent + 112) << 23) | (mantissa << 13))};
}

static inline void store(float* p, Lane v) { write(p, v.x); }

static inline void store(bf16* p, Lane v) {  // to nearest even; NaN stays NaN, quiet
  const uint32_t u = bits_of(v.x);
  const bool nan = (u & 0x7fffffffu) > 0x7f800000u;
  write(p, bf16{uint16_t(nan ? (u >> 16) | 0x40u : (u + 0x7fffu + ((u >> 16) & 1u)) >> 16)});
}

static inline void store(f16* p, Lane v) {  // to nearest even, denormals included; NaN stays NaN, quiet
  const uint32_t u = bits_of(v.x), sign = (u >> 16) & 0x8000u, a = u & 0x7fffffffu;
  uint32_t h;
  if (a > 0x7f800000u) {
    h = 0x7e00u | ((a >> 13) & 0x3ffu);
  } else if (a >= 0x477ff000u) {  // 65520 and above round to infinity
    h = 0x7c00u;
  } else if (a >= 0x38800000u) {  // normal: rebias, then round on the 13 bits that go
    const uint32_t r = a - (112u << 23);
    h = (r + 0xfffu + ((r >> 13) & 1u)) >> 13;
  } else {  // denormal or zero: adding one half puts the result's last bit at fp32's last bit, so the adder rounds
    h = bits_of(float_of(a) + 0.5f) - 0x3f000000u;
  }
  write(p, f16{uint16_t(sign | h)});
}

// The value that is left when `v` is stored so.
template <class Half>
static inline Lane rounded(Lane v, const Half*) {
  Half half;
  store(&half, v);
  return load(&half, Lane{});
}
// x where a and b have the same bits, y elsewhere.
static inline Lane where_same(Lane a, Lane b, Lane x, Lane y) { return bits_of(a.x) == bits_of(b.x) ? x : y; }

static inline Lane operator+(Lane a, Lane b) { return {a.x + b.x}; }
static inline Lane operator-(Lane a, Lane b) { return {a.x - b.x}; }
static inline Lane operator*(Lane a, Lane b) { return {a.x * b.x}; }
static inline Lane operator/(Lane a, Lane b) { return {a.x / b.x}; }
static inline Lane fma(Lane a, Lane b, Lane c) { return {__builtin_fmaf(a.x, b.x, c.x)}; }
// The greater one; b if a is NaN.
static inline Lane at_least(Lane a, Lane b) { return {a.x > b.x ? a.x : b.x}; }
static inline Lane sqrt(Lane a) { return {__builtin_sqrtf(a.x)}; }
static inline Lane sign(Lane a) { return {a.x > 0.f ? 1.f : a.x < 0.f ? -1.f : a.x == 0.f ? 0.f : a.x}; }
