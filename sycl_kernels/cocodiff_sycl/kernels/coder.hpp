// What a work-item of the residual codec's kernels does with its rows: encoding, decoding and noting of groups.
struct Strides { // in numbers, or bytes of a code
  i64 batch, token, head;
};

struct Residuals {
  const char *x;       // not for decoding
  char *last, *before; // before: null where one is kept
  uint8_t *code;       // null for note_change and continue_linearly
  char *out;           // null where nothing is continued
  i64 *notes;          // of encoding and note_change
  i64 factor_bits, onward_bits; // of floats: of what predicts, and of what is continued
  i64 rows, rows_each; // of [B, L, H]; rows_each: consecutive rows of one group of LANES work-items
  i64 tokens, heads, numbers;
  Strides of_x, of_last, of_before, of_code, of_out;
  i64 bits;
  i64 linear, compare; // whether the linear continuation predicts; whether the two predictions are compared
  i64 measure;         // whether the differences to the newest values are compared with x
};

// A tensor's rows one after the other: places are counted on, because 64-bit products take a GPU many instructions.
template <typename T> struct Walk {
  T *first, *at;
  Strides by;
  void go(i64 batch, i64 token, i64 head) { at = first + batch * by.batch + token * by.token + head * by.head; }
};

// What of the linear continuation a launch works out.
enum Continuation { NOTHING, PREDICTS, COMPARED, ANY };

// One tensor. BITS and WHAT are 0 and ANY on a GPU and where a CPU encodes (batch.hpp): each more is a longer time to
// compile. A CPU's decoding is bound by instructions and knows them.
template <typename Type, bool WORDS, int BITS, int WHAT> struct Coder {
  using Bits = typename Type::Bits;
  const Residuals &of;
  const Place place;
  const int bits = BITS ? BITS : int(of.bits);
  const bool linear = WHAT == NOTHING ? false : WHAT == PREDICTS ? true : of.linear;
  const bool compared = WHAT == ANY ? of.compare : WHAT == COMPARED;
  const float factor = sycl::bit_cast<float>(uint32_t(of.factor_bits)), middle = (1 << (bits - 1)) - 0.5f;
  const float onward = sycl::bit_cast<float>(uint32_t(of.onward_bits));
  const i64 width = (of.numbers * bits + 7) / 8; // bytes of a row's codes; scales follow
  const i64 places = i64(of.code) | of.of_code.batch | of.of_code.token | of.of_code.head;
  Walk<const Bits> x{reinterpret_cast<const Bits *>(of.x), nullptr, of.of_x};
  Walk<Bits> last{reinterpret_cast<Bits *>(of.last), nullptr, of.of_last};
  Walk<Bits> before{reinterpret_cast<Bits *>(of.before), nullptr, of.of_before};
  Walk<uint8_t> code{of.code, nullptr, of.of_code};
  Walk<Bits> out{reinterpret_cast<Bits *>(of.out), nullptr, of.of_out};
  int32_t unfit = 0, difference = 0, change = 0; // of this work-item's groups: what the notes are to be told

  template <typename Work> void rows(Work work) {
    const i64 end = sycl::min((place.row + 1) * of.rows_each, of.rows);
    i64 row = place.row * of.rows_each;
    if (row >= end) return;
    const uint32_t of_all = uint32_t(row) / uint32_t(of.heads); // in 32 bits: a GPU has no division of 64
    i64 batch = of_all / uint32_t(of.tokens), token = of_all - batch * of.tokens, head = row - of_all * of.heads;
    go(batch, token, head);
    for (; row < end; ++row) {
      Bits *const target = of.before ? before.at : last.at;
      for (i64 group = 0; group < of.numbers; group += LANES == 1 ? GROUP : LANES * WIDTH) {
        const i64 at = group + place.lane * WIDTH;
        work(Part<Bits>{x.at + at, last.at + at, before.at + at, target + at, out.at + at,
                        code.at + at * bits / 8, code.at + width + at / GROUP, of.numbers - at});
      }
      x.at += of.of_x.head, last.at += of.of_last.head, before.at += of.of_before.head, code.at += of.of_code.head;
      out.at += of.of_out.head;
      if (++head < of.heads) continue;
      head = 0;
      if (++token == of.tokens) token = 0, ++batch;
      go(batch, token, 0);
    }
  }

  void go(i64 batch, i64 token, i64 head) {
    x.go(batch, token, head), last.go(batch, token, head), before.go(batch, token, head), code.go(batch, token, head);
    out.go(batch, token, head);
  }

  // work(part), for a CPU's short group with copies, beside which there are zeros.
  template <typename Work> void staged(Part<Bits> part, Work work) const {
    if (LANES > 1 || part.count >= GROUP) return work(part);
    Bits x[GROUP] = {}, last[GROUP] = {}, before[GROUP] = {}, target[GROUP], out[GROUP];
    uint8_t code[GROUP] = {};
    const i64 bytes = (part.count * bits + 7) / 8;
    for (i64 i = 0; i < part.count; ++i) {
      if (of.x) x[i] = part.x[i];
      last[i] = part.last[i];
      if (of.before) before[i] = part.before[i];
    }
    if (of.code)
      for (i64 i = 0; i < bytes; ++i) code[i] = part.code[i];
    work(Part<Bits>{x, last, before, target, out, code, part.scale, part.count});
    for (i64 i = 0; i < part.count; ++i) {
      if (of.code || of.notes) part.target[i] = target[i];
      if (of.out) part.out[i] = out[i];
    }
  }

  Floats continuation(Floats newest, const Bits *from, i64 count) const {
    return limited(newest + (newest - load_first<Type, WORDS>(from, count)) * factor);
  }
  // What stands for the next tensor, by the newest two.
  void go_on(Bits *to, Floats newest, Floats older, i64 count) const {
    store_first<Type, WORDS>(to, kept_finite<Type>(newest + (newest - older) * onward), count);
  }

  // Another work-item's number.
  template <typename T> T from_other(T x, int distance) const {
    return sycl::permute_group_by_xor(place.item.get_sub_group(), x, distance);
  }

  // Of a group, over its work-items.
  int32_t largest_in_group(Ints own) const {
    int32_t largest = largest_of(own);
    if constexpr (SHARING > 1)
      for (int other = 1; other < SHARING; other *= 2) largest = sycl::max(largest, from_other(largest, other));
    return largest;
  }

  // The size byte of a group's magnitudes, as bits. NaN counts as infinity: some of its patterns would overflow.
  static int32_t size_byte(int32_t largest) {
    return sycl::clamp(byte_above(sycl::bit_cast<float>(sycl::min(largest, 0x7f800000))), 0, LARGEST);
  }
  // One work-item tells of a group.
  bool tells(i64 count) const { return place.lane % SHARING == 0 && count > 0; }

  int32_t count_in_group(Ints own) const {
    int32_t count = sum_of(own);
    if constexpr (SHARING > 1)
      for (int other = 1; other < SHARING; other *= 2) count += from_other(count, other);
    return count;
  }

  // In the order of the definition: the upper half of 32 numbers is added to the lower one, and so on.
  float sum_in_group(const Floats (&own)[PARTS]) const {
    Floats sum = own[0];
    if constexpr (SHARING > 1)
      for (int other = SHARING / 2; other; other /= 2)
#pragma unroll
        for (int i = 0; i < WIDTH; ++i) sum[i] += from_other(sum[i], other);
    return sum_of(sum);
  }

  // The byte of the step with which 2 bits err least. channels: of the group.
  int32_t byte_of_two_bits(const Floats (&size)[PARTS], float largest, int32_t channels) const {
    const float all = sum_in_group(size);
    float total = largest * (13 / 32.0f), count = 1; // the step is their quotient
#pragma unroll
    for (int round = 0; round < 2; ++round) {
      Floats large[PARTS];
      Ints found = 0;
#pragma unroll
      for (int i = 0; i < PARTS; ++i) {
        const Ints is_large = size[i] * count >= total;
        large[i] = is_large ? size[i] : Floats(0);
        found -= is_large;
      }
      total = 2 * (all + 2 * sum_in_group(large));
      count = float(channels + 8 * count_in_group(found));
    }
    // The quotient need not be exact: products of the middles, which are, decide.
    const int32_t byte = byte_above(total / count, 0x7ffff);
    const float above = (step_of(byte) + step_of(byte + 1)) / 2, below = (step_of(byte - 1) + step_of(byte)) / 2;
    return byte + (total > above * count) - (total <= below * count);
  }

  void encode(Part<Bits> part) {
    Floats predicted[PARTS], residual[PARTS];
    Ints largest = 0, largest_of_other = 0, largest_change = 0, largest_of_x = 0;
#pragma unroll
    for (int i = 0; i < PARTS; ++i) {
      const i64 from = i * WIDTH, left = part.count - from;
      const Floats own = load_first<Type, WORDS>(part.x + from, left);
      const Floats newest = load_first<Type, WORDS>(part.last + from, left);
      const Floats same = limited(newest);
      Floats forecast = same;
      if (linear || compared) forecast = continuation(newest, part.before + from, left);
      predicted[i] = linear ? forecast : same;
      residual[i] = own - predicted[i];
      largest = __builtin_elementwise_max(largest, __builtin_bit_cast(Ints, residual[i]) & 0x7fffffff);
      if (compared) {
        const Floats other = own - (linear ? same : forecast);
        largest_of_other = __builtin_elementwise_max(largest_of_other, __builtin_bit_cast(Ints, other) & 0x7fffffff);
      }
      if (of.measure) {
        largest_change = __builtin_elementwise_max(largest_change, __builtin_bit_cast(Ints, own - newest) & 0x7fffffff);
        largest_of_x = __builtin_elementwise_max(largest_of_x, __builtin_bit_cast(Ints, own) & 0x7fffffff);
      }
    }
    const int32_t most_bits = largest_in_group(largest);
    const float most = sycl::bit_cast<float>(most_bits);
    int32_t byte = byte_above(most * (1.0f / (1 << (bits - 1))));
    if (bits == 2) {
      Floats size[PARTS];
#pragma unroll
      for (int i = 0; i < PARTS; ++i) size[i] = __builtin_elementwise_abs(residual[i]);
      const i64 before = place.lane % SHARING * WIDTH; // channels of the group in other work-items
      byte = byte_of_two_bits(size, most, int32_t(sycl::min(part.count + before, i64(GROUP))));
    }
    const Scale scale(byte, most_bits < 0x7f800000);
    const bool tells = this->tells(part.count);
    if (tells) *part.scale = uint8_t(scale.byte), unfit += !scale.fits;
    if (compared) {
      const int32_t more = size_byte(most_bits) - size_byte(largest_in_group(largest_of_other));
      if (tells) difference += linear ? more : -more;
    }
    if (of.measure) {
      const int32_t more = size_byte(largest_in_group(largest_change)) - size_byte(largest_in_group(largest_of_x));
      if (tells) change += more;
    }
    const float reciprocal = scale.reciprocal(), step = scale.step(), limit = (1 << (bits - 1)) - 1;
    const int32_t half = 1 << (bits - 1), kept = scale.codes() ? 2 * half - 1 : 0;
#pragma unroll
    for (int i = 0; i < PARTS; ++i) {
      const i64 from = i * WIDTH, left = part.count - from;
      if (LANES > 1 && left <= 0) continue;
      Floats sized = __builtin_elementwise_abs(residual[i]) * reciprocal;
      sized = sized < limit ? sized : limit; // of NaN too
      const Ints magnitude = __builtin_convertvector(sized, Ints) | half;
      const Ints sign = __builtin_bit_cast(Ints, residual[i]) >> 31;
      const Ints codes = (magnitude ^ sign) & kept;
      renew(part.target + from, left, predicted[i], codes, step);
      by_bits([&](auto bits) {
        store_codes<bits>(part.code + from * bits / 8, __builtin_bit_cast(Words, codes), left, places);
      });
    }
  }

  void note_change(Part<Bits> part) {
    Ints largest = 0, largest_of_x = 0;
#pragma unroll
    for (int i = 0; i < PARTS; ++i) {
      const i64 from = i * WIDTH, left = part.count - from;
      const Floats own = load_first<Type, WORDS>(part.x + from, left);
      const Floats residual = own - load_first<Type, WORDS>(part.last + from, left);
      largest = __builtin_elementwise_max(largest, __builtin_bit_cast(Ints, residual) & 0x7fffffff);
      largest_of_x = __builtin_elementwise_max(largest_of_x, __builtin_bit_cast(Ints, own) & 0x7fffffff);
      store_first<Type, WORDS>(part.target + from, own, left);
    }
    const int32_t more = size_byte(largest_in_group(largest)) - size_byte(largest_in_group(largest_of_x));
    if (tells(part.count)) change += more;
  }

  void decode(Part<Bits> part) const {
    if (part.count <= 0) return;
    const int32_t byte = *part.scale;
    const float step = Scale(byte, byte != BAD).step();
#pragma unroll
    for (int i = 0; i < PARTS; ++i) {
      const i64 from = i * WIDTH, left = part.count - from;
      const Floats newest = load_first<Type, WORDS>(part.last + from, left);
      const Floats predicted = linear ? continuation(newest, part.before + from, left) : limited(newest);
      Words codes;
      by_bits([&](auto bits) { codes = load_codes<bits>(part.code + from * bits / 8, left, places); });
      const Floats next = renew(part.target + from, left, predicted, __builtin_bit_cast(Ints, codes), step);
      if (of.out) go_on(part.out + from, rounded<Type>(next), newest, left);
    }
  }

  void continue_linearly(Part<Bits> part) const {
#pragma unroll
    for (int i = 0; i < PARTS; ++i) {
      const i64 from = i * WIDTH, left = part.count - from;
      const Floats older = load_first<Type, WORDS>(part.before + from, left);
      go_on(part.out + from, load_first<Type, WORDS>(part.last + from, left), older, left);
    }
  }

  // The next reconstruction, before it is rounded.
  Floats renew(Bits *target, i64 count, Floats predicted, Ints codes, float step) const {
    const Floats next = kept_finite<Type>(predicted + (__builtin_convertvector(codes, Floats) - middle) * step);
    store_first<Type, WORDS>(target, next, count);
    return next;
  }

  template <typename Work> void by_bits(Work work) const {
    if (bits == 2)
      work(std::integral_constant<int, 2>());
    else if (bits == 4)
      work(std::integral_constant<int, 4>());
    else
      work(std::integral_constant<int, 8>());
  }

  // What there is to tell is added by one work-item.
  void tell() const {
    i64 all_unfit = unfit, all_difference = difference, all_change = change;
    if (of.measure && place.row == 0 && place.lane == 0) add(of.notes[3], of.rows * ((of.numbers + GROUP - 1) / GROUP));
#if LANES > 1
    auto lanes = place.item.get_sub_group();
    if (!sycl::any_of_group(lanes, unfit || difference || change)) return;
    all_unfit = sycl::reduce_over_group(lanes, unfit, sycl::plus<int32_t>());
    all_difference = sycl::reduce_over_group(lanes, difference, sycl::plus<int32_t>());
    all_change = sycl::reduce_over_group(lanes, change, sycl::plus<int32_t>());
#endif
    if (place.lane) return;
    if (all_unfit) add(of.notes[0], all_unfit);
    if (all_difference) add(of.notes[1], all_difference);
    if (all_change) add(of.notes[2], all_change);
  }
  static void add(i64 &note, i64 number) {
    sycl::atomic_ref<i64, sycl::memory_order::relaxed, sycl::memory_scope::device,
                     sycl::access::address_space::global_space>(note)
        .fetch_add(number);
  }
};
