// The lossless codec: blocks of a 16-bit tensor as streams, and back. cocodiff/kernels/lossless.py defines them.
//
// stream_sizes finds every tile's words, stream_begins where tiles begin and how long streams are, stream_numbers writes
// the tiles and what is known next; read_streams is the way back. LANES work-items take a tile, each a group of 8
// numbers in a pass. x and what is known are read twice. Where blocks are of few tiles, stream_numbers finds by itself
// where they begin, which saves a launch.
namespace lossless {
constexpr int RUN = 8, TILE = 64, RAW = 15, NOTED_PARTS = 16;

struct StreamBlock { // in the launch's table
  i64 first_tile, tiles, groups, cells, start, size, place, room; // place: of the stream; room: of its first part, bytes
  i64 by_inner, by_middle;
};

struct StreamsOf {
  const char *x; // not for decoding
  char *last, *before;
  uint8_t *first, *rests; // streams, or their first parts and what did not fit there
  const StreamBlock *blocks;
  i64 *begins, *lengths, *needed; // begins: of tiles, in words behind the sizes
  i64 factor_bits;
  i64 tiles, count, tokens, heads, numbers, by_rows, linear, by_head;
  Strides of_x, of_last, of_before;
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

inline int32_t most(Run x) {
  int32_t found = x[0];
#pragma unroll
  for (int i = 1; i < RUN; ++i) found = sycl::max(found, x[i]);
  return found;
}
inline int32_t sum(Run x) {
  int32_t found = 0;
#pragma unroll
  for (int i = 0; i < RUN; ++i) found += x[i];
  return found;
}

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

// Where a group of a block lies in a tensor, of less than 2**32 numbers.
struct Spot {
  uint32_t batch, token, head, number;
  Spot(const StreamsOf &of, const StreamBlock &block, i64 group) {
    const uint32_t inner = of.by_rows ? of.heads : block.size, middle = of.by_rows ? block.size : of.tokens;
    const uint32_t cell = divided(group, of.by_head), row = divided(cell, block.by_inner);
    number = uint32_t(group) * RUN - cell * uint32_t(of.numbers);
    batch = divided(row, block.by_middle);
    token = row - batch * middle + (of.by_rows ? uint32_t(block.start) : 0);
    head = cell - row * inner + (of.by_rows ? 0 : uint32_t(block.start));
  }
  uint32_t in(const Strides &by) const {
    return batch * uint32_t(by.batch) + token * uint32_t(by.token) + head * uint32_t(by.head) + number;
  }
};

// What is known of a group: the order of its prediction, and by how many bits its numbers may be longer.
template <typename Type, bool WORDS> struct Known {
  Run order, further;
  Known(const StreamsOf &of, const uint16_t *last, const uint16_t *before) {
    const Run newest = taken<WORDS>(last);
    Run bits = newest;
    int32_t largest;
    if (of.linear) {
      const RunOfFloats one = widened<Type>(newest), two = widened<Type>(taken<WORDS>(before));
      const RunOfFloats forecast = one + (one - two) * sycl::bit_cast<float>(uint32_t(of.factor_bits));
      bits = narrowed<Type>(forecast);
      largest = most(exponent_of(bits));
      if (largest == NOT_FINITE) { // or rounded to infinity
        const Run finite = (__builtin_bit_cast(Run, forecast) & 0x7fffffff) < 0x7f800000;
        bits = finite ? bits : newest, largest = most(exponent_of(bits));
      }
    } else
      largest = most(exponent_of(bits));
    order = order_of(bits), further = largest - exponent_of(bits);
  }
  static constexpr int32_t NOT_FINITE = std::is_same_v<Type, BF16> ? 0xff : 0x1f;
  static Run exponent_of(Run bits) { return bits >> (std::is_same_v<Type, BF16> ? 7 : 10) & NOT_FINITE; }
  Run width(int32_t code) const {
    const Run wanted = further + (code == RAW ? 16 : sycl::max(code - 1, 0));
    const int32_t most = code ? 16 : 0;
    return wanted > most ? Run(most) : wanted;
  }
};

// How long a z is, its exponent as a float tells, in which 16 bits are exact.
inline int32_t code_of(Run z, Run further) {
  const Run scaled = __builtin_bit_cast(Run, __builtin_convertvector(z, RunOfFloats)) - (further << 23);
  const int32_t code = 1 + sycl::max((most(scaled) >> 23) - 126, 0);
  return most(z) == 0 ? 0 : sycl::min(code, RAW);
}

inline Run folded(Run difference) {
  const Run high = difference << 16;
  return ((high >> 15) ^ (high >> 31)) & 0xffff;
}

// Which block a tile belongs to, and what of it.
struct Tile {
  const StreamBlock *block;
  i64 number; // of the block's tiles
  int32_t groups, codes; // words
  Tile(const StreamsOf &of, i64 tile) : block(of.blocks) {
    while (tile >= block->first_tile + block->tiles) ++block;
    number = tile - block->first_tile;
    groups = sycl::min(block->groups - number * TILE, i64(TILE)), codes = (groups + 3) / 4;
  }
  // By the words of a tile: without codes?
  bool raw(int32_t words) const { return words == groups * RUN; }
  // The group of this work-item in a pass; some other one where there is none.
  i64 group(int32_t first) const { return number * TILE + sycl::min(first + lane(), groups - 1); }
};

// What a work-item has of a pass: its numbers, z and widths, which are 0 where the tile has no such group.
template <typename Type, bool WORDS> struct Pass {
  bool there;
  Spot spot;
  Run bits, z, width;
  int32_t code;
  Pass(const StreamsOf &of, const Tile &tile, int32_t first, bool raw)
      : there(first + lane() < tile.groups), spot(of, *tile.block, tile.group(first)) {
    using Bits = const uint16_t *;
    bits = taken<WORDS>(Bits(of.x) + spot.in(of.of_x));
    const Known<Type, WORDS> known(of, Bits(of.last) + spot.in(of.of_last), Bits(of.before) + spot.in(of.of_before));
    z = folded(order_of(bits) - known.order) & (there ? -1 : 0);
    code = there ? raw ? RAW : code_of(z, known.further) : 0;
    width = known.width(code);
  }
};

template <typename Type, bool WORDS> inline void stream_sizes(const StreamsOf &of) {
  const Place place;
  if (place.row >= of.tiles) return;
  const Tile tile(of, place.row);
  int32_t all = 0;
  for (int32_t first = 0; first < tile.groups; first += LANES) all += sum(Pass<Type, WORDS>(of, tile, first, false).width);
  all = tile.codes + (sum_of_all(all) + 15) / 16;
  if (lane() == 0)
    reinterpret_cast<uint16_t *>(of.first + tile.block->place)[tile.number] = sycl::min(all, tile.groups * RUN);
}

inline int32_t word_at(const uint8_t *from) { return from[0] | from[1] << 8; } // may lie anywhere

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
  if (!own) note_length(of, block, all);
}

// Puts numbers behind `count` bits of a word: calls emit(word) with each that is full. Returns the one that is not.
template <typename Emit> inline uint32_t append(int32_t count, Run z, Run width, Emit emit) {
  uint32_t held = 0;
#pragma unroll
  for (int i = 0; i < RUN; ++i) {
    held |= uint32_t(z[i]) << count, count += width[i];
    if (count < 16) continue;
    emit(uint16_t(held));
    held >>= 16, count -= 16;
  }
  return held;
}

template <typename Type, bool WORDS> inline void stream_numbers(const StreamsOf &of) {
  const Place place;
  if (place.row >= of.tiles) return;
  const Tile tile(of, place.row);
  uint16_t *const stream = reinterpret_cast<uint16_t *>(of.first + tile.block->place);
  const bool raw = tile.raw(stream[tile.number]);
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
  uint16_t *const codes = stream + tile.block->tiles + begin;
  uint16_t *to = codes + (raw ? 0 : tile.codes);
  uint32_t held = 0, code_word = 0; // the word that is not full, alike on all work-items; count: its bits
  int32_t count = 0;
  for (int32_t first = 0; first < tile.groups; first += LANES) {
    const Pass<Type, WORDS> pass(of, tile, first, raw);
    const int32_t own = sum(pass.width), from = count + sum_before(own), end = from + own;
    if (pass.there)
      put<WORDS>(of.before ? reinterpret_cast<uint16_t *>(of.before) + pass.spot.in(of.of_before)
                           : reinterpret_cast<uint16_t *>(of.last) + pass.spot.in(of.of_last), pass.bits);
    const int32_t group = first + lane();
    code_word = (group % 4 ? code_word : 0) | uint32_t(pass.code) << 4 * (group % 4);
    uint16_t *const at = to + from / 16;
    uint32_t first_word = 0;
    int32_t full = 0;
    uint32_t left = append(from % 16, pass.z, pass.width, [&](uint16_t word) {
      if (full++) at[full - 1] = word;
      else first_word = word;
    });
    uint32_t begun = from < 16 ? held : 0; // what lies before this work-item's bits in its first word
#if LANES > 1
    code_word = uint32_t(pass.code) << 4 * (group % 4);
    code_word |= sycl::permute_group_by_xor(lanes(), code_word, 1);
    code_word |= sycl::permute_group_by_xor(lanes(), code_word, 2);
    // Of the word that this work-item leaves unfilled, its own bits and those of the work-items before it.
    const int32_t last_word = end / 16;
#pragma unroll
    for (int distance = 1; distance < LANES; distance *= 2) {
      const uint32_t other = sycl::shift_group_right(lanes(), left, distance);
      const int32_t its_word = sycl::shift_group_right(lanes(), last_word, distance);
      if (lane() >= distance && its_word == last_word) left |= other;
    }
    const uint32_t earlier = sycl::shift_group_right(lanes(), left, 1);
    begun |= lane() ? earlier : 0;
#endif
    if (full) at[0] = uint16_t(first_word | begun);
    if (!raw && pass.there && (group % 4 == 3 || group == tile.groups - 1)) codes[group / 4] = uint16_t(code_word);
#if LANES > 1
    left = sycl::select_from_group(lanes(), left, LANES - 1);
    const int32_t whole_end = sycl::select_from_group(lanes(), end, LANES - 1);
#else
    const int32_t whole_end = end;
#endif
    held = left | (whole_end < 16 ? held : 0), count = whole_end % 16, to += whole_end / 16;
  }
  if (count && lane() == 0) *to = uint16_t(held);
}

template <typename Type, bool WORDS> inline void read_streams(const StreamsOf &of) {
  const Place place;
  if (place.row >= of.tiles) return;
  const Tile tile(of, place.row);
  const StreamBlock &block = *tile.block;
  const i64 begin = 2 * (block.tiles + of.begins[place.row]); // bytes; sizes are always in the first part
  const bool raw = tile.raw(word_at(of.first + block.place + 2 * tile.number));
  const uint8_t *const here = of.first + block.place + begin;
  const uint8_t *rest = of.rests + (begin - block.room);
  for (const StreamBlock *one = of.blocks; one < &block; ++one) // rests lie one behind the other
    rest += sycl::max(i64(0), of.lengths[one - of.blocks] - one->room);
  const int32_t room = sycl::clamp(block.room - begin, i64(0), i64(1 << 30));
  const auto byte = [&](int32_t at) { return (at < room ? here : rest) + at; };
  uint16_t *const last = reinterpret_cast<uint16_t *>(of.last), *const before = reinterpret_cast<uint16_t *>(of.before);
  int32_t bits = raw ? 0 : 16 * tile.codes; // where the next group begins
  for (int32_t first = 0; first < tile.groups; first += LANES) {
    const int32_t group = first + lane();
    const bool there = group < tile.groups;
    const Spot spot(of, block, tile.group(first));
    const uint32_t of_last = spot.in(of.of_last), of_before = spot.in(of.of_before);
    const Known<Type, WORDS> known(of, last + of_last, before + of_before);
    int32_t code = there ? RAW : 0;
    if (there && !raw) code = *byte(group / 2) >> 4 * (group % 2) & 15;
    const Run width = known.width(code);
    const int32_t own = sum(width), from = bits + sum_before(own);
    int32_t next = from / 16 * 2;
    uint32_t held = 0;
    int32_t count = 0;
    if (own) held = word_at(byte(next)) >> from % 16, count = 16 - from % 16, next += 2;
    Run z = 0;
#pragma unroll
    for (int i = 0; i < RUN; ++i) {
      if (count < width[i]) held |= uint32_t(word_at(byte(next))) << count, count += 16, next += 2;
      z[i] = held & ((1u << width[i]) - 1);
      held >>= width[i], count -= width[i];
    }
    bits += sum_of_all(own);
    const Run difference = (z >> 1) ^ -(z & 1), order = (known.order + difference) << 16 >> 16;
    if (there) put<WORDS>(before ? before + of_before : last + of_last, order_of(order));
  }
}

template <typename Work> inline void by_words(const StreamsOf &of, Work work) {
  i64 strides = 0;
  for (const Strides *one : {&of.of_x, &of.of_last, &of.of_before}) strides |= one->batch | one->token | one->head;
  by_alignment<BF16>(i64(of.x) | i64(of.last) | i64(of.before) | 2 * strides, work);
}
} // namespace lossless

KERNEL(stream_begins)(lossless::StreamsOf of) { lossless::stream_begins(of); }
KERNEL(stream_sizes_bf16)(lossless::StreamsOf of) { lossless::by_words(of, [&](auto words) { lossless::stream_sizes<BF16, words>(of); }); }
KERNEL(stream_sizes_f16)(lossless::StreamsOf of) { lossless::by_words(of, [&](auto words) { lossless::stream_sizes<F16, words>(of); }); }
KERNEL(stream_numbers_bf16)(lossless::StreamsOf of) { lossless::by_words(of, [&](auto words) { lossless::stream_numbers<BF16, words>(of); }); }
KERNEL(stream_numbers_f16)(lossless::StreamsOf of) { lossless::by_words(of, [&](auto words) { lossless::stream_numbers<F16, words>(of); }); }
KERNEL(read_streams_bf16)(lossless::StreamsOf of) { lossless::by_words(of, [&](auto words) { lossless::read_streams<BF16, words>(of); }); }
KERNEL(read_streams_f16)(lossless::StreamsOf of) { lossless::by_words(of, [&](auto words) { lossless::read_streams<F16, words>(of); }); }
