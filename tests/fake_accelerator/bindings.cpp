// The functions that Python calls, as torch.ops.fake_accelerator: pybind11 would double the time to compile.
#include "generator.h"
#include "host.h"
#include "kernel.h"
#include "memory.h"

#include <torch/library.h>

namespace fake {
namespace {

void set_schedule_by_name(std::string name, int64_t seed) {
  TORCH_CHECK(name == "eager" || name == "lazy" || name == "seeded", "fake: no schedule is called '", name,
              "'; there are eager, lazy and seeded");
  Schedule schedule = name == "eager" ? Schedule::eager : name == "lazy" ? Schedule::lazy : Schedule::seeded;
  set_schedule(schedule, static_cast<uint64_t>(seed));
}

using Counter = std::atomic<int64_t> Counters::*;

const std::vector<std::pair<const char*, Counter>>& counter_names() {
  static const std::vector<std::pair<const char*, Counter>> names{
      {"h2d_bytes", &Counters::h2d_bytes},
      {"d2h_bytes", &Counters::d2h_bytes},
      {"d2d_bytes", &Counters::d2d_bytes},
      {"pageable_bytes", &Counters::pageable_bytes},
      {"blocking_copies", &Counters::blocking_copies},
      {"host_syncs", &Counters::host_syncs},
      {"kernels", &Counters::kernels},
      {"stream_waits", &Counters::stream_waits},
  };
  return names;
}

c10::Dict<std::string, int64_t> read_counters(int64_t device) {
  c10::Dict<std::string, int64_t> values;
  Counters& count = counters(static_cast<int>(device));
  for (auto [name, counter] : counter_names()) values.insert(name, (count.*counter).load());
  return values;
}

void reset_counters(int64_t device) {
  for (auto [name, counter] : counter_names()) counters(static_cast<int>(device)).*counter = 0;
}

// Seed and offset of a device's default generator, as signed numbers: torch knows no others.
std::tuple<int64_t, int64_t> generator_state(int64_t device) {
  c10::GeneratorImpl* generator = default_generator(static_cast<int>(device)).unsafeGetGeneratorImpl();
  return {static_cast<int64_t>(generator->current_seed()), static_cast<int64_t>(generator->get_offset())};
}

void set_generator_state(int64_t device, int64_t seed, int64_t offset) {
  c10::GeneratorImpl* generator = default_generator(static_cast<int>(device)).unsafeGetGeneratorImpl();
  std::lock_guard<std::mutex> guard(generator->mutex_);
  generator->set_current_seed(static_cast<uint64_t>(seed));
  generator->set_offset(static_cast<uint64_t>(offset));
}

}  // namespace

TORCH_LIBRARY(fake_accelerator, m) {
  m.def("device_count", [] { return int64_t{kDevices}; });
  m.def("set_schedule", &set_schedule_by_name);
  m.def("set_budget", [](int64_t device, int64_t nbytes) { set_budget(static_cast<int>(device), nbytes); });
  m.def("counters", &read_counters);
  m.def("reset_counters", &reset_counters);
  m.def("register_host_memory", [](int64_t address, int64_t nbytes) { register_host_memory(address, nbytes); });
  m.def("unregister_host_memory", [](int64_t address) { unregister_host_memory(address); });
  m.def("generator_state", &generator_state);
  m.def("set_generator_state", &set_generator_state);
  m.def("operators_without_shapes", &operators_without_shapes);
}

}  // namespace fake
