// A device for torch whose memory the host cannot read, without any hardware: a stand-in for a GPU where there is none.
//
// Each allocation is mapped twice. Torch gets the address of a mapping that nobody may touch, so whatever takes a tensor
// of this device for host memory ends with SIGSEGV. The device's own work goes by the other mapping.
//
// Data moves by copies between the two; everything else is computed by torch's kernels for the CPU on such copies.

#include <ATen/EmptyTensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/view_native.h>
#include <c10/core/Allocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <sys/mman.h>
#include <torch/library.h>
#include <unistd.h>

#include <atomic>
#include <cstddef>

namespace {

constexpr auto kFar = c10::DeviceType::PrivateUse1;

struct Allocation {
  void* untouchable;
  void* memory;
  size_t bytes;
};

std::atomic<int64_t> allocated_bytes{0};

void release(void* context) {
  auto* allocation = static_cast<Allocation*>(context);
  munmap(allocation->untouchable, allocation->bytes);
  munmap(allocation->memory, allocation->bytes);
  allocated_bytes -= static_cast<int64_t>(allocation->bytes);
  delete allocation;
}

struct FarAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t wanted_bytes) override {
    const c10::Device device(kFar, 0);
    if (wanted_bytes == 0) return {nullptr, nullptr, &release_nothing, device};
    const int file = memfd_create("far", MFD_CLOEXEC);
    TORCH_CHECK(file >= 0 && ftruncate(file, static_cast<off_t>(wanted_bytes)) == 0, "no memory on the far device");
    void* untouchable = mmap(nullptr, wanted_bytes, PROT_NONE, MAP_SHARED, file, 0);
    void* memory = mmap(nullptr, wanted_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    TORCH_CHECK(untouchable != MAP_FAILED && memory != MAP_FAILED, "no memory on the far device");
    allocated_bytes += static_cast<int64_t>(wanted_bytes);
    return {untouchable, new Allocation{untouchable, memory, wanted_bytes}, &release, device};
  }

  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }

  void copy_data(void*, const void*, size_t) const override { TORCH_CHECK(false, "only tensors are copied"); }

  static void release_nothing(void*) {}
};

FarAllocator allocator;

// The same elements where the host can reach them.
at::Tensor reachable(const at::Tensor& tensor) {
  if (tensor.device().type() != kFar || tensor.numel() == 0) {
    return tensor.device().type() == kFar ? at::empty(tensor.sizes(), tensor.options().device(c10::kCPU)) : tensor;
  }
  auto* allocation = static_cast<Allocation*>(tensor.storage().data_ptr().get_context());
  auto* start = static_cast<std::byte*>(allocation->memory) + tensor.storage_offset() * tensor.itemsize();
  return at::from_blob(start, tensor.sizes(), tensor.strides(), tensor.options().device(c10::kCPU));
}

// --- what torch asks of a device ---

at::Tensor empty_memory_format(
    at::IntArrayRef sizes, std::optional<at::ScalarType> dtype, std::optional<at::Layout>, std::optional<at::Device>,
    std::optional<bool>, std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(
      sizes, &allocator, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(
    at::IntArrayRef sizes, at::IntArrayRef strides, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<at::Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(
      sizes, strides, &allocator, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype));
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& into, bool) {
  reachable(into).copy_(reachable(from));
  return into;
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& into) {
  at::native::resize_(into, from.sizes(), std::nullopt);
  return copy_from(from, into, false);
}

at::Tensor& set_to_storage(
    at::Tensor& tensor, at::Storage storage, int64_t offset, at::IntArrayRef sizes, at::IntArrayRef strides) {
  auto* implementation = tensor.unsafeGetTensorImpl();
  implementation->set_storage_keep_dtype(std::move(storage));
  implementation->set_storage_offset(offset);
  implementation->set_sizes_and_strides(sizes, strides);
  return tensor;
}

at::Tensor as_strided(
    const at::Tensor& tensor, at::IntArrayRef sizes, at::IntArrayRef strides, std::optional<int64_t> offset) {
  return at::native::as_strided_tensorimpl(tensor, sizes, strides, offset);
}

at::Tensor view(const at::Tensor& tensor, at::IntArrayRef sizes) { return at::native::view(tensor, sizes); }

void on_the_host(const c10::OperatorHandle& operation, torch::jit::Stack* stack) {
  at::native::cpu_fallback(operation, stack);
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", &empty_memory_format);
  library.impl("empty_strided", &empty_strided);
  library.impl("_copy_from", &copy_from);
  library.impl("_copy_from_and_resize", &copy_from_and_resize);
  library.impl("set_.source_Storage_storage_offset", &set_to_storage);
  library.impl("as_strided", &as_strided);
  library.impl("view", &view);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) { library.fallback(torch::CppFunction::makeFromBoxedFunction<&on_the_host>()); }

TORCH_LIBRARY(far_device, library) {
  library.def("allocated_bytes() -> int", []() { return allocated_bytes.load(); });
}

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t wanted_bytes) const override {
    TORCH_CHECK(storage.nbytes() == 0, "a storage of the far device cannot grow");
    storage.set_data_ptr_noswap(allocator.allocate(wanted_bytes));
    storage.set_nbytes(wanted_bytes);
  }
};

struct Guard final : c10::impl::NoOpDeviceGuardImpl<kFar> {
  c10::Device exchangeDevice(c10::Device) const override { return {kFar, 0}; }
  c10::Device getDevice() const override { return {kFar, 0}; }
  c10::Stream getStream(c10::Device) const noexcept override { return c10::Stream(c10::Stream::DEFAULT, c10::Device(kFar, 0)); }
  c10::Stream exchangeStream(c10::Stream) const noexcept override {
    return c10::Stream(c10::Stream::DEFAULT, c10::Device(kFar, 0));
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);
REGISTER_ALLOCATOR(kFar, &allocator);

const bool hooked = [] {
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  return true;
}();

}  // namespace
