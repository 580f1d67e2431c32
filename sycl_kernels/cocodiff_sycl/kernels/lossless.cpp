// The lossless codec: blocks of a 16-bit tensor as streams, and back. cocodiff/kernels/lossless.py defines them.
//
// A work-item goes through a strip, token by token; neighbouring ones read neighbouring numbers. LANES of them take a
// tile. code_strips writes every strip's words where any would fit, and what is known next, stream_begins finds where
// tiles begin and how long streams are, join_strips copies the words there; read_streams is the way back. Where blocks
// are of few tiles, join_strips finds by itself where they begin, which saves a launch.
namespace lossless {
constexpr int RUN = 8, TOKENS = 32, TILE = 16, RAW = 255, UNARY = 4, LONGEST = 12, NOTED_PARTS = 16;
constexpr int STRIP = 2 + TOKENS * RUN * 28 / 32, IS_RAW = 1 << 15; // of what code_strips leaves: words, and those

struct StreamBlock { // in the launch's table
  i64 first_tile, tiles, strips, cells, start, tokens;
  i64 place, room; // of the stream, and of its first part, bytes
  i64 columns, chunks, by_columns, by_chunks;
};

struct StreamsOf {
  const char *x, *last, *before; // x: not for decoding. last, before: where they are known
  char *written;
  uint8_t *first, *rests; // streams, or their first parts and what did not fit there
  const StreamBlock *blocks;
  i64 *begins, *lengths, *needed; // begins: of tiles, in words behind the sizes
  uint32_t *strips; // of code_strips
  i64 factor_bits;
  i64 tiles, count, heads, numbers, by_rows, linear, by_head, odd; // odd: whether streams begin at odd bytes
  Strides of_x, of_last, of_before, of_written;
};

struct __attribute__((packed)) Anywhere {
  uint16_t word;
};
using Run = Vector<int32_t, RUN>;
using RunOfFloats = Vector<float, RUN>;
using Shorts = Vector<int16_t, RUN>;

#if LANES > 1
inline auto lanes() { return syclext::this_work_item::get_sub_group(); }
inline int32_t lane() { return lanes().get_local_linear_id(); }
inline int32_t sum_of_all(int32_t x) { return sycl::reduce_over_group(lanes(), x, sycl::plus<int32_t>()); }
inline int32_t sum_before(int32_t x) { return sycl::exclusive_scan_over_group(lanes(), x, sycl::plus<int32_t>()); }
#else
inline int32_t lane() { return 0; }
inline int32_t sum_of_all(int32_t x) { return x; }
inline int32_t sum_before(int32_t) { return 0; }
#endif

// 16 bits with their sign.
template <bool WORDS> inline Run taken(const uint16_t *from) {
  if constexpr (WORDS)
    return __builtin_convertvector(
        __builtin_bit_cast(Shorts, reinterpret_cast<const Loose<uint32_t, RUN / 2> *>(from)->value), Run);
  else
    return __builtin_convertvector(reinterpret_cast<const Loose<int16_t, RUN> *>(from)->value, Run);
}
template <bool WORDS> inline void put(uint16_t *to, Run x) {
  const Shorts narrow = __builtin_convertvector(x, Shorts);
  if constexpr (WORDS)
    reinterpret_cast<Loose<uint32_t, RUN / 2> *>(to)->value = __builtin_bit_cast(Vector<uint32_t, RUN / 2>, narrow);
  else
    reinterpret_cast<Loose<int16_t, RUN> *>(to)->value = narrow;
}

template <typename Type> inline RunOfFloats widened(Run bits) {
  if constexpr (std::is_same_v<Type, BF16>)
    return __builtin_bit_cast(RunOfFloats, bits << 16);
  else
    return __builtin_convertvector(
        __builtin_bit_cast(Vector<_Float16, RUN>, __builtin_convertvector(bits, Shorts)), RunOfFloats);
}

// Of finite numbers, with their sign.
template <typename Type> inline Run narrowed(RunOfFloats x) {
  if constexpr (std::is_same_v<Type, BF16>) {
    const auto bits = __builtin_bit_cast(Vector<uint32_t, RUN>, x);
    return __builtin_bit_cast(Run, bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  } else
    return __builtin_convertvector(
        __builtin_bit_cast(Shorts, __builtin_convertvector(x, Vector<_Float16, RUN>)), Run);
}

// Of 16 bits with their sign; its own inverse.
inline Run order_of(Run bits) { return bits ^ ((bits >> 15) & 0x7fff); }

// x < 2**31 over what `_divisor` gave: a GPU has no division.
inline uint32_t divided(uint32_t x, i64 divisor) {
  return divisor ? sycl::mul_hi(x, uint32_t(divisor)) >> uint32_t(divisor >> 32) : x;
}

// Which block a tile belongs to, and what of it.
struct Tile {
  const StreamBlock *block;
  i64 number; // of the block's tiles
  int32_t strips, sizes; // words of their sizes
  Tile(const StreamsOf &of, i64 tile) : block(of.blocks) {
    while (tile >= block->first_tile + block->tiles) ++block;
    number = tile - block->first_tile;
    strips = sycl::min(block->strips - number * TILE, i64(TILE)), sizes = (strips + 1) / 2;
  }
};

inline int32_t exponent_of(float x) { return sycl::bit_cast<uint32_t>(x) >> 23 & 255; }
inline Run exponents_of(RunOfFloats x) { return __builtin_bit_cast(Run, x) >> 23 & 255; }
inline RunOfFloats absolute(RunOfFloats x) {
  return __builtin_bit_cast(RunOfFloats, __builtin_bit_cast(Run, x) & 0x7fffffff);
}
inline Run folded(Run difference, int bits) { // modulo 2**bits
  const Run wrapped = difference << (32 - bits) >> (32 - bits);
  return wrapped << 1 ^ wrapped >> 31;
}
inline float step(RunOfFloats product) { // by what a factor of these moves
  const float trend = sum_of(product);
  return trend > 0 ? .0625f : trend < 0 ? -.0625f : 0.f;
}
inline Run unfolded(Run z) { return z >> 1 ^ -(z & 1); }

// A strip as both ends go through it: for each token `expect`, then `z_of` or `bits_of`, then `learn`.
template <typename Type, bool WORDS> struct Strip {
  static constexpr bool IS_BF16 = std::is_same_v<Type, BF16>;
  static constexpr int MANTISSA = IS_BF16 ? 7 : 10, BIAS = IS_BF16 ? 0 : 112, EXPONENT = 15 - MANTISSA;
  const StreamsOf &of;
  int32_t tokens;
  uint32_t batch, token, head, number; // of its first ones
  float weight = .5f, factor; // of gap, by how much the token before missed its continuation, and of change
  RunOfFloats gap = 0.f, change = 0.f, continued = 0.f, forecast = 0.f, size = 0.f; // size: of the errors
  Run expected, parameter;

  Strip(const StreamsOf &of, const Tile &tile, int32_t strip)
      : of(of), factor(sycl::bit_cast<float>(uint32_t(of.factor_bits))) {
    const StreamBlock &block = *tile.block;
    const uint32_t own = tile.number * TILE + sycl::min(strip, tile.strips - 1);
    const uint32_t row = divided(own, block.by_columns), column = own - row * uint32_t(block.columns);
    batch = divided(row, block.by_chunks);
    const uint32_t chunk = row - batch * uint32_t(block.chunks), all = block.tokens;
    const uint32_t begin = divided(chunk * all, block.by_chunks);
    tokens = strip < tile.strips ? divided((chunk + 1) * all, block.by_chunks) - begin : 0;
    token = begin + (of.by_rows ? uint32_t(block.start) : 0);
    const uint32_t within = divided(column, of.by_head);
    number = column * RUN - within * uint32_t(of.numbers);
    head = within + (of.by_rows ? 0 : uint32_t(block.start));
  }
  uint16_t *in(const char *tensor, const Strides &by, int32_t at) const {
    const uint32_t cell = batch * uint32_t(by.batch) + (token + at) * uint32_t(by.token) + head * uint32_t(by.head);
    return reinterpret_cast<uint16_t *>(const_cast<char *>(tensor)) + (cell + number);
  }
  Run x(int32_t at) const { return taken<WORDS>(in(of.x, of.of_x, at)); }
  void write(int32_t at, Run bits) const { put<WORDS>(in(of.written, of.of_written, at), bits); }

  // The forecast of a token, and the bits of the last values.
  Run look(int32_t at) {
    if (!of.last) return 0;
    const Run last = taken<WORDS>(in(of.last, of.of_last, at));
    continued = widened<Type>(last);
    if (of.linear) {
      change = continued - widened<Type>(taken<WORDS>(in(of.before, of.of_before, at)));
      continued = continued + change * factor;
    }
    forecast = continued + weight * gap;
    return last;
  }
  // h, by the first token's bits.
  int32_t header(Run bits) {
    look(0);
    return exponent_of(sum_of(absolute(widened<Type>(bits) - forecast)) * 6.f);
  }
  void begin(int32_t h) { size = sycl::bit_cast<float>(h << 23); }
  void expect(int32_t at) {
    const Run last = look(at);
    if (!of.last) {
      expected = exponents_of(size * .7f) - (5 + BIAS), parameter = MANTISSA + 1;
      return;
    }
    const Run finite = exponents_of(forecast) != 255, bits = finite ? narrowed<Type>(forecast) : last;
    expected = order_of(bits);
    parameter = exponents_of(size) - ((bits & 0x7fff) >> MANTISSA) + (MANTISSA - 4 - BIAS);
    parameter = parameter < 0 ? Run(0) : parameter > 15 ? Run(15) : parameter;
  }
  Run z_of(Run bits) const {
    if (of.last) return folded(order_of(bits) - expected, 16);
    const Run low = (bits & ((1 << MANTISSA) - 1)) << 1 | (bits >> 15 & 1);
    return folded(expected - ((bits & 0x7fff) >> MANTISSA), EXPONENT) << (MANTISSA + 1) | low;
  }
  Run bits_of(Run z) const { // with their sign
    if (of.last) return order_of((expected + unfolded(z)) << 16 >> 16);
    const Run exponent = (expected - unfolded(z >> (MANTISSA + 1))) & ((1 << EXPONENT) - 1);
    return (exponent << MANTISSA | (z >> 1 & ((1 << MANTISSA) - 1)) | (z & 1) << 15) << 16 >> 16;
  }
  void learn(int32_t at, Run bits) {
    const RunOfFloats values = widened<Type>(bits), error = values - forecast, sizes = absolute(error);
    const RunOfFloats now = sum_of(sizes) * .75f + sizes * 2.f;
    size = at ? size * .75f + now : now * 4.f;
    if (!of.last) return;
    weight = sycl::clamp(weight + step(error * gap), 0.f, 1.f);
    if (of.linear) factor = sycl::clamp(factor + step(error * change), -1.f, 2.f);
    gap = values - continued;
  }
};

// The codes of numbers, and of how many bits they are: at most 28.
struct Codes {
  Run bits, width;
  Codes(Run z, Run k) {
    const Run q = z >> k, above = q - (UNARY - 1), few = q < UNARY;
    const Run further = few ? Run(0) : exponents_of(__builtin_convertvector(above, RunOfFloats)) - 127;
    const Run ones = few ? q : UNARY + further, base = few ? q : UNARY - 1 + (Run(1) << further);
    const Run many = ones >= LONGEST;
    bits = many ? ((1 << LONGEST) - 1) | z << LONGEST : ((Run(1) << ones) - 1) | (z - (base << k)) << (ones + 1);
    width = many ? Run(LONGEST + 16) : ones + 1 + k + further;
  }
};

template <typename Type, bool WORDS> inline void code_strips(const StreamsOf &of) {
  const Place place;
  if (place.row >= of.tiles) return;
  const Tile tile(of, place.row);
  int32_t all = 0;
  for (int32_t first = 0; first < tile.strips; first += LANES) {
    Strip<Type, WORDS> strip(of, tile, first + lane());
    if (!strip.tokens) continue;
    uint32_t *const own = of.strips + (place.row * TILE + first + lane()) * STRIP;
    const int32_t h = strip.header(strip.x(0));
    strip.begin(h);
    uint32_t held = h; // the bits behind the last whole 32
    int32_t length = 8, any = 0;
    for (int32_t at = 0; at < strip.tokens; ++at) {
      strip.expect(at);
      const Run bits = strip.x(at), z = strip.z_of(bits);
      const Codes codes(z, strip.parameter);
#pragma unroll
      for (int i = 0; i < RUN; ++i) {
        const int32_t count = length & 31;
        const uint32_t code = codes.bits[i], joined = held | code << count;
        const bool full = count + codes.width[i] >= 32;
        if (full) own[1 + length / 32] = joined;
        held = full ? code >> 1 >> (31 - count) : joined;
        length += codes.width[i], any |= z[i];
      }
      strip.learn(at, bits);
      strip.write(at, bits);
    }
    own[1 + length / 32] = held;
    const int32_t most = strip.tokens * RUN, words = any ? (length + 15) / 16 : 0;
    const bool raw = words >= sycl::min(most, RAW);
    for (int32_t at = 0; raw && at < strip.tokens; ++at)
      put<false>(reinterpret_cast<uint16_t *>(own + 1) + at * RUN, strip.x(at));
    *own = raw ? most | IS_RAW : words;
    all += raw ? most : words;
  }
  all = sum_of_all(all) + tile.sizes;
  if (lane() == 0) reinterpret_cast<uint16_t *>(of.first + tile.block->place)[tile.number] = all;
}

// A word of a stream, which may lie anywhere where not WORDS; a CPU does not mind.
template <bool WORDS> inline uint32_t word_at(const uint8_t *from) {
  if constexpr (WORDS) return *reinterpret_cast<const uint16_t *>(from);
  if constexpr (LANES == 1) return reinterpret_cast<const Anywhere *>(from)->word;
  return from[0] | from[1] << 8;
}

// words: of all its tiles.
inline void note_length(const StreamsOf &of, const StreamBlock &block, i64 words) {
  const i64 length = 2 * (block.tiles + words);
  of.lengths[&block - of.blocks] = length;
  if (of.needed && block.cells)
    sycl::atomic_ref<i64, sycl::memory_order::relaxed, sycl::memory_scope::device,
                     sycl::access::address_space::global_space>(*of.needed)
        .fetch_max((length * NOTED_PARTS + block.cells - 1) / block.cells);
}

// One work-group a block.
inline void stream_begins(const StreamsOf &of) {
  auto item = syclext::this_work_item::get_nd_item<1>();
  auto group = item.get_group();
  const i64 members = item.get_local_range(0), own = item.get_local_id(0);
  const StreamBlock &block = of.blocks[item.get_group(0)];
  const i64 part = (block.tiles + members - 1) / members;
  const i64 begin = sycl::min(own * part, block.tiles), end = sycl::min(begin + part, block.tiles);
  const uint8_t *const sizes = of.first + block.place;
  i64 words = 0;
  for (i64 tile = begin; tile < end; ++tile) words += word_at<false>(sizes + 2 * tile);
#if LANES == 1
  i64 at = 0;
  const i64 all = words;
#else
  i64 at = sycl::exclusive_scan_over_group(group, words, sycl::plus<i64>());
  const i64 all = sycl::reduce_over_group(group, words, sycl::plus<i64>());
#endif
  for (i64 tile = begin; tile < end; ++tile) {
    of.begins[block.first_tile + tile] = at;
    at += word_at<false>(sizes + 2 * tile);
  }
  if (!own) note_length(of, block, all);
}

inline void join_strips(const StreamsOf &of) {
  const Place place;
  if (place.row >= of.tiles) return;
  const Tile tile(of, place.row);
  uint16_t *const stream = reinterpret_cast<uint16_t *>(of.first + tile.block->place);
  i64 begin = 0;
  if (of.begins)
    begin = of.begins[place.row];
  else {
    int32_t words = 0;
    for (int32_t before = lane(); before < tile.number; before += LANES) words += stream[before];
    begin = sum_of_all(words);
    if (lane() == 0 && tile.number == tile.block->tiles - 1) note_length(of, *tile.block, begin + stream[tile.number]);
    for (i64 block = 0; place.row == 0 && block < of.count; ++block)
      if (lane() == 0 && !of.blocks[block].tiles) of.lengths[block] = 0;
  }
  uint16_t *to = stream + tile.block->tiles + begin;
  const uint32_t *const strips = of.strips + place.row * TILE * STRIP;
  for (int32_t pair = lane(); pair < tile.sizes; pair += LANES) {
    const auto size = [&](int32_t number) {
      const int32_t words = number < tile.strips ? strips[number * STRIP] : 0;
      return words & IS_RAW ? RAW : words;
    };
    to[pair] = size(2 * pair) | size(2 * pair + 1) << 8;
  }
  to += tile.sizes;
  for (int32_t number = 0; number < tile.strips; ++number) {
    const uint32_t *const strip = strips + number * STRIP;
    const uint16_t *const from = reinterpret_cast<const uint16_t *>(strip + 1);
    const int32_t words = *strip & (IS_RAW - 1);
    for (int32_t word = lane(); word < words; word += LANES) to[word] = from[word];
    to += words;
  }
}

template <typename Type, bool WORDS> inline void read_streams(const StreamsOf &of) {
  const Place place;
  if (place.row >= of.tiles) return;
  const Tile tile(of, place.row);
  const StreamBlock &block = *tile.block;
  const i64 begin = 2 * (block.tiles + of.begins[place.row]); // bytes
  const uint8_t *const here = of.first + block.place + begin;
  const uint8_t *rest = of.rests + (begin - block.room);
  for (const StreamBlock *one = of.blocks; one < &block; ++one) // rests lie one behind the other
    rest += sycl::max(i64(0), of.lengths[one - of.blocks] - one->room);
  const int32_t room = sycl::clamp(block.room - begin, i64(0), i64(1 << 30)) / 2;
  const auto word = [&](int32_t at) { return word_at<WORDS>((at < room ? here : rest) + 2 * at); };
  int32_t all = tile.sizes;
  for (int32_t first = 0; first < tile.strips; first += LANES) {
    const int32_t own = first + lane();
    Strip<Type, WORDS> strip(of, tile, own);
    const int32_t size = strip.tokens ? word(own / 2) >> own % 2 * 8 & 255 : 0;
    const int32_t words = size == RAW ? strip.tokens * RUN : size;
    int32_t next = all + sum_before(words), count = 0;
    const int32_t end = next + words;
    all += sum_of_all(words);
    if (size == RAW) {
      for (int32_t at = 0; at < strip.tokens; ++at) {
        Run bits;
#pragma unroll
        for (int i = 0; i < RUN; ++i) bits[i] = word(next++);
        strip.write(at, bits);
      }
      continue;
    }
    uint32_t held = 0;
    const auto refill = [&] { // at least 16 bits, if there are so many
      if (count < 16 && next < end) held |= word(next++) << count, count += 16;
    };
    refill();
    strip.begin(held & 255);
    held >>= 8, count -= 8;
    for (int32_t at = 0; at < strip.tokens; ++at) {
      strip.expect(at);
      Run z = 0;
      if (size) {
#pragma unroll
        for (int i = 0; i < RUN; ++i) {
          refill();
          const int32_t ones = sycl::min(int32_t(sycl::ctz(~held)), LONGEST), k = strip.parameter[i];
          const int32_t prefix = ones + (ones < LONGEST), further = sycl::max(ones - UNARY, 0);
          const int32_t below = ones < LONGEST ? k + further : 16;
          held >>= prefix, count -= prefix;
          if (count < below) refill();
          const int32_t base = (ones < UNARY ? ones : UNARY - 1 + (1 << further)) << k;
          z[i] = int32_t(held & ((1u << below) - 1)) + (ones < LONGEST ? base : 0);
          held >>= below, count -= below;
        }
      }
      const Run bits = strip.bits_of(z);
      strip.learn(at, bits);
      strip.write(at, bits);
    }
  }
}

template <typename Work> inline void by_words(const StreamsOf &of, Work work) {
  i64 strides = 0;
  for (const Strides *one : {&of.of_x, &of.of_last, &of.of_before, &of.of_written})
    strides |= one->batch | one->token | one->head;
  const i64 streams = i64(of.first) | i64(of.rests) | of.odd;
  by_alignment<BF16>(i64(of.x) | i64(of.last) | i64(of.before) | i64(of.written) | 2 * (strides | streams), work);
}
} // namespace lossless

KERNEL(stream_begins)(lossless::StreamsOf of) { lossless::stream_begins(of); }
KERNEL(join_strips)(lossless::StreamsOf of) { lossless::join_strips(of); }
KERNEL(code_strips_bf16)(lossless::StreamsOf of) { lossless::by_words(of, [&](auto words) { lossless::code_strips<BF16, words>(of); }); }
KERNEL(code_strips_f16)(lossless::StreamsOf of) { lossless::by_words(of, [&](auto words) { lossless::code_strips<F16, words>(of); }); }
KERNEL(read_streams_bf16)(lossless::StreamsOf of) { lossless::by_words(of, [&](auto words) { lossless::read_streams<BF16, words>(of); }); }
KERNEL(read_streams_f16)(lossless::StreamsOf of) { lossless::by_words(of, [&](auto words) { lossless::read_streams<F16, words>(of); }); }
