// merge_partials: adds one partial attention result to a running one, (out, lse) and (part, part_lse), in place.
//
// out := out + w (part - out) with w = exp(part_lse) / (exp(lse) + exp(part_lse)), lse := log of that sum (StreamFusion,
// appendix C). In fp64, rounded once. Bound by memory: out is read and written, part is read; two exponentials a row.
// out may be wider than part: a running result of many parts.
template <typename Out, typename Part, bool WORDS>
inline void merge_row(typename Out::Bits *out, const typename Part::Bits *part, double w, i64 numbers, i64 lane) {
  i64 at = lane * WIDTH;
  for (; at + WIDTH <= numbers; at += LANES * WIDTH) {
    Floats x = load<Out, WIDTH, WORDS>(out + at), y = load<Part, WIDTH, WORDS>(part + at), merged;
    merged.lo = __builtin_convertvector(low(x) * (1 - w) + low(y) * w, HalfFloats);
    merged.hi = __builtin_convertvector(high(x) * (1 - w) + high(y) * w, HalfFloats);
    store<Out, WIDTH, WORDS>(out + at, merged);
  }
  if (at < numbers)
    for (; at < numbers; ++at)
      store1<Out>(out + at, float(double(load1<Out>(out + at)) * (1 - w) + double(load1<Part>(part + at)) * w));
}

struct Partials {
  char *out;
  float *lse;
  const char *part;
  const float *part_lse; // both contiguous
  i64 rows, rows_each;   // of [B, L, H]; rows_each: consecutive rows of one group of LANES work-items
  i64 tokens, heads, numbers;
  i64 o_batch, o_token, o_head, p_batch, p_token, p_head; // strides in numbers
};

template <typename Out, typename Part, bool WORDS> inline void merge_rows(const Partials &of) {
  Place place;
  const i64 end = sycl::min((place.row + 1) * of.rows_each, of.rows);
  for (i64 row = place.row * of.rows_each; row < end; ++row) {
    const double known = of.lse[row], fresh = of.part_lse[row], larger = sycl::fmax(known, fresh);
    if (larger == -__builtin_inf()) continue; // nothing was attended to, in either
    const double both = larger + sycl::log1p(sycl::exp(-sycl::fabs(known - fresh)));
    const double w = 1 / (1 + sycl::exp(known - fresh));
    // In 32 bits, which hold the rows' number: a GPU has no division of 64.
    const uint32_t of_all = uint32_t(row) / uint32_t(of.heads), batch = of_all / uint32_t(of.tokens);
    const i64 head = row - i64(of_all) * of.heads, token = of_all - i64(batch) * of.tokens;
    merge_row<Out, Part, WORDS>(
        reinterpret_cast<typename Out::Bits *>(of.out) + batch * of.o_batch + token * of.o_token + head * of.o_head,
        reinterpret_cast<const typename Part::Bits *>(of.part) + batch * of.p_batch + token * of.p_token +
            head * of.p_head,
        w, of.numbers, place.lane);
    if (LANES > 1) sycl::group_barrier(place.item.get_sub_group()); // all have read lse
    if (place.lane == 0) of.lse[row] = float(both);
  }
}

template <typename Out, typename Part> inline void merge(const Partials &of) {
  const i64 strides = of.o_batch | of.o_token | of.o_head | of.p_batch | of.p_token | of.p_head;
  by_alignment<Part>(i64(of.out) | i64(of.part) | 2 * strides,
                     [&](auto words) { merge_rows<Out, Part, words>(of); });
}

KERNEL(merge_f32_f32)(Partials of) { merge<F32, F32>(of); }
KERNEL(merge_bf16_bf16)(Partials of) { merge<BF16, BF16>(of); }
KERNEL(merge_f16_f16)(Partials of) { merge<F16, F16>(of); }
KERNEL(merge_f32_bf16)(Partials of) { merge<F32, BF16>(of); }
KERNEL(merge_f32_f16)(Partials of) { merge<F32, F16>(of); }
