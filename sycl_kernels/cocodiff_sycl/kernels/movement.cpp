// pack, unpack, gather_pack and scatter_rows: many strided or chosen rows to many places, in one launch.
//
// Bound by memory: each byte is read once and written once (twice where a reference is renewed).
//
// A GPU's sub-group moves a run in blocks of 16 bytes a work-item, which lie side by side: of 128 numbers in bf16, one
// block message of 256 bytes. Its places are the same for all work-items, so they are worked out once for a block, and
// BATCH blocks are read before the first is written, because a message's answer takes hundreds of cycles.
//
// On a CPU device a single work-item walks a chunk, 64 bytes at an access (32 where addresses are odd multiples of 2),
// and short runs are bound by the arithmetic of their addresses. Two things make up for what memory costs there: heads
// that lie side by side are read so, whichever peer they are for, because to skip from row to row misses pages and what
// hardware fetches ahead; and what the cache has no room for is written past it, because a line that is written there
// is read first.
struct Move {
  const char *source;
  char *target, *reference; // reference: chosen rows are written there as well; may be null
  const i64 *source_index, *target_index, *reference_index; // null: rows in their order. reference_index < 0: not kept
  i64 inner;                                                // rows of one outer row
  i64 source_outer, source_row, source_run;                 // strides in bytes
  i64 target_outer, target_row, target_run;
  i64 reference_row, reference_run;
  i64 runs;               // contiguous runs of a row
  i64 blocks, accesses;   // of a run: blocks; those and what is left, in units (CPU) or as one access (GPU)
  i64 left;               // of a run: units that are left
  i64 first_chunk, total; // the move's first chunk in the launch; its accesses in all
};

#if LANES == 1
// Word: what addresses are a multiple of. A block of 16 words is 64 bytes, or 32 where addresses are odd.
// past_cache: targets are multiples of 64 bytes and are written without a place in the cache.
template <typename Unit, typename Word, bool past_cache> struct Run {
  using Block = Loose<Word, 16>;
  const char *from;
  char *to, *kept;

  void block(i64 at) const {
    auto value = reinterpret_cast<const Block *>(from)[at];
    if constexpr (past_cache)
      __builtin_nontemporal_store(value.value, reinterpret_cast<Vector<Word, 16> *>(to) + at);
    else
      reinterpret_cast<Block *>(to)[at] = value;
    if (kept) reinterpret_cast<Block *>(kept)[at] = value;
  }
  void unit(i64 at, i64 after) const {
    i64 offset = after * i64(sizeof(Block)) + at * i64(sizeof(Unit));
    auto value = *reinterpret_cast<const Unit *>(from + offset);
    *reinterpret_cast<Unit *>(to + offset) = value;
    if (kept) *reinterpret_cast<Unit *>(kept + offset) = value;
  }
};
#else
using Block = Vector<uint32_t, 4>; // of a work-item

// Unit: what addresses are a multiple of. A GPU has messages for blocks at multiples of 16 bytes, which take one address
// instead of one for each work-item. The CPU device's driver crashes on them.
template <typename Unit> struct Run {
  using Word = std::conditional_t<sizeof(Unit) == 16, uint32_t, Unit>;
  using Own = Loose<Word, 16 / sizeof(Word)>; // a work-item's part of a block
  static constexpr i64 BLOCK_BYTES = LANES * i64(sizeof(Block));
  const char *from;
  char *to, *kept;

  Block read(i64 at, i64 lane) const {
    const char *place = from + at * BLOCK_BYTES;
    if constexpr (BLOCK_MESSAGES && sizeof(Unit) == 16)
      return __spirv_SubgroupBlockReadINTEL<Block>((const __attribute__((opencl_global)) uint32_t *)place);
    else
      return __builtin_bit_cast(Block, reinterpret_cast<const Own *>(place)[lane].value);
  }
  static void write(char *run, i64 at, i64 lane, Block block) {
    char *place = run + at * BLOCK_BYTES;
    if constexpr (BLOCK_MESSAGES && sizeof(Unit) == 16)
      __spirv_SubgroupBlockWriteINTEL((__attribute__((opencl_global)) uint32_t *)place, block);
    else
      reinterpret_cast<Own *>(place)[lane].value = __builtin_bit_cast(decltype(Own::value), block);
  }
  void rest(i64 blocks, i64 units, i64 lane) const {
    using Words = std::conditional_t<sizeof(Unit) == 16, Own, Unit>;
    const i64 after = blocks * BLOCK_BYTES;
    for (i64 at = lane; at < units; at += LANES) {
      auto value = reinterpret_cast<const Words *>(from + after)[at];
      reinterpret_cast<Words *>(to + after)[at] = value;
      if (kept) reinterpret_cast<Words *>(kept + after)[at] = value;
    }
  }
};
#endif

template <typename Run> inline Run run_at(const Move &move, uint32_t number) {
  uint32_t row = number, run = 0;
  if (move.runs > 1) {
    row = number / uint32_t(move.runs);
    run = number - row * uint32_t(move.runs);
  }
  i64 taken = move.source_index ? move.source_index[row] : row;
  i64 put = move.target_index ? move.target_index[row] : row;
  auto place = [&](i64 at, i64 outer_stride, i64 row_stride) {
    if (at < move.inner) return at * row_stride;
    uint32_t outer = uint32_t(at) / uint32_t(move.inner);
    return outer * outer_stride + (at - outer * move.inner) * row_stride;
  };
  Run result;
  result.from = move.source + place(taken, move.source_outer, move.source_row) + run * move.source_run;
  result.to = move.target + place(put, move.target_outer, move.target_row) + run * move.target_run;
  i64 kept = move.reference ? move.reference_index[row] : -1;
  result.kept = kept < 0 ? nullptr : move.reference + kept * move.reference_row + run * move.reference_run;
  return result;
}

struct Moves {
  const Move *moves;
  i64 count, chunks;
  i64 chunk; // accesses of one group of LANES work-items; groups past `chunks` have nothing to do
  i64 abreast; // not 0: all moves have so many runs, and a chunk is `chunk` runs of each of them
};

inline i64 move_of(const Moves &all, i64 chunk) { // the last one that begins at or before a chunk
  i64 low = 0, high = all.count;
  while (high - low > 1) {
    i64 middle = (low + high) / 2;
    (all.moves[middle].first_chunk <= chunk ? low : high) = middle;
  }
  return low;
}

#if LANES == 1
// Accesses [at, stop) of a run.
template <typename Run> inline i64 move_run(const Run &run, const Move &move, i64 at, i64 stop) {
  const i64 whole = sycl::min(move.blocks, stop);
  for (; at < whole; ++at) run.block(at);
  for (; at < stop; ++at) run.unit(at - move.blocks, move.blocks);
  return at;
}

// Run after run of all moves: first runs, then second ones.
template <typename Run> inline void move_abreast(const Moves &all, const Place &place) {
  const i64 begin = place.row * all.chunk, end = sycl::min(begin + all.chunk, all.abreast);
  for (i64 number = begin; number < end; ++number)
    for (i64 mine = 0; mine < all.count; ++mine) {
      const Move &move = all.moves[mine];
      move_run(run_at<Run>(move, uint32_t(number)), move, 0, move.accesses);
    }
}

template <typename Run> inline void move_in_order(const Moves &all, const Place &place) {
  const Move move = all.moves[move_of(all, place.row)];
  i64 begin = (place.row - move.first_chunk) * all.chunk;
  i64 left = sycl::min(begin + all.chunk, move.total) - begin;
  i64 number = begin / move.accesses;
  i64 at = begin - number * move.accesses;
  while (left > 0) {
    const i64 start = at;
    at = move_run(run_at<Run>(move, uint32_t(number)), move, at, sycl::min(move.accesses, at + left));
    left -= at - start;
    i64 further = at / move.accesses;
    number += further;
    at -= further * move.accesses;
  }
}

template <typename Unit, typename Word, bool past_cache = false> inline void move_rows(const Moves &all) {
  using Own = Run<Unit, Word, past_cache>;
  Place place;
  if (place.row >= all.chunks) return;
  if (all.abreast)
    move_abreast<Own>(all, place);
  else
    move_in_order<Own>(all, place);
  // Such writes are seen by other cores in no order, unless they are waited for.
  if (past_cache) sycl::atomic_fence(sycl::memory_order::seq_cst, sycl::memory_scope::system);
}

// NAME_BYTES: in runs whose rest and addresses are whole numbers of so many bytes.
KERNEL(move_rows_16)(Moves all) { move_rows<Loose<uint32_t, 4>, uint32_t>(all); }
KERNEL(move_rows_4)(Moves all) { move_rows<uint32_t, uint32_t>(all); }
KERNEL(move_rows_2)(Moves all) { move_rows<uint16_t, uint16_t>(all); }
// Runs and targets are whole numbers of 64 bytes, and too large for the cache.
KERNEL(move_rows_past_cache)(Moves all) { move_rows<Loose<uint32_t, 4>, uint32_t, true>(all); }
#else
constexpr int BATCH = 4;

template <typename Unit> inline void move_rows(const Moves &all) {
  using Own = Run<Unit>;
  Place place;
  if (place.row >= all.chunks) return;
  const Move move = all.moves[move_of(all, place.row)];
  const uint32_t blocks = uint32_t(move.blocks), accesses = uint32_t(move.accesses);
  i64 access = (place.row - move.first_chunk) * all.chunk;
  const i64 end = sycl::min(access + all.chunk, move.total);
  uint32_t number = uint32_t(access / move.accesses), at = uint32_t(access - number * move.accesses);
  if (blocks == accesses) // nothing is left of a run
    for (; access + BATCH <= end; access += BATCH) {
      Own runs[BATCH];
      uint32_t places[BATCH];
      Block values[BATCH];
#pragma unroll
      for (int n = 0; n < BATCH; ++n) {
        runs[n] = run_at<Own>(move, number);
        places[n] = at;
        values[n] = runs[n].read(at, place.lane);
        if (++at == blocks) at = 0, ++number;
      }
#pragma unroll
      for (int n = 0; n < BATCH; ++n) Own::write(runs[n].to, places[n], place.lane, values[n]);
      if (move.reference)
#pragma unroll
        for (int n = 0; n < BATCH; ++n)
          if (runs[n].kept) Own::write(runs[n].kept, places[n], place.lane, values[n]);
    }
  for (; access < end; ++access) {
    const Own run = run_at<Own>(move, number);
    if (at < blocks) {
      const Block value = run.read(at, place.lane);
      Own::write(run.to, at, place.lane, value);
      if (run.kept) Own::write(run.kept, at, place.lane, value);
    } else
      run.rest(blocks, move.left, place.lane);
    if (++at == accesses) at = 0, ++number;
  }
}

struct Sixteen { // bytes
  uint32_t words[4];
};

// NAME_BYTES: addresses, and what is left of a run, are whole numbers of so many bytes.
KERNEL(move_rows_16)(Moves all) { move_rows<Sixteen>(all); }
KERNEL(move_rows_4)(Moves all) { move_rows<uint32_t>(all); }
KERNEL(move_rows_2)(Moves all) { move_rows<uint16_t>(all); }
#endif
