// A module of a binary that was compiled elsewhere, on Level Zero: from the structures of its specification (1.0 and
// later) and SYCL's interoperability. There was no such device where it was written.
//
// Level Zero's loader is the one that the SYCL runtime has opened, so nothing is linked and no header of it is needed.
#pragma once
#include <cstring>
#include <dlfcn.h>
#include <stdexcept>
#include <string>
#include <sycl/backend.hpp>
#include <sycl/ext/oneapi/backend/level_zero.hpp>
#include <vector>

namespace level_zero {

constexpr auto BACKEND = sycl::backend::ext_oneapi_level_zero;

struct ModuleDescription { // ze_module_desc_t
  int type = 0x1b;         // ZE_STRUCTURE_TYPE_MODULE_DESC
  const void *next = nullptr;
  int format = 1; // ZE_MODULE_FORMAT_NATIVE
  size_t size = 0;
  const uint8_t *bytes = nullptr;
  const char *flags = "";
  const void *constants = nullptr;
};

struct KernelDescription { // ze_kernel_desc_t
  int type = 0x1d;         // ZE_STRUCTURE_TYPE_KERNEL_DESC
  const void *next = nullptr;
  uint32_t flags = 0;
  const char *name = nullptr;
};

template <typename Function> Function *function(const char *name) {
  void *loader = dlopen("libze_loader.so.1", RTLD_NOW | RTLD_NOLOAD);
  void *found = loader ? dlsym(loader, name) : nullptr;
  if (loader) dlclose(loader); // only the count of its users
  if (!found) throw std::runtime_error(std::string("Level Zero's loader has no ") + name);
  return reinterpret_cast<Function *>(found);
}

using Modules = std::vector<ze_module_handle_t>;

// Of binaries: a size in 8 bytes each, then the bytes. A driver that one does not suit refuses it.
inline Modules modules(const sycl::queue &queue, const char *from, size_t size) {
  auto create = function<int(ze_context_handle_t, ze_device_handle_t, const ModuleDescription *, ze_module_handle_t *,
                             void **)>("zeModuleCreate");
  Modules found;
  for (const char *end = from + size; from < end;) {
    uint64_t count = 0;
    if (size_t(end - from) >= sizeof count) std::memcpy(&count, from, sizeof count), from += sizeof count;
    if (!count || count > size_t(end - from)) throw std::runtime_error("binaries end early");
    ModuleDescription description;
    description.size = count, description.bytes = reinterpret_cast<const uint8_t *>(from);
    ze_module_handle_t made = nullptr;
    const int code = create(sycl::get_native<BACKEND>(queue.get_context()),
                            sycl::get_native<BACKEND>(queue.get_device()), &description, &made, nullptr);
    if (code) throw std::runtime_error("a module of a binary: Level Zero error " + std::to_string(code));
    found.push_back(made);
    from += count;
  }
  return found;
}

inline sycl::kernel kernel(const Modules &modules, const std::string &name, const sycl::context &context) {
  auto create = function<int(ze_module_handle_t, const KernelDescription *, ze_kernel_handle_t *)>("zeKernelCreate");
  const std::string whole = "__sycl_kernel_" + name; // as the compiler calls kernels of ours
  KernelDescription description;
  description.name = whole.c_str();
  for (ze_module_handle_t module : modules) {
    ze_kernel_handle_t made = nullptr;
    if (create(module, &description, &made)) continue; // of another module
    using sycl::ext::oneapi::level_zero::ownership;
    auto bundle =
        sycl::make_kernel_bundle<BACKEND, sycl::bundle_state::executable>({module, ownership::keep}, context);
    return sycl::make_kernel<BACKEND>({bundle, made, ownership::transfer}, context);
  }
  throw std::runtime_error("no kernel of this name in the binaries");
}

} // namespace level_zero
