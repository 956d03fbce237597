// Python bindings: raw addresses in, nothing checked here. offload/kernels/calls.py is the only caller and checks all.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>
#include <pthread.h>
#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <stdexcept>
#include <string>
#include <vector>

#include "checksum.h"
#include "crc32.h"
#include "kernels.h"
#include "thread_team.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace offload {
namespace {

constexpr int64_t update_block = 32768;  // elements that a lane takes at a time
static_assert(update_block * sizeof(float) == sum_bytes, "a lane takes the sums of what it has made");

std::atomic<const Table*> chosen{nullptr};

std::vector<std::string> isas() {
  int count = 0;
  const Table* const* tables = available_tables(count);
  std::vector<std::string> names;
  for (int i = 0; i < count; ++i) names.emplace_back(tables[i]->name);
  return names;
}

const Table& table() {
  const Table* now = chosen.load();
  if (now == nullptr) {
    int count = 0;
    now = available_tables(count)[0];
  }
  return *now;
}

std::string isa() { return table().name; }

void set_isa(const std::string& name) {
  int count = 0;
  const Table* const* tables = available_tables(count);
  for (int i = 0; i < count; ++i) {
    if (name == tables[i]->name) return chosen.store(tables[i]);
  }
  throw std::invalid_argument("instruction set not available: " + name);
}

// Calls body(begin, end) over [0, count) in blocks, on the team.
template <class Body>
void in_blocks(int64_t count, int64_t block, int threads, const Body& body) {
  struct Context {
    const Body& body;
    int64_t count, block;
  } context{body, count, block};
  team_run((count + block - 1) / block, threads,
           [](const void* opaque, int64_t index) {
             const Context& c = *static_cast<const Context*>(opaque);
             c.body(index * c.block, std::min(c.count, (index + 1) * c.block));
           },
           &context);
}

template <class T>
T* at(uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

// The arguments that every update shares, as offload/kernels/calls.py hands them over.
struct Update {
  Buffers buffers;
  int64_t count;
  int threads;
  uint64_t* sums[3];  // of param, state0, state1: one for each whole block; nullptr: not wanted

  Update(uintptr_t param, uintptr_t grad, uintptr_t state0, uintptr_t state1, uintptr_t out, int grad_dtype,
         int out_dtype, double scale, int64_t count, int64_t tail_begin, int threads, bool adopt, uintptr_t param_sums,
         uintptr_t state0_sums, uintptr_t state1_sums)
      : buffers{at<float>(param),
                at<const void>(grad),
                at<float>(state0),
                at<float>(state1),
                at<void>(out),
                static_cast<DType>(grad_dtype),
                static_cast<DType>(out_dtype),
                float(scale),
                tail_begin,
                adopt},
        count(count),
        threads(threads),
        sums{at<uint64_t>(param_sums), at<uint64_t>(state0_sums), at<uint64_t>(state1_sums)} {}

  template <class Scalars>
  void run(void (*kernel)(const Buffers&, const Scalars&, int64_t, int64_t), const Scalars& scalars) const {
    in_blocks(count, update_block, threads, [&](int64_t begin, int64_t end) {
      kernel(buffers, scalars, begin, end);
      if (end - begin == update_block) sum_up(begin);
    });
  }

  void sum_up(int64_t begin) const {
    const float* const made[] = {buffers.param, buffers.state0, buffers.state1};
    for (int i = 0; i < 3; ++i) {
      if (sums[i] != nullptr) sums[i][begin / update_block] = checksum(made[i] + begin, sum_bytes);
    }
  }
};

void adam(const Update& u, float lerp_weight, float beta2, float one_minus_beta2, float bias2_sqrt,
          float bias2_sqrt_inverse, float eps, float neg_step_size, float decay, bool lerp_from_grad, bool decoupled,
          bool has_decay) {
  u.run(table().adam, AdamScalars{lerp_weight, beta2, one_minus_beta2, bias2_sqrt, bias2_sqrt_inverse, eps,
                                  neg_step_size, decay, lerp_from_grad, decoupled, has_decay});
}

void sgd(const Update& u, float neg_lr, float decay, float momentum, float one_minus_dampening, bool has_decay,
         bool has_momentum, bool nesterov, bool first) {
  u.run(table().sgd,
        SgdScalars{neg_lr, decay, momentum, one_minus_dampening, has_decay, has_momentum, nesterov, first});
}

void adagrad(const Update& u, float lr, float eps, float decay, bool has_decay) {
  u.run(table().adagrad, AdagradScalars{lr, eps, decay, has_decay});
}

void lion(const Update& u, float beta1, float one_minus_beta1, float beta2, float one_minus_beta2, float neg_lr,
          float decay) {
  u.run(table().lion, LionScalars{beta1, one_minus_beta1, beta2, one_minus_beta2, neg_lr, decay});
}

// Writes one double for each stats_block of the gradient.
void block_sums(uintptr_t grad, int dtype, int64_t count, uintptr_t sums, int threads) {
  const Table& t = table();
  in_blocks(count, stats_block, threads, [&](int64_t begin, int64_t end) {
    at<double>(sums)[begin / stats_block] = t.sum_squares(at<const void>(grad), static_cast<DType>(dtype), begin, end);
  });
}

void cast(uintptr_t source, int from, uintptr_t target, int to, int64_t count, int threads) {
  const Table& t = table();
  in_blocks(count, update_block, threads, [&](int64_t begin, int64_t end) {
    t.cast(at<const void>(source), static_cast<DType>(from), at<void>(target), static_cast<DType>(to), begin, end);
  });
}

// Of something with the buffer protocol, as zlib.crc32. isa: the set's name; empty: the one in use.
uint32_t crc32(nb::handle data, uint32_t begin, const std::string& isa) {
  const Crc32 way = crc32_of(isa.empty() ? table().name : isa.c_str());
  Py_buffer view;
  if (PyObject_GetBuffer(data.ptr(), &view, PyBUF_SIMPLE) != 0) throw nb::python_error();
  uint32_t sum = 0;
  {
    nb::gil_scoped_release no_gil;
    sum = way(view.buf, view.len, begin);
  }
  PyBuffer_Release(&view);
  return sum;
}

// 0 if `advice` (one that populates) can be given for the first and the last page of [begin, end), which are
// `page_bytes` long, else the kernel's error number.
int populate(uintptr_t begin, uintptr_t end, size_t page_bytes, int advice) {
  const uintptr_t first = begin & ~(page_bytes - 1), last = (end - 1) & ~(page_bytes - 1);
  if (madvise(at<void>(first), page_bytes, advice) != 0) return errno;
  return last == first || madvise(at<void>(last), page_bytes, advice) == 0 ? 0 : errno;
}

void touch(uintptr_t p, uintptr_t g, uintptr_t m, uintptr_t v, int64_t count, int threads) {
  const Table& t = table();
  in_blocks(count, update_block, threads, [&](int64_t begin, int64_t end) {
    t.touch(at<float>(p), at<const float>(g), at<float>(m), at<float>(v), begin, end);
  });
}

}  // namespace
}  // namespace offload

void bind_io(nb::module_& m);  // module_io.cpp

NB_MODULE(_native, m) {
  using namespace offload;
  bind_io(m);
  // A program that ends with a tensor or a loss in a global keeps a pool or a store alive past the end of Python. Their
  // files have no names and their memory is freed with the process: no leak to warn of.
  nb::set_leak_warnings(false);
  using no_gil = nb::call_guard<nb::gil_scoped_release>;
  m.attr("STATS_BLOCK") = stats_block;
  nb::class_<Update>(m, "Update")
      .def(nb::init<uintptr_t, uintptr_t, uintptr_t, uintptr_t, uintptr_t, int, int, double, int64_t, int64_t, int,
                    bool, uintptr_t, uintptr_t, uintptr_t>(),
           "param"_a, "grad"_a, "state0"_a, "state1"_a, "out"_a, "grad_dtype"_a, "out_dtype"_a, "scale"_a, "count"_a,
           "tail_begin"_a, "threads"_a, "adopt"_a = false, "param_sums"_a = 0, "state0_sums"_a = 0,
           "state1_sums"_a = 0);
  m.def("isas", isas);
  m.def("isa", isa);
  m.def("set_isa", set_isa, "name"_a);
  m.def("adam", adam, no_gil());
  m.def("sgd", sgd, no_gil());
  m.def("adagrad", adagrad, no_gil());
  m.def("lion", lion, no_gil());
  m.def("block_sums", block_sums, no_gil());
  m.def("cast", cast, no_gil());
  m.def("touch", touch, no_gil());
  m.def("crc32", crc32, "data"_a, "begin"_a = 0, "isa"_a = "");
  m.def("populate", populate);
  m.def("threads", team_limit);
  m.def("set_threads", team_set_limit, "count"_a);
  m.def("assume_forked", team_assume_forked);
  m.def("most_lanes", team_most_lanes);
}
