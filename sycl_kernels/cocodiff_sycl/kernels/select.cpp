// choose_tokens: the tokens of each set that V-Major sends; compact_rows: their rows, rank after rank.
//
// Both are bound by latency and, on a CPU device, by their counting loops; scores stay in a cache (4 bytes a token).
// Each work-item has one consecutive part of the tokens, so what it writes is in their order without a sort.
constexpr int DIGITS = 256;

// Unsigned numbers in the order in which torch sorts floats: -0 equals 0, NaN is the largest.
inline uint32_t sortable(float score) {
  if (score != score) return 0xffffffffu;
  uint32_t bits = sycl::bit_cast<uint32_t>(score == 0 ? 0.0f : score);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

// A work-item of a group, and its consecutive part of what the group goes through.
struct Member {
  sycl::nd_item<1> item = syclext::this_work_item::get_nd_item<1>();
  sycl::group<1> group = item.get_group();
  i64 own = item.get_local_id(0), members = item.get_local_range(0);
  i64 begin(i64 first, i64 count) const { return first + sycl::min(own * ((count + members - 1) / members), count); }
  i64 end(i64 first, i64 count) const { return first + sycl::min((own + 1) * ((count + members - 1) / members), count); }
  template <typename T> T sum(T x) const { return sycl::reduce_over_group(group, x, sycl::plus<T>()); }
  i64 before(i64 x) const { return sycl::exclusive_scan_over_group(group, x, sycl::plus<i64>()); }
};

struct Choice {
  const float *scores;
  const i64 *places, *begins; // of the tokens' scores, then of their norms; of every set, and the end
  uint8_t *active;            // of every token, and at last a 1
  i64 *scratch;
  i64 tokens, by_share;
  double share, threshold;
};

// One work-group a set. By a share, four rounds of a radix search over 8 bits of the score find the k-th largest; of
// equal scores the later position is larger. By a threshold, scores are compared with that part of the mean norm.
KERNEL(choose_tokens)(Choice of) {
  const Member me;
  const i64 set = me.item.get_group(0), first = of.begins[set], count = of.begins[set + 1] - first;
  const i64 begin = me.begin(first, count), end = me.end(first, count);
  if (set == 0 && me.own == 0) of.active[of.tokens] = 1;
  if (!of.by_share) {
    double norms = 0;
    for (i64 at = begin; at < end; ++at) norms += of.scores[of.places[of.tokens + at]];
    const double limit = of.threshold * (me.sum(norms) / double(count));
    for (i64 at = begin; at < end; ++at) of.active[at] = !(double(of.scores[of.places[at]]) <= limit);
    return;
  }
  i64 *counts = of.scratch + set * (DIGITS + 2); // the digits' counts, then what a round found: prefix and what it leaves
  uint32_t prefix = 0;
  i64 wanted = count - i64(sycl::floor(double(count) * of.share)); // among the scores that begin with prefix
  for (int shift = 24; shift >= 0; shift -= 8) {
    for (i64 digit = me.own; digit < DIGITS; digit += me.members) counts[digit] = 0;
    sycl::group_barrier(me.group);
    for (i64 at = begin; at < end; ++at) {
      uint32_t number = sortable(of.scores[of.places[at]]);
      if (shift == 24 || number >> (shift + 8) == prefix)
        sycl::atomic_ref<i64, sycl::memory_order::relaxed, sycl::memory_scope::work_group,
                         sycl::access::address_space::global_space>(counts[number >> shift & 255])
            .fetch_add(1);
    }
    sycl::group_barrier(me.group);
    if (me.own == 0) {
      int digit = DIGITS - 1;
      i64 left = wanted;
      while (digit > 0 && counts[digit] < left) left -= counts[digit--];
      counts[DIGITS] = digit;
      counts[DIGITS + 1] = left;
    }
    sycl::group_barrier(me.group);
    prefix = prefix << 8 | uint32_t(counts[DIGITS]);
    wanted = counts[DIGITS + 1];
    sycl::group_barrier(me.group);
  }
  // prefix is the k-th largest score; `wanted` of those equal to it are chosen: the last ones.
  i64 equal = 0;
  for (i64 at = begin; at < end; ++at) equal += sortable(of.scores[of.places[at]]) == prefix;
  i64 equal_before = me.before(equal);
  const i64 skipped = me.sum(equal) - wanted; // of the equal ones, the first
  for (i64 at = begin; at < end; ++at) {
    uint32_t number = sortable(of.scores[of.places[at]]);
    of.active[at] = number > prefix || (number == prefix && equal_before++ >= skipped);
  }
}

struct Compaction {
  const uint8_t *active;
  const i64 *tokens, *lasts, *tables; // every row's place in `active`; every rank's last row; columns of numbers of rows
  i64 *chosen, *ends;
  i64 ranks, rows, columns, ranks_each; // ranks_each: of one work-group
};

// A work-group counts the active rows of all ranks before its own ones, then puts those of its ranks behind them.
KERNEL(compact_rows)(Compaction of) {
  const Member me;
  const i64 first_rank = i64(me.item.get_group(0)) * of.ranks_each;
  i64 row = first_rank ? of.lasts[first_rank - 1] + 1 : 0, counted = 0;
  for (i64 before = me.own; before < row; before += me.members) counted += of.active[of.tokens[before]];
  i64 to = me.sum(counted);
  for (i64 rank = first_rank; rank < sycl::min(first_rank + of.ranks_each, of.ranks); ++rank) {
    const i64 count = of.lasts[rank] + 1 - row, begin = me.begin(row, count), end = me.end(row, count);
    i64 own = 0;
    for (i64 at = begin; at < end; ++at) own += of.active[of.tokens[at]];
    i64 place = to + me.before(own);
    for (i64 at = begin; at < end; ++at)
      if (of.active[of.tokens[at]]) {
        for (i64 column = 0; column < of.columns; ++column)
          of.chosen[column * of.rows + place] = of.tables[column * of.rows + at];
        ++place;
      }
    to += me.sum(own);
    row += count;
    if (me.own == 0) of.ends[rank] = to;
  }
}
