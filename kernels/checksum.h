// Checksum of a piece of swapped bytes: 64 bits, at the speed of memory.
//
// 32 lanes of 32-bit words, each with a mixed state (xor, multiply, rotate) and a plain sum, folded with the length at
// the end. An error within one word, or in several words of different lanes that are one each, is always seen; two
// single-bit errors anywhere too, but for the same bit of one lane flipped opposite ways, which only the mixed state
// sees. Anything else is missed once in some 2^64 times. A CRC in the CPU's own instruction was tried first: at the
// speed of today's drives it needed most of a core (benchmarks/LOG.md). Kept in memory only, so that its definition may
// change with any version. Same value on every CPU; written once for all instruction sets in passes.h.
//
// One is taken of each sum_bytes. That is what a thread updates at a time, so that an update can take the sums of what it
// has just made while that is in its cache: from memory they would cost as much as reading all of it once more.
#pragma once

#include <cstdint>

#include "kernels.h"

namespace offload {

constexpr int64_t sum_bytes = 128 << 10;

inline uint64_t checksum(const void* data, int64_t bytes) {
  static const Table& best = []() -> const Table& {
    int count = 0;
    return *available_tables(count)[0];
  }();
  return best.checksum(data, bytes);
}

}  // namespace offload
