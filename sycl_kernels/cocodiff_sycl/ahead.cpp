// What is put after the kernels' source when icpx compiles it ahead of time: kernels by their names.
//
// COCODIFF_KERNELS(X) is X(name) for each kernel. The runtime has their code for the device that was named to icpx, and
// throws for any other.
#include <cstring>
#include <stdexcept>
#include <string>

namespace {
template <auto *function> sycl::kernel compiled(const sycl::queue &queue) {
  auto bundle = syclexp::get_kernel_bundle<function, sycl::bundle_state::executable>(queue.get_context(),
                                                                                     {queue.get_device()});
  return bundle.template ext_oneapi_get_kernel<function>();
}
} // namespace

// queue: the address of a sycl::queue. Returns the address of a sycl::kernel, or throws.
extern "C" void *cocodiff_ahead_kernel(void *queue, const char *name) {
  const auto &of = *static_cast<const sycl::queue *>(queue);
#define COCODIFF_NAMED(known)                                                                                          \
  if (!std::strcmp(name, #known)) return new sycl::kernel(compiled<known>(of));
  COCODIFF_KERNELS(COCODIFF_NAMED)
  throw std::runtime_error(std::string("no kernel of this name was compiled ahead of time: ") + name);
}
