// Where torch's tensors lie, and how: read here because Python needs a microsecond for a tensor.
//
// The functions that read a tuple are Python's, the one that reads a tensor is torch's (DLPack's exchange API). Both are
// given, so that nothing is linked and no header of theirs is needed.
#pragma once
#include <algorithm>
#include <cstdint>
#include <vector>

struct Described { // DLTensor of DLPack 1
  void *data;
  int32_t device_type, device_number, dimensions;
  uint8_t kind, bits; // of a number
  uint16_t lanes;
  const int64_t *shape, *strides;
  uint64_t byte_offset;
};

struct Reads {
  intptr_t (*size)(void *tuple);
  void *(*item)(void *tuple, intptr_t);
  void *(*bytes)(const char *, intptr_t);
  const void *none;
  int (*describe)(void *tensor, Described *); // not 0: a Python exception is set
};

// Python bytes: the address of each tensor in a tuple (0 for None), then what their layouts are, in 8 bytes each: -1 for
// None; -2 for that of the last tensor before; else device, dimensions with dtype, sizes and strides. (Most launches are
// of a dozen equal slices, and what is shorter is faster to look up.) Null with a Python exception set.
inline void *look(const Reads &python, void *tuple) {
  static thread_local std::vector<int64_t> found;
  const intptr_t count = python.size(tuple);
  if (count < 0) return nullptr;
  found.resize(count);
  size_t last = 0, end = 0; // where the last tensor's layout is
  for (intptr_t n = 0; n < count; ++n) {
    void *item = python.item(tuple, n);
    if (item == python.none) {
      found[n] = 0;
      found.push_back(-1);
      continue;
    }
    Described x{};
    if (python.describe(item, &x)) return nullptr;
    found[n] = int64_t(x.data) + int64_t(x.byte_offset);
    const size_t begin = found.size();
    found.push_back(int64_t(x.device_type) << 32 | uint32_t(x.device_number));
    found.push_back(int64_t(x.dimensions) << 32 | uint32_t(x.kind) << 24 | uint32_t(x.bits) << 16 | x.lanes);
    found.insert(found.end(), x.shape, x.shape + x.dimensions);
    found.insert(found.end(), x.strides, x.strides + x.dimensions);
    if (std::equal(found.begin() + begin, found.end(), found.begin() + last, found.begin() + end)) {
      found.resize(begin);
      found.push_back(-2);
    } else {
      last = begin, end = found.size();
    }
  }
  return python.bytes(reinterpret_cast<const char *>(found.data()), intptr_t(found.size() * sizeof found[0]));
}
