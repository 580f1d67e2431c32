// encode_residual and decode_residual: a tensor's difference to its prediction as codes of 2, 4 or 8 bits, and back.
//
// The arithmetic is defined, operation for operation, in cocodiff/kernels/residual.py. Bound by memory: x, the
// reconstructions that the prediction takes and the code are read or written once, and the next reconstruction is
// written once. A group's numbers stay in registers between the look for the largest difference and their codes.
constexpr int GROUP = 32;                                // channels of one scale
constexpr int PARTS = LANES == 1 ? GROUP / WIDTH : 1;    // accesses of a work-item to a group
constexpr int SHARING = LANES == 1 ? 1 : GROUP / WIDTH;  // work-items that share a group
constexpr int LOWEST = (127 - 20) << 3, LARGEST = 254, BAD = 255; // LOWEST: the smallest step's exponent, in eighths
using Ints = Vector<int32_t, WIDTH>;
using Words = Vector<uint32_t, WIDTH>;

struct Strides { // in numbers, or bytes of a code
  i64 batch, token, head;
};

struct Residuals {
  const char *x; // encoding alone
  char *last, *before;
  uint8_t *code;
  i64 *notes;      // encoding alone
  i64 factor_bits; // of a float
  i64 rows, rows_each; // of [B, L, H]; rows_each: consecutive rows of one group of LANES work-items
  i64 tokens, heads, numbers;
  Strides of_x, of_last, of_before, of_code;
  i64 bits;
  i64 linear, compare; // whether the linear continuation predicts; whether the two predictions are compared
};

// A tensor's rows one after the other: places are counted on, because 64-bit products take a GPU many instructions.
template <typename T> struct Walk {
  T *first, *at;
  Strides by;
  void go(i64 batch, i64 token, i64 head) { at = first + batch * by.batch + token * by.token + head * by.head; }
};

inline int32_t largest_of(Vector<int32_t, 2> x) { return sycl::max(x.x, x.y); }
template <int N> inline int32_t largest_of(Vector<int32_t, N> x) {
  return largest_of(__builtin_elementwise_max(x.lo, x.hi));
}

// The first `count` of N numbers; what is beyond is 0 and is not touched.
template <typename Type, int N, bool WORDS>
inline Vector<float, N> load_first(const typename Type::Bits *from, i64 count) {
  if (count >= N) return load<Type, N, WORDS>(from);
  Vector<float, N> x = 0;
#pragma unroll
  for (int i = 0; i < N; ++i)
    if (i < count) x[i] = load1<Type>(from + i);
  return x;
}

template <typename Type, int N, bool WORDS>
inline void store_first(typename Type::Bits *to, Vector<float, N> x, i64 count) {
  if (count >= N) return store<Type, N, WORDS>(to, x);
#pragma unroll
  for (int i = 0; i < N; ++i)
    if (i < count) store1<Type>(to + i, x[i]);
}

// A scale byte, and what follows from it.
struct Scale {
  int32_t byte;
  bool fits; // whether a scale fits the group
  bool codes() const { return byte != 0 && byte != BAD; }
  // a: bits of the largest |d| of a group.
  static Scale of(int32_t largest, float step_of_largest) {
    const int32_t step = sycl::bit_cast<int32_t>(sycl::bit_cast<float>(largest) * step_of_largest);
    const int32_t byte = ((step + 0xfffff) >> 20) - LOWEST + 1;
    const bool finite = largest < 0x7f800000;
    return {finite ? sycl::clamp(byte, 0, LARGEST) : BAD, finite && byte <= LARGEST};
  }
  // 0 adds nothing to a prediction: with the code 0 it makes -0.
  float step() const {
    const float step = sycl::bit_cast<float>((byte - 1 + LOWEST) << 20);
    return byte == 0 ? 0.0f : byte == BAD ? __builtin_nanf("") : step;
  }
  // 1 / step, rounded to nearest: of the 8 significands, without a division.
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
    if constexpr (LANES > 1 && BITS > 2)
      if (!(places & 3)) return store_codes<BITS, uint32_t, WIDTH>(to, code);
    if constexpr (LANES > 1)
      if (!(places & 1)) return store_codes<BITS, uint16_t, WIDTH>(to, code);
    return store_codes<BITS, uint8_t, WIDTH>(to, code);
  }
#pragma unroll
  for (int i = 0; i < WIDTH; i += 8 / BITS) {
    uint32_t byte = 0;
#pragma unroll
    for (int n = 0; n < 8 / BITS; ++n) byte |= code[i + n] << n * BITS;
    if (i < count) to[i * BITS / 8] = uint8_t(byte);
  }
}

template <int BITS> inline Words load_codes(const uint8_t *from, i64 count, i64 places) {
  if (count >= WIDTH) {
    if constexpr (LANES > 1 && BITS > 2)
      if (!(places & 3)) return load_codes<BITS, uint32_t, WIDTH>(from);
    if constexpr (LANES > 1)
      if (!(places & 1)) return load_codes<BITS, uint16_t, WIDTH>(from);
    return load_codes<BITS, uint8_t, WIDTH>(from);
  }
  Words code = 0;
#pragma unroll
  for (int i = 0; i < WIDTH; ++i)
    if (i < count) code[i] = from[i * BITS / 8] >> i * BITS % 8 & ((1 << BITS) - 1);
  return code;
}

// One tensor's rows, and the loop over them that encoding and decoding share.
template <typename Type, bool WORDS> struct Coder {
  using Bits = typename Type::Bits;
  const Residuals &of;
  const Place place;
  const bool continued = of.before && (of.linear || of.compare); // whether the linear continuation is worked out
  const bool linear = of.before && of.linear, compared = of.before && of.compare;
  const float factor = sycl::bit_cast<float>(uint32_t(of.factor_bits)), middle = (1 << (of.bits - 1)) - 0.5f;
  const float step_of_largest = of.bits == 2 ? 13 / 32.0f : of.bits == 4 ? 1 / 8.0f : 1 / 128.0f;
  const i64 width = (of.numbers * of.bits + 7) / 8; // bytes of a row's codes; scales follow
  const i64 places = i64(of.code) | of.of_code.batch | of.of_code.token | of.of_code.head;
  Walk<const Bits> x{reinterpret_cast<const Bits *>(of.x), nullptr, of.of_x};
  Walk<Bits> last{reinterpret_cast<Bits *>(of.last), nullptr, of.of_last};
  Walk<Bits> before{reinterpret_cast<Bits *>(of.before), nullptr, of.of_before};
  Walk<uint8_t> code{of.code, nullptr, of.of_code};
  int32_t unfit = 0, difference = 0; // of this work-item's groups: what the notes are to be told

  // work(at, count): of a work-item's part of each group: its first channel and how many are left.
  template <typename Work> void rows(Work work) {
    const i64 end = sycl::min((place.row + 1) * of.rows_each, of.rows);
    i64 row = place.row * of.rows_each;
    if (row >= end) return;
    const uint32_t of_all = uint32_t(row) / uint32_t(of.heads); // in 32 bits: a GPU has no division of 64
    i64 batch = of_all / uint32_t(of.tokens), token = of_all - batch * of.tokens, head = row - of_all * of.heads;
    go(batch, token, head);
    for (; row < end; ++row) {
      for (i64 group = 0; group < of.numbers; group += LANES == 1 ? GROUP : LANES * WIDTH) {
        const i64 at = group + place.lane * WIDTH;
        work(at, of.numbers - at);
      }
      x.at += of.of_x.head, last.at += of.of_last.head, before.at += of.of_before.head, code.at += of.of_code.head;
      if (++head < of.heads) continue;
      head = 0;
      if (++token == of.tokens) token = 0, ++batch;
      go(batch, token, 0);
    }
  }

  void go(i64 batch, i64 token, i64 head) {
    x.go(batch, token, head), last.go(batch, token, head), before.go(batch, token, head), code.go(batch, token, head);
  }

  Bits *target() const { return of.before ? before.at : last.at; }

  Floats continuation(Floats newest, i64 at, i64 count) const {
    return newest + (newest - load_first<Type, WIDTH, WORDS>(before.at + at, count)) * factor;
  }

  // Of a group, over its work-items.
  int32_t largest_in_group(Ints own) const {
    int32_t largest = largest_of(own);
#if LANES > 1
    for (int other = 1; other < SHARING; other *= 2)
      largest = sycl::max(largest, sycl::permute_group_by_xor(place.item.get_sub_group(), largest, other));
#endif
    return largest;
  }

  void encode(i64 at, i64 count) {
    Floats predicted[PARTS], residual[PARTS];
    Ints largest = 0, largest_of_other = 0;
#pragma unroll
    for (int part = 0; part < PARTS; ++part) {
      const i64 from = at + part * WIDTH, left = count - part * WIDTH;
      const Floats own = load_first<Type, WIDTH, WORDS>(x.at + from, left);
      const Floats newest = load_first<Type, WIDTH, WORDS>(last.at + from, left);
      Floats other = predicted[part] = newest;
      if (continued) (linear ? predicted[part] : other) = continuation(newest, from, left);
      residual[part] = own - predicted[part];
      largest = __builtin_elementwise_max(largest, __builtin_bit_cast(Ints, residual[part]) & 0x7fffffff);
      if (compared)
        largest_of_other =
            __builtin_elementwise_max(largest_of_other, __builtin_bit_cast(Ints, own - other) & 0x7fffffff);
    }
    const Scale scale = Scale::of(largest_in_group(largest), step_of_largest);
    const bool tells = place.lane % SHARING == 0 && count > 0; // one work-item of a group
    if (tells) code.at[width + at / GROUP] = uint8_t(scale.byte), unfit += !scale.fits;
    if (compared) {
      const Scale other = Scale::of(largest_in_group(largest_of_other), step_of_largest);
      if (tells) difference += linear ? scale.byte - other.byte : other.byte - scale.byte;
    }
    const float reciprocal = scale.reciprocal(), step = scale.step(), most = (1 << (of.bits - 1)) - 1;
    const int32_t half = 1 << (of.bits - 1), mask = 2 * half - 1, kept = scale.codes() ? mask : 0;
#pragma unroll
    for (int part = 0; part < PARTS; ++part) {
      const i64 from = at + part * WIDTH, left = count - part * WIDTH;
      if (left <= 0) continue;
      Floats sized = __builtin_elementwise_abs(residual[part]) * reciprocal;
      sized = sized < most ? sized : most; // of NaN too
      const Ints magnitude = __builtin_convertvector(sized, Ints) + half;
      const Ints sign = __builtin_bit_cast(Ints, residual[part]) >> 31;
      Ints codes = (magnitude ^ sign) & kept;
      if (left < WIDTH) {
#pragma unroll
        for (int i = 0; i < WIDTH; ++i)
          if (i >= left) codes[i] = 0;
      }
      renew(from, left, predicted[part], codes, step);
      auto store = [&](auto bits) {
        store_codes<bits>(code.at + from * bits / 8, __builtin_bit_cast(Words, codes), left, places);
      };
      by_bits(store);
    }
  }

  void decode(i64 at, i64 count) {
    if (count <= 0) return;
    const float step = Scale{code.at[width + at / GROUP], true}.step();
#pragma unroll
    for (int part = 0; part < PARTS; ++part) {
      const i64 from = at + part * WIDTH, left = count - part * WIDTH;
      if (left <= 0) continue;
      Floats predicted = load_first<Type, WIDTH, WORDS>(last.at + from, left);
      if (linear) predicted = continuation(predicted, from, left);
      Words codes;
      auto load = [&](auto bits) { codes = load_codes<bits>(code.at + from * bits / 8, left, places); };
      by_bits(load);
      renew(from, left, predicted, __builtin_bit_cast(Ints, codes), step);
    }
  }

  void renew(i64 at, i64 count, Floats predicted, Ints codes, float step) const {
    const Floats value = (__builtin_convertvector(codes, Floats) - middle) * step;
    store_first<Type, WIDTH, WORDS>(target() + at, predicted + value, count);
  }

  template <typename Work> void by_bits(Work work) const {
    if (of.bits == 2)
      work(std::integral_constant<int, 2>());
    else if (of.bits == 4)
      work(std::integral_constant<int, 4>());
    else
      work(std::integral_constant<int, 8>());
  }

  // What there is to tell is added by one work-item.
  void tell() const {
    i64 all_unfit = unfit, all_difference = difference;
#if LANES > 1
    auto lanes = place.item.get_sub_group();
    if (!sycl::any_of_group(lanes, unfit || difference)) return;
    all_unfit = sycl::reduce_over_group(lanes, unfit, sycl::plus<int32_t>());
    all_difference = sycl::reduce_over_group(lanes, difference, sycl::plus<int32_t>());
#endif
    if (place.lane) return;
    if (all_unfit) add(of.notes[0], all_unfit);
    if (all_difference) add(of.notes[1], all_difference);
  }
  static void add(i64 &note, i64 number) {
    sycl::atomic_ref<i64, sycl::memory_order::relaxed, sycl::memory_scope::device,
                     sycl::access::address_space::global_space>(note)
        .fetch_add(number);
  }
};

template <typename Type, bool WORDS> inline void encode_rows(const Residuals &of) {
  Coder<Type, WORDS> coder{of, {}};
  coder.rows([&](i64 at, i64 count) { coder.encode(at, count); });
  coder.tell();
}

template <typename Type, bool WORDS> inline void decode_rows(const Residuals &of) {
  Coder<Type, WORDS> coder{of, {}};
  coder.rows([&](i64 at, i64 count) { coder.decode(at, count); });
}

inline i64 places_of(const Residuals &of) {
  const Strides &x = of.of_x, &last = of.of_last, &before = of.of_before;
  const i64 strides = x.batch | x.token | x.head | last.batch | last.token | last.head | before.batch | before.token |
                      before.head;
  return i64(of.x) | i64(of.last) | i64(of.before) | 2 * strides;
}

template <typename Type> inline void encode(const Residuals &of) {
  by_alignment<Type>(places_of(of), [&](auto words) { encode_rows<Type, words>(of); });
}

template <typename Type> inline void decode(const Residuals &of) {
  by_alignment<Type>(places_of(of), [&](auto words) { decode_rows<Type, words>(of); });
}

KERNEL(encode_residual_f32)(Residuals of) { encode<F32>(of); }
KERNEL(encode_residual_bf16)(Residuals of) { encode<BF16>(of); }
KERNEL(encode_residual_f16)(Residuals of) { encode<F16>(of); }
KERNEL(decode_residual_f32)(Residuals of) { decode<F32>(of); }
KERNEL(decode_residual_bf16)(Residuals of) { decode<BF16>(of); }
KERNEL(decode_residual_f16)(Residuals of) { decode<F16>(of); }
