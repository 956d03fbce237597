// Which tables this binary holds and this CPU can run.
#include "kernels.h"

namespace offload {

namespace scalar {
extern const Table table;
}
#if defined(__x86_64__)
namespace avx2 {
extern const Table table;
}
namespace avx512 {
extern const Table table;
}
#elif defined(__aarch64__)
namespace neon {
extern const Table table;
}
#endif

namespace {

struct Found {
  const Table* tables[3];
  int count = 0;

  Found() {
#if defined(__x86_64__)
    // These also ask whether the operating system saves the wide registers.
    __builtin_cpu_init();
    const bool has_avx2 =
        __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
#ifdef OFFLOAD_EMULATE_AVX512
    tables[count++] = &avx512::table;
#else
    if (has_avx2 && __builtin_cpu_supports("avx512f")) tables[count++] = &avx512::table;
#endif
    if (has_avx2) tables[count++] = &avx2::table;
#elif defined(__aarch64__)
    tables[count++] = &neon::table;
#endif
    tables[count++] = &scalar::table;
  }
};

}  // namespace

const Table* const* available_tables(int& count) {
  static const Found found;
  count = found.count;
  return found.tables;
}

}  // namespace offload
