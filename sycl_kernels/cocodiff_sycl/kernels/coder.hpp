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
  i64 linear;  // whether the linear continuation predicts
  i64 measure; // whether the differences to the newest values are compared with x
};

// A tensor's rows one after the other: places are counted on, because 64-bit products take a GPU many instructions.
template <typename T> struct Walk {
  T *first, *at;
  Strides by;
  void go(i64 batch, i64 token, i64 head) { at = first + batch * by.batch + token * by.token + head * by.head; }
};

// One tensor.
template <typename Type, bool WORDS> struct Coder {
  using Bits = typename Type::Bits;
  const Residuals &of;
  const Place place;
  const int bits = of.bits;
  const bool linear = of.linear;
  const float factor = sycl::bit_cast<float>(uint32_t(of.factor_bits)), middle = (1 << (bits - 1)) - 0.5f;
  const float onward = sycl::bit_cast<float>(uint32_t(of.onward_bits));
  const i64 width = (of.numbers * bits + 7) / 8; // bytes of a row's codes; scales follow
  const i64 places = i64(of.code) | of.of_code.batch | of.of_code.token | of.of_code.head;
  Walk<const Bits> x{reinterpret_cast<const Bits *>(of.x), nullptr, of.of_x};
  Walk<Bits> last{reinterpret_cast<Bits *>(of.last), nullptr, of.of_last};
  Walk<Bits> before{reinterpret_cast<Bits *>(of.before), nullptr, of.of_before};
  Walk<uint8_t> code{of.code, nullptr, of.of_code};
  Walk<Bits> out{reinterpret_cast<Bits *>(of.out), nullptr, of.of_out};
  int32_t unfit = 0, change = 0; // of this work-item's groups: what the notes are to be told

  template <typename Work> void rows(Work work) {
    const i64 end = sycl::min((place.row + 1) * of.rows_each, of.rows);
    i64 row = place.row * of.rows_each;
    if (row >= end) return;
    const uint32_t of_all = uint32_t(row) / uint32_t(of.heads); // in 32 bits: a GPU has no division of 64
    i64 batch = of_all / uint32_t(of.tokens), token = of_all - batch * of.tokens, head = row - of_all * of.heads;
    go(batch, token, head);
    for (; row < end; ++row) {
      Bits *const target = of.before ? before.at : last.at;
      for (i64 group = 0; group < of.numbers; group += LANES * WIDTH) {
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
  float sum_in_group(Floats sum) const {
    if constexpr (SHARING > 1)
      for (int other = SHARING / 2; other; other /= 2)
#pragma unroll
        for (int i = 0; i < WIDTH; ++i) sum[i] += from_other(sum[i], other);
    return sum_of(sum);
  }

  // The byte of the step with which 2 bits err least. channels: of the group.
  int32_t byte_of_two_bits(Floats size, float largest, int32_t channels) const {
    const float all = sum_in_group(size);
    float total = largest * (13 / 32.0f), count = 1; // the step is their quotient
#pragma unroll
    for (int round = 0; round < 2; ++round) {
      const Ints is_large = size * count >= total;
      total = 2 * (all + 2 * sum_in_group(is_large ? size : Floats(0)));
      count = float(channels + 8 * count_in_group(-is_large));
    }
    // The quotient need not be exact: products of the middles, which are, decide.
    const int32_t byte = byte_above(total / count, 0x7ffff);
    const float above = (step_of(byte) + step_of(byte + 1)) / 2, below = (step_of(byte - 1) + step_of(byte)) / 2;
    return byte + (total > above * count) - (total <= below * count);
  }

  static Ints magnitude_of(Floats x) { return __builtin_bit_cast(Ints, x) & 0x7fffffff; }

  void encode(Part<Bits> part) {
    const i64 left = part.count;
    const Floats own = load_first<Type, WORDS>(part.x, left), newest = load_first<Type, WORDS>(part.last, left);
    const Floats predicted = linear ? continuation(newest, part.before, left) : limited(newest);
    const Floats residual = own - predicted;
    const int32_t most_bits = largest_in_group(magnitude_of(residual));
    const float most = sycl::bit_cast<float>(most_bits);
    int32_t byte = byte_above(most * (1.0f / (1 << (bits - 1))));
    if (bits == 2) {
      const i64 before = place.lane % SHARING * WIDTH; // channels of the group in other work-items
      byte = byte_of_two_bits(__builtin_elementwise_abs(residual), most, int32_t(sycl::min(left + before, i64(GROUP))));
    }
    const Scale scale(byte, most_bits < 0x7f800000);
    const bool tells = this->tells(left);
    if (tells) *part.scale = uint8_t(scale.byte), unfit += !scale.fits;
    if (of.measure) {
      const int32_t more = change_of(own, newest);
      if (tells) change += more;
    }
    if (left <= 0) return;
    const float limit = (1 << (bits - 1)) - 1;
    const int32_t half = 1 << (bits - 1), kept = scale.codes() ? 2 * half - 1 : 0;
    Floats sized = __builtin_elementwise_abs(residual) * scale.reciprocal();
    sized = sized < limit ? sized : limit; // of NaN too
    const Ints magnitude = __builtin_convertvector(sized, Ints) | half;
    const Ints codes = (magnitude ^ __builtin_bit_cast(Ints, residual) >> 31) & kept;
    renew(part.target, left, predicted, codes, scale.step());
    by_bits([&](auto bits) { store_codes<bits>(part.code, __builtin_bit_cast(Words, codes), left, places); });
  }

  // By how many eighths of an octave a group's differences to the newest values are larger than x.
  int32_t change_of(Floats own, Floats newest) const {
    return size_byte(largest_in_group(magnitude_of(own - newest))) - size_byte(largest_in_group(magnitude_of(own)));
  }

  void note_change(Part<Bits> part) {
    const Floats own = load_first<Type, WORDS>(part.x, part.count);
    const Floats newest = load_first<Type, WORDS>(part.last, part.count);
    store_first<Type, WORDS>(part.target, own, part.count);
    const int32_t more = change_of(own, newest);
    if (tells(part.count)) change += more;
  }

  void decode(Part<Bits> part) const {
    if (part.count <= 0) return;
    const int32_t byte = *part.scale;
    const float step = Scale(byte, byte != BAD).step();
    const Floats newest = load_first<Type, WORDS>(part.last, part.count);
    const Floats predicted = linear ? continuation(newest, part.before, part.count) : limited(newest);
    Words codes;
    by_bits([&](auto bits) { codes = load_codes<bits>(part.code, part.count, places); });
    const Floats next = renew(part.target, part.count, predicted, __builtin_bit_cast(Ints, codes), step);
    if (of.out) go_on(part.out, rounded<Type>(next), newest, part.count);
  }

  void continue_linearly(Part<Bits> part) const {
    const Floats older = load_first<Type, WORDS>(part.before, part.count);
    go_on(part.out, load_first<Type, WORDS>(part.last, part.count), older, part.count);
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
    i64 all_unfit = unfit, all_change = change;
    if (of.measure && place.row == 0 && place.lane == 0) add(of.notes[3], of.rows * ((of.numbers + GROUP - 1) / GROUP));
#if LANES > 1
    auto lanes = place.item.get_sub_group();
    if (!sycl::any_of_group(lanes, unfit || change)) return;
    all_unfit = sycl::reduce_over_group(lanes, unfit, sycl::plus<int32_t>());
    all_change = sycl::reduce_over_group(lanes, change, sycl::plus<int32_t>());
#endif
    if (place.lane) return;
    if (all_unfit) add(of.notes[0], all_unfit);
    if (all_change) add(of.notes[2], all_change);
  }
  static void add(i64 &note, i64 number) {
    sycl::atomic_ref<i64, sycl::memory_order::relaxed, sycl::memory_scope::device,
                     sycl::access::address_space::global_space>(note)
        .fetch_add(number);
  }
};
