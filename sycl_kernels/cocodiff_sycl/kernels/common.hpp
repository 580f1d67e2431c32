// What all kernels share: number types, vectors of WIDTH numbers, and sums over the work-items of a row.
//
// LANES work-items share a row of numbers or a chunk of a copy. 1 is for CPU devices, whose vector units take the 32
// numbers of one work-item; 16 is for GPUs, where it is a sub-group, which takes a head of 128 numbers in one access.
// Every kernel takes one struct by value, whose members are 8 bytes each: one argument is set faster than many.
#include <sycl/sycl.hpp>

#include <cstdint>
#include <type_traits>

#ifndef LANES
#define LANES 1
#endif

#ifndef BLOCK_MESSAGES
#define BLOCK_MESSAGES 0 // 1: for a GPU
#endif

namespace syclext = sycl::ext::oneapi;
namespace syclexp = sycl::ext::oneapi::experimental;

#if LANES == 1
#define KERNEL(name)                                                                                                   \
  extern "C" SYCL_EXT_ONEAPI_FUNCTION_PROPERTY((syclexp::nd_range_kernel<1>))                                          \
  SYCL_EXT_ONEAPI_FUNCTION_PROPERTY((syclexp::work_group_size<1>)) void name
#else // the property sub_group_size instead of the attribute was not obeyed (libsycl 8, CPU device)
#define KERNEL(name)                                                                                                   \
  extern "C" SYCL_EXT_ONEAPI_FUNCTION_PROPERTY((syclexp::nd_range_kernel<1>))                                          \
  [[sycl::reqd_sub_group_size(LANES)]] void name
#endif

// A product and a sum round one after the other, as torch's do.
#pragma clang fp contract(off)

using i64 = long;
template <typename T, int N> using Vector = T __attribute__((ext_vector_type(N)));
constexpr int WIDTH = LANES == 1 ? 32 : 8; // numbers of a work-item's access
constexpr int HALF = WIDTH / 2;
using Floats = Vector<float, WIDTH>;
using HalfFloats = Vector<float, HALF>;
using HalfDoubles = Vector<double, HALF>;

// Numbers as they lie in memory. `widen` and `narrow` are exact and round to nearest even; bfloat16 is done in bits,
// because not every device has the type.
struct F32 {
  using Bits = float;
  template <int N> static Vector<float, N> widen(Vector<float, N> x) { return x; }
  template <int N> static Vector<float, N> narrow(Vector<float, N> x) { return x; }
};

struct F16 {
  using Bits = _Float16;
  template <int N> static Vector<float, N> widen(Vector<_Float16, N> x) {
    return __builtin_convertvector(x, Vector<float, N>);
  }
  template <int N> static Vector<_Float16, N> narrow(Vector<float, N> x) {
    return __builtin_convertvector(x, Vector<_Float16, N>);
  }
};

struct BF16 {
  using Bits = uint16_t;
  template <int N> static Vector<float, N> widen(Vector<uint16_t, N> x) {
    Vector<uint32_t, N> bits = __builtin_convertvector(x, Vector<uint32_t, N>) << 16;
    return __builtin_bit_cast(Vector<float, N>, bits);
  }
  template <int N> static Vector<uint16_t, N> narrow(Vector<float, N> x) {
    Vector<uint32_t, N> bits = __builtin_bit_cast(Vector<uint32_t, N>, x);
    Vector<uint32_t, N> rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    Vector<uint32_t, N> nan = (bits >> 16) | 0x40u;
    auto is_nan = (bits & 0x7fffffffu) > 0x7f800000u;
    return __builtin_convertvector(is_nan ? nan : rounded, Vector<uint16_t, N>);
  }
};

// Vectors need not be aligned to their size, only to their numbers.
template <typename T, int N> struct __attribute__((packed, aligned(sizeof(T)))) Loose {
  Vector<T, N> value;
};

// WORDS: addresses of 16-bit numbers are multiples of 4 bytes. A GPU then moves 16 bytes of a work-item in one message;
// where it cannot know, it takes one for each 4 bytes.
template <typename Type, int N, bool WORDS = false> inline Vector<float, N> load(const typename Type::Bits *from) {
  using Bits = typename Type::Bits;
  if constexpr (WORDS && sizeof(Bits) == 2) {
    auto words = reinterpret_cast<const Loose<uint32_t, N / 2> *>(from)->value;
    return Type::template widen<N>(__builtin_bit_cast(Vector<Bits, N>, words));
  } else
    return Type::template widen<N>(reinterpret_cast<const Loose<Bits, N> *>(from)->value);
}

template <typename Type, int N, bool WORDS = false> inline void store(typename Type::Bits *to, Vector<float, N> x) {
  using Bits = typename Type::Bits;
  auto narrow = Type::template narrow<N>(x);
  if constexpr (WORDS && sizeof(Bits) == 2)
    reinterpret_cast<Loose<uint32_t, N / 2> *>(to)->value = __builtin_bit_cast(Vector<uint32_t, N / 2>, narrow);
  else
    reinterpret_cast<Loose<Bits, N> *>(to)->value = narrow;
}

// Calls work(true_type) where a GPU's 16-bit numbers lie at multiples of 4 bytes. places: addresses and strides in
// bytes, or-ed. The branch is the same for all work-items.
template <typename Type, typename Work> inline void by_alignment(i64 places, Work work) {
  if constexpr (LANES > 1 && sizeof(typename Type::Bits) == 2)
    if (!(places & 3)) return work(std::true_type());
  work(std::false_type());
}

template <typename Type> inline float load1(const typename Type::Bits *from) {
  Vector<typename Type::Bits, 2> pair = *from;
  return Type::template widen<2>(pair).x;
}

template <typename Type> inline void store1(typename Type::Bits *to, float x) {
  Vector<float, 2> pair = x;
  *to = Type::template narrow<2>(pair).x;
}

inline HalfDoubles low(Floats x) { return __builtin_convertvector(x.lo, HalfDoubles); }
inline HalfDoubles high(Floats x) { return __builtin_convertvector(x.hi, HalfDoubles); }

template <typename T> inline T sum_of(Vector<T, 2> x) { return x.x + x.y; }
template <typename T, int N> inline T sum_of(Vector<T, N> x) { return sum_of<T>(x.lo + x.hi); }

// Where a work-item stands: `row` counts groups of LANES items, `lane` is the item's place among them.
struct Place {
  i64 row, lane;
  sycl::nd_item<1> item = syclext::this_work_item::get_nd_item<1>();
  Place() {
#if LANES > 1 // a GPU's compiler knows that a sub-group has one number, so it works out once what follows from `row`
    auto lanes = item.get_sub_group();
    row = i64(item.get_group(0)) * (item.get_local_range(0) / LANES) + lanes.get_group_linear_id();
    lane = lanes.get_local_linear_id();
#else
    row = item.get_global_id(0);
    lane = 0;
#endif
  }
  // The sum over the row's work-items, for each of them.
  double sum(double x) const {
#if LANES > 1
    return sycl::reduce_over_group(item.get_sub_group(), x, sycl::plus<double>());
#else
    return x;
#endif
  }
};
