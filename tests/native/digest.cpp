// Runs every kernel of every instruction set that this binary and CPU have, on numbers of all kinds, and prints a
// digest of the results: one line for each set. Equal lines mean equal bits. Stand-alone, so that it also runs where
// Python does not: under a sanitizer, under an emulator, on another architecture.
#include <cinttypes>
#include <cstdio>
#include <cstring>
#include <vector>

#include "crew.h"
#include "kernels.h"

using namespace offload;

namespace {

struct Random {
  uint64_t state;
  uint32_t next() {
    state = state * 6364136223846793005u + 1442695040888963407u;
    return uint32_t(state >> 32);
  }
};

float as_float(uint32_t bits) {
  float x;
  memcpy(&x, &bits, 4);
  return x;
}

// Mostly numbers near one, every fourth a random bit pattern: infinities, NaN, denormals, all of them.
std::vector<float> floats(int64_t count, uint64_t seed) {
  Random random{seed};
  std::vector<float> values(count);
  for (float& v : values) {
    const uint32_t bits = random.next();
    v = bits % 4 ? float(int32_t(random.next())) * 0x1p-31f : as_float(random.next());
  }
  return values;
}

std::vector<uint16_t> words(int64_t count, uint64_t seed) {
  Random random{seed};
  std::vector<uint16_t> values(count);
  for (uint16_t& v : values) v = uint16_t(random.next());
  return values;
}

class Digest {
 public:
  void add(const void* data, size_t bytes) {
    for (size_t i = 0; i < bytes; ++i) sum_ = (sum_ ^ static_cast<const uint8_t*>(data)[i]) * 1099511628211u;
  }
  // Any NaN counts as the same: which of two payloads an operation keeps differs between architectures.
  void add(const std::vector<float>& values) {
    for (float v : values) {
      if (v != v) v = as_float(0x7fc00000u);
      add(&v, 4);
    }
  }
  void add(const std::vector<uint16_t>& values, DType dtype) {
    const uint16_t exponent = dtype == DType::bf16 ? 0x7f80 : 0x7c00;
    for (uint16_t v : values) {
      if ((v & 0x7fff) > exponent) v = 0x7fff;
      add(&v, 2);
    }
  }
  uint64_t value() const { return sum_; }

 private:
  uint64_t sum_ = 14695981039346656037u;
};

template <class Scalars>
void update_all(Digest& digest, void (*kernel)(const Buffers&, const Scalars&, int64_t, int64_t), const Scalars& s,
                int64_t count) {
  for (DType grad : {DType::f32, DType::bf16, DType::f16}) {
    for (DType out : {DType::none, DType::bf16, DType::f16}) {
      std::vector<float> p = floats(count, 1), m = floats(count, 2), v = floats(count, 3), g = floats(count, 4);
      std::vector<uint16_t> half = words(count, 5), narrow(count);
      const void* gradient = grad == DType::f32 ? static_cast<const void*>(g.data()) : half.data();
      const Buffers b{p.data(), gradient, m.data(), v.data(), out == DType::none ? nullptr : narrow.data(),
                      grad,     out,      0.75f,    count - count % 8};
      const int64_t cut = count / 3;  // two ranges, so that the second starts anywhere
      kernel(b, s, 0, cut);
      kernel(b, s, cut, count);
      digest.add(p), digest.add(m), digest.add(v), digest.add(narrow, out);
    }
  }
}

uint64_t digest_of(const Table& t) {
  Digest digest;
  for (int64_t count : {0, 1, 3, 7, 8, 9, 15, 16, 17, 31, 33, 64, 1000, 4099}) {
    for (bool decoupled : {true, false}) {
      update_all(digest, t.adam, AdamScalars{0.1f, 0.999f, 0.001f, 0.03f, 1.f / 0.03f, 1e-8f, -1e-3f, 0.9f, false, decoupled, true}, count);
      update_all(digest, t.adam, AdamScalars{-0.3f, 0.95f, 0.05f, 0.9f, 1.f / 0.9f, 0.f, -3.f, 0.1f, true, decoupled, false}, count);
    }
    for (bool first : {true, false}) {
      update_all(digest, t.sgd, SgdScalars{-0.1f, 0.01f, 0.9f, 0.7f, true, true, !first, first}, count);
      update_all(digest, t.sgd, SgdScalars{-0.1f, 0.f, 0.f, 1.f, false, false, false, first}, count);
    }
    update_all(digest, t.adagrad, AdagradScalars{0.1f, 1e-10f, 0.01f, true}, count);
    update_all(digest, t.lion, LionScalars{0.9f, 0.1f, 0.99f, 0.01f, -0.01f, 0.999f}, count);
    std::vector<float> wide = floats(count, 6), back(count);
    std::vector<uint16_t> narrow(count);
    std::vector<float> finite = wide;
    for (float& x : finite) x = x - x == 0.f ? x : 1.f;
    for (DType half : {DType::bf16, DType::f16}) {
      t.cast(wide.data(), DType::f32, narrow.data(), half, 0, count);
      digest.add(narrow, half);
      t.cast(narrow.data(), half, back.data(), DType::f32, 0, count);
      digest.add(back);
    }
    const double sum = t.sum_squares(finite.data(), DType::f32, 0, count);
    digest.add(&sum, sizeof sum);
    std::vector<float> p = wide, m = back, v = finite;
    t.touch(p.data(), wide.data(), m.data(), v.data(), 0, count);
    digest.add(v.data(), 4 * v.size());
  }
  return digest.value();
}

// The threads, on a job small enough for an emulator.
bool crew_adds_up() {
  crew_set_limit(3);
  std::vector<int64_t> seen(1000);
  for (int round = 0; round < 20; ++round) {
    crew_run(int64_t(seen.size()), 0,
             [](const void* context, int64_t i) { ++(*static_cast<std::vector<int64_t>*>(const_cast<void*>(context)))[i]; },
             &seen);
  }
  for (int64_t count : seen) {
    if (count != 20) return false;
  }
  return true;
}

}  // namespace

int main() {
  int count = 0;
  const Table* const* tables = available_tables(count);
  for (int i = 0; i < count; ++i) printf("%s %016" PRIx64 "\n", tables[i]->name, digest_of(*tables[i]));
  printf("crew %s\n", crew_adds_up() ? "ok" : "WRONG");
  return 0;
}
