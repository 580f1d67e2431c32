// qk_norm_rope: RMSNorm over a head's numbers, its weight, and the rotary embedding, in one pass.
//
// Bound by memory on a GPU (x read, result written; cos and sin are shared by all heads of a token and stay in a cache),
// by arithmetic on a CPU device. The second look at a head's numbers finds them in registers or L1. Roundings are those
// of the modules that models run one after the other, with the mean square summed in fp64 and rounded once.
// Accesses are 16 numbers of a work-item: 64 bytes of fp32, 32 of the 16-bit types.
enum Layout { PAIRS, HALVES, COMPLEX, NONE };

struct Pairs { // 8 pairs of numbers that are rotated together
  Float8 a, b;
};

// Pair i of `numbers`: neighbours 2i and 2i+1, or where they are HALVED, i and i + numbers/2.
template <typename Type, bool HALVED>
inline Pairs load_pairs(const typename Type::Bits *from, i64 pair, i64 numbers) {
  if (HALVED) return {load<Type, 8>(from + pair), load<Type, 8>(from + numbers / 2 + pair)};
  Float16 both = load<Type, 16>(from + 2 * pair);
  return {both.even, both.odd};
}

template <typename Type, bool HALVED>
inline void store_pairs(typename Type::Bits *to, i64 pair, i64 numbers, Pairs x) {
  if (HALVED) {
    store<Type, 8>(to + pair, x.a);
    store<Type, 8>(to + numbers / 2 + pair, x.b);
    return;
  }
  Float16 both;
  both.even = x.a;
  both.odd = x.b;
  store<Type, 16>(to + 2 * pair, both);
}

template <typename Type> inline Float8 rounded(Float8 x) {
  return Type::template widen<8>(Type::template narrow<8>(x));
}

// The first `count` of 8 pairs; what is beyond is 0 and is not touched.
template <typename Type, bool HALVED>
inline Pairs load_some(const typename Type::Bits *from, i64 pair, i64 numbers, i64 count) {
  if (count >= 8) return load_pairs<Type, HALVED>(from, pair, numbers);
  Pairs x = {0, 0};
  for (int i = 0; i < count; ++i) {
    i64 first = HALVED ? pair + i : 2 * (pair + i), second = HALVED ? numbers / 2 + first : first + 1;
    x.a[i] = load1<Type>(from + first);
    x.b[i] = load1<Type>(from + second);
  }
  return x;
}

template <typename Type, bool HALVED>
inline void store_some(typename Type::Bits *to, i64 pair, i64 numbers, i64 count, Pairs x) {
  if (count >= 8) return store_pairs<Type, HALVED>(to, pair, numbers, x);
  for (int i = 0; i < count; ++i) {
    i64 first = HALVED ? pair + i : 2 * (pair + i), second = HALVED ? numbers / 2 + first : first + 1;
    store1<Type>(to + first, x.a[i]);
    store1<Type>(to + second, x.b[i]);
  }
}

template <typename Type, bool HALVED>
inline void norm_rope_row(const typename Type::Bits *x, typename Type::Bits *out, const typename Type::Bits *weight,
                          const float *cosine, const float *sine, i64 numbers, float epsilon, i64 layout,
                          bool round_before_weight,
                          const Place &place) {
  const i64 pairs = numbers / 2, first = place.lane * 8, step = LANES * 8;
  float scale = 1;
  if (epsilon >= 0) {
    Double8 squares = 0;
    for (i64 at = first; at < pairs; at += step) {
      Pairs own = load_some<Type, HALVED>(x, at, numbers, pairs - at);
      Double8 a = __builtin_convertvector(own.a, Double8), b = __builtin_convertvector(own.b, Double8);
      squares += a * a;
      squares += b * b;
    }
    float mean = float(place.sum(total(squares)) / double(numbers));
    scale = 1.0f / sycl::sqrt(mean + epsilon);
  }
  for (i64 at = first; at < pairs; at += step) {
    const i64 count = pairs - at;
    Pairs own = load_some<Type, HALVED>(x, at, numbers, count);
    if (epsilon >= 0) {
      own = {own.a * scale, own.b * scale};
      if (weight) {
        Pairs by = load_some<Type, HALVED>(weight, at, numbers, count);
        if (round_before_weight) own = {rounded<Type>(own.a), rounded<Type>(own.b)};
        own = {own.a * by.a, own.b * by.b};
      }
      own = {rounded<Type>(own.a), rounded<Type>(own.b)};
    }
    if (layout != NONE) {
      Pairs by_cos = load_some<F32, HALVED>(cosine, at, numbers, count);
      Pairs by_sin;
      if (layout == COMPLEX) { // one table, of the complex numbers cos + i sin
        by_sin = {by_cos.b, by_cos.b};
        by_cos.b = by_cos.a;
      } else
        by_sin = load_some<F32, HALVED>(sine, at, numbers, count);
      own = {own.a * by_cos.a + -own.b * by_sin.a, own.b * by_cos.b + own.a * by_sin.b};
    }
    store_some<Type, HALVED>(out, at, numbers, count, own);
  }
}

struct Heads {
  const char *x, *weight;
  const float *cosine, *sine;
  char *out; // contiguous
  i64 rows, rows_each; // of [B, L, H]; rows_each: consecutive rows of one group of LANES work-items
  i64 tokens, heads, numbers;
  i64 batch_stride, token_stride, head_stride; // of x, in numbers
  i64 epsilon_bits;                            // of a float; negative: no normalisation
  i64 layout;
  i64 round_before_weight; // rounded before the weight as well
};

template <typename Type> inline void norm_rope(const Heads &of) {
  Place place;
  using Bits = typename Type::Bits;
  const float epsilon = sycl::bit_cast<float>(uint32_t(of.epsilon_bits));
  const Bits *weight = reinterpret_cast<const Bits *>(of.weight);
  const i64 end = sycl::min((place.row + 1) * of.rows_each, of.rows);
  i64 row = place.row * of.rows_each;
  i64 token = row / of.heads, head = row - token * of.heads; // counted on from here: a division is as long as 8 pairs
  i64 batch = token / of.tokens;
  token -= batch * of.tokens;
  for (; row < end; ++row) {
    const Bits *from = reinterpret_cast<const Bits *>(of.x) + batch * of.batch_stride + token * of.token_stride +
                       head * of.head_stride;
    Bits *to = reinterpret_cast<Bits *>(of.out) + row * of.numbers;
    const float *cosine = of.cosine + token * of.numbers, *sine = of.sine + token * of.numbers;
    if (of.layout == HALVES)
      norm_rope_row<Type, true>(from, to, weight, cosine, sine, of.numbers, epsilon, of.layout,
                                of.round_before_weight, place);
    else
      norm_rope_row<Type, false>(from, to, weight, cosine, sine, of.numbers, epsilon, of.layout,
                                 of.round_before_weight, place);
    if (++head < of.heads) continue;
    head = 0;
    if (++token < of.tokens) continue;
    token = 0;
    ++batch;
  }
}

KERNEL(norm_rope_f32)(Heads of) { norm_rope<F32>(of); }
KERNEL(norm_rope_bf16)(Heads of) { norm_rope<BF16>(of); }
KERNEL(norm_rope_f16)(Heads of) { norm_rope<F16>(of); }
