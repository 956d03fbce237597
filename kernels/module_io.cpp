// Python bindings of the I/O engines: raw addresses in. offload/storage/native_engine.py is the only caller; it keeps the
// memory alive and checks what it is given. Everything that may wait lets go of the GIL. Also the lists of free space for
// offload/storage/space.py.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <optional>
#include <system_error>
#include <tuple>
#include <utility>

#include "checksum.h"
#include "io_engine.h"
#include "io_extents.h"

namespace nb = nanobind;
using namespace nb::literals;
using namespace offload;

namespace {

using Engine = std::shared_ptr<IoEngine>;
using Region = std::pair<uintptr_t, int64_t>;

std::pair<Engine, std::vector<std::string>> open_uring(int depth, int64_t piece_bytes,
                                                       const std::vector<Region>& memory,
                                                       const std::vector<int>& files) {
  std::vector<IoRegion> regions;
  for (const auto& [address, bytes] : memory) regions.push_back({reinterpret_cast<char*>(address), bytes});
  std::vector<std::string> notes;
  Engine engine = make_uring_engine(depth, piece_bytes, regions, files, notes);
  return {engine, notes};
}

void check_priority(int priority) {
  if (priority < 0 || priority >= priorities) throw nb::value_error("priority: not one of Priority");
}

void promote(IoEngine& engine, int64_t id, int priority) {
  check_priority(priority);
  engine.promote(id, priority);
}

void submit(IoEngine& engine, int64_t id, bool write, int fd, uintptr_t memory, int64_t bytes, int64_t offset,
            int64_t align, uintptr_t sums, int priority, bool known) {
  check_priority(priority);
  engine.submit({id, write, fd, reinterpret_cast<char*>(memory), bytes, offset, align,
                 reinterpret_cast<uint64_t*>(sums), priority, known});
}

using Done = std::tuple<int64_t, int, int64_t>;

// One round of the thread that takes in: what is overdue is written off, then it waits for what ends. Late ones are
// looked for first: that they were written off is then in what is reaped, or was before.
std::pair<std::vector<Done>, std::vector<int64_t>> take_in(IoEngine& engine, double wait_s, double age_s,
                                                           double round_s) {
  engine.write_off(age_s, round_s);
  std::vector<int64_t> late = engine.late();
  std::vector<Done> found;
  for (const IoDone& done : engine.reap(wait_s)) found.emplace_back(done.id, done.error, done.error_at);
  return {std::move(found), std::move(late)};
}

std::vector<std::tuple<int64_t, bool, int64_t, int64_t, double>> in_flight(IoEngine& engine) {
  std::vector<std::tuple<int64_t, bool, int64_t, int64_t, double>> found;
  for (const IoFlight& f : engine.in_flight()) found.emplace_back(f.id, f.write, f.offset, f.bytes, f.seconds);
  return found;
}

void inject(IoEngine& engine, int kind, int code, int64_t nth, bool forever, uint64_t seed) {
  engine.inject({static_cast<FaultKind>(kind), code, nth, forever, seed});
}

std::optional<int64_t> find(const Extents& extents, int64_t size) {
  const int64_t begin = extents.find(size);
  return begin < 0 ? std::nullopt : std::optional<int64_t>(begin);
}

// By name of the instruction set; empty: the best one.
uint64_t sum_of(uintptr_t memory, int64_t bytes, const std::string& isa) {
  const void* data = reinterpret_cast<const void*>(memory);
  int count = 0;
  const Table* const* tables = available_tables(count);
  for (int i = 0; i < count; ++i) {
    if (isa == tables[i]->name) return tables[i]->checksum(data, bytes);
  }
  return checksum(data, bytes);
}

}  // namespace

void bind_io(nb::module_& m) {
  using no_gil = nb::call_guard<nb::gil_scoped_release>;
  // Calls that only look into a queue keep the GIL: letting go and taking it again costs more than that, and while it
  // is gone another thread may keep it for milliseconds.
  nb::class_<IoEngine>(m, "IoEngine")
      .def("submit", submit, "id"_a, "write"_a, "fd"_a, "memory"_a, "bytes"_a, "offset"_a, "align"_a, "sums"_a,
           "priority"_a, "known"_a = false)
      .def("promote", promote, "id"_a, "priority"_a)
      .def("knows", &IoEngine::knows, "id"_a)
      .def("take_in", take_in, "wait_s"_a, "age_s"_a, "round_s"_a, no_gil())
      .def("in_flight", in_flight, no_gil())
      .def("inject", inject, "kind"_a, "code"_a, "nth"_a, "forever"_a, "seed"_a, no_gil())
      .def("attempts", &IoEngine::attempts)
      .def("stop", &IoEngine::stop, "timeout_s"_a, no_gil())
      .def_prop_ro("piece_bytes", &IoEngine::piece_bytes)
      .def_prop_ro("sum_bytes", &IoEngine::sum_bytes);
  nb::class_<Extents>(m, "Extents")
      .def(nb::init<int64_t, int64_t>(), "capacity"_a, "align"_a)
      .def("find", find, "size"_a)
      .def("take_at", &Extents::take_at, "begin"_a, "size"_a)
      .def("give_back", &Extents::give_back, "begin"_a)
      .def("is_taken", &Extents::is_taken, "begin"_a)
      .def_prop_ro("capacity", &Extents::capacity)
      .def_prop_ro("used", &Extents::used)
      .def_prop_ro("largest_free", &Extents::largest_free);
  // What the system refuses is an OSError with its errno.
  nb::register_exception_translator([](const std::exception_ptr& thrown, void*) {
    try {
      std::rethrow_exception(thrown);
    } catch (const std::system_error& error) {
      errno = error.code().value();
      PyErr_SetFromErrno(PyExc_OSError);
    }
  });
  m.attr("SUM_BYTES") = sum_bytes;
  m.def("thread_engine", make_thread_engine, "depth"_a, "piece_bytes"_a);
  m.def("uring_engine", open_uring, "depth"_a, "piece_bytes"_a, "memory"_a, "files"_a);
  m.def("probe_uring", probe_uring);
  m.def("checksum", sum_of, "memory"_a, "bytes"_a, "isa"_a = "", no_gil());
}
