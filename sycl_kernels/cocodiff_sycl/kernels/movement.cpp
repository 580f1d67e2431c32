// pack, unpack, gather_pack and scatter_rows: many strided or chosen rows to many places, in one launch.
//
// Bound by memory: each byte is read once and written once (twice where a reference is renewed).
//
// A GPU's sub-group moves a run in blocks of 16 bytes a work-item, which lie side by side: of 128 numbers in bf16, one
// block message of 256 bytes. Its places are the same for all work-items, so they are worked out once for a block, and
// BATCH blocks are read before the first is written, because a message's answer takes hundreds of cycles.
struct Move {
  const char *source;
  char *target, *reference; // reference: chosen rows are written there as well; may be null
  const i64 *source_index, *target_index, *reference_index; // null: rows in their order. reference_index < 0: not kept
  i64 inner;                                                // rows of one outer row
  i64 source_outer, source_row, source_run;                 // strides in bytes
  i64 target_outer, target_row, target_run;
  i64 reference_row, reference_run;
  i64 runs;               // contiguous runs of a row
  i64 blocks, accesses;   // of a run: blocks; those, and what is left as one access
  i64 left;               // of a run: units that are left
  i64 first_chunk, total; // the move's first chunk in the launch; its accesses in all
};

using Block = Vector<uint32_t, LANES == 1 ? 16 : 4>; // of a work-item

// Unit: what addresses are a multiple of. A GPU has messages for blocks at multiples of 16 bytes, which take one address
// instead of one for each work-item. The CPU device's driver crashes on them.
template <typename Unit> struct Run {
  using Word = std::conditional_t<sizeof(Unit) == 16, uint32_t, Unit>;
  using Own = Loose<Word, sizeof(Block) / sizeof(Word)>; // a work-item's part of a block
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
      __spirv_SubgroupBlockWriteINTEL((__attribute__((opencl_global)) uint32_t *)place, __builtin_bit_cast(decltype(Own::value), block));
    else
      reinterpret_cast<Own *>(place)[lane].value = __builtin_bit_cast(decltype(Own::value), block);
  }
  void rest(i64 blocks, i64 units, i64 lane) const {
    const i64 after = blocks * BLOCK_BYTES;
    for (i64 at = lane; at < units; at += LANES) {
      auto value = reinterpret_cast<const Unit *>(from + after)[at];
      reinterpret_cast<Unit *>(to + after)[at] = value;
      if (kept) reinterpret_cast<Unit *>(kept + after)[at] = value;
    }
  }
};

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
};

inline i64 move_of(const Moves &all, i64 chunk) { // the last one that begins at or before a chunk
  i64 low = 0, high = all.count;
  while (high - low > 1) {
    i64 middle = (low + high) / 2;
    (all.moves[middle].first_chunk <= chunk ? low : high) = middle;
  }
  return low;
}

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
  if (LANES > 1 && blocks == accesses) // nothing is left of a run
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
  if (access >= end) return;
  Own run = run_at<Own>(move, number);
  for (; access < end; ++access) {
    if (at < blocks) {
      const Block value = run.read(at, place.lane);
      Own::write(run.to, at, place.lane, value);
      if (run.kept) Own::write(run.kept, at, place.lane, value);
    } else
      run.rest(blocks, move.left, place.lane);
    if (++at < accesses || access + 1 == end) continue;
    at = 0, ++number;
    run = run_at<Own>(move, number);
  }
}

// NAME_BYTES: addresses, and what is left of a run, are whole numbers of so many bytes.
KERNEL(move_rows_16)(Moves all) { move_rows<Loose<uint32_t, 4>>(all); }
KERNEL(move_rows_4)(Moves all) { move_rows<uint32_t>(all); }
KERNEL(move_rows_2)(Moves all) { move_rows<uint16_t>(all); }
