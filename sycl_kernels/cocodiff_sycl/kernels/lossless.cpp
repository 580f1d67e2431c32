// The lossless codec: blocks of a 16-bit tensor as streams, and back. cocodiff/kernels/lossless.py defines them.
//
// stream_sizes finds every tile's codes and its words, stream_begins where tiles' numbers begin and how long streams
// are, stream_numbers writes the numbers and what is known next; read_streams is the way back. LANES work-items take a
// tile, a group of 16 numbers at a time: on a GPU a number each. Bound by memory: x and what is known are read twice.
namespace lossless {
constexpr int RUN = 16, TILE = 32, RAW = 15, NOTED_PARTS = 16;

struct StreamBlock { // in the launch's table
  i64 first_tile, tiles, groups, cells, start, size, place, room; // place: of the stream; room: of its first part, bytes
};

struct StreamsOf {
  const char *x; // not for decoding
  char *last, *before;
  uint8_t *first, *rests; // streams, or their first parts and what did not fit there
  const StreamBlock *blocks;
  i64 *begins, *lengths, *needed; // begins: of tiles, in words; of blocks' rests behind them
  i64 factor_bits;
  i64 tiles, count, tokens, heads, numbers, by_rows, linear;
  Strides of_x, of_last, of_before;
};

constexpr int EACH = RUN / LANES;         // numbers of a group that a work-item has
constexpr int WIDE = EACH == 1 ? 2 : EACH; // there are no vectors of one number: the second one is not looked at
using Run = Vector<int32_t, WIDE>;
using RunOfFloats = Vector<float, WIDE>;
using Shorts = Vector<uint16_t, WIDE>;

#if LANES > 1
inline auto lanes() { return syclext::this_work_item::get_sub_group(); }
inline int32_t lane() { return lanes().get_local_linear_id(); }
inline int32_t most_of_all(int32_t x) { return sycl::reduce_over_group(lanes(), x, sycl::maximum<int32_t>()); }
inline int32_t sum_of_all(int32_t x) { return sycl::reduce_over_group(lanes(), x, sycl::plus<int32_t>()); }
inline int32_t sum_before(int32_t x) { return sycl::exclusive_scan_over_group(lanes(), x, sycl::plus<int32_t>()); }
#else
inline int32_t lane() { return 0; }
inline int32_t most_of_all(int32_t x) { return x; }
inline int32_t sum_of_all(int32_t x) { return x; }
inline int32_t sum_before(int32_t) { return 0; }
#endif

inline int32_t own_most(Run x) {
  int32_t found = x[0];
#pragma unroll
  for (int i = 1; i < EACH; ++i) found = sycl::max(found, x[i]);
  return found;
}
inline int32_t own_sum(Run x) {
  int32_t found = 0;
#pragma unroll
  for (int i = 0; i < EACH; ++i) found += x[i];
  return found;
}
inline int32_t most(Run x) { return most_of_all(own_most(x)); }
inline int32_t sum(Run x) { return sum_of_all(own_sum(x)); }
// Of every number the sum of those before it in the group.
inline Run before_each(Run x) {
  Run found = 0;
  int32_t at = sum_before(own_sum(x));
#pragma unroll
  for (int i = 0; i < EACH; ++i) found[i] = at, at += x[i];
  return found;
}
inline Run taken(const uint16_t *from) {
  if constexpr (EACH == 1) return Run{from[lane()], 0};
  return __builtin_convertvector(reinterpret_cast<const Loose<uint16_t, WIDE> *>(from + lane() * EACH)->value, Run);
}
inline void put(uint16_t *to, Run x) {
  if constexpr (EACH == 1)
    to[lane()] = uint16_t(x[0]);
  else
    reinterpret_cast<Loose<uint16_t, WIDE> *>(to + lane() * EACH)->value = __builtin_convertvector(x, Shorts);
}
inline Run length_of(Run z) {
  Run found = 0;
#pragma unroll
  for (int i = 0; i < EACH; ++i) found[i] = 32 - int32_t(sycl::clz(uint32_t(z[i])));
  return found;
}

template <typename Type> inline RunOfFloats widened(Run bits) {
  if constexpr (std::is_same_v<Type, BF16>)
    return __builtin_bit_cast(RunOfFloats, bits << 16);
  else
    return __builtin_convertvector(
        __builtin_bit_cast(Vector<_Float16, WIDE>, __builtin_convertvector(bits, Shorts)), RunOfFloats);
}

// Of finite numbers.
template <typename Type> inline Run narrowed(RunOfFloats x) {
  if constexpr (std::is_same_v<Type, BF16>) {
    const Run bits = __builtin_bit_cast(Run, x);
    return ((bits + 0x7fff + ((bits >> 16) & 1)) >> 16) & 0xffff;
  } else
    return __builtin_convertvector(
        __builtin_bit_cast(Shorts, __builtin_convertvector(x, Vector<_Float16, WIDE>)), Run);
}

// 16 bits with their sign.
inline Run with_sign(Run bits) { return ((bits + 0x8000) & 0xffff) - 0x8000; }
inline Run order_of(Run signed_bits) { return signed_bits ^ ((signed_bits >> 15) & 0x7fff); }

// Where a tile's groups lie in a tensor, one after the other.
struct Groups {
  i64 batch, row, head, part; // of the block
  i64 inner, middle, of_head; // heads and rows of the block; groups of a head
  Groups(const StreamsOf &of, const StreamBlock &block, i64 group) {
    inner = of.by_rows ? of.heads : block.size, middle = of.by_rows ? block.size : of.tokens, of_head = of.numbers / RUN;
    uint32_t cell = uint32_t(group) / uint32_t(of_head);
    part = group - cell * of_head;
    const uint32_t above = cell / uint32_t(inner);
    head = cell - above * inner, batch = above / uint32_t(middle), row = above - batch * middle;
  }
  i64 place(const StreamsOf &of, const StreamBlock &block, const Strides &by) const {
    const i64 token = row + (of.by_rows ? block.start : 0), number = head + (of.by_rows ? 0 : block.start);
    return batch * by.batch + token * by.token + number * by.head + part * RUN;
  }
  void go_on() {
    if (++part < of_head) return;
    part = 0;
    if (++head < inner) return;
    head = 0;
    if (++row < middle) return;
    row = 0, ++batch;
  }
};

// What is known of a group: the order of its prediction, and by how many bits its numbers may be longer.
template <typename Type> struct Known {
  Run order, further;
  Known(const StreamsOf &of, const uint16_t *last, const uint16_t *before) {
    const Run newest = taken(last);
    Run bits = newest;
    if (of.linear) {
      const RunOfFloats one = widened<Type>(newest), two = widened<Type>(taken(before));
      const RunOfFloats forecast = one + (one - two) * sycl::bit_cast<float>(uint32_t(of.factor_bits));
      const Run finite = (__builtin_bit_cast(Run, forecast) & 0x7fffffff) < 0x7f800000;
      bits = finite ? narrowed<Type>(forecast) : newest;
    }
    const Run exponent = (bits & 0x7fff) >> (std::is_same_v<Type, BF16> ? 7 : 10);
    order = order_of(with_sign(bits)), further = most(exponent) - exponent;
  }
  Run width(int32_t code) const {
    const Run wanted = further + (code - 1);
    const Run limited = wanted > 16 ? Run(16) : wanted;
    return code == RAW ? Run(16) : code == 0 ? Run(0) : limited;
  }
};

inline int32_t code_of(Run z, Run further) {
  if (most(z) == 0) return 0;
  return sycl::min(1 + sycl::max(most(length_of(z) - further), 0), RAW);
}

inline Run folded(Run difference) {
  const Run wrapped = with_sign(difference);
  return ((wrapped << 1) ^ (wrapped >> 15)) & 0xffff;
}

// Which block a tile belongs to, and what of it.
struct Tile {
  const StreamBlock *block;
  i64 number, groups; // of the block's tiles; its groups
  Tile(const StreamsOf &of, i64 tile) : block(of.blocks) {
    while (tile >= block->first_tile + block->tiles) ++block;
    number = tile - block->first_tile;
    groups = sycl::min(block->groups - number * TILE, i64(TILE));
  }
  i64 numbers_at() const { return 2 * (block->tiles + (block->groups + 3) / 4); } // bytes, of a stream
  i64 codes_at() const { return 2 * block->tiles + number * (TILE / 2); }
};

template <typename Type> struct Encoder {
  const StreamsOf &of;
  const uint16_t *x = reinterpret_cast<const uint16_t *>(of.x);
  uint16_t *last = reinterpret_cast<uint16_t *>(of.last), *before = reinterpret_cast<uint16_t *>(of.before);

  // work(z, known, x, where what is known next is written), group after group.
  template <typename Work> void groups(const Tile &tile, Work work) const {
    Groups at(of, *tile.block, tile.number * TILE);
    for (int group = 0; group < tile.groups; ++group, at.go_on()) {
      const i64 place = at.place(of, *tile.block, of.of_last), other = at.place(of, *tile.block, of.of_before);
      const Run bits = taken(x + at.place(of, *tile.block, of.of_x));
      const Known<Type> known(of, last + place, before + other);
      work(group, folded(order_of(with_sign(bits)) - known.order), known, bits, before ? before + other : last + place);
    }
  }
};

template <typename Type> inline void stream_sizes(const StreamsOf &of) {
  const Place place;
  if (place.row >= of.tiles) return;
  const Tile tile(of, place.row);
  uint16_t *const stream = reinterpret_cast<uint16_t *>(of.first + tile.block->place);
  uint16_t *const codes = stream + tile.codes_at() / 2;
  int32_t all = 0, four = 0;
  Encoder<Type>{of}.groups(tile, [&](int group, Run z, const Known<Type> &known, Run, uint16_t *) {
    const int32_t code = code_of(z, known.further);
    all += sum(known.width(code));
    four |= code << 4 * (group & 3);
    if ((group & 3) != 3 && group + 1 < tile.groups) return;
    if (place.lane == 0) codes[group / 4] = uint16_t(four);
    four = 0;
  });
  if (place.lane == 0) stream[tile.number] = uint16_t((all + 15) / 16);
}

inline int32_t word_at(const uint8_t *from) { return from[0] | from[1] << 8; } // may lie anywhere

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
  for (i64 tile = begin; tile < end; ++tile) words += word_at(sizes + 2 * tile);
#if LANES == 1
  i64 at = 0;
  const i64 all = words;
#else
  i64 at = sycl::exclusive_scan_over_group(group, words, sycl::plus<i64>());
  const i64 all = sycl::reduce_over_group(group, words, sycl::plus<i64>());
#endif
  for (i64 tile = begin; tile < end; ++tile) {
    of.begins[block.first_tile + tile] = at;
    at += word_at(sizes + 2 * tile);
  }
  if (own) return;
  const i64 length = 2 * (block.tiles + (block.groups + 3) / 4 + all);
  of.lengths[item.get_group(0)] = length;
  if (of.needed && block.cells)
    sycl::atomic_ref<i64, sycl::memory_order::relaxed, sycl::memory_scope::device,
                     sycl::access::address_space::global_space>(*of.needed)
        .fetch_max((length * NOTED_PARTS + block.cells - 1) / block.cells);
}

template <typename Type> inline void stream_numbers(const StreamsOf &of) {
  const Place place;
  if (place.row >= of.tiles) return;
  const Tile tile(of, place.row);
  uint8_t *const stream = of.first + tile.block->place;
  uint16_t *to = reinterpret_cast<uint16_t *>(stream + tile.numbers_at()) + of.begins[place.row];
#if LANES == 1
  uint64_t held = 0; // bits that fill no word yet
  int32_t count = 0;
  Encoder<Type>{of}.groups(tile, [&](int, Run z, const Known<Type> &known, Run bits, uint16_t *target) {
    const Run width = known.width(code_of(z, known.further));
    put(target, bits);
#pragma unroll
    for (int i = 0; i < RUN; ++i) {
      held |= uint64_t(uint32_t(z[i])) << count, count += width[i];
      if (count < 32) continue;
      *reinterpret_cast<Loose<uint16_t, 2> *>(to) = __builtin_bit_cast(Loose<uint16_t, 2>, uint32_t(held));
      to += 2, held >>= 32, count -= 32;
    }
  });
  for (; count > 0; count -= 16, held >>= 16) *to++ = uint16_t(held);
#else
  int32_t held = 0, count = 0; // bits that fill no word yet, alike on all work-items
  Encoder<Type>{of}.groups(tile, [&](int, Run z, const Known<Type> &known, Run bits, uint16_t *target) {
    const Run width = known.width(code_of(z, known.further)), from = before_each(width) + count;
    put(target, bits);
    Vector<uint32_t, WIDE> words = 0; // the work-item's, of the group's 16
    if (lane() == 0) words[0] = held;
#pragma unroll
    for (int i = 0; i < RUN; ++i) {
      const uint32_t number = sycl::select_from_group(lanes(), uint32_t(z[i % EACH]), i / EACH);
      const int32_t place = sycl::select_from_group(lanes(), from[i % EACH], i / EACH);
#pragma unroll
      for (int own = 0; own < EACH; ++own) {
        const int32_t by = place - 16 * (lane() * EACH + own);
        words[own] |= by >= 16 || by <= -16 ? 0 : by >= 0 ? number << by : number >> -by;
      }
    }
    const int32_t all = count + sum(width), full = all / 16;
    uint32_t next = 0; // the word that is not full
#pragma unroll
    for (int own = 0; own < EACH; ++own) {
      if (lane() * EACH + own < full) to[lane() * EACH + own] = uint16_t(words[own]);
      if (lane() * EACH + own == full) next = words[own];
    }
    if (full == RUN && lane() == LANES - 1) // of the last number alone
      next = from[EACH - 1] + width[EACH - 1] > 256 ? uint32_t(z[EACH - 1]) >> (256 - from[EACH - 1]) : 0;
    held = sycl::reduce_over_group(lanes(), next & 0xffff, sycl::bit_or<uint32_t>());
    to += full, count = all % 16;
  });
  if (count && lane() == 0) *to = uint16_t(held);
#endif
}

template <typename Type> inline void read_streams(const StreamsOf &of) {
  const Place place;
  if (place.row >= of.tiles) return;
  const Tile tile(of, place.row);
  const StreamBlock &block = *tile.block;
  const uint8_t *const first = of.first + block.place, *rest = of.rests;
  for (const StreamBlock *one = of.blocks; one < &block; ++one) // rests lie one behind the other
    rest += sycl::max(i64(0), of.lengths[one - of.blocks] - one->room);
  const auto word = [&](i64 at) { return word_at(at < block.room ? first + at : rest + (at - block.room)); };
  uint16_t *const last = reinterpret_cast<uint16_t *>(of.last), *const before = reinterpret_cast<uint16_t *>(of.before);
  i64 bits = 8 * (tile.numbers_at() + 2 * of.begins[place.row]); // where the next group begins
  Groups at(of, block, tile.number * TILE);
  int32_t four = 0;
  for (int group = 0; group < tile.groups; ++group, at.go_on()) {
    const i64 own = at.place(of, block, of.of_last), other = at.place(of, block, of.of_before);
    const Known<Type> known(of, last + own, before + other);
    if (!(group & 3)) four = word(tile.codes_at() + group / 2);
    const Run width = known.width(four & 15);
    four >>= 4;
    Run z = 0;
    const Run from = before_each(width);
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
      if (!width[i]) continue;
      const i64 bit = bits + from[i], byte = bit / 16 * 2;
      uint32_t two = word(byte);
      if ((bit & 15) + width[i] > 16) two |= uint32_t(word(byte + 2)) << 16;
      z[i] = two >> (bit & 15) & ((1u << width[i]) - 1);
    }
    bits += sum(width);
    const Run difference = (z >> 1) ^ -(z & 1);
    put(before ? before + other : last + own, order_of(with_sign(known.order + difference)) & 0xffff);
  }
}

} // namespace lossless

KERNEL(stream_begins)(lossless::StreamsOf of) { lossless::stream_begins(of); }
KERNEL(stream_sizes_bf16)(lossless::StreamsOf of) { lossless::stream_sizes<BF16>(of); }
KERNEL(stream_sizes_f16)(lossless::StreamsOf of) { lossless::stream_sizes<F16>(of); }
KERNEL(stream_numbers_bf16)(lossless::StreamsOf of) { lossless::stream_numbers<BF16>(of); }
KERNEL(stream_numbers_f16)(lossless::StreamsOf of) { lossless::stream_numbers<F16>(of); }
KERNEL(read_streams_bf16)(lossless::StreamsOf of) { lossless::read_streams<BF16>(of); }
KERNEL(read_streams_f16)(lossless::StreamsOf of) { lossless::read_streams<F16>(of); }
