// CRC-32 by multiplication without carries, for any CPU that has it. Included by the crc32_*.cpp, which bring a type
// for the register, V: V::load, V::keys, fold, ^; and for V of 16 bytes store.
//
// A register holds a polynomial over bits, its highest power in bit 0 of byte 0. A register may be moved n bits towards
// the end of the data: multiplied by x^n, and only what is left of that modulo the CRC's polynomial matters. So both its
// halves are multiplied by a power of x that is already reduced to 32 bits, and the sum fits a register again. Four
// registers are moved at a time, over the four behind them; in the end one is left, which the tables finish.
//
// The product of two halves lies one bit too low in the register, which is one power of x too much: the keys have one
// less.
#pragma once

#include <cstring>

#include "crc32.h"

namespace offload::crc {

// x^degree modulo the polynomial, in a half register.
constexpr uint64_t power(int degree) {
  uint32_t value = 0x80000000u;
  for (int i = 0; i < degree; ++i) value = (value >> 1) ^ (value & 1 ? 0xedb88320u : 0);
  return uint64_t(value) << 32;
}

// What moves a register by so many bits: for the half with the higher powers, and for the other.
struct Keys {
  uint64_t high, low;
};

template <int bits>
constexpr Keys keys_of{power(bits + 63), power(bits - 1)};

// One register for all that can be taken in whole registers; `p` and `left` are what remains. `first` is what is at p,
// of which there are at least four registers.
template <class V>
static inline V fold_all(V first, const uint8_t*& p, int64_t& left) {
  constexpr int64_t step = V::bytes;
  const V near = V::keys(keys_of<8 * step>), far = V::keys(keys_of<4 * 8 * step>);
  V sums[4] = {first, V::load(p + step), V::load(p + 2 * step), V::load(p + 3 * step)};
  for (p += 4 * step, left -= 4 * step; left >= 4 * step; p += 4 * step, left -= 4 * step) {
#pragma GCC unroll 4
    for (int k = 0; k < 4; ++k) sums[k] = fold(sums[k], far) ^ V::load(p + k * step);
  }
  V total = sums[0];
  for (int k = 1; k < 4; ++k) total = fold(total, near) ^ sums[k];
  for (; left >= step; p += step, left -= step) total = fold(total, near) ^ V::load(p);
  return total;
}

// The same for what remains when a register is there already.
template <class V>
static inline uint32_t finish(V total, const uint8_t* p, int64_t left) {
  const V near = V::keys(keys_of<8 * V::bytes>);
  for (; left >= V::bytes; p += V::bytes, left -= V::bytes) total = fold(total, near) ^ V::load(p);
  uint8_t last[V::bytes];
  total.store(last);
  return ~add_bytes(add_bytes(0, last, V::bytes), p, left);
}

// The bytes at p with the state of those before them, which belongs to the first four.
template <class V>
static inline V load_first(const uint8_t* p, uint32_t begin) {
  uint8_t first[V::bytes];
  memcpy(first, p, sizeof first);
  uint32_t word;
  memcpy(&word, first, 4);
  word ^= ~begin;
  memcpy(first, &word, 4);
  return V::load(first);
}

template <class V>
static inline uint32_t crc32_folded(const void* data, int64_t bytes, uint32_t begin) {
  if (bytes < 4 * V::bytes) return by_tables(data, bytes, begin);
  const uint8_t* p = static_cast<const uint8_t*>(data);
  const V total = fold_all(load_first<V>(p, begin), p, bytes);
  return finish(total, p, bytes);
}

}  // namespace offload::crc
