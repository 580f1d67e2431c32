// What `cost_report.py` counts beside the kernels themselves: their path for contiguous heads of 128 channels,
// with the weight, interleaved angles and no renewal, whose choices are known here. The compiler leaves one loop without
// branches, so that its instructions can be counted. A copy's loop needs none of this.
inline Heads usual(Heads of) {
  of.numbers = 128, of.layout = PAIRS, of.round_before_weight = 1, of.epsilon_bits = 0x358637bd; // 1e-6f
  if (!of.weight) __builtin_unreachable();
  return of;
}
KERNEL(case_norm_rope_f32)(Heads of) { norm_rope_rows<F32, false, false>(usual(of)); }
KERNEL(case_norm_rope_bf16)(Heads of) { norm_rope_rows<BF16, false, true>(usual(of)); }
KERNEL(case_norm_rope_f16)(Heads of) { norm_rope_rows<F16, false, true>(usual(of)); }

template <typename Type, bool WORDS> inline void usual_score(const Scores &of) {
  Place place;
  const Rows of_v{of.inner, of.v_outer, of.v_row, 0}, of_r{of.inner, of.r_outer, of.r_row, 0};
  Scores one = of;
  one.runs = 1, one.numbers = of.numbers / (LANES * WIDTH) * (LANES * WIDTH);
  score_row<Type, false, WORDS>(one, place.row, place, of_v, of_r);
}
KERNEL(case_l1_score_f32)(Scores of) { usual_score<F32, false>(of); }
KERNEL(case_l1_score_bf16)(Scores of) { usual_score<BF16, true>(of); }
KERNEL(case_l1_score_f16)(Scores of) { usual_score<F16, true>(of); }

inline Partials usual(Partials of) {
  of.numbers = 128;
  return of;
}
KERNEL(case_merge_f32_f32)(Partials of) { merge_rows<F32, F32, false>(usual(of)); }
KERNEL(case_merge_bf16_bf16)(Partials of) { merge_rows<BF16, BF16, true>(usual(of)); }
KERNEL(case_merge_f16_f16)(Partials of) { merge_rows<F16, F16, true>(usual(of)); }
KERNEL(case_merge_f32_bf16)(Partials of) { merge_rows<F32, BF16, true>(usual(of)); }
KERNEL(case_merge_f32_f16)(Partials of) { merge_rows<F32, F16, true>(usual(of)); }

// Of the codec: 4 bits, from the newest reconstruction, which is written over; and in bf16 what takes more.
template <Way WAY, typename Type, int BITS = 4, bool LINEAR = false, bool MEASURE = false, bool ONWARD = false>
inline void usual_residual(Residuals of) {
  const Place place;
  of.numbers = 128, of.bits = BITS, of.linear = LINEAR, of.measure = MEASURE;
  if (!LINEAR && WAY != CONTINUE) of.before = nullptr;
  if (!ONWARD) of.out = nullptr;
  const i64 places = i64(of.code) | of.of_code.batch | of.of_code.token | of.of_code.head;
  if ((places & 3) || place.lane < 0 || place.lane >= LANES || (LINEAR && !of.before) || (ONWARD && !of.out))
    __builtin_unreachable();
  residual_rows<WAY, Type, sizeof(typename Type::Bits) == 2>(of);
}
KERNEL(case_encode_residual_f32)(Residuals of) { usual_residual<ENCODE, F32>(of); }
KERNEL(case_encode_residual_bf16)(Residuals of) { usual_residual<ENCODE, BF16>(of); }
KERNEL(case_encode_residual_f16)(Residuals of) { usual_residual<ENCODE, F16>(of); }
KERNEL(case_encode_residual_bf16_int2)(Residuals of) { usual_residual<ENCODE, BF16, 2>(of); }
KERNEL(case_encode_residual_bf16_taylor)(Residuals of) { usual_residual<ENCODE, BF16, 4, true>(of); }
KERNEL(case_encode_residual_bf16_measure)(Residuals of) { usual_residual<ENCODE, BF16, 4, true, true>(of); }
KERNEL(case_note_change_f32)(Residuals of) { usual_residual<NOTE, F32, 8, false, true>(of); }
KERNEL(case_note_change_bf16)(Residuals of) { usual_residual<NOTE, BF16, 8, false, true>(of); }
KERNEL(case_note_change_f16)(Residuals of) { usual_residual<NOTE, F16, 8, false, true>(of); }
KERNEL(case_decode_residual_f32)(Residuals of) { usual_residual<DECODE, F32>(of); }
KERNEL(case_decode_residual_bf16)(Residuals of) { usual_residual<DECODE, BF16>(of); }
KERNEL(case_decode_residual_f16)(Residuals of) { usual_residual<DECODE, F16>(of); }
KERNEL(case_decode_residual_bf16_int2)(Residuals of) { usual_residual<DECODE, BF16, 2>(of); }
KERNEL(case_decode_residual_bf16_taylor)(Residuals of) { usual_residual<DECODE, BF16, 4, true>(of); }
KERNEL(case_decode_residual_bf16_onward)(Residuals of) { usual_residual<DECODE, BF16, 4, false, false, true>(of); }
KERNEL(case_continue_linearly_f32)(Residuals of) { usual_residual<CONTINUE, F32, 8, false, false, true>(of); }
KERNEL(case_continue_linearly_bf16)(Residuals of) { usual_residual<CONTINUE, BF16, 8, false, false, true>(of); }
KERNEL(case_continue_linearly_f16)(Residuals of) { usual_residual<CONTINUE, F16, 8, false, false, true>(of); }

// Of the lossless codec, by a continuation, from streams at even bytes.
inline lossless::StreamsOf usual(lossless::StreamsOf of) {
  of.linear = 1, of.numbers = 128;
  if (!of.last || !of.before) __builtin_unreachable();
  return of;
}
KERNEL(case_code_strips_bf16)(lossless::StreamsOf of) { lossless::code_strips<BF16, true>(usual(of)); }
KERNEL(case_code_strips_f16)(lossless::StreamsOf of) { lossless::code_strips<F16, true>(usual(of)); }
KERNEL(case_read_streams_bf16)(lossless::StreamsOf of) { lossless::read_streams<BF16, true>(usual(of)); }
KERNEL(case_read_streams_f16)(lossless::StreamsOf of) { lossless::read_streams<F16, true>(usual(of)); }
