// encode_residual and decode_residual: a tensor's difference to its prediction as codes of 2, 4 or 8 bits, and back.
// note_change: how large the difference to the last values is, of a tensor that is not coded. continue_linearly, and
// decode_residual where it has `out`: what stands for the next tensor in a call that does not wait for it.
//
// The arithmetic is defined, operation for operation, in cocodiff/kernels/residual.py. Bound by memory: x, the
// reconstructions that the prediction takes and the code are read or written once, and the next reconstruction is
// written once. Between the look for the largest difference and their codes a group's numbers stay in registers.

enum Way { ENCODE, NOTE, DECODE, CONTINUE };

template <Way WAY, typename Type, bool WORDS> inline void residual_rows(const Residuals &of) {
  Coder<Type, WORDS> coder{of, Place()};
  coder.rows([&](auto part) {
    if constexpr (WAY == ENCODE) coder.encode(part);
    if constexpr (WAY == NOTE) coder.note_change(part);
    if constexpr (WAY == DECODE) coder.decode(part);
    if constexpr (WAY == CONTINUE) coder.continue_linearly(part);
  });
  if constexpr (WAY == ENCODE || WAY == NOTE) coder.tell();
}

template <Way WAY, typename Type> inline void residual(const Residuals &of) {
  i64 strides = 0;
  for (const Strides *one : {&of.of_x, &of.of_last, &of.of_before, &of.of_out})
    strides |= one->batch | one->token | one->head;
  by_alignment<Type>(i64(of.x) | i64(of.last) | i64(of.before) | i64(of.out) | 2 * strides,
                     [&](auto words) { residual_rows<WAY, Type, words>(of); });
}

KERNEL(encode_residual_f32)(Residuals of) { residual<ENCODE, F32>(of); }
KERNEL(encode_residual_bf16)(Residuals of) { residual<ENCODE, BF16>(of); }
KERNEL(encode_residual_f16)(Residuals of) { residual<ENCODE, F16>(of); }
KERNEL(note_change_f32)(Residuals of) { residual<NOTE, F32>(of); }
KERNEL(note_change_bf16)(Residuals of) { residual<NOTE, BF16>(of); }
KERNEL(note_change_f16)(Residuals of) { residual<NOTE, F16>(of); }
KERNEL(decode_residual_f32)(Residuals of) { residual<DECODE, F32>(of); }
KERNEL(decode_residual_bf16)(Residuals of) { residual<DECODE, BF16>(of); }
KERNEL(decode_residual_f16)(Residuals of) { residual<DECODE, F16>(of); }
KERNEL(continue_linearly_f32)(Residuals of) { residual<CONTINUE, F32>(of); }
KERNEL(continue_linearly_bf16)(Residuals of) { residual<CONTINUE, BF16>(of); }
KERNEL(continue_linearly_f16)(Residuals of) { residual<CONTINUE, F16>(of); }
