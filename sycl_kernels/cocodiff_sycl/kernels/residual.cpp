// encode_residual and decode_residual: a tensor's difference to its prediction as codes of 2, 4 or 8 bits, and back.
// note_change: how large the difference to the last values is, of a tensor that is not coded. continue_linearly, and
// decode_residual where it has `out`: what stands for the next tensor in a call that does not wait for it.
//
// The arithmetic is defined, operation for operation, in cocodiff/kernels/residual.py. Bound by memory: x, the
// reconstructions that the prediction takes and the code are read or written once, and the next reconstruction is
// written once. Between the look for the largest difference and their codes a group's numbers stay in a GPU's registers;
// a CPU, which encodes 16 groups together (batch.hpp), keeps them in its cache.

struct Encoding {
  template <typename Type, bool WORDS, int BITS, int WHAT> static OUT_OF_LINE void run(const Residuals &of, Place place) {
    Coder<Type, WORDS, BITS, WHAT> coder{of, place};
#if LANES == 1
    Batch<Type> batch;
    const auto encode = [&] {
      batch.predict(of.linear, of.compare, of.measure, coder.factor);
      batch.scales.find(coder.bits, of.linear, of.compare, of.measure);
      const Scales &found = batch.scales;
      coder.unfit += found.unfit, coder.difference += found.difference, coder.change += found.change;
      coder.by_bits([&](auto bits) { batch.template write<bits>(); });
      batch.groups = 0;
    };
    coder.rows([&](auto part) {
      batch.parts[batch.groups++] = part;
      if (batch.groups == BATCH) encode();
    });
    if (batch.groups) encode();
#else
    coder.rows([&](auto part) { coder.encode(part); });
#endif
    coder.tell();
  }
};

struct Noting {
  template <typename Type, bool WORDS, int BITS, int WHAT> static OUT_OF_LINE void run(const Residuals &of, Place place) {
    Coder<Type, WORDS, BITS, WHAT> coder{of, place};
    coder.rows([&](auto part) { coder.staged(part, [&](auto part) { coder.note_change(part); }); });
    coder.tell();
  }
};

struct Decoding {
  template <typename Type, bool WORDS, int BITS, int WHAT> static OUT_OF_LINE void run(const Residuals &of, Place place) {
    Coder<Type, WORDS, BITS, WHAT> coder{of, place};
    coder.rows([&](auto part) { coder.staged(part, [&](auto part) { coder.decode(part); }); });
  }
};

struct Continuing {
  template <typename Type, bool WORDS, int BITS, int WHAT> static OUT_OF_LINE void run(const Residuals &of, Place place) {
    Coder<Type, WORDS, BITS, WHAT> coder{of, place};
    coder.rows([&](auto part) { coder.staged(part, [&](auto part) { coder.continue_linearly(part); }); });
  }
};

template <typename Way, typename Type, int BITS, int WHAT> inline void aligned(const Residuals &of) {
  i64 strides = 0;
  for (const Strides *one : {&of.of_x, &of.of_last, &of.of_before, &of.of_out})
    strides |= one->batch | one->token | one->head;
  by_alignment<Type>(i64(of.x) | i64(of.last) | i64(of.before) | i64(of.out) | 2 * strides,
                     [&](auto words) { Way::template run<Type, words, BITS, WHAT>(of, Place()); });
}

#if LANES == 1
template <typename Type, int BITS> inline void decode_bits(const Residuals &of) {
  if (of.linear)
    Decoding::run<Type, false, BITS, PREDICTS>(of, Place());
  else
    Decoding::run<Type, false, BITS, NOTHING>(of, Place());
}
template <typename Way, typename Type> inline void residual(const Residuals &of) {
  if constexpr (std::is_same_v<Way, Encoding>)
    Encoding::run<Type, false, 0, ANY>(of, Place());
  else if (of.bits == 2)
    decode_bits<Type, 2>(of);
  else if (of.bits == 4)
    decode_bits<Type, 4>(of);
  else
    decode_bits<Type, 8>(of);
}
#else
template <typename Way, typename Type> inline void residual(const Residuals &of) {
  aligned<Way, Type, 0, ANY>(of);
}
#endif

template <typename Type> inline void note_change(const Residuals &of) { aligned<Noting, Type, 8, NOTHING>(of); }
template <typename Type> inline void continue_linearly(const Residuals &of) { aligned<Continuing, Type, 8, NOTHING>(of); }

KERNEL(encode_residual_f32)(Residuals of) { residual<Encoding, F32>(of); }
KERNEL(encode_residual_bf16)(Residuals of) { residual<Encoding, BF16>(of); }
KERNEL(encode_residual_f16)(Residuals of) { residual<Encoding, F16>(of); }
KERNEL(note_change_f32)(Residuals of) { note_change<F32>(of); }
KERNEL(note_change_bf16)(Residuals of) { note_change<BF16>(of); }
KERNEL(note_change_f16)(Residuals of) { note_change<F16>(of); }
KERNEL(decode_residual_f32)(Residuals of) { residual<Decoding, F32>(of); }
KERNEL(decode_residual_bf16)(Residuals of) { residual<Decoding, BF16>(of); }
KERNEL(decode_residual_f16)(Residuals of) { residual<Decoding, F16>(of); }
KERNEL(continue_linearly_f32)(Residuals of) { continue_linearly<F32>(of); }
KERNEL(continue_linearly_bf16)(Residuals of) { continue_linearly<BF16>(of); }
KERNEL(continue_linearly_f16)(Residuals of) { continue_linearly<F16>(of); }
