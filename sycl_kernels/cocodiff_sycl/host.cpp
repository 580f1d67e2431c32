// The host side of the SYCL kernels: a C interface around a queue, run-time compilation, and launches.
//
// g++ and the headers and library of the SYCL runtime are enough; kernels are compiled from source by that runtime.
// Every function that can fail returns null or non-zero and leaves its reason in cocodiff_error(). No exception leaves.
#if __has_include(<sycl/detail/core.hpp>) && __has_include(<sycl/properties/queue_properties.hpp>)
#include <sycl/detail/core.hpp> // a quarter of the compile time of all of SYCL
#include <sycl/ext/oneapi/experimental/raw_kernel_arg.hpp>
#include <sycl/handler.hpp>
#include <sycl/kernel_bundle.hpp>
#include <sycl/properties/queue_properties.hpp>
#include <sycl/usm.hpp>
#else
#include <sycl/sycl.hpp>
#endif

#include <array>
#include <cstdint>
#include <cstring>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "moves.hpp"
#include "opencl.hpp"
#include "tensors.hpp"

namespace syclexp = sycl::ext::oneapi::experimental;
using Bundle = sycl::kernel_bundle<sycl::bundle_state::executable>;

namespace {

thread_local std::string last_error;

template <typename Result, typename Work> Result guarded(Result failed, Work work) {
  try {
    return work();
  } catch (const std::exception &error) {
    last_error = error.what();
  } catch (...) {
    last_error = "unknown exception";
  }
  if (last_error.empty()) last_error = "an exception without a message";
  return failed;
}

// Where tables of a launch are copied to, for devices that cannot read the host's memory. A slot is used again when the
// launch that read it is done.
class TableRing {
public:
  static constexpr size_t SLOTS = 32;

  void *put(sycl::queue &queue, const void *table, size_t bytes, size_t &slot) {
    std::lock_guard<std::mutex> hold(lock_);
    slot = next_++ % SLOTS;
    Slot &own = slots_[slot];
    if (own.busy) own.last.wait();
    if (own.size < bytes) {
      release(own);
      const size_t size = std::max<size_t>(bytes, 4096);
      own.context = queue.get_context();
      own.host = sycl::malloc_host(size, queue);
      own.device = sycl::malloc_device(size, queue);
      if (own.host == nullptr || own.device == nullptr) throw std::runtime_error("no memory for a table of slices");
      own.size = size;
    }
    std::memcpy(own.host, table, bytes);
    // An event is given as well: a caller's queue need not be in order.
    own.last = queue.memcpy(own.device, own.host, bytes);
    own.busy = true;
    return own.device;
  }
  sycl::event copied(size_t slot) { return slots_[slot].last; }
  void read_by(size_t slot, const sycl::event &launch) { slots_[slot].last = launch; }

private:
  struct Slot {
    void *host = nullptr, *device = nullptr;
    size_t size = 0;
    bool busy = false;
    sycl::event last;
    sycl::context context;
  };
  static void release(Slot &slot) {
    if (slot.host) sycl::free(slot.host, slot.context);
    if (slot.device) sycl::free(slot.device, slot.context);
    slot.host = slot.device = nullptr;
    slot.size = 0;
  }
  std::array<Slot, SLOTS> slots_;
  size_t next_ = 0;
  std::mutex lock_;
};

// A device's queue and what was built for its context.
struct Device {
  sycl::queue queue;
  uint32_t units; // compute units that kernels run on
  std::optional<sycl::queue> of_this_thread; // beside a CPU queue of our own: takes what no other core would share
  TableRing tables;

  sycl::queue &queue_for(sycl::queue *callers, const sycl::nd_range<1> &range) {
    if (callers) return *callers;
    return of_this_thread && (units == 1 || range.get_group_range()[0] == 1) ? *of_this_thread : queue;
  }
};

// What launches of a kernel on tensors of one layout have in common, as Python packs it: the kernel's struct begins with
// `addresses` numbers that each launch brings, and ends with the `count` numbers that follow here.
struct Launch {
  Device *device;
  sycl::kernel *kernel;
  int64_t global, local, flags, addresses, count;
  const int64_t *numbers() const { return reinterpret_cast<const int64_t *>(this + 1); }
};

// The same of movement launches. kernels: of units of 16, 4 and 2 bytes. look: whether indices are read and checked.
// chunk: bytes; units: cores (see MoveTable). packed: groups of lanes in a work-group. `count` pieces follow.
struct MoveLaunch {
  Device *device;
  sycl::kernel *kernels[3];
  int64_t flags, itemsize, look, lanes, chunk, units, packed, count;
  const Piece *pieces() const { return reinterpret_cast<const Piece *>(this + 1); }
};

constexpr int64_t WAIT = 1, COPY_TABLE = 2; // flags: wait for a CPU's kernel; copy the table even where it could be read

// Starts a kernel that takes one struct of `bytes` by value.
//
// table: null, or bytes that the kernel reads through the struct's first member, which is set here. They are copied
//        unless the launch is waited for: a CPU reads the host's memory.
void start(Device &device, sycl::queue *callers, const sycl::kernel &kernel, const sycl::nd_range<1> &range,
           void *arguments, size_t bytes, const void *table, size_t table_bytes, int64_t flags) {
  sycl::queue &on = device.queue_for(callers, range);
  size_t slot = 0;
  const bool copied = table && (!(flags & WAIT) || (flags & COPY_TABLE));
  if (table) {
    const void *seen = copied ? device.tables.put(on, table, table_bytes, slot) : table;
    std::memcpy(arguments, &seen, sizeof seen);
  }
  sycl::event done = on.submit([&](sycl::handler &handler) {
    if (copied) handler.depends_on(device.tables.copied(slot));
    handler.set_arg(0, syclexp::raw_kernel_arg(arguments, bytes));
    handler.parallel_for(range, kernel);
  });
  if (copied) device.tables.read_by(slot, done);
  if (flags & WAIT) done.wait_and_throw();
}

} // namespace

extern "C" {

const char *cocodiff_error() { return last_error.c_str(); }

// queue: the address of a sycl::queue, or null for an in-order queue of our own on the CPU device. threads: how many the
// CPU device was told to run kernels on, which its driver obeys and does not tell.
void *cocodiff_open(void *queue, int threads) {
  return guarded<void *>(nullptr, [&]() -> void * {
    sycl::queue own = queue ? *static_cast<sycl::queue *>(queue)
                            : sycl::queue(sycl::device(sycl::cpu_selector_v), sycl::property::queue::in_order{});
    const sycl::device where = own.get_device();
    const uint32_t units = where.get_info<sycl::info::device::max_compute_units>();
    return new Device{own, where.is_cpu() ? std::min<uint32_t>(units, threads) : units,
                      queue ? std::nullopt : queue_of_this_thread(own), {}};
  });
}

// "NAME; DRIVER; BACKEND; TYPE; UNITS" into text. Returns 0.
int cocodiff_describe(void *device, char *text, size_t size) {
  return guarded(1, [&] {
    auto *of = static_cast<Device *>(device);
    sycl::device where = of->queue.get_device();
    std::string backend = of->queue.get_backend() == sycl::backend::opencl ? "opencl" : "level_zero";
    std::string about = where.get_info<sycl::info::device::name>() + "; " +
                        where.get_info<sycl::info::device::driver_version>() + "; " + backend + "; " +
                        (where.is_cpu() ? "cpu" : "gpu") + "; " + std::to_string(of->units);
    std::strncpy(text, about.c_str(), size - 1);
    text[size - 1] = 0;
    return 0;
  });
}

// Compiles SYCL source. option: for the compiler, "" for none.
void *cocodiff_build(void *device, const char *source, const char *option) {
  return guarded<void *>(nullptr, [&]() -> void * {
    std::vector<std::string> options;
    if (*option) options.push_back(option);
    auto &queue = static_cast<Device *>(device)->queue;
    auto text = syclexp::create_kernel_bundle_from_source(queue.get_context(), syclexp::source_language::sycl,
                                                          std::string(source));
    auto built = syclexp::build(text, {queue.get_device()}, syclexp::properties{syclexp::build_options{options}});
    return new Bundle(built);
  });
}

void *cocodiff_kernel(void *built, const char *name) {
  return guarded<void *>(nullptr, [&]() -> void * {
    return new sycl::kernel(static_cast<Bundle *>(built)->ext_oneapi_get_kernel(std::string(name)));
  });
}

// Where a tuple's tensors lie, and how, as Python bytes. Called with the interpreter's lock held.
void *cocodiff_look(const Reads *python, void *tuple) {
  return guarded<void *>(nullptr, [&] { return look(*python, tuple); });
}

// queue: the caller's current sycl::queue, or null for the device's own.
int cocodiff_launch(const Launch *launch, void *queue, const int64_t *addresses) {
  return guarded(1, [&] {
    const auto [device, kernel, global, local, flags, before, count] = *launch;
    std::array<int64_t, 64> own;
    if (size_t(before + count) > own.size()) throw std::runtime_error("more than 64 numbers for a kernel");
    std::memcpy(own.data(), addresses, before * sizeof(int64_t));
    std::memcpy(own.data() + before, launch->numbers(), count * sizeof(int64_t));
    start(*device, static_cast<sycl::queue *>(queue), *kernel, sycl::nd_range<1>(global, local), own.data(),
          (before + count) * sizeof(int64_t), nullptr, 0, flags);
    return 0;
  });
}

// Moves pieces in one launch. addresses: of the tensors that pieces name. Returns 2 for a mistake in them.
int cocodiff_move(const MoveLaunch *launch, void *queue, const int64_t *addresses) {
  const MoveLaunch &how = *launch;
  std::optional<MoveTable> table;
  const int mistake = guarded(2, [&] {
    table.emplace(how.pieces(), how.count, addresses, how.itemsize, how.look != 0, how.lanes, how.chunk, how.units);
    return 0;
  });
  if (mistake) return mistake;
  return guarded(1, [&] {
    if (table->moves.empty()) return 0;
    int64_t arguments[] = {0, int64_t(table->moves.size()), table->chunks, table->chunk};
    const int unit = table->unit == 16 ? 0 : table->unit == 4 ? 1 : 2;
    const sycl::kernel &kernel = *how.kernels[unit];
    const int64_t groups = (table->chunks + how.packed - 1) / how.packed, local = how.packed * how.lanes;
    start(*how.device, static_cast<sycl::queue *>(queue), kernel, sycl::nd_range<1>(groups * local, local), arguments,
          sizeof arguments, table->moves.data(), table->moves.size() * sizeof(Move), how.flags);
    return 0;
  });
}
}
