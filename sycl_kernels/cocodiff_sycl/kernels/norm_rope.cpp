// qk_norm_rope: RMSNorm over a head's numbers, its weight, and the rotary embedding, in one pass.
//
// Bound by memory on a GPU (x read, result written; cos and sin are shared by all heads of a token), by arithmetic on a
// CPU device. Roundings are those of the modules that models run one after the other, with the mean square summed in
// fp64 and rounded once. A GPU holds a head of up to LANES * WIDTH numbers in registers, and the weight and a token's
// angles as long as it has heads of that token, so each is read once; the second look at a longer head, and a CPU's,
// finds its numbers in L1.
enum Layout { PAIRS, HALVES, COMPLEX, NONE };

struct Pairs { // HALF pairs of numbers that are rotated together
  HalfFloats a, b;
};

// Pair i of `numbers`: neighbours 2i and 2i+1, or where they are HALVED, i and i + numbers/2.
template <typename Type, bool HALVED, bool WORDS>
inline Pairs load_pairs(const typename Type::Bits *from, i64 pair, i64 numbers) {
  if (HALVED) return {load<Type, HALF, WORDS>(from + pair), load<Type, HALF, WORDS>(from + numbers / 2 + pair)};
  Floats both = load<Type, WIDTH, WORDS>(from + 2 * pair);
  return {both.even, both.odd};
}

template <typename Type, bool HALVED, bool WORDS>
inline void store_pairs(typename Type::Bits *to, i64 pair, i64 numbers, Pairs x) {
  if (HALVED) {
    store<Type, HALF, WORDS>(to + pair, x.a);
    store<Type, HALF, WORDS>(to + numbers / 2 + pair, x.b);
    return;
  }
  Floats both;
  both.even = x.a;
  both.odd = x.b;
  store<Type, WIDTH, WORDS>(to + 2 * pair, both);
}

// To the nearest number of the type. For bfloat16 without the way through 16 bits.
template <typename Type> inline HalfFloats rounded(HalfFloats x) {
  if constexpr (LANES > 1 && std::is_same_v<Type, BF16>) {
    using Words = Vector<uint32_t, HALF>;
    Words bits = __builtin_bit_cast(Words, x);
    Words nearest = bits + 0x7fffu + ((bits >> 16) & 1u), nan = bits | 0x400000u;
    auto is_nan = (bits & 0x7fffffffu) > 0x7f800000u;
    return __builtin_bit_cast(HalfFloats, Words((is_nan ? nan : nearest) & 0xffff0000u));
  } else
    return Type::template widen<HALF>(Type::template narrow<HALF>(x));
}

// The first `count` of HALF pairs; what is beyond is 0 and is not touched.
template <typename Type, bool HALVED, bool WORDS>
inline Pairs load_some(const typename Type::Bits *from, i64 pair, i64 numbers, i64 count) {
  if (count >= HALF) return load_pairs<Type, HALVED, WORDS>(from, pair, numbers);
  Pairs x = {0, 0};
#pragma unroll
  for (int i = 0; i < HALF; ++i) {
    if (i >= count) continue;
    i64 first = HALVED ? pair + i : 2 * (pair + i), second = HALVED ? numbers / 2 + first : first + 1;
    x.a[i] = load1<Type>(from + first);
    x.b[i] = load1<Type>(from + second);
  }
  return x;
}

template <typename Type, bool HALVED, bool WORDS>
inline void store_some(typename Type::Bits *to, i64 pair, i64 numbers, i64 count, Pairs x) {
  if (count >= HALF) return store_pairs<Type, HALVED, WORDS>(to, pair, numbers, x);
#pragma unroll
  for (int i = 0; i < HALF; ++i) {
    if (i >= count) continue;
    i64 first = HALVED ? pair + i : 2 * (pair + i), second = HALVED ? numbers / 2 + first : first + 1;
    store1<Type>(to + first, x.a[i]);
    store1<Type>(to + second, x.b[i]);
  }
}

inline void add_squares(HalfDoubles &squares, Pairs x) {
  HalfDoubles a = __builtin_convertvector(x.a, HalfDoubles), b = __builtin_convertvector(x.b, HalfDoubles);
  squares += a * a;
  squares += b * b;
}

// What a head's numbers are multiplied by, from the sum of their squares.
inline float scale_of(double squares, i64 numbers, float epsilon) {
  float mean = float(squares / double(numbers));
  return 1.0f / sycl::sqrt(mean + epsilon);
}

template <typename Type> inline Pairs normed(Pairs x, float scale) {
  return {rounded<Type>(x.a * scale), rounded<Type>(x.b * scale)};
}

template <typename Type> inline Pairs weighted(Pairs x, float scale, Pairs weight, bool round_before_weight) {
  x = {x.a * scale, x.b * scale};
  if (round_before_weight) x = {rounded<Type>(x.a), rounded<Type>(x.b)};
  return {rounded<Type>(x.a * weight.a), rounded<Type>(x.b * weight.b)};
}

struct Angles {
  Pairs cosine, sine;
};

template <bool HALVED>
inline Angles angles_at(const float *cosine, const float *sine, i64 pair, i64 numbers, i64 count, i64 layout) {
  Pairs first = load_some<F32, HALVED, true>(cosine, pair, numbers, count);
  if (layout == COMPLEX) // one table, of the complex numbers cos + i sin
    return {{first.a, first.a}, {first.b, first.b}};
  return {first, load_some<F32, HALVED, true>(sine, pair, numbers, count)};
}

inline Pairs rotated(Pairs x, const Angles &by) {
  return {x.a * by.cosine.a + -x.b * by.sine.a, x.b * by.cosine.b + x.a * by.sine.b};
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
  float epsilon() const { return sycl::bit_cast<float>(uint32_t(epsilon_bits)); }
};

// One head, whose numbers are looked at twice where they are normalised.
template <typename Type, bool HALVED, bool WORDS>
inline void norm_rope_row(const Heads &of, const typename Type::Bits *x, typename Type::Bits *out, const float *cosine,
                          const float *sine, const Place &place) {
  const auto *weight = reinterpret_cast<const typename Type::Bits *>(of.weight);
  const i64 numbers = of.numbers, pairs = numbers / 2, first = place.lane * HALF, step = LANES * HALF;
  const float epsilon = of.epsilon();
  float scale = 1;
  if (epsilon >= 0) {
    HalfDoubles squares = 0;
    for (i64 at = first; at < pairs; at += step)
      add_squares(squares, load_some<Type, HALVED, WORDS>(x, at, numbers, pairs - at));
    scale = scale_of(place.sum(sum_of<double>(squares)), numbers, epsilon);
  }
  for (i64 at = first; at < pairs; at += step) {
    const i64 count = pairs - at;
    Pairs own = load_some<Type, HALVED, WORDS>(x, at, numbers, count);
    if (epsilon >= 0 && weight)
      own = weighted<Type>(own, scale, load_some<Type, HALVED, WORDS>(weight, at, numbers, count),
                           of.round_before_weight);
    else if (epsilon >= 0)
      own = normed<Type>(own, scale);
    if (of.layout != NONE) own = rotated(own, angles_at<HALVED>(cosine, sine, at, numbers, count, of.layout));
    store_some<Type, HALVED, WORDS>(out, at, numbers, count, own);
  }
}

template <typename Type, bool HALVED, bool WORDS> inline void norm_rope_rows(const Heads &of) {
  Place place;
  using Bits = typename Type::Bits;
  const i64 end = sycl::min((place.row + 1) * of.rows_each, of.rows);
  i64 row = place.row * of.rows_each;
  if (LANES > 1 && row >= end) return;
  i64 token = row / of.heads, head = row - token * of.heads; // counted on from here: a division is as long as 8 pairs
  i64 batch = token / of.tokens;
  token -= batch * of.tokens;
  // Of a head that fits into registers, with HALF pairs or none for each lane: their weight, and angles at the token.
  const bool fits = LANES > 1 && of.numbers <= LANES * WIDTH && of.numbers % WIDTH == 0;
  const i64 pair = place.lane * HALF;
  const bool works = fits && pair < of.numbers / 2;
  const float epsilon = of.epsilon();
  const bool by_weight = epsilon >= 0 && of.weight;
  Pairs weight = {0, 0};
  Angles angles = {{0, 0}, {0, 0}};
  bool fresh = true; // angles are of another token
  if (works && by_weight)
    weight = load_pairs<Type, HALVED, WORDS>(reinterpret_cast<const Bits *>(of.weight), pair, of.numbers);
  // Places are counted on as well, because 64-bit products take a GPU many instructions.
  const Bits *const x = reinterpret_cast<const Bits *>(of.x);
  const Bits *from = x + batch * of.batch_stride + token * of.token_stride + head * of.head_stride;
  Bits *to = reinterpret_cast<Bits *>(of.out) + row * of.numbers;
  const float *cosine = of.cosine + token * of.numbers, *sine = of.sine + token * of.numbers;
  for (; row < end; ++row, to += of.numbers) {
    if (fits) {
      Pairs own = {0, 0};
      if (works) own = load_pairs<Type, HALVED, WORDS>(from, pair, of.numbers);
      if (fresh && works && of.layout != NONE)
        angles = angles_at<HALVED>(cosine, sine, pair, of.numbers, HALF, of.layout);
      fresh = false;
      if (epsilon >= 0) {
        HalfDoubles squares = 0;
        add_squares(squares, own);
        const float scale = scale_of(place.sum(sum_of<double>(squares)), of.numbers, epsilon);
        own = by_weight ? weighted<Type>(own, scale, weight, of.round_before_weight) : normed<Type>(own, scale);
      }
      if (of.layout != NONE) own = rotated(own, angles);
      if (works) store_pairs<Type, HALVED, WORDS>(to, pair, of.numbers, own);
    } else
      norm_rope_row<Type, HALVED, WORDS>(of, from, to, cosine, sine, place);
    from += of.head_stride;
    if (++head < of.heads) continue;
    head = 0;
    fresh = true;
    if (++token == of.tokens) token = 0, ++batch;
    from = x + batch * of.batch_stride + token * of.token_stride;
    cosine = of.cosine + token * of.numbers, sine = of.sine + token * of.numbers;
  }
}

template <typename Type> inline void norm_rope(const Heads &of) {
  const i64 half = of.layout == HALVES ? of.numbers : 0; // where its other half begins, in bytes of 16-bit numbers
  const i64 strides = of.batch_stride | of.token_stride | of.head_stride;
  by_alignment<Type>(i64(of.x) | i64(of.out) | i64(of.weight) | 2 * strides | half, [&](auto words) {
    if (of.layout == HALVES)
      norm_rope_rows<Type, true, words>(of);
    else
      norm_rope_rows<Type, false, words>(of);
  });
}

KERNEL(norm_rope_f32)(Heads of) { norm_rope<F32>(of); }
KERNEL(norm_rope_bf16)(Heads of) { norm_rope<BF16>(of); }
KERNEL(norm_rope_f16)(Heads of) { norm_rope<F16>(of); }
