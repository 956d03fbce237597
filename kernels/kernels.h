// The interface between the kernels and their callers: plain structs, one table of functions per instruction set.
//
// Everything here is raw memory that the caller has checked: pointers need no alignment, ranges do not
// overlap. A kernel works on elements [begin, end) of the buffers it is given and touches nothing else, so that
// any cut of a range over threads gives the same bits. No torch header is included anywhere below `kernels/`.
#pragma once

#include <cstdint>
#include <type_traits>

namespace offload {

enum class DType : int { f32 = 0, bf16 = 1, f16 = 2, none = 3 };

// The memory of one update. `param` is fp32: the parameter itself or the exact master of a 16-bit one.
struct Buffers {
  float* param;
  const void* grad;
  float* state0;  // Adam m, SGD momentum, Adagrad sum, Lion m; unused: nullptr
  float* state1;  // Adam v; unused: nullptr
  void* out;      // the 16-bit parameter, written in the same pass; nullptr when out_dtype is none
  DType grad_dtype;
  DType out_dtype;
  float scale;         // every gradient element is multiplied by this first (unscale x clip; negative: maximize)
  int64_t tail_begin;  // from here on torch's scalar tail formulas apply; see update.h
  bool adopt = false;  // where `out` is not the rounding of `param`, user code has set it: take it over first
};

// Scalars are computed in double by the caller and rounded to fp32 once. See offload/kernels/calls.py.
struct AdamScalars {
  float lerp_weight;  // 1-b1 when it is below one half, else (1-b1)-1
  float beta2, one_minus_beta2;
  float bias2_sqrt;          // sqrt(1 - b2^step)
  float bias2_sqrt_inverse;  // its reciprocal, rounded to nearest
  float eps;
  float neg_step_size;  // -(lr / (1 - b1^step))
  float decay;          // AdamW: 1 - lr*wd; Adam: wd
  bool lerp_from_grad;  // 1-b1 is one half or more
  bool decoupled;       // AdamW
  bool has_decay;       // Adam with wd != 0
};

struct SgdScalars {
  float neg_lr, decay, momentum, one_minus_dampening;
  bool has_decay, has_momentum, nesterov, first;
};

struct AdagradScalars {
  float lr, eps, decay;  // lr: after its own decay
  bool has_decay;
};

struct LionScalars {
  float beta1, one_minus_beta1, beta2, one_minus_beta2;
  float neg_lr, decay;  // decay: 1 - lr*wd
};

// Elements of one partial sum of squares. Partial sums are what makes the result independent of threads and cuts.
constexpr int64_t stats_block = 16384;

struct Table {
  const char* name;
  void (*adam)(const Buffers&, const AdamScalars&, int64_t begin, int64_t end);
  void (*sgd)(const Buffers&, const SgdScalars&, int64_t begin, int64_t end);
  void (*adagrad)(const Buffers&, const AdagradScalars&, int64_t begin, int64_t end);
  void (*lion)(const Buffers&, const LionScalars&, int64_t begin, int64_t end);
  // Sum of squares of [begin, end), at most stats_block elements, in double. Not finite exactly when an element is not.
  double (*sum_squares)(const void* grad, DType dtype, int64_t begin, int64_t end);
  void (*cast)(const void* source, DType from, void* target, DType to, int64_t begin, int64_t end);
  // The ceiling of the benchmarks: reads four fp32 buffers and writes three, without arithmetic (p^=g, m^=g, v^=g).
  void (*touch)(float* p, const float* g, float* m, float* v, int64_t begin, int64_t end);
  uint64_t (*checksum)(const void* data, int64_t bytes);  // see checksum.h
};

// The tables compiled in that this CPU can run, best first; the scalar one is always there.
const Table* const* available_tables(int& count);

}  // namespace offload
