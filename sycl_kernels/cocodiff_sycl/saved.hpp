// Compiled kernels as bytes, so that a later process need not load the runtime's compiler (144 MB) to have them.
//
// For OpenCL devices: SYCL's interoperability gives their programs, OpenCL turns a program into bytes and back.
#pragma once
#include "opencl.hpp"

namespace saved {
constexpr const char *PREFIX = "__sycl_kernel_"; // what the compiler puts before the name of a kernel of ours
}

#if __has_include(<CL/cl.h>)
#include <cstring>
#include <vector>

namespace saved {

inline void demand(cl_int code, const char *what) {
  if (code != CL_SUCCESS) throw std::runtime_error(std::string(what) + ": OpenCL error " + std::to_string(code));
}

using Programs = std::vector<cl_program>;

// Of one device's programs: for each its size in 8 bytes, then its bytes.
template <typename Bundle> std::string bytes(const Bundle &bundle) {
  std::string all;
  auto about = COCODIFF_CL(clGetProgramInfo);
  for (cl_program program : sycl::get_native<OPENCL>(bundle)) {
    size_t size = 0;
    demand(about(program, CL_PROGRAM_BINARY_SIZES, sizeof size, &size, nullptr), "size of a program");
    std::string own(size, 0);
    auto *to = reinterpret_cast<unsigned char *>(own.data());
    demand(about(program, CL_PROGRAM_BINARIES, sizeof to, &to, nullptr), "bytes of a program");
    uint64_t count = size;
    all.append(reinterpret_cast<const char *>(&count), sizeof count).append(own);
  }
  return all;
}

inline Programs programs(const sycl::queue &queue, const char *from, size_t size) {
  Programs found;
  auto context = sycl::get_native<OPENCL>(queue.get_context());
  auto device = sycl::get_native<OPENCL>(queue.get_device());
  for (const char *end = from + size; from < end;) {
    uint64_t count = 0;
    if (size_t(end - from) < sizeof count) throw std::runtime_error("saved kernels end early");
    std::memcpy(&count, from, sizeof count);
    from += sizeof count;
    if (count > size_t(end - from)) throw std::runtime_error("saved kernels end early");
    auto *program_bytes = reinterpret_cast<const unsigned char *>(from);
    size_t program_size = count;
    cl_int status = 0, code = 0;
    auto create = COCODIFF_CL(clCreateProgramWithBinary);
    found.push_back(create(context, 1, &device, &program_size, &program_bytes, &status, &code));
    demand(code ? code : status, "a saved program");
    demand(COCODIFF_CL(clBuildProgram)(found.back(), 1, &device, "", nullptr, nullptr), "building a saved program");
    from += count;
  }
  return found;
}

inline sycl::kernel kernel(const Programs &programs, const std::string &name, const sycl::context &context) {
  auto create = COCODIFF_CL(clCreateKernel);
  for (cl_program program : programs) {
    cl_int code = 0;
    cl_kernel found = create(program, (PREFIX + name).c_str(), &code);
    if (code == CL_SUCCESS) return sycl::make_kernel<OPENCL>(found, context);
  }
  throw std::runtime_error("no kernel of this name in the saved programs");
}

} // namespace saved
#else
namespace saved { // without OpenCL's headers nothing is saved
using Programs = std::vector<int>;
template <typename Bundle> std::string bytes(const Bundle &) { throw std::runtime_error("no OpenCL headers"); }
inline Programs programs(const sycl::queue &, const char *, size_t) { throw std::runtime_error("no OpenCL headers"); }
inline sycl::kernel kernel(const Programs &, const std::string &, const sycl::context &) {
  throw std::runtime_error("no OpenCL headers");
}
} // namespace saved
#endif
