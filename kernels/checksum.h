// Checksum of a piece of swapped bytes.
//
// CRC-32C in four lanes (8-byte word i goes to lane i % 4), which the CPU's instruction computes side by side, then
// CRC-32C over the four lanes, the bytes left over and the length. A change of up to 32 neighbouring bits within a
// word is always seen, anything else is missed once in four billion times. Kept in memory only, so its definition may
// change with any version. Same value on every CPU.
#pragma once

#include <cstdint>

namespace offload {

uint32_t checksum(const void* data, int64_t bytes);
uint32_t checksum_by_table(const void* data, int64_t bytes);  // the plain version, and the judge of the other
bool checksum_in_hardware();

}  // namespace offload
