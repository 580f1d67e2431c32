// What the residual codec's kernels read and write: numbers of a group, scale bytes and codes, which
// cocodiff/kernels/residual.py defines.
constexpr int GROUP = 32;              // channels of one scale
constexpr int SHARING = GROUP / WIDTH; // work-items that share a group
constexpr int LOWEST = (127 - 20) << 3, LARGEST = 254, BAD = 255; // LOWEST: the smallest step's exponent, in eighths
using Ints = Vector<int32_t, WIDTH>;
using Words = Vector<uint32_t, WIDTH>;

// The first `count` of WIDTH numbers; what is beyond is 0 and is not touched.
template <typename Type, bool WORDS> inline Floats load_first(const typename Type::Bits *from, i64 count) {
  if (count >= WIDTH) return load<Type, WIDTH, WORDS>(from);
  Floats x = 0;
#pragma unroll
  for (int i = 0; i < WIDTH; ++i)
    if (i < count) x[i] = load1<Type>(from + i);
  return x;
}

// Of NaN too, unless it lies in the low 16 bits alone, which no arithmetic with a bfloat16 leaves.
template <typename Type> inline auto narrow(Floats x) {
  if constexpr (std::is_same_v<Type, BF16>) {
    const Words bits = __builtin_bit_cast(Words, x);
    return __builtin_convertvector((bits + ((bits >> 16 & 1u) + 0x7fffu)) >> 16, Vector<uint16_t, WIDTH>);
  } else
    return Type::template narrow<WIDTH>(x);
}

// As it is after rounding.
template <typename Type> inline Floats rounded(Floats x) { return Type::template widen<WIDTH>(narrow<Type>(x)); }

template <typename Type, bool WORDS> inline void store_first(typename Type::Bits *to, Floats x, i64 count) {
  using Bits = typename Type::Bits;
  const auto all = narrow<Type>(x);
  if (count >= WIDTH) {
    if constexpr (WORDS)
      reinterpret_cast<Loose<uint32_t, WIDTH / 2> *>(to)->value = __builtin_bit_cast(Vector<uint32_t, WIDTH / 2>, all);
    else
      reinterpret_cast<Loose<Bits, WIDTH> *>(to)->value = all;
    return;
  }
#pragma unroll
  for (int i = 0; i < WIDTH; ++i)
    if (i < count) to[i] = all[i];
}

// A prediction, so that no difference to a finite number overflows; NaN becomes the lower limit.
inline Floats limited(Floats x) {
  return __builtin_elementwise_min(__builtin_elementwise_max(x, Floats(-0x1p102f)), Floats(0x1p102f));
}

// What is kept or goes on of a tensor: of half precision no larger than its largest number, NaN staying.
template <typename Type> inline Floats kept_finite(Floats x) {
  if constexpr (std::is_same_v<Type, F16>) {
    const Floats low = x < -65504.0f ? Floats(-65504.0f) : x;
    return low > 65504.0f ? Floats(65504.0f) : low;
  } else
    return x;
}

inline int32_t largest_of(Vector<int32_t, 2> x) { return sycl::max(x.x, x.y); }
template <int N> inline int32_t largest_of(Vector<int32_t, N> x) {
  return largest_of(__builtin_elementwise_max(x.lo, x.hi));
}

// Part of a row, of one work-item.
template <typename Bits> struct Part {
  const Bits *x, *last, *before;
  Bits *target, *out;
  uint8_t *code, *scale;
  i64 count; // numbers that are left of the row
};

// The step of a byte, and the byte of the smallest step that is not smaller; outside of 1 to 254 there is none.
inline float step_of(int32_t byte) { return sycl::bit_cast<float>(uint32_t(byte - 1 + LOWEST) << 20); }
inline int32_t byte_above(float step, uint32_t round_up = 0xfffff) {
  return (int32_t(sycl::bit_cast<uint32_t>(step) + round_up) >> 20) - LOWEST + 1;
}

// A scale byte, and what follows from it.
struct Scale {
  int32_t byte;
  bool fits; // whether a scale fits the group
  Scale(int32_t found, bool finite)
      : byte(!finite ? BAD : found > LARGEST ? 0 : sycl::max(found, 0)), fits(finite && found <= LARGEST) {}
  bool codes() const { return byte != 0 && byte != BAD; }
  // 0 adds nothing to a prediction: with the code 0 it makes -0.
  float step() const { return byte == 0 ? 0.0f : byte == BAD ? __builtin_nanf("") : step_of(byte); }
  // 1 / step, rounded to nearest, by that of the 8 significands: a GPU has no quick division that is exact.
  float reciprocal() const {
    const int32_t eighths = byte - 1 + LOWEST;
    const bool one = eighths & 1, two = eighths & 2, four = eighths & 4;
    const float low = two ? one ? 8 / 11.0f : 8 / 10.0f : one ? 8 / 9.0f : 1.0f;
    const float high = two ? one ? 8 / 15.0f : 8 / 14.0f : one ? 8 / 13.0f : 8 / 12.0f;
    const int32_t significand = sycl::bit_cast<int32_t>(four ? high : low);
    return sycl::bit_cast<float>(significand - ((eighths >> 3) - 127) * (1 << 23));
  }
};

// Codes lie in the order of their channels, the first in the lowest bits. Unit: what their addresses are a multiple of.
template <int BITS, typename Unit, int N> inline void store_codes(uint8_t *to, Vector<uint32_t, N> code) {
  if constexpr (BITS == 8 * sizeof(Unit))
    reinterpret_cast<Loose<Unit, N> *>(to)->value = __builtin_convertvector(code, Vector<Unit, N>);
  else if constexpr (N == 2)
    *reinterpret_cast<Unit *>(to) = Unit(code.x | code.y << BITS);
  else {
    Vector<uint32_t, N / 2> pair = code.even | code.odd << BITS;
    store_codes<2 * BITS, Unit, N / 2>(to, pair);
  }
}

template <int BITS, typename Unit, int N> inline Vector<uint32_t, N> load_codes(const uint8_t *from) {
  if constexpr (BITS == 8 * sizeof(Unit)) {
    return __builtin_convertvector(reinterpret_cast<const Loose<Unit, N> *>(from)->value, Vector<uint32_t, N>);
  } else {
    constexpr uint32_t mask = (1 << BITS) - 1;
    Vector<uint32_t, N> code;
    if constexpr (N == 2) {
      const uint32_t pair = *reinterpret_cast<const Unit *>(from);
      code.x = pair & mask, code.y = pair >> BITS;
    } else {
      const auto pair = load_codes<2 * BITS, Unit, N / 2>(from);
      code.even = pair & mask, code.odd = pair >> BITS;
    }
    return code;
  }
}

// The first `count` of a work-item's codes; those beyond are 0, and their bytes are not touched. places: an address and
// strides, or-ed. The outer branches are the same for all work-items.
template <int BITS> inline void store_codes(uint8_t *to, Words code, i64 count, i64 places) {
  if (count >= WIDTH) {
    if constexpr (BITS > 2)
      if (!(places & 3)) return store_codes<BITS, uint32_t, WIDTH>(to, code);
    if (!(places & 1)) return store_codes<BITS, uint16_t, WIDTH>(to, code);
    return store_codes<BITS, uint8_t, WIDTH>(to, code);
  }
#pragma unroll
  for (int i = 0; i < WIDTH; i += 8 / BITS) {
    uint32_t byte = 0;
#pragma unroll
    for (int n = 0; n < 8 / BITS; ++n)
      if (i + n < count) byte |= code[i + n] << n * BITS;
    if (i < count) to[i * BITS / 8] = uint8_t(byte);
  }
}

template <int BITS> inline Words load_codes(const uint8_t *from, i64 count, i64 places) {
  if (count >= WIDTH) {
    if constexpr (BITS > 2)
      if (!(places & 3)) return load_codes<BITS, uint32_t, WIDTH>(from);
    if (!(places & 1)) return load_codes<BITS, uint16_t, WIDTH>(from);
    return load_codes<BITS, uint8_t, WIDTH>(from);
  }
  Words code = 0;
#pragma unroll
  for (int i = 0; i < WIDTH; ++i)
    if (i < count) code[i] = from[i * BITS / 8] >> i * BITS % 8 & ((1 << BITS) - 1);
  return code;
}
