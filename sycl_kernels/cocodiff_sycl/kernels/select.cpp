// select: the positions of the k largest scores of each row, ascending; of equal scores the later position is larger.
//
// One work-group a row. Four rounds of a radix search over 8 bits of the score find the k-th largest, a last pass writes
// the positions. Bound by latency and, on a CPU device, by the counting loop; scores stay in a cache (4 bytes a token).
// Each work-item has one consecutive part of the row, so positions come out in their order without a sort.
constexpr int DIGITS = 256;

// Unsigned numbers in the order in which torch sorts floats: -0 equals 0, NaN is the largest.
inline uint32_t sortable(float score) {
  if (score != score) return 0xffffffffu;
  uint32_t bits = sycl::bit_cast<uint32_t>(score == 0 ? 0.0f : score);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

struct Selection {
  const float *scores;
  i64 *chosen, *scratch;
  i64 stride, columns, k;
};

KERNEL(select_largest)(Selection of) {
  const auto [scores, all_chosen, scratch, stride, columns, k] = of;
  i64 *const chosen = all_chosen;
  auto item = syclext::this_work_item::get_nd_item<1>();
  auto group = item.get_group();
  const i64 row = item.get_group(0), members = item.get_local_range(0), own = item.get_local_id(0);
  const float *score = scores + row * stride;
  i64 *counts = scratch + row * (DIGITS + 2); // the digits' counts, then what a round found: prefix and what it leaves
  const i64 part = (columns + members - 1) / members;
  const i64 begin = sycl::min(own * part, columns), end = sycl::min(begin + part, columns);

  uint32_t prefix = 0;
  i64 wanted = k; // among the scores that begin with prefix
  for (int shift = 24; shift >= 0; shift -= 8) {
    for (i64 digit = own; digit < DIGITS; digit += members) counts[digit] = 0;
    sycl::group_barrier(group);
    for (i64 at = begin; at < end; ++at) {
      uint32_t number = sortable(score[at]);
      if (shift == 24 || number >> (shift + 8) == prefix)
        sycl::atomic_ref<i64, sycl::memory_order::relaxed, sycl::memory_scope::work_group,
                         sycl::access::address_space::global_space>(counts[number >> shift & 255])
            .fetch_add(1);
    }
    sycl::group_barrier(group);
    if (own == 0) {
      int digit = DIGITS - 1;
      i64 left = wanted;
      while (digit > 0 && counts[digit] < left) left -= counts[digit--];
      counts[DIGITS] = digit;
      counts[DIGITS + 1] = left;
    }
    sycl::group_barrier(group);
    prefix = prefix << 8 | uint32_t(counts[DIGITS]);
    wanted = counts[DIGITS + 1];
    sycl::group_barrier(group);
  }
  // prefix is the k-th largest score; `wanted` of those equal to it are chosen: the last ones.
  i64 equal = 0, above = 0;
  for (i64 at = begin; at < end; ++at) {
    uint32_t number = sortable(score[at]);
    equal += number == prefix;
    above += number > prefix;
  }
  i64 equal_before = sycl::exclusive_scan_over_group(group, equal, sycl::plus<i64>());
  i64 skipped = sycl::reduce_over_group(group, equal, sycl::plus<i64>()) - wanted; // of the equal ones, the first
  i64 taken = above + sycl::max(i64(0), equal_before + equal - sycl::max(skipped, equal_before));
  i64 to = row * k + sycl::exclusive_scan_over_group(group, taken, sycl::plus<i64>());
  for (i64 at = begin; at < end; ++at) {
    uint32_t number = sortable(score[at]);
    if (number > prefix || (number == prefix && equal_before++ >= skipped)) chosen[to++] = at;
  }
}
