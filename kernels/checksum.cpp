#include "checksum.h"

#include <array>
#include <cstring>

#if defined(__x86_64__)
#include <nmmintrin.h>
#define OFFLOAD_CRC_TARGET __attribute__((target("sse4.2")))
#elif defined(__aarch64__) && defined(__linux__)
#include <arm_acle.h>
#include <sys/auxv.h>
#define OFFLOAD_CRC_TARGET __attribute__((target("+crc")))
#endif

namespace offload {
namespace {

constexpr int lanes = 4;

std::array<uint32_t, 256> make_table() {
  std::array<uint32_t, 256> table{};
  for (uint32_t i = 0; i < 256; ++i) {
    uint32_t crc = i;
    for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ (crc & 1 ? 0x82f63b78u : 0u);
    table[i] = crc;
  }
  return table;
}

struct ByTable {
  static uint32_t byte(uint32_t crc, uint8_t value) {
    static const std::array<uint32_t, 256> table = make_table();
    return (crc >> 8) ^ table[(crc ^ value) & 0xff];
  }
  static uint32_t word(uint32_t crc, uint64_t value) {
    for (int i = 0; i < 8; ++i) crc = byte(crc, uint8_t(value >> (8 * i)));
    return crc;
  }
};

// Always inlined, so that it is compiled with the instructions of its caller.
template <class Crc>
[[gnu::always_inline]] inline uint32_t sum(const void* data, int64_t bytes) {
  const auto* p = static_cast<const uint8_t*>(data);
  uint32_t crc[lanes] = {~0u, ~0u, ~0u, ~0u};
  int64_t left = bytes;
  for (; left >= 8 * lanes; left -= 8 * lanes, p += 8 * lanes) {
    uint64_t words[lanes];
    memcpy(words, p, sizeof words);
    for (int lane = 0; lane < lanes; ++lane) crc[lane] = Crc::word(crc[lane], words[lane]);
  }
  uint32_t total = ~0u;
  for (uint32_t lane : crc) total = Crc::word(total, lane);
  for (; left > 0; --left) total = Crc::byte(total, *p++);
  return ~Crc::word(total, uint64_t(bytes));
}

#ifdef OFFLOAD_CRC_TARGET
struct ByInstruction {
#if defined(__x86_64__)
  OFFLOAD_CRC_TARGET static uint32_t byte(uint32_t crc, uint8_t value) { return _mm_crc32_u8(crc, value); }
  OFFLOAD_CRC_TARGET static uint32_t word(uint32_t crc, uint64_t value) { return uint32_t(_mm_crc32_u64(crc, value)); }
#else
  OFFLOAD_CRC_TARGET static uint32_t byte(uint32_t crc, uint8_t value) { return __crc32cb(crc, value); }
  OFFLOAD_CRC_TARGET static uint32_t word(uint32_t crc, uint64_t value) { return __crc32cd(crc, value); }
#endif
};

OFFLOAD_CRC_TARGET uint32_t checksum_by_instruction(const void* data, int64_t bytes) {
  return sum<ByInstruction>(data, bytes);
}
#endif

bool ask_cpu() {
#if defined(__x86_64__)
  return __builtin_cpu_supports("sse4.2");
#elif defined(OFFLOAD_CRC_TARGET)
  return getauxval(AT_HWCAP) & HWCAP_CRC32;
#else
  return false;
#endif
}

}  // namespace

bool checksum_in_hardware() {
  static const bool there = ask_cpu();
  return there;
}

uint32_t checksum_by_table(const void* data, int64_t bytes) { return sum<ByTable>(data, bytes); }

uint32_t checksum(const void* data, int64_t bytes) {
#ifdef OFFLOAD_CRC_TARGET
  if (checksum_in_hardware()) return checksum_by_instruction(data, bytes);
#endif
  return checksum_by_table(data, bytes);
}

}  // namespace offload
