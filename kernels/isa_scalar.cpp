// Plain C++ for any CPU. Slower where fma is a library call, with the same bits.
#include "kernels.h"

#define OFFLOAD_ISA_NAME "scalar"
namespace offload::scalar {
#include "scalar.h"
using Vec = Lane;
#include "table.h"
}  // namespace offload::scalar
