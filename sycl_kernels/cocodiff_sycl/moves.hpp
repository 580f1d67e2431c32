// The table of a movement launch, made here because Python needs several microseconds for an entry.
//
// Python gives pieces, which name the launch's tensors by their places, and the addresses of those; what follows from
// sizes and strides is checked there, numbers of indices are looked at here. An entry is a struct Move of
// kernels/movement.cpp.
#pragma once
#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

struct Piece { // sizes and strides of four dimensions, in numbers; strides of the last one are 1
  int64_t source, target, reference;                   // places of tensors, -1 for none
  int64_t source_index, target_index, reference_index; // places of row numbers, -1 for rows in their order
  int64_t start;                                       // where in the target, in numbers
  int64_t source_rows, target_rows, reference_rows;    // what row numbers stay below
  int64_t size[4], from[4], to[4], kept[4];
};

struct Move {
  int64_t source, target, reference, source_index, target_index, reference_index;
  int64_t inner, source_outer, source_row, source_run, target_outer, target_row, target_run, reference_row, reference_run;
  int64_t runs, blocks, accesses, left, first_chunk, total;
};

class MoveTable {
public:
  std::vector<Move> moves;
  int64_t unit = 16, chunks = 0, chunk = 0;

  // addresses: of the launch's tensors. look: whether the numbers of indices are read. most: bytes of a chunk at most;
  // units: cores to share the work, 0 for a device that is given chunks of `most`.
  MoveTable(const Piece *pieces, size_t count, const int64_t *addresses, int64_t itemsize, bool look, int64_t lanes,
            int64_t most, int64_t units)
      : tensors_(addresses) {
    moves.reserve(count);
    for (size_t n = 0; n < count; ++n) {
      if (look) check(pieces[n]);
      add(pieces[n], itemsize);
    }
    while (unit > 2 && (addresses_ & (unit - 1))) unit = unit == 16 ? 4 : 2;
    if (units) most = std::min(most, std::max<int64_t>(4096, bytes_ / (4 * units)));
    const int64_t block = lanes == 1 ? 64 : 16 * lanes; // bytes of an access
    chunk = std::max<int64_t>(1, most / block);
    for (Move &move : moves) {
      const int64_t run = move.blocks, count = move.total; // as `add` leaves them: bytes of a run, runs in all
      move.blocks = run / block;
      move.left = (run - move.blocks * block) / unit;
      move.accesses = move.blocks + (move.left > 0);
      move.total = move.accesses * count;
      move.first_chunk = chunks;
      chunks += (move.total + chunk - 1) / chunk;
    }
  }

private:
  const int64_t *tensors_;
  int64_t addresses_ = 0; // all addresses, strides and lengths of runs or-ed: what is common to them is the unit
  int64_t bytes_ = 0;     // what is moved, counted once
  struct Index {
    int64_t address, count, rows;
  };
  std::vector<Index> seen_;

  int64_t address(int64_t place) const { return place < 0 ? 0 : tensors_[place]; }

  void add(const Piece &piece, int64_t itemsize) {
    const auto [outer, rows, all_heads, numbers_of_head] = piece.size;
    const int64_t count = outer * rows;
    int64_t heads = all_heads, numbers = numbers_of_head;
    if (!(count * heads * numbers)) return;
    const bool kept_follows = piece.reference < 0 || piece.kept[2] == numbers;
    if (heads == 1 || (piece.from[2] == numbers && piece.to[2] == numbers && kept_follows)) {
      numbers *= heads;
      heads = 1;
    }
    if (count * heads > UINT32_MAX)
      throw std::invalid_argument(std::to_string(count * heads) + " runs in one piece: at most " +
                                  std::to_string(UINT32_MAX));
    Move move{};
    move.source = address(piece.source), move.target = address(piece.target) + piece.start * itemsize;
    move.reference = address(piece.reference);
    move.source_index = address(piece.source_index), move.target_index = address(piece.target_index);
    move.reference_index = address(piece.reference_index);
    const bool one_stride = move.source_index || move.target_index || outer == 1;
    move.inner = one_stride ? int64_t(1) << 62 : rows;
    move.source_outer = piece.from[0] * itemsize, move.source_row = piece.from[1] * itemsize;
    move.target_outer = piece.to[0] * itemsize, move.target_row = piece.to[1] * itemsize;
    move.source_run = piece.from[2] * itemsize, move.target_run = piece.to[2] * itemsize;
    move.reference_row = piece.kept[1] * itemsize, move.reference_run = piece.kept[2] * itemsize;
    move.runs = heads, move.blocks = numbers * itemsize, move.total = count * heads;
    addresses_ |= move.source | move.target | move.reference | move.blocks;
    addresses_ |= move.source_row | move.target_row | move.reference_row;
    if (!one_stride) addresses_ |= move.source_outer | move.target_outer;
    if (heads > 1) addresses_ |= move.source_run | move.target_run | move.reference_run;
    bytes_ += move.blocks * move.total;
    moves.push_back(move);
  }

  void check(const Piece &piece) {
    const int64_t count = piece.size[0] * piece.size[1];
    check({address(piece.source_index), count, piece.source_rows}, 0);
    check({address(piece.target_index), count, piece.target_rows}, 0);
    check({address(piece.reference_index), count, piece.reference_rows}, -1);
  }

  void check(Index index, int64_t least) {
    if (!index.address || !index.count) return;
    for (const Index &other : seen_) // heads of one tensor share an index
      if (other.address == index.address && other.count == index.count && other.rows == index.rows) return;
    seen_.push_back(index);
    const auto *numbers = reinterpret_cast<const int64_t *>(index.address);
    int64_t low = numbers[0], high = numbers[0];
    for (int64_t n = 1; n < index.count; ++n) low = std::min(low, numbers[n]), high = std::max(high, numbers[n]);
    if (low < least || high >= index.rows)
      throw std::invalid_argument("index from " + std::to_string(low) + " to " + std::to_string(high) + " for " +
                    std::to_string(index.rows) + " rows: give " + std::to_string(least) + " to " +
                    std::to_string(index.rows - 1));
  }
};
