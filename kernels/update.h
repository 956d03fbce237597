// The update rules, written once for every instruction set: V is the set's vector, or Lane for the ends of a range.
//
// The bits are those of torch's fused CPU kernels. Three things decide them: which products are fused into an fma
// (contraction is switched off, every fma is spelled out), scalars rounded to fp32 once, and torch's scalar tail:
// the last numel % 8 elements of each parameter run through other code there, in which the compiler fused the
// other product of a sum. `tail` marks those elements.

template <class V>
struct Adam {
  static constexpr int states = 2;
  const AdamScalars s;
  static bool has_state0(const AdamScalars&) { return true; }

  template <bool tail>
  void apply(V g, V& p, V& m, V& v) const {
    if (s.decoupled) {
      p = p * V::set(s.decay);
    } else if (s.has_decay) {
      g = fma(p, V::set(s.decay), g);
    }
    if (s.lerp_from_grad) {
      m = fma(V::set(s.lerp_weight), g - m, g);
    } else {
      m = fma(V::set(s.lerp_weight), g - m, m);
    }
    const V gg = V::set(s.one_minus_beta2) * g;
    if constexpr (tail) {
      v = fma(V::set(s.beta2), v, gg * g);
    } else {
      v = fma(gg, g, V::set(s.beta2) * v);
    }
    const V denominator = sqrt(v) / V::set(s.bias2_sqrt) + V::set(s.eps);
    p = p + (V::set(s.neg_step_size) * m) / denominator;
  }
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

// One pass over elements [i, i + V::width).
template <class V, bool tail, class Rule, class Grad, class Out>
static inline void update_at(const Buffers& b, const Rule& rule, int64_t i) {
  const V g = load(static_cast<const Grad*>(b.grad) + i, V{}) * V::set(b.scale);
  V p = load(b.param + i, V{}), s0 = V::set(0.f), s1 = V::set(0.f);
  const bool has_state0 = Rule::has_state0(rule.s);
  if (has_state0) s0 = load(b.state0 + i, V{});
  if constexpr (Rule::states == 2) s1 = load(b.state1 + i, V{});
  rule.template apply<tail>(g, p, s0, s1);
  store(b.param + i, p);
  if (has_state0) store(b.state0 + i, s0);
  if constexpr (Rule::states == 2) store(b.state1 + i, s1);
  if constexpr (!__is_same(Out, Nothing)) store(static_cast<Out*>(b.out) + i, p);
}

template <template <class> class Rule, class Grad, class Out, class Scalars>
static void update_range(const Buffers& shared, const Scalars& s, int64_t begin, int64_t end) {
  // Copies of its own: the compiler must not suspect that a store to a float changes a pointer or a scalar.
  const Buffers b = shared;
  const Rule<Vec> wide{s};
  const Rule<Lane> narrow{s};
  const int64_t body_end = end < b.tail_begin ? end : b.tail_begin;
  int64_t i = begin;
  for (; i + Vec::width <= body_end; i += Vec::width) update_at<Vec, false, Rule<Vec>, Grad, Out>(b, wide, i);
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
