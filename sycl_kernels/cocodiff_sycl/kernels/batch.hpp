// encode_residual on a CPU: 16 groups together. A group's scale takes a long chain of operations on single numbers; here
// each of them is done for 16 groups in the lanes of a vector. Differences and predictions wait in 4 KB of its cache.
#if LANES == 1
constexpr int BATCH = WIDTH;

// Lane i of the result joins the numbers of x[i]: the upper half with the lower half, and so on.
template <typename T, typename Join>
inline Vector<T, BATCH> across(const Vector<T, BATCH> (&x)[BATCH], Join join) {
  Vector<T, BATCH> of[BATCH / 2];
#pragma unroll
  for (int i = 0; i < 8; ++i)
    of[i] = join(__builtin_shufflevector(x[i], x[i + 8], 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23),
                 __builtin_shufflevector(x[i], x[i + 8], 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31));
#pragma unroll
  for (int i = 0; i < 4; ++i)
    of[i] = join(__builtin_shufflevector(of[i], of[i + 4], 0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27),
                 __builtin_shufflevector(of[i], of[i + 4], 4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31));
#pragma unroll
  for (int i = 0; i < 2; ++i)
    of[i] = join(__builtin_shufflevector(of[i], of[i + 2], 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29),
                 __builtin_shufflevector(of[i], of[i + 2], 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31));
  return join(__builtin_shufflevector(of[0], of[1], 0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30),
              __builtin_shufflevector(of[0], of[1], 1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31));
}
inline Ints largest_across(const Ints (&x)[BATCH]) {
  return across<int32_t>(x, [](Ints a, Ints b) { return __builtin_elementwise_max(a, b); });
}
template <typename T> inline Vector<T, BATCH> sum_across(const Vector<T, BATCH> (&x)[BATCH]) {
  return across<T>(x, [](Vector<T, BATCH> a, Vector<T, BATCH> b) { return a + b; });
}

// A number of each group. It is kept in memory, because to read one lane of a vector, known at run time alone, the
// compiler stores all of them first.
template <typename T> struct Each {
  T of[BATCH];
  void operator=(Vector<T, BATCH> x) { reinterpret_cast<Loose<T, BATCH> *>(of)->value = x; }
  operator Vector<T, BATCH>() const { return reinterpret_cast<const Loose<T, BATCH> *>(of)->value; }
};

inline Floats steps_of(Ints byte) { return __builtin_bit_cast(Floats, (byte - 1 + LOWEST) << 20); }
inline Ints bytes_above(Floats step, uint32_t round_up = 0xfffff) {
  return (__builtin_bit_cast(Ints, __builtin_bit_cast(Words, step) + round_up) >> 20) - LOWEST + 1;
}
inline Ints clamped(Ints byte) {
  return __builtin_elementwise_min(__builtin_elementwise_max(byte, Ints(0)), Ints(LARGEST));
}
// Of magnitudes, as bits; NaN counts as infinity.
inline Ints size_bytes(Ints magnitude) {
  return clamped(bytes_above(__builtin_bit_cast(Floats, __builtin_elementwise_min(magnitude, Ints(0x7f800000)))));
}

// The numbers of a group, of which a short one has zeros.
template <typename Type> inline Floats load_some(const typename Type::Bits *from, i64 count) {
  if (count >= WIDTH) return load<Type, WIDTH>(from);
  typename Type::Bits some[WIDTH] = {};
  for (i64 i = 0; i < count; ++i) some[i] = from[i];
  return load<Type, WIDTH>(some);
}

// The codes of a group. Bytes are made of neighbours: or-ed in a wider number, of which the lowest byte is kept.
template <int BITS> inline void store_group(uint8_t *to, Ints low, Ints high) {
  using Bytes = Vector<uint8_t, WIDTH>;
  const Bytes one = __builtin_convertvector(low, Bytes), other = __builtin_convertvector(high, Bytes);
  if constexpr (BITS == 8) {
    reinterpret_cast<Loose<uint8_t, 16> *>(to)[0].value = one;
    reinterpret_cast<Loose<uint8_t, 16> *>(to)[1].value = other;
  } else if constexpr (BITS == 4) {
    using Pairs = Vector<uint16_t, 8>;
    Vector<uint16_t, 16> pairs;
    pairs.lo = __builtin_bit_cast(Pairs, one), pairs.hi = __builtin_bit_cast(Pairs, other);
    reinterpret_cast<Loose<uint8_t, 16> *>(to)->value = __builtin_convertvector(pairs | pairs >> 4, Bytes);
  } else {
    using Fours = Vector<uint32_t, 4>;
    Vector<uint32_t, 8> fours;
    fours.lo = __builtin_bit_cast(Fours, one), fours.hi = __builtin_bit_cast(Fours, other);
    fours |= fours >> 6;
    using Half = Vector<uint8_t, 8>;
    reinterpret_cast<Loose<uint8_t, 8> *>(to)->value = __builtin_convertvector(fours | fours >> 12, Half);
  }
}

// Of a batch: what the steps of encoding hand on. Groups that are not there have zeros.
struct Scales {
  // The largest magnitudes in a group's two halves, as bits: of the residual, of the other prediction's, of what has
  // changed since the newest reconstruction, and of x.
  Ints largest[BATCH], of_other[BATCH], of_change[BATCH], of_x[BATCH];
  Floats residual[BATCH][PARTS], predicted[BATCH][PARTS];
  Each<int32_t> channels, byte, kept; // kept: the bits of a code, none where the scale makes none
  Each<float> reciprocal, step;
  int32_t unfit, difference, change; // what the notes are to be told of all groups

  // The byte of the step with which 2 bits err least, as the definition has it.
  Ints of_two_bits(Floats most) {
    Floats some[BATCH];
    for (int i = 0; i < BATCH; ++i)
      some[i] = __builtin_elementwise_abs(residual[i][0]) + __builtin_elementwise_abs(residual[i][1]);
    const Floats all = sum_across<float>(some);
    Floats total = most * (13 / 32.0f), count = 1; // the step is their quotient
    for (int round = 0; round < 2; ++round) {
      Ints found[BATCH];
      Each<float> totals, counts;
      totals = total, counts = count;
      for (int i = 0; i < BATCH; ++i) {
        const Floats low = __builtin_elementwise_abs(residual[i][0]), high = __builtin_elementwise_abs(residual[i][1]);
        const Ints low_large = low * counts.of[i] >= totals.of[i], high_large = high * counts.of[i] >= totals.of[i];
        some[i] = (low_large ? low : Floats(0)) + (high_large ? high : Floats(0));
        found[i] = low_large + high_large;
      }
      total = 2 * (all + 2 * sum_across<float>(some));
      count = __builtin_convertvector(Ints(channels) - 8 * sum_across<int32_t>(found), Floats);
    }
    // The quotient need not be exact: products of the middles, which are, decide.
    const Ints byte = bytes_above(total / count, 0x7ffff);
    const Floats above = (steps_of(byte) + steps_of(byte + 1)) / 2, below = (steps_of(byte - 1) + steps_of(byte)) / 2;
    return byte - (total > above * count) + (total <= below * count);
  }

  OUT_OF_LINE void find(int bits, bool linear, bool compared, bool measured) {
    const Ints most_bits = largest_across(largest), finite = most_bits < 0x7f800000;
    const Floats most = __builtin_bit_cast(Floats, most_bits);
    const Ints found = bits == 2 ? of_two_bits(most) : bytes_above(most * (1.0f / (1 << (bits - 1))));
    const Ints fits = finite & (found <= LARGEST);
    unfit = BATCH + sum_of<int32_t>(fits);
    const Ints scaled = fits ? __builtin_elementwise_max(found, Ints(0)) : Ints(0), byte = finite ? scaled : Ints(BAD);
    this->byte = byte;
    const Ints size = size_bytes(most_bits);
    const int32_t more = compared ? sum_of<int32_t>(size - size_bytes(largest_across(of_other))) : 0;
    difference = linear ? more : -more;
    change = measured ? sum_of<int32_t>(size_bytes(largest_across(of_change)) - size_bytes(largest_across(of_x))) : 0;
    const Ints none = byte == 0, bad = byte == BAD;
    const Floats regular = steps_of(byte);
    step = none ? Floats(0) : bad ? Floats(__builtin_nanf("")) : regular;
    using Doubles = Vector<double, BATCH>;
    reciprocal = __builtin_convertvector(1 / __builtin_convertvector(regular, Doubles), Floats);
    kept = ~(none | bad) & ((1 << bits) - 1);
  }
};

template <typename Type> struct Batch {
  using Bits = typename Type::Bits;
  Part<Bits> parts[BATCH];
  int groups = 0;
  Scales scales;

  OUT_OF_LINE void predict(bool linear, bool compared, bool measured, float factor) {
    for (int i = 0; i < BATCH; ++i) {
      scales.largest[i] = scales.of_other[i] = scales.of_change[i] = scales.of_x[i] = 0;
      scales.channels.of[i] = GROUP;
      if (i >= groups) {
        for (int n = 0; n < PARTS; ++n) scales.residual[i][n] = scales.predicted[i][n] = 0;
        continue;
      }
      const Part<Bits> &part = parts[i];
#pragma unroll
      for (int n = 0; n < PARTS; ++n) {
        const i64 from = n * WIDTH, left = part.count - from;
        const Floats own = load_some<Type>(part.x + from, left), newest = load_some<Type>(part.last + from, left);
        const Floats same = limited(newest);
        Floats forecast = same;
        if (linear || compared)
          forecast = limited(newest + (newest - load_some<Type>(part.before + from, left)) * factor);
        const Floats predicted = linear ? forecast : same, residual = own - predicted;
        scales.predicted[i][n] = predicted, scales.residual[i][n] = residual;
        scales.largest[i] = larger(scales.largest[i], residual);
        if (compared) scales.of_other[i] = larger(scales.of_other[i], own - (linear ? same : forecast));
        if (!measured) continue;
        scales.of_change[i] = larger(scales.of_change[i], own - newest), scales.of_x[i] = larger(scales.of_x[i], own);
      }
      if (part.count < GROUP) scales.channels.of[i] = int32_t(part.count);
    }
  }

  static Ints larger(Ints largest, Floats x) {
    return __builtin_elementwise_max(largest, __builtin_bit_cast(Ints, x) & 0x7fffffff);
  }

  template <int BITS> OUT_OF_LINE void write() {
    constexpr int HALF_OF_ALL = 1 << (BITS - 1);
    constexpr float LIMIT = HALF_OF_ALL - 1, MIDDLE = HALF_OF_ALL - 0.5f;
    for (int i = 0; i < groups; ++i) {
      const Part<Bits> &part = parts[i];
      const float reciprocal = scales.reciprocal.of[i], step = scales.step.of[i];
      const int32_t kept = scales.kept.of[i];
      Ints codes[PARTS];
#pragma unroll
      for (int n = 0; n < PARTS; ++n) {
        const i64 from = n * WIDTH;
        const Floats residual = scales.residual[i][n];
        Floats sized = __builtin_elementwise_abs(residual) * reciprocal;
        sized = sized < LIMIT ? sized : LIMIT; // of NaN too
        const Ints magnitude = __builtin_convertvector(sized, Ints) | HALF_OF_ALL;
        codes[n] = (magnitude ^ __builtin_bit_cast(Ints, residual) >> 31) & kept;
        const Floats value = (__builtin_convertvector(codes[n], Floats) - MIDDLE) * step;
        store_some(part.target + from, kept_finite<Type>(scales.predicted[i][n] + value), part.count - from);
      }
      *part.scale = uint8_t(scales.byte.of[i]);
      if (part.count >= GROUP)
        store_group<BITS>(part.code, codes[0], codes[1]);
      else
        store_short<BITS>(part, codes);
    }
  }

  static void store_some(Bits *to, Floats x, i64 count) {
    if (count >= WIDTH) return store_first<Type, false>(to, x, count);
    Bits some[WIDTH];
    store_first<Type, false>(some, x, WIDTH);
    for (i64 i = 0; i < count; ++i) to[i] = some[i];
  }

  // The codes of a short group: the bits that are left of its last byte are 0.
  template <int BITS> static void store_short(const Part<Bits> &part, Ints (&codes)[PARTS]) {
    uint8_t bytes[GROUP];
    store_group<BITS>(bytes, codes[0], codes[1]);
    const i64 used = part.count * BITS, whole = used / 8;
    for (i64 i = 0; i < whole; ++i) part.code[i] = bytes[i];
    if (used % 8) part.code[whole] = bytes[whole] & ((1 << used % 8) - 1);
  }
};
#endif
