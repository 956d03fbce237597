// Runs every kernel of every instruction set that this binary and CPU have, on numbers of all kinds, and prints a
// digest of the results: one line for each set. Equal lines mean equal bits. Also: a kernel writes its range and
// nothing else, however short the range and wherever it begins; a job runs on as many threads as it was given. Exits
// with 1 if anything of that is wrong. Stand-alone, so that it also runs where Python does not: under a sanitizer,
// under an emulator, on another architecture.
#include <chrono>
#include <cinttypes>
#include <condition_variable>
#include <cstdio>
#include <cstring>
#include <mutex>
#include <set>
#include <thread>
#include <vector>

#include "crc32.h"
#include "kernels.h"
#include "thread_team.h"

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

bool is_nan(float x, DType) { return x != x; }
bool is_nan(uint16_t x, DType dtype) { return (x & 0x7fff) > (dtype == DType::bf16 ? 0x7f80 : 0x7c00); }

class Digest {
 public:
  void add(const void* data, size_t bytes) {
    for (size_t i = 0; i < bytes; ++i) sum_ = (sum_ ^ static_cast<const uint8_t*>(data)[i]) * 1099511628211u;
  }
  // Any NaN counts as the same: which of two payloads an operation keeps differs between architectures.
  void add(const std::vector<float>& values) {
    for (float v : values) {
      if (is_nan(v, DType::f32)) v = as_float(0x7fc00000u);
      add(&v, 4);
    }
  }
  void add(const std::vector<uint16_t>& values, DType dtype) {
    for (uint16_t v : values) {
      if (is_nan(v, dtype)) v = 0x7fff;
      add(&v, 2);
    }
  }
  uint64_t value() const { return sum_; }

 private:
  uint64_t sum_ = 14695981039346656037u;
};

// Calls visit(kernel, scalars) for every rule, with scalars that take each of its branches.
template <class Visit>
void each_rule(const Table& t, const Visit& visit) {
  for (bool decoupled : {true, false}) {
    visit(t.adam, AdamScalars{0.1f, 0.999f, 0.001f, 0.03f, 1.f / 0.03f, 1e-8f, -1e-3f, 0.9f, false, decoupled, true});
    visit(t.adam, AdamScalars{-0.3f, 0.95f, 0.05f, 0.9f, 1.f / 0.9f, 0.f, -3.f, 0.1f, true, decoupled, false});
    visit(t.adam, AdamScalars{0.f, 0.95f, 0.05f, 1.f, 1.f, 0.f, -3.f, 0.1f, true, decoupled, true});
  }
  for (bool first : {true, false}) {
    visit(t.sgd, SgdScalars{-0.1f, 0.01f, 0.9f, 0.7f, true, true, !first, first});
    visit(t.sgd, SgdScalars{-0.1f, 0.f, 0.f, 1.f, false, false, false, first});
  }
  visit(t.adagrad, AdagradScalars{0.1f, 1e-10f, 0.01f, true});
  visit(t.lion, LionScalars{0.9f, 0.1f, 0.99f, 0.01f, -0.01f, 0.999f});
}

// The tensors of one update; `guard` elements on both sides of `count` ones, which no kernel may write.
struct Tensors {
  int64_t guard;
  std::vector<float> p, m, v, g;
  std::vector<uint16_t> half, narrow;

  Tensors(int64_t count, int64_t around)
      : guard(around),
        p(floats(count + 2 * guard, 1)),
        m(floats(count + 2 * guard, 2)),
        v(floats(count + 2 * guard, 3)),
        g(floats(count + 2 * guard, 4)),
        half(words(count + 2 * guard, 5)),
        narrow(count + 2 * guard, 0x1234) {}

  Buffers buffers(DType grad, DType out, int64_t tail_begin) {
    const void* gradient = half.data() + guard;
    if (grad == DType::f32) gradient = g.data() + guard;
    return Buffers{p.data() + guard,
                   gradient,
                   m.data() + guard,
                   v.data() + guard,
                   out == DType::none ? nullptr : narrow.data() + guard,
                   grad,
                   out,
                   0.75f,
                   tail_begin};
  }
};

template <class Visit>
void each_dtype(const Visit& visit) {
  for (DType grad : {DType::f32, DType::bf16, DType::f16}) {
    for (DType out : {DType::none, DType::bf16, DType::f16}) visit(grad, out);
  }
}

// --- the digest ---------------------------------------------------------------------------------------------------

void digest_updates(Digest& digest, const Table& t, int64_t count) {
  each_rule(t, [&](auto kernel, const auto& scalars) {
    each_dtype([&](DType grad, DType out) {
      Tensors x(count, 0);  // exact sizes, so that a sanitizer sees who reads or writes behind the end
      const Buffers b = x.buffers(grad, out, count - count % 8);
      const int64_t cut = count / 3;  // two ranges, so that the second starts anywhere
      kernel(b, scalars, 0, cut);
      kernel(b, scalars, cut, count);
      digest.add(x.p), digest.add(x.m), digest.add(x.v), digest.add(x.narrow, out);
      if (out == DType::none) return;
      for (int64_t i = 0; i < count; i += 3) x.narrow[i] = x.half[i];  // as set by user code
      Buffers adopting = b;
      adopting.adopt = true;
      kernel(adopting, scalars, 0, cut);
      kernel(adopting, scalars, cut, count);
      digest.add(x.p), digest.add(x.narrow, out);
    });
  });
}

void digest_sum(Digest& digest, const Table& t, const void* grad, DType dtype, int64_t count) {
  const double sum = t.sum_squares(grad, dtype, 0, count);
  digest.add(&sum, sizeof sum);
}

void digest_passes(Digest& digest, const Table& t, int64_t count) {
  const std::vector<float> wide = floats(count, 6);
  std::vector<float> back(count), finite = wide;
  std::vector<uint16_t> narrow(count);
  for (float& x : finite) x = x - x == 0.f ? x : 1.f;
  digest_sum(digest, t, finite.data(), DType::f32, count);
  for (DType half : {DType::bf16, DType::f16}) {
    t.cast(wide.data(), DType::f32, narrow.data(), half, 0, count);
    digest.add(narrow, half);
    t.cast(narrow.data(), half, back.data(), DType::f32, 0, count);
    digest.add(back);
    std::vector<uint16_t> numbers = words(count, 7);
    const uint16_t exponent = half == DType::bf16 ? 0x7f80 : 0x7c00;
    for (uint16_t& x : numbers) x = (x & exponent) == exponent ? 0x3c01 : x;  // neither infinity nor NaN
    digest_sum(digest, t, numbers.data(), half, count);
  }
  std::vector<float> p = wide, m = back, v = finite;
  t.touch(p.data(), wide.data(), m.data(), v.data(), 0, count);
  for (const std::vector<float>* written : {&p, &m, &v}) digest.add(written->data(), 4 * written->size());
}

// Pieces of exact size, so that a sanitizer sees who reads behind the end; in two, so that the second begins anywhere.
void digest_crc32(Digest& digest, const Table& t, int64_t bytes) {
  const Crc32 crc32 = crc32_of(t.name);
  Random random{uint64_t(bytes)};
  std::vector<uint8_t> data(bytes);
  for (uint8_t& byte : data) byte = uint8_t(random.next());
  const uint32_t whole = crc32(data.data(), bytes, 0);
  digest.add(&whole, sizeof whole);
  const int64_t cut = bytes / 3;
  const uint32_t pieces = crc32(data.data() + cut, bytes - cut, crc32(data.data(), cut, 0));
  digest.add(&pieces, sizeof pieces);
}

bool crc32_is_that_of_everybody(const Table& t) {
  const Crc32 crc32 = crc32_of(t.name);
  const std::vector<uint8_t> zeros(1 << 20);  // known values: zlib's
  return crc32("123456789", 9, 0) == 0xcbf43926u && crc32("", 0, 7) == 7 &&
         crc32(zeros.data(), int64_t(zeros.size()), 0) == 0xa738ea1cu;
}

uint64_t digest_of(const Table& t) {
  Digest digest;
  for (int64_t count : {0, 1, 3, 7, 8, 9, 15, 16, 17, 31, 33, 64, 1000, 4099}) {
    digest_updates(digest, t, count);
    digest_passes(digest, t, count);
  }
  for (int64_t bytes = 0; bytes < 700; ++bytes) digest_crc32(digest, t, bytes);
  digest_crc32(digest, t, 100003);
  return digest.value();
}

// --- ranges -------------------------------------------------------------------------------------------------------

constexpr int64_t longest = 40, around = 64;

// Bit by bit: `got` is `after` in [begin, end) and `before` outside. Any NaN is the same, see Digest.
template <class T>
bool only_range(const std::vector<T>& got, const std::vector<T>& before, const std::vector<T>& after, int64_t begin,
                int64_t end, DType dtype = DType::f32) {
  for (int64_t i = 0; i < int64_t(got.size()); ++i) {
    const bool inside = i >= begin + around && i < end + around;
    const T& expected = inside ? after[i] : before[i];
    if (inside && is_nan(expected, dtype) && is_nan(got[i], dtype)) continue;
    if (memcmp(&got[i], &expected, sizeof(T)) != 0) return false;
  }
  return true;
}

// Calls run(begin, end) for every range below `longest`.
template <class Run>
bool every_range(const Run& run) {
  for (int64_t begin = 0; begin <= longest; ++begin) {
    for (int64_t end = begin; end <= longest; ++end) {
      if (!run(begin, end)) return false;
    }
  }
  return true;
}

bool updates_keep_to_their_range(const Table& t) {
  bool right = true;
  each_rule(t, [&](auto kernel, const auto& scalars) {
    each_dtype([&](DType grad, DType out) {
      for (int64_t tail_begin : {int64_t{0}, int64_t{17}, longest}) {
        const Tensors before(longest, around);
        Tensors after = before, got = before;
        kernel(after.buffers(grad, out, tail_begin), scalars, 0, longest);
        right &= every_range([&](int64_t begin, int64_t end) {
          got.p = before.p, got.m = before.m, got.v = before.v, got.narrow = before.narrow;
          kernel(got.buffers(grad, out, tail_begin), scalars, begin, end);
          return only_range(got.p, before.p, after.p, begin, end) && only_range(got.m, before.m, after.m, begin, end) &&
                 only_range(got.v, before.v, after.v, begin, end) &&
                 only_range(got.narrow, before.narrow, after.narrow, begin, end, out);
        });
      }
    });
  });
  return right;
}

bool passes_keep_to_their_range(const Table& t) {
  bool right = true;
  const Tensors before(longest, around);
  for (DType half : {DType::bf16, DType::f16}) {
    Tensors after = before;
    t.cast(after.g.data() + around, DType::f32, after.narrow.data() + around, half, 0, longest);
    t.cast(after.half.data() + around, half, after.p.data() + around, DType::f32, 0, longest);
    right &= every_range([&](int64_t begin, int64_t end) {
      Tensors got = before;
      t.cast(got.g.data() + around, DType::f32, got.narrow.data() + around, half, begin, end);
      t.cast(got.half.data() + around, half, got.p.data() + around, DType::f32, begin, end);
      return only_range(got.narrow, before.narrow, after.narrow, begin, end, half) &&
             only_range(got.p, before.p, after.p, begin, end);
    });
  }
  Tensors after = before;
  t.touch(after.p.data() + around, after.g.data() + around, after.m.data() + around, after.v.data() + around, 0,
          longest);
  right &= every_range([&](int64_t begin, int64_t end) {
    Tensors got = before;
    t.touch(got.p.data() + around, got.g.data() + around, got.m.data() + around, got.v.data() + around, begin, end);
    return only_range(got.p, before.p, after.p, begin, end) && only_range(got.m, before.m, after.m, begin, end) &&
           only_range(got.v, before.v, after.v, begin, end);
  });
  return right;
}

// --- the team -----------------------------------------------------------------------------------------------------

// The threads, on a job small enough for an emulator.
bool team_adds_up() {
  team_set_limit(3);
  std::vector<int64_t> seen(1000);
  for (int round = 0; round < 20; ++round) {
    const Task count = [](const void* context, int64_t i) {
      ++(*static_cast<std::vector<int64_t>*>(const_cast<void*>(context)))[i];
    };
    team_run(int64_t(seen.size()), 0, count, &seen);
  }
  for (int64_t count : seen) {
    if (count != 20) return false;
  }
  return true;
}

// Which threads have come to a job; each piece of it waits until `expected` ones are there.
struct RollCall {
  size_t expected;
  std::mutex mutex;
  std::condition_variable came;
  std::set<std::thread::id> threads;

  static void answer(const void* context, int64_t) {
    RollCall& call = *static_cast<RollCall*>(const_cast<void*>(context));
    {
      std::unique_lock<std::mutex> lock(call.mutex);
      call.threads.insert(std::this_thread::get_id());
      call.came.notify_all();
      call.came.wait_for(lock, std::chrono::seconds(10), [&] { return call.threads.size() >= call.expected; });
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(1));  // time for those who should not come
  }
};

bool team_has_as_many_threads_as_it_counts() {
  team_set_limit(3);
  for (int lanes : {1, 2, 3, 4, 0}) {
    const size_t expected = lanes == 0 ? 3 : size_t(lanes < 3 ? lanes : 3);
    team_most_lanes();
    RollCall call{expected, {}, {}, {}};
    team_run(60, lanes, RollCall::answer, &call);
    if (call.threads.size() != expected || call.threads.count(std::this_thread::get_id()) != 1) return false;
    if (team_most_lanes() != int(expected)) return false;
  }
  return true;
}

bool report(const char* what, bool right) {
  printf("%s %s\n", what, right ? "ok" : "WRONG");
  return right;
}

}  // namespace

int main() {
  int count = 0;
  bool right = true;
  const Table* const* tables = available_tables(count);
  uint64_t first = 0;
  for (int i = 0; i < count; ++i) {
    const uint64_t digest = digest_of(*tables[i]);
    printf("%s %016" PRIx64 "\n", tables[i]->name, digest);
    if (i == 0) first = digest;
    right &= digest == first;
    if (!crc32_is_that_of_everybody(*tables[i])) right = report("check: CRC-32", false);
    if (!updates_keep_to_their_range(*tables[i])) right = report("check: range of an update", false);
    if (!passes_keep_to_their_range(*tables[i])) right = report("check: range of a cast or touch", false);
  }
  right &= report("check: team", team_adds_up());
  right &= report("check: threads", team_has_as_many_threads_as_it_counts());
  return right ? 0 : 1;
}
