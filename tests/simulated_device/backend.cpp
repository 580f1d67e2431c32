// The simulated device as PyTorch's PrivateUse1. What an operation returns is sized by its meta kernel when it is
// launched; it runs later, by the CPU's kernel, in the thread of the stream that was current then. Where no meta kernel
// tells the sizes the stream is waited for, as a GPU does for `nonzero`.
#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

#include <map>

#include "runtime.h"

namespace simulated {
namespace {

constexpr auto TYPE = c10::DeviceType::PrivateUse1;

c10::Device device(int index) { return {TYPE, static_cast<c10::DeviceIndex>(index < 0 ? current_device() : index)}; }
c10::Stream for_torch(const Stream* stream) {
  return c10::Stream(c10::Stream::UNSAFE, device(stream->device), stream->id);
}
Stream* ours(const c10::Stream& stream) { return stream_of(stream.device_index(), stream.id()); }

// Memory ---------------------------------------------------------------------------------------------------------------

struct Allocator final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t bytes) override {
    c10::Device here = device(-1);
    if (bytes == 0)
      return {nullptr, here};
    Block* block = simulated::allocate(bytes, here.index());
    return {block->memory, block, [](void* freed) { release(static_cast<Block*>(freed)); }, here};
  }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
  void recordStream(const c10::DataPtr& data, c10::Stream stream) override {
    if (data.get_context() != nullptr)
      record_stream(static_cast<Block*>(data.get_context()), ours(stream));
  }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex) override { return {0, 0}; }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {}
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex) override { return {}; }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex) override {}
};
Allocator allocator;
REGISTER_ALLOCATOR(TYPE, &allocator);

// Pinned memory is never given back: nobody has to wait for the copies from and to it.
struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    auto* memory = static_cast<char*>(std::malloc(std::max<size_t>(bytes, 1)));
    std::lock_guard<std::mutex> lock(mutex);
    sizes[memory] = bytes;
    return {memory, memory, [](void*) {}, c10::Device(c10::kCPU)};
  }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
  bool has(const void* data) {
    std::lock_guard<std::mutex> lock(mutex);
    auto after = sizes.upper_bound(static_cast<const char*>(data));
    return after != sizes.begin() && data < std::prev(after)->first + std::prev(after)->second;
  }
  std::mutex mutex;
  std::map<const char*, size_t> sizes;
};
PinnedAllocator pinned;

// Devices, streams and events ------------------------------------------------------------------------------------------

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return TYPE; }
  c10::Device getDevice() const override { return device(-1); }
  void setDevice(c10::Device to) const override { set_current_device(device(to.index()).index()); }
  void uncheckedSetDevice(c10::Device to) const noexcept override { setDevice(to); }
  c10::Device exchangeDevice(c10::Device to) const override {
    c10::Device before = getDevice();
    setDevice(to);
    return before;
  }
  c10::DeviceIndex deviceCount() const noexcept override { return static_cast<c10::DeviceIndex>(device_count()); }
  void synchronizeDevice(c10::DeviceIndex index) const override { synchronize_device(device(index).index()); }

  c10::Stream getStream(c10::Device of) const override { return for_torch(current_stream(of.index())); }
  c10::Stream getDefaultStream(c10::Device of) const override { return for_torch(stream_of(of.index(), 0)); }
  c10::Stream getStreamFromGlobalPool(c10::Device of, bool) const override { return getNewStream(of, 0); }
  c10::Stream getNewStream(c10::Device of, int) const override {
    return for_torch(new_stream(device(of.index()).index()));
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    return for_torch(exchange_current_stream(ours(stream)));
  }
  bool queryStream(const c10::Stream& stream) const override { return ours(stream)->idle(); }
  void synchronizeStream(const c10::Stream& stream) const override { synchronize(mark(ours(stream))); }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    allocator.recordStream(data, stream);
  }

  // An event that was never recorded is nullptr.
  void record(void** event, const c10::Stream& stream, c10::DeviceIndex, c10::EventFlag) const override {
    delete static_cast<Mark*>(std::exchange(*event, new Mark(mark(ours(stream)))));
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event != nullptr)
      wait(ours(stream), *static_cast<Mark*>(event));
  }
  bool queryEvent(void* event) const override { return event == nullptr || static_cast<Mark*>(event)->passed(); }
  void synchronizeEvent(void* event) const override {
    if (event != nullptr)
      synchronize(*static_cast<Mark*>(event));
  }
  void destroyEvent(void* event, c10::DeviceIndex) const noexcept override { delete static_cast<Mark*>(event); }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return device_count() > 0; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return static_cast<c10::DeviceIndex>(device_count()); }
  c10::DeviceIndex getCurrentDevice() const override { return device(-1).index(); }
  void setCurrentDevice(c10::DeviceIndex index) const override { set_current_device(index); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex index) const override {
    c10::DeviceIndex before = getCurrentDevice();
    setCurrentDevice(index);
    return before;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex index) const override { return exchangeDevice(index); }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override {
    return at::detail::getDefaultCPUGenerator();
  }
  bool isPinnedPtr(const void* data) const override { return pinned.has(data); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned; }
};

// Tensors --------------------------------------------------------------------------------------------------------------

bool is_ours(const at::Tensor& x) { return x.defined() && x.device().type() == TYPE; }

// Adds what an operation reads or writes of a tensor.
void add_use(std::vector<Use>& uses, const at::Tensor& x, bool writes) {
  if (!is_ours(x) || x.numel() == 0)
    return;
  auto* block = static_cast<Block*>(x.storage().data_ptr().get_context());
  auto itemsize = static_cast<int64_t>(x.element_size());
  uses.push_back({block, bytes_of(x.storage_offset() * itemsize, itemsize, x.sizes().vec(), x.strides().vec()), writes});
}

// The same bytes as a tensor of the CPU. As a kernel's pointer it does not keep them.
at::Tensor on_host(const at::Tensor& x) {
  c10::InferenceMode inference(true);
  const c10::Storage& storage = x.storage();
  c10::DataPtr bytes(const_cast<void*>(storage.data_ptr().get()), c10::Device(c10::kCPU));
  at::Tensor host = at::empty({0}, at::TensorOptions().dtype(x.dtype()).device(at::kCPU));
  auto* impl = host.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(
      c10::Storage(c10::Storage::use_byte_size_t(), storage.nbytes(), std::move(bytes), nullptr, false));
  impl->set_sizes_and_strides(x.sizes(), x.strides(), x.storage_offset());
  if (x.unsafeGetTensorImpl()->is_wrapped_number())
    impl->set_wrapped_number(true);
  return x.is_conj() ? host.conj() : host;
}

at::Tensor on_meta(const at::Tensor& x) {
  if (x.is_cpu() && x.dim() == 0)  // a number goes with tensors of any device
    return x;
  at::Tensor meta = at::empty_strided(x.sizes(), x.strides(), at::TensorOptions().dtype(x.dtype()).device(at::kMeta));
  return x.is_conj() ? meta.conj() : meta;
}

at::Tensor empty(c10::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                 std::optional<at::Device> where, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  c10::DeviceGuard guard(c10::device_or_default(where));
  return at::detail::empty_generic(size, &allocator, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>, std::optional<at::Device> where, std::optional<bool>) {
  c10::DeviceGuard guard(c10::device_or_default(where));
  return at::detail::empty_strided_generic(size, stride, &allocator, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                           c10::dtype_or_default(dtype));
}

at::Tensor& set_storage(at::Tensor& x, at::Storage storage, c10::SymInt offset, c10::SymIntArrayRef size,
                        c10::SymIntArrayRef stride) {
  x.unsafeGetTensorImpl()->set_storage_keep_dtype(std::move(storage));
  x.unsafeGetTensorImpl()->set_sizes_and_strides(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride),
                                                 offset.guard_int(__FILE__, __LINE__));
  return x;
}

const at::Tensor& resize(const at::Tensor& x, c10::SymIntArrayRef, std::optional<at::MemoryFormat>) {
  TORCH_CHECK(false, "the simulated device has no resize_");
  return x;
}

void record_tensor(at::Tensor& x, at::Stream stream) { allocator.recordStream(x.storage().data_ptr(), stream); }

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  if (to.numel() == 0)
    return to;
  TORCH_CHECK(from.is_cpu() || to.is_cpu() || from.device() == to.device(), "a copy between two simulated devices");
  std::vector<Use> uses;
  add_use(uses, from, false);
  add_use(uses, to, true);
  Stream* stream = current_stream((is_ours(from) ? from : to).device().index());
  // The host's memory is taken as it is where it is pinned, else as it is now.
  bool at_once = !non_blocking || !(is_ours(from) ? to : from).is_pinned();
  at::Tensor source = is_ours(from) ? on_host(from) : at_once ? from.clone() : from;
  at::Tensor target = is_ours(to) ? on_host(to) : to.detach();
  if (settings().pitch_lost && is_ours(from) && is_ours(to) && source.dim() > 1 && !source.is_contiguous())
    source = source.as_strided(source.sizes(), at::empty(source.sizes(), at::kMeta).strides(), source.storage_offset());
  launch(stream, "copy", uses, [source, target]() mutable { target.copy_(source); });
  if (at_once && !(is_ours(from) && is_ours(to)))
    synchronize(mark(stream));
  return to;
}

at::Scalar number_in(const at::Tensor& x) {
  std::vector<Use> uses;
  add_use(uses, x, false);
  Stream* stream = current_stream(x.device().index());
  launch(stream, "item", uses, [] {});
  synchronize(mark(stream));
  return on_host(x).item();
}

// All other operations -------------------------------------------------------------------------------------------------

using Change = std::function<at::Tensor(const at::Tensor&)>;

// An argument or result with its tensors changed.
c10::IValue changed(const c10::IValue& value, const Change& change) {
  auto one = [&](const at::Tensor& x) { return x.defined() ? change(x) : x; };
  if (value.isTensor())
    return one(value.toTensor());
  if (value.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const at::Tensor& x : value.toTensorVector())
      list.push_back(one(x));
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> list;
    for (const std::optional<at::Tensor>& x : value.toOptionalTensorList().vec())
      list.push_back(x.has_value() ? std::optional<at::Tensor>(one(*x)) : x);
    return list;
  }
  return value;
}

std::vector<at::Tensor> tensors_in(const c10::IValue& value) {
  std::vector<at::Tensor> found;
  changed(value, [&](const at::Tensor& x) {
    found.push_back(x);
    return x;
  });
  return found;
}

using Values = std::vector<c10::IValue>;

// Flips the lowest bit of some numbers of a product, others each time: as kernels that add up in any order.
void wander(const std::string& op, const at::Tensor& x) {
  static const std::set<std::string> products = {"aten::linear", "aten::matmul", "aten::mm", "aten::addmm", "aten::bmm",
                                                 "aten::baddbmm", "aten::convolution",
                                                 "aten::scaled_dot_product_attention"};
  const std::string& when = settings().wandering;
  bool deterministic = when != "always" && at::globalContext().deterministicMkldnn();
  if (when.empty() || deterministic || !products.count(op) || !x.is_floating_point())
    return;
  static std::atomic<uint64_t> times{0};
  auto draw = at::detail::createCPUGenerator(++times);
  at::Tensor bits = x.view(x.element_size() == 2 ? at::kShort : x.element_size() == 4 ? at::kInt : at::kLong);
  bits.bitwise_xor_(at::empty(x.sizes(), bits.options()).random_(0, 8, draw).eq(0).to(bits.scalar_type()));
}

Values with(const Values& values, const Change& change, c10::DeviceType instead) {
  Values made;
  for (const c10::IValue& value : values)
    made.push_back(value.isDevice() && value.toDevice().type() == TYPE ? c10::IValue(c10::Device(instead))
                                                                      : changed(value, change));
  return made;
}

Values run_on_cpu(const c10::OperatorHandle& op, Values values) {
  c10::InferenceMode inference(true);
  op.callBoxed(&values);
  return values;
}

// One launch of an operation.
class Launch {
 public:
  Launch(const c10::OperatorHandle& op, Values given) : op_(op), given_(std::move(given)), device_(device_of_arguments()) {}

  Values run() {
    check_devices();
    c10::DeviceGuard guard(device_);
    stream_ = current_stream(device_.index());
    const auto& returns = op_.schema().returns();
    if (!returns.empty() && returns[0].alias_info() != nullptr && !returns[0].alias_info()->isWrite())
      return views();
    return later();
  }

 private:
  c10::Device device_of_arguments() const {
    for (const c10::IValue& value : given_) {
      for (const at::Tensor& x : tensors_in(value))
        if (is_ours(x))
          return x.device();
      if (value.isDevice() && value.toDevice().type() == TYPE)
        return device(value.toDevice().index());
    }
    return device(-1);
  }

  bool writes(size_t argument) const {
    const auto* alias = op_.schema().arguments()[argument].alias_info();
    return alias != nullptr && alias->isWrite();
  }

  // The argument that a result is, of operations in place and of those with `out`.
  std::optional<size_t> argument_of(const c10::Argument& result) const {
    for (size_t i = 0; i < given_.size(); ++i)
      if (writes(i) && result.alias_info() != nullptr &&
          op_.schema().arguments()[i].alias_info()->beforeSets() == result.alias_info()->beforeSets())
        return i;
    return std::nullopt;
  }

  std::vector<Use> uses() const {
    std::vector<Use> found;
    for (size_t i = 0; i < given_.size(); ++i)
      for (const at::Tensor& x : tensors_in(given_[i]))
        add_use(found, x, writes(i));
    return found;
  }

  Values views() const {
    at::Tensor base;
    Values host = run_on_cpu(op_, with(given_, [&](const at::Tensor& x) {
      base = base.defined() || !is_ours(x) ? base : x;
      return is_ours(x) ? on_host(x) : x;
    }, c10::kCPU));
    return with(host, [&](const at::Tensor& x) {
      at::Tensor view = at::detail::make_tensor<c10::TensorImpl>(
          c10::TensorImpl::VIEW, c10::Storage(base.storage()), base.key_set(), x.dtype());
      view.unsafeGetTensorImpl()->set_sizes_and_strides(x.sizes(), x.strides(), x.storage_offset());
      if (x.is_conj() != base.is_conj())
        view._set_conj(x.is_conj());
      return view;
    }, c10::kCPU);
  }

  // As on other devices: tensors of the host are numbers, or say which elements are meant.
  void check_devices() const {
    bool indexes = op_.schema().name().find("index") != std::string::npos;
    for (const c10::IValue& value : given_)
      for (const at::Tensor& x : tensors_in(value))
        TORCH_CHECK(x.device() == device_ || (x.is_cpu() && (x.dim() == 0 || indexes)), op_.schema().name(), " on ",
                    device_, " is given a tensor on ", x.device());
  }

  // The results' sizes, strides and dtypes; nothing where only the values tell.
  std::optional<Values> sized() const {
    try {
      at::AutoDispatchBelowADInplaceOrView below;
      Values metas = with(given_, on_meta, c10::kMeta);
      op_.callBoxed(&metas);
      for (const c10::IValue& value : metas)
        if (!value.isTensor() && !value.isTensorList() && !value.isNone())
          return std::nullopt;
      if (op_.schema().name() == "aten::scaled_dot_product_attention" && metas[0].toTensor().dim() == 4)
        metas[0] = metas[0].toTensor().transpose(1, 2).contiguous().transpose(1, 2);  // as the CPU's kernel has it
      return metas;
    } catch (const std::exception&) {
      return std::nullopt;
    }
  }

  Values later() {
    const auto& returns = op_.schema().returns();
    bool known = !returns.empty();
    for (const auto& result : returns) {
      auto argument = argument_of(result);
      known = known && argument.has_value() && !op_.schema().arguments()[*argument].is_out();
    }
    std::optional<Values> metas = known ? Values(returns.size()) : sized();
    if (!metas.has_value())
      return now();
    for (size_t i = 0; i < returns.size(); ++i)
      if (auto argument = argument_of(returns[i]); argument && !known && (*metas)[i].isTensor())
        renew(given_[*argument].toTensor(), (*metas)[i].toTensor());
    Values results;
    std::vector<Use> used = uses();
    std::vector<std::pair<size_t, c10::IValue>> targets;  // by number the results that are no argument, on the host
    for (size_t i = 0; i < returns.size(); ++i) {
      if (auto argument = argument_of(returns[i])) {
        results.push_back(given_[*argument]);
        continue;
      }
      results.push_back(changed((*metas)[i], [&](const at::Tensor& meta) {
        at::Tensor made = empty_strided(meta.sizes(), meta.strides(), meta.scalar_type(), {}, device_, {});
        add_use(used, made, true);
        return made;
      }));
      targets.emplace_back(i, changed(results[i], on_host));
    }
    // Numbers of the host are taken as they are now.
    Values host = with(given_, [](const at::Tensor& x) { return is_ours(x) ? on_host(x) : x.clone(); }, c10::kCPU);
    launch(stream_, op_.schema().name(), used, [op = op_, host, targets] {
      Values values = run_on_cpu(op, host);
      for (const auto& [number, target] : targets) {
        auto into = tensors_in(target), from = tensors_in(values[number]);
        for (size_t i = 0; i < into.size(); ++i)
          if (from[i].numel() || !into[i].numel())  // statistics that it was given the CPU's batch norm leaves out
            into[i].copy_(from[i]);
        for (const at::Tensor& x : into)
          wander(op.schema().name(), x);
      }
    });
    return results;
  }

  // Gives a result's tensor the size that it will have, as kernels do with those that come empty.
  void renew(const at::Tensor& x, const at::Tensor& meta) const {
    if (x.sizes() == meta.sizes())
      return;
    at::Tensor made = empty_strided(meta.sizes(), meta.strides(), x.scalar_type(), {}, device_, {});
    x.unsafeGetTensorImpl()->set_storage_keep_dtype(c10::Storage(made.storage()));
    x.unsafeGetTensorImpl()->set_sizes_and_strides(made.sizes(), made.strides(), 0);
  }

  // Waits for the stream, runs the operation here, and copies what it returns to the device.
  Values now() {
    launch(stream_, op_.schema().name(), uses(), [] {});
    synchronize(mark(stream_));
    Values results = run_on_cpu(op_, with(given_, [](const at::Tensor& x) { return is_ours(x) ? on_host(x) : x; }, c10::kCPU));
    for (size_t i = 0; i < results.size(); ++i) {
      auto argument = argument_of(op_.schema().returns()[i]);
      results[i] = argument ? given_[*argument] : changed(results[i], [&](const at::Tensor& x) {
        at::Tensor made = empty_strided(x.sizes(), x.strides(), x.scalar_type(), {}, device_, {});
        copy_from(x, made, false);
        return made;
      });
    }
    return results;
  }

  c10::OperatorHandle op_;
  Values given_;
  c10::Device device_;
  Stream* stream_ = nullptr;
};

void any_operation(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  Values given = torch::jit::pop(*stack, op.schema().arguments().size());
  for (c10::IValue& result : Launch(op, std::move(given)).run())
    stack->push_back(std::move(result));
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&any_operation>()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("set_.source_Storage_storage_offset", &set_storage);
  m.impl("resize_", &resize);
  m.impl("record_stream", &record_tensor);
  m.impl("_copy_from", &copy_from);
  m.impl("_local_scalar_dense", &number_in);
  // Composed of others on most devices. Taken whole, the CPU's own kernels give the CPU's own bits.
  for (const char* name : {"linear", "matmul", "scaled_dot_product_attention", "convolution", "rms_norm", "layer_norm",
                           "group_norm"})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&any_operation>());
}

// For Python -----------------------------------------------------------------------------------------------------------

// Launches a Python function that reads and writes some tensors' memory.
void launch_function(const c10::Stream& stream, const std::string& what, const std::vector<at::Tensor>& reads,
                     const std::vector<at::Tensor>& writes, py::function function) {
  std::vector<Use> uses;
  for (const at::Tensor& x : reads)
    add_use(uses, x, false);
  for (const at::Tensor& x : writes)
    add_use(uses, x, true);
  std::shared_ptr<py::function> kept(new py::function(std::move(function)), [](py::function* done) {
    py::gil_scoped_acquire gil;
    delete done;
  });
  py::gil_scoped_release no_gil;
  launch(ours(stream), what, uses, [kept = std::move(kept)] {
    py::gil_scoped_acquire gil;
    try {
      (*kept)();
    } catch (const py::error_already_set& error) {
      throw std::runtime_error(error.what());
    }
  });
}

void set(double delayed, int delay_us, uint64_t seed, bool strict, const std::string& wandering, bool pitch_lost,
         const std::string& line_of) {
  settings() = {delayed, delay_us, seed, strict, wandering, pitch_lost, line_of};
}

}  // namespace
}  // namespace simulated

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  using namespace simulated;
  static Hooks hooks;
  at::RegisterPrivateUse1HooksInterface(&hooks);
  m.def("set", &set);
  m.def("device_count", &device_count);
  m.def("set_device_count", &set_device_count);
  m.def("current_device", &current_device);
  m.def("set_current_device", &set_current_device);
  m.def("synchronize", &synchronize_device, py::call_guard<py::gil_scoped_release>());
  m.def("memory", &memory);
  m.def("empty_cache", &empty_cache);
  m.def("reuse_streams", &reuse_streams);
  m.def("host_view", &on_host);
  m.def("launch_function", &launch_function);
  m.def("take_reports", &take_reports);
  m.def("take_launched", &take_launched);
  m.def("stop", &stop, py::call_guard<py::gil_scoped_release>());
}
