#include "crc32_pclmul.h"

namespace offload::crc {

uint32_t by_pclmul(const void* data, int64_t bytes, uint32_t begin) { return crc32_folded<Narrow>(data, bytes, begin); }

}  // namespace offload::crc
