// What all kernels share: number types, vectors of 16 numbers, and sums over the work-items of a row.
//
// LANES work-items share a row of numbers or a chunk of a copy. 1 is for CPU devices, whose vector units take the 16
// numbers of one work-item; 16 is for GPUs, where it is a sub-group. Nothing else differs between the two.
// Every kernel takes one struct by value, whose members are 8 bytes each: one argument is set faster than many.
#include <sycl/sycl.hpp>

#include <cstdint>

#ifndef LANES
#define LANES 1
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
using Float16 = Vector<float, 16>;
using Float8 = Vector<float, 8>;
using Double8 = Vector<double, 8>;

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

template <typename Type, int N> inline Vector<float, N> load(const typename Type::Bits *from) {
  return Type::template widen<N>(reinterpret_cast<const Loose<typename Type::Bits, N> *>(from)->value);
}

template <typename Type, int N> inline void store(typename Type::Bits *to, Vector<float, N> x) {
  reinterpret_cast<Loose<typename Type::Bits, N> *>(to)->value = Type::template narrow<N>(x);
}

template <typename Type> inline float load1(const typename Type::Bits *from) {
  Vector<typename Type::Bits, 2> pair = *from;
  return Type::template widen<2>(pair).x;
}

template <typename Type> inline void store1(typename Type::Bits *to, float x) {
  Vector<float, 2> pair = x;
  *to = Type::template narrow<2>(pair).x;
}

inline Double8 low(Float16 x) { return __builtin_convertvector(x.lo, Double8); }
inline Double8 high(Float16 x) { return __builtin_convertvector(x.hi, Double8); }

inline double total(Double8 x) {
  Vector<double, 4> four = x.lo + x.hi;
  Vector<double, 2> two = four.lo + four.hi;
  return two.x + two.y;
}

// Where a work-item stands: `row` counts groups of LANES items, `lane` is the item's place among them.
struct Place {
  i64 row, lane;
  sycl::nd_item<1> item = syclext::this_work_item::get_nd_item<1>();
  Place() {
    i64 id = item.get_global_id(0);
    row = id / LANES;
    lane = id % LANES;
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
