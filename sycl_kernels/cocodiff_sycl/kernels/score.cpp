// l1_score: how far each token is from its reference, and how long the reference is; both L1, summed in fp64.
//
// Bound by memory: v and reference are read once, and with `renew` reference is written once; a torch chain makes fp64
// copies of both first. Accesses are WIDTH numbers of a work-item: a GPU's neighbours read side by side.
struct Rows { // of [B, L, H, D], strides in numbers; a run is D numbers, or H * D where heads follow each other
  i64 inner, outer_stride, row_stride, run_stride;
  i64 at(i64 row) const {
    i64 outer = row / inner;
    return outer * outer_stride + (row - outer * inner) * row_stride;
  }
};

template <typename Type, bool RENEW, bool WORDS>
inline void score_run(const typename Type::Bits *v, typename Type::Bits *reference, i64 numbers, i64 lane,
                      HalfDoubles &change, HalfDoubles &norm) {
  i64 at = lane * WIDTH;
  for (; at + WIDTH <= numbers; at += LANES * WIDTH) {
    Floats x = load<Type, WIDTH, WORDS>(v + at), known = load<Type, WIDTH, WORDS>(reference + at);
    HalfDoubles first = low(known), second = high(known);
    change += __builtin_elementwise_abs(low(x) - first);
    change += __builtin_elementwise_abs(high(x) - second);
    norm += __builtin_elementwise_abs(first);
    norm += __builtin_elementwise_abs(second);
    if (RENEW) store<Type, WIDTH, WORDS>(reference + at, x);
  }
  if (at < numbers) // the run's last numbers, fewer than WIDTH, belong to one lane
    for (; at < numbers; ++at) {
      double x = load1<Type>(v + at), known = load1<Type>(reference + at);
      change.s0 += sycl::fabs(x - known);
      norm.s0 += sycl::fabs(known);
      if (RENEW) reference[at] = v[at];
    }
}

struct Scores {
  const char *v;
  char *reference;
  float *change, *norm;
  i64 rows, rows_each; // rows_each: consecutive rows of one group of LANES work-items
  i64 inner, v_outer, v_row, v_run, r_outer, r_row, r_run;
  i64 runs, numbers; // of a row; of a run
  i64 renew;         // reference becomes v
};

template <typename Type, bool RENEW, bool WORDS>
inline void score_row(const Scores &of, i64 row, const Place &place, const Rows &of_v, const Rows &of_reference) {
  auto *v = reinterpret_cast<const typename Type::Bits *>(of.v) + of_v.at(row);
  auto *reference = reinterpret_cast<typename Type::Bits *>(of.reference) + of_reference.at(row);
  HalfDoubles changes = 0, norms = 0;
  for (i64 run = 0; run < of.runs; ++run)
    score_run<Type, RENEW, WORDS>(v + run * of_v.run_stride, reference + run * of_reference.run_stride, of.numbers,
                                  place.lane, changes, norms);
  double sum = place.sum(sum_of<double>(changes)), length = place.sum(sum_of<double>(norms));
  if (place.lane == 0) {
    of.change[row] = float(sum);
    of.norm[row] = float(length);
  }
}

template <typename Type> inline void l1_score(const Scores &of) {
  Place place;
  const Rows of_v{of.inner, of.v_outer, of.v_row, of.v_run}, of_r{of.inner, of.r_outer, of.r_row, of.r_run};
  const i64 end = sycl::min((place.row + 1) * of.rows_each, of.rows);
  const i64 strides = of.v_outer | of.v_row | of.v_run | of.r_outer | of.r_row | of.r_run;
  by_alignment<Type>(i64(of.v) | i64(of.reference) | 2 * strides, [&](auto words) {
    for (i64 row = place.row * of.rows_each; row < end; ++row)
      if (of.renew)
        score_row<Type, true, words>(of, row, place, of_v, of_r);
      else
        score_row<Type, false, words>(of, row, place, of_v, of_r);
  });
}

KERNEL(l1_score_f32)(Scores of) { l1_score<F32>(of); }
KERNEL(l1_score_bf16)(Scores of) { l1_score<BF16>(of); }
KERNEL(l1_score_f16)(Scores of) { l1_score<F16>(of); }
