// OpenCL's functions, of the loader that the SYCL runtime has opened, so nothing is linked.
#pragma once
#include <optional>
#include <sycl/queue.hpp>
#if __has_include(<CL/cl.h>)
#include <CL/cl.h>
#include <CL/cl_ext.h>
#include <dlfcn.h>

#include <exception>
#include <stdexcept>
#include <string>
#include <sycl/backend.hpp>

constexpr auto OPENCL = sycl::backend::opencl;

template <typename Function> Function *opencl(Function *, const char *name) {
  void *loader = dlopen("libOpenCL.so.1", RTLD_NOW | RTLD_NOLOAD);
  void *found = loader ? dlsym(loader, name) : nullptr;
  if (loader) dlclose(loader); // only the count of its users
  if (!found) throw std::runtime_error(std::string("OpenCL's loader has no ") + name);
  return reinterpret_cast<Function *>(found);
}
#define COCODIFF_CL(function) opencl(&function, #function)

// A queue whose kernels run on the thread that launches them, where the driver has such queues: Intel's for CPUs does
// ("immediate command execution"). Its other queues wake a worker for each kernel, which then looks for more work on a
// core that another rank could use. Unordered, as its guide advises: threads do not wait for each other's kernels.
inline std::optional<sycl::queue> queue_of_this_thread(const sycl::queue &like) {
  if (like.get_backend() != OPENCL || !like.get_device().is_cpu()) return std::nullopt;
  const cl_queue_properties wanted[] = {
      CL_QUEUE_PROPERTIES, CL_QUEUE_THREAD_LOCAL_EXEC_ENABLE_INTEL | CL_QUEUE_OUT_OF_ORDER_EXEC_MODE_ENABLE, 0};
  try {
    cl_int code = 0;
    cl_command_queue made = COCODIFF_CL(clCreateCommandQueueWithProperties)(
        sycl::get_native<OPENCL>(like.get_context()), sycl::get_native<OPENCL>(like.get_device()), wanted, &code);
    if (code != CL_SUCCESS) return std::nullopt;
    return sycl::make_queue<OPENCL>(made, like.get_context());
  } catch (const std::exception &) { // it is quicker with one, it works without
    return std::nullopt;
  }
}
#else
inline std::optional<sycl::queue> queue_of_this_thread(const sycl::queue &) { return std::nullopt; }
#endif
