// CRC-32 as zlib, gzip and PNG have it: the checksum of everything in a checkpoint, so that any tool can check one.
// Same value on every CPU. `begin` is the CRC of the bytes before, so that pieces can be added one by one.
#pragma once

#include <cstdint>

namespace offload {

using Crc32 = uint32_t (*)(const void* data, int64_t bytes, uint32_t begin);

// The fastest way of the instruction set with this name (see kernels.h) on this CPU; tables where it has no other.
Crc32 crc32_of(const char* isa);

namespace crc {
// Without the inversions at both ends, by tables: what the other ways use for short pieces.
uint32_t add_bytes(uint32_t state, const uint8_t* data, int64_t bytes);

uint32_t by_tables(const void* data, int64_t bytes, uint32_t begin);
uint32_t by_pclmul(const void* data, int64_t bytes, uint32_t begin);
uint32_t by_vpclmul(const void* data, int64_t bytes, uint32_t begin);
uint32_t by_pmull(const void* data, int64_t bytes, uint32_t begin);
}  // namespace crc

}  // namespace offload
