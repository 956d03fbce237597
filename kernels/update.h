// The update rules, written once for every instruction set: V is the set's vector, or Lane for the ends of a range.
//
// The bits are those of torch's fused CPU kernels. Three things decide them: which products are fused into an fma
// (contraction is switched off, every fma is spelled out), scalars rounded to fp32 once, and torch's scalar tail:
// the last numel % 8 elements of each parameter run through other code there, in which the compiler fused the
// other product of a sum. `tail` marks those elements.

enum class Decay { none, into_grad, decoupled };

// x / divisor, correctly rounded, in three multiplications, for a divisor whose rounded reciprocal is known: the unit
// that divides also takes square roots and is what Adam waits for when memory is fast. Correct for every x >= 0 without
// over- or underflow on the way (Brisebarre, Muller and Raina, 2004, method 1); the remainder of infinity is NaN, which
// at_least() turns into a number, so that infinity stays what it is.
template <class V>
static inline V divide(V x, float divisor, float reciprocal) {
  const V quotient = x * V::set(reciprocal);
  const V remainder = fma(quotient, V::set(-divisor), x);
  return fma(at_least(remainder, V::set(-3.4e38f)), V::set(reciprocal), quotient);
}

// Adam is the one that must run at the speed of memory, so its flags are compiled in rather than asked in the loop.
template <Decay decay, bool lerp_from_grad>
struct Adam {
  template <class V>
  struct Rule {
    static constexpr int states = 2;
    const AdamScalars s;
    static bool has_state0(const AdamScalars&) { return true; }

    template <bool tail>
    void apply(V g, V& p, V& m, V& v) const {
      if constexpr (decay == Decay::decoupled) p = p * V::set(s.decay);
      if constexpr (decay == Decay::into_grad) g = fma(p, V::set(s.decay), g);
      // A weight of exactly 1 leaves a coefficient of zero, whose sign torch's tail has the other way round.
      const bool negative_zero = tail && lerp_from_grad && s.lerp_weight == 0.f;
      m = fma(V::set(negative_zero ? -0.f : s.lerp_weight), g - m, lerp_from_grad ? g : m);
      const V gg = V::set(s.one_minus_beta2) * g;
      if constexpr (tail) {
        v = fma(V::set(s.beta2), v, gg * g);
      } else {
        v = fma(gg, g, V::set(s.beta2) * v);
      }
      const V denominator = divide(sqrt(v), s.bias2_sqrt, s.bias2_sqrt_inverse) + V::set(s.eps);
      p = p + (V::set(s.neg_step_size) * m) / denominator;
    }
  };
};

template <class V>
struct Sgd {
  static constexpr int states = 1;
  const SgdScalars s;
  static bool has_state0(const SgdScalars& s) { return s.has_momentum; }

  template <bool tail>
  void apply(V g, V& p, V& buffer, V&) const {
    if (s.has_decay) g = fma(p, V::set(s.decay), g);
    if (s.has_momentum) {
      if (s.first) {
        buffer = g;
      } else if constexpr (tail) {
        buffer = fma(buffer, V::set(s.momentum), g * V::set(s.one_minus_dampening));
      } else {
        buffer = fma(g, V::set(s.one_minus_dampening), buffer * V::set(s.momentum));
      }
      if (s.nesterov) {
        g = fma(buffer, V::set(s.momentum), g);
      } else {
        g = buffer;
      }
    }
    p = fma(g, V::set(s.neg_lr), p);
  }
};

template <class V>
struct Adagrad {
  static constexpr int states = 1;
  const AdagradScalars s;
  static bool has_state0(const AdagradScalars&) { return true; }

  template <bool tail>
  void apply(V g, V& p, V& sum, V&) const {
    if (s.has_decay) g = fma(p, V::set(s.decay), g);
    sum = fma(g, g, sum);
    p = p - (V::set(s.lr) * g) / (sqrt(sum) + V::set(s.eps));
  }
};

// Lion has no torch counterpart; a NaN gradient reaches the parameter (sign(NaN) is NaN, as in the published code).
template <class V>
struct Lion {
  static constexpr int states = 1;
  const LionScalars s;
  static bool has_state0(const LionScalars&) { return true; }

  template <bool tail>
  void apply(V g, V& p, V& m, V&) const {
    const V direction = sign(fma(V::set(s.beta1), m, V::set(s.one_minus_beta1) * g));
    p = p * V::set(s.decay) + V::set(s.neg_lr) * direction;
    m = fma(V::set(s.beta2), m, V::set(s.one_minus_beta2) * g);
  }
};

struct Nothing {};  // the type of `out` when there is none

// The master `p`, or the 16-bit parameter wherever that is not the master's rounding.
template <class V, class Out>
static inline V adopted(V p, const Out* out) {
  const V held = load(out, V{});
  return where_same(held, rounded(p, out), p, held);
}

// One pass over elements [i, i + V::width).
template <class V, bool tail, class Rule, class Grad, class Out>
static inline void update_at(const Buffers& b, const Rule& rule, int64_t i) {
  const V g = load(static_cast<const Grad*>(b.grad) + i, V{}) * V::set(b.scale);
  V p = load(b.param + i, V{});
  if constexpr (!std::is_same_v<Out, Nothing>) {
    if (b.adopt) p = adopted(p, static_cast<const Out*>(b.out) + i);
  }
  V s0 = V::set(0.f), s1 = V::set(0.f);
  const bool has_state0 = Rule::has_state0(rule.s);
  if (has_state0) s0 = load(b.state0 + i, V{});
  if constexpr (Rule::states == 2) s1 = load(b.state1 + i, V{});
  rule.template apply<tail>(g, p, s0, s1);
  store(b.param + i, p);
  if (has_state0) store(b.state0 + i, s0);
  if constexpr (Rule::states == 2) store(b.state1 + i, s1);
  if constexpr (!std::is_same_v<Out, Nothing>) store(static_cast<Out*>(b.out) + i, p);
}

// Elements of one turn of the main loop: a whole cache line of fp32, so that a line is loaded and stored at one go.
// Measured on Zen 3 (benchmarks/LOG.md): half a line a turn can be much slower.
constexpr int turn = 16;

// Elements by which lines are asked for in advance. The arithmetic of Adam fills the processor's window of instructions
// with four turns, too few loads to keep memory busy; six lines ahead is best on Zen 3, half or twice that is not.
// An address behind the end of a buffer is no error: a prefetch never faults.
constexpr int64_t ahead = 96;

template <class Grad, class Out, class Rule>
static inline void prefetch(const Buffers& b, const Rule& rule, int64_t i) {
  if constexpr (!std::is_same_v<Out, Nothing>) __builtin_prefetch(static_cast<const Out*>(b.out) + i, 1);
  __builtin_prefetch(static_cast<const Grad*>(b.grad) + i);
  __builtin_prefetch(b.param + i, 1);
  if (Rule::has_state0(rule.s)) __builtin_prefetch(b.state0 + i, 1);
  if constexpr (Rule::states == 2) __builtin_prefetch(b.state1 + i, 1);
}

template <template <class> class Rule, class Grad, class Out, class Scalars>
static void update_range(const Buffers& shared, const Scalars& s, int64_t begin, int64_t end) {
  // Copies of its own: the compiler must not suspect that a store to a float changes a pointer or a scalar.
  const Buffers b = shared;
  const Rule<Vec> wide{s};
  const Rule<Lane> narrow{s};
  const int64_t body_end = end < b.tail_begin ? end : b.tail_begin;
  int64_t i = begin;
  for (; i + turn <= body_end; i += turn) {
    prefetch<Grad, Out>(b, wide, i + ahead);
#pragma GCC unroll 4
    for (int k = 0; k < turn; k += Vec::width) update_at<Vec, false, Rule<Vec>, Grad, Out>(b, wide, i + k);
  }
  for (; i < body_end; ++i) update_at<Lane, false, Rule<Lane>, Grad, Out>(b, narrow, i);
  for (; i < end; ++i) update_at<Lane, true, Rule<Lane>, Grad, Out>(b, narrow, i);
}

template <template <class> class Rule, class Grad, class Scalars>
static void update_into(const Buffers& b, const Scalars& s, int64_t begin, int64_t end) {
  switch (b.out_dtype) {
    case DType::bf16: return update_range<Rule, Grad, bf16>(b, s, begin, end);
    case DType::f16: return update_range<Rule, Grad, f16>(b, s, begin, end);
    default: return update_range<Rule, Grad, Nothing>(b, s, begin, end);
  }
}

template <template <class> class Rule, class Scalars>
static void update(const Buffers& b, const Scalars& s, int64_t begin, int64_t end) {
  switch (b.grad_dtype) {
    case DType::bf16: return update_into<Rule, bf16>(b, s, begin, end);
    case DType::f16: return update_into<Rule, f16>(b, s, begin, end);
    default: return update_into<Rule, float>(b, s, begin, end);
  }
}

template <Decay decay>
static void adam_with(const Buffers& b, const AdamScalars& s, int64_t begin, int64_t end) {
  if (s.lerp_from_grad) return update<Adam<decay, true>::template Rule>(b, s, begin, end);
  update<Adam<decay, false>::template Rule>(b, s, begin, end);
}

static void adam(const Buffers& b, const AdamScalars& s, int64_t begin, int64_t end) {
  if (s.decoupled) return adam_with<Decay::decoupled>(b, s, begin, end);
  if (s.has_decay) return adam_with<Decay::into_grad>(b, s, begin, end);
  adam_with<Decay::none>(b, s, begin, end);
}
