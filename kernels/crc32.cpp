// The CRC-32 by tables, 16 bytes at a time; and which way a CPU has.
#include "crc32.h"

#include <cstring>
#if defined(__aarch64__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

namespace offload {
namespace crc {
namespace {

constexpr uint32_t polynomial = 0xedb88320u;  // the lowest power of x in the highest bit
constexpr int slices = 16;

// of[k][byte]: what a byte adds to the state when k bytes come behind it.
struct Tables {
  uint32_t of[slices][256] = {};

  constexpr Tables() {
    for (uint32_t byte = 0; byte < 256; ++byte) {
      uint32_t state = byte;
      for (int bit = 0; bit < 8; ++bit) state = (state >> 1) ^ (state & 1 ? polynomial : 0);
      of[0][byte] = state;
    }
    for (int k = 1; k < slices; ++k) {
      for (int byte = 0; byte < 256; ++byte) {
        const uint32_t before = of[k - 1][byte];
        of[k][byte] = (before >> 8) ^ of[0][before & 0xff];
      }
    }
  }
};

constexpr Tables tables;

}  // namespace

uint32_t add_bytes(uint32_t state, const uint8_t* data, int64_t bytes) {
  for (; bytes >= slices; bytes -= slices, data += slices) {
    uint32_t next = 0;
#pragma GCC unroll 16
    for (int i = 0; i < slices; ++i) {
      const uint32_t before = i < 4 ? (state >> (8 * i)) & 0xff : 0;
      next ^= tables.of[slices - 1 - i][data[i] ^ before];
    }
    state = next;
  }
  for (; bytes > 0; --bytes, ++data) state = (state >> 8) ^ tables.of[0][(state ^ *data) & 0xff];
  return state;
}

uint32_t by_tables(const void* data, int64_t bytes, uint32_t begin) {
  return ~add_bytes(~begin, static_cast<const uint8_t*>(data), bytes);
}

}  // namespace crc

Crc32 crc32_of(const char* isa) {
  const bool is_scalar = strcmp(isa, "scalar") == 0;
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool is_narrow = strcmp(isa, "avx2") == 0;
  // CPUs with AVX2 have the instruction; a virtual machine may hide it.
  const bool has_pclmul = __builtin_cpu_supports("pclmul") && __builtin_cpu_supports("sse4.1");
#ifndef OFFLOAD_EMULATE_AVX512
  const bool has_wide = has_pclmul && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("vpclmulqdq");
  if (!is_scalar && !is_narrow && has_wide) return crc::by_vpclmul;
#else
  (void)is_narrow;
#endif
  if (!is_scalar && has_pclmul) return crc::by_pclmul;
#elif defined(__aarch64__)
  if (!is_scalar && (getauxval(AT_HWCAP) & HWCAP_PMULL) != 0) return crc::by_pmull;
#endif
  (void)is_scalar;
  return crc::by_tables;
}

}  // namespace offload
