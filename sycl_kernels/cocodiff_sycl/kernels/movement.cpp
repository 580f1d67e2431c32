// pack, unpack, gather_pack and scatter_rows: many strided or chosen rows to many places, in one launch.
//
// Bound by memory: each byte is read once and written once (twice where a reference is renewed). A work-item moves 64
// bytes at an access (32 where addresses are odd multiples of 2); LANES neighbours move neighbouring blocks. On a CPU
// device a single work-item walks a chunk, and short runs are bound by the arithmetic of their addresses. Two things
// make up for what memory costs there: heads that lie side by side are read so, whichever peer they are for, because
// to skip from row to row misses pages and what hardware fetches ahead; and what the cache has no room for is written
// past it, because a line that is written there is read first.
struct Move {
  const char *source;
  char *target, *reference; // reference: chosen rows are written there as well; may be null
  const i64 *source_index, *target_index, *reference_index; // null: rows in their order. reference_index < 0: not kept
  i64 inner;                                                // rows of one outer row
  i64 source_outer, source_row, source_run;                 // strides in bytes
  i64 target_outer, target_row, target_run;
  i64 reference_row, reference_run;
  i64 runs;               // contiguous runs of a row
  i64 blocks, accesses;   // of a run: blocks of 16 words; those and what is left in units
  i64 first_chunk, total; // the move's first chunk in the launch; its accesses in all
};

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

// Accesses [at, at + LANES, .. stop) of a run.
template <typename Run> inline i64 move_run(const Run &run, const Move &move, i64 at, i64 stop) {
  const i64 whole = sycl::min(move.blocks, stop);
  for (; at < whole; at += LANES) run.block(at);
  for (; at < stop; at += LANES) run.unit(at - move.blocks, move.blocks);
  return at;
}

// Run after run of all moves: first runs, then second ones.
template <typename Run> inline void move_abreast(const Moves &all, const Place &place) {
  const i64 begin = place.row * all.chunk, end = sycl::min(begin + all.chunk, all.abreast);
  for (i64 number = begin; number < end; ++number)
    for (i64 mine = 0; mine < all.count; ++mine) {
      const Move &move = all.moves[mine];
      move_run(run_at<Run>(move, uint32_t(number)), move, place.lane, move.accesses);
    }
}

template <typename Run> inline void move_in_order(const Moves &all, const Place &place) {
  i64 low = 0, high = all.count; // the last move that begins at or before this chunk
  while (high - low > 1) {
    i64 middle = (low + high) / 2;
    (all.moves[middle].first_chunk <= place.row ? low : high) = middle;
  }
  const Move move = all.moves[low];
  i64 begin = (place.row - move.first_chunk) * all.chunk;
  i64 left = sycl::min(begin + all.chunk, move.total) - begin - place.lane;
  i64 number = (begin + place.lane) / move.accesses;
  i64 at = begin + place.lane - number * move.accesses;
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
// Runs and targets are whole numbers of 64 bytes, and too large for the cache (CPU).
KERNEL(move_rows_past_cache)(Moves all) { move_rows<Loose<uint32_t, 4>, uint32_t, true>(all); }
