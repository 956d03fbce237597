// The functions that Python calls directly.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "generator.h"
#include "host.h"
#include "kernel.h"
#include "memory.h"

#include <map>

namespace py = pybind11;

namespace fake {
namespace {

void set_schedule_by_name(const std::string& name, uint64_t seed) {
  TORCH_CHECK(name == "eager" || name == "lazy" || name == "seeded", "fake: no schedule is called '", name,
              "'; there are eager, lazy and seeded");
  Schedule schedule = name == "eager" ? Schedule::eager : name == "lazy" ? Schedule::lazy : Schedule::seeded;
  set_schedule(schedule, seed);
}

using Counter = std::atomic<int64_t> Counters::*;

const std::vector<std::pair<const char*, Counter>>& counter_names() {
  static const std::vector<std::pair<const char*, Counter>> names{
      {"h2d_bytes", &Counters::h2d_bytes},           {"d2h_bytes", &Counters::d2h_bytes},
      {"d2d_bytes", &Counters::d2d_bytes},           {"pageable_bytes", &Counters::pageable_bytes},
      {"blocking_copies", &Counters::blocking_copies}, {"host_syncs", &Counters::host_syncs},
      {"kernels", &Counters::kernels},               {"stream_waits", &Counters::stream_waits}};
  return names;
}

std::map<std::string, int64_t> read_counters(int device) {
  std::map<std::string, int64_t> values;
  for (auto [name, counter] : counter_names()) values[name] = counters(device).*counter;
  return values;
}

void reset_counters(int device) {
  for (auto [name, counter] : counter_names()) counters(device).*counter = 0;
}

// Seed and offset of a device's default generator.
std::pair<uint64_t, uint64_t> generator_state(int device) {
  c10::GeneratorImpl* generator = default_generator(device).unsafeGetGeneratorImpl();
  return {generator->current_seed(), generator->get_offset()};
}

void set_generator_state(int device, uint64_t seed, uint64_t offset) {
  c10::GeneratorImpl* generator = default_generator(device).unsafeGetGeneratorImpl();
  std::lock_guard<std::mutex> guard(generator->mutex_);
  generator->set_current_seed(seed);
  generator->set_offset(offset);
}

}  // namespace
}  // namespace fake

PYBIND11_MODULE(fake_accelerator_core, m) {
  using release = py::call_guard<py::gil_scoped_release>;
  m.attr("device_count") = fake::kDevices;
  m.def("set_schedule", &fake::set_schedule_by_name, release());
  m.def("set_budget", &fake::set_budget, release());
  m.def("counters", &fake::read_counters, release());
  m.def("reset_counters", &fake::reset_counters, release());
  m.def("register_host_memory", &fake::register_host_memory, release());
  m.def("unregister_host_memory", &fake::unregister_host_memory, release());
  m.def("generator_state", &fake::generator_state, release());
  m.def("set_generator_state", &fake::set_generator_state, release());
  m.def("operators_without_shapes", &fake::operators_without_shapes, release());
}
