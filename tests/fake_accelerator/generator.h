// Random numbers: a counter per device. Each random operator takes one number when it is issued and seeds its CPU
// kernel with it, so the schedule cannot change what is drawn.
#pragma once

#include <ATen/core/Generator.h>

namespace fake {

const at::Generator& default_generator(int device);
at::Generator new_generator(int device);

// The next number of a generator of this device; an undefined one stands for the default. Throws for a CPU generator.
uint64_t draw(const at::Generator& generator, int device);

// A generator of the CPU that starts from the seed.
at::Generator host_generator(uint64_t seed);

// For its lifetime the CPU's default generator starts from the given seed; then it is put back. For random operators
// that take no generator.
class SeededHost {
 public:
  explicit SeededHost(uint64_t seed);
  ~SeededHost();
  SeededHost(const SeededHost&) = delete;
  SeededHost& operator=(const SeededHost&) = delete;

 private:
  c10::intrusive_ptr<c10::TensorImpl> state_;
};

}  // namespace fake
