// Operators of the device that are not kernels: making tensors, changing their storage, reading a value.
#include "kernel.h"
#include "memory.h"
#include "view.h"

#include <ATen/EmptyTensor.h>
#include <torch/library.h>

#include <cstring>

namespace fake {

// Gives a storage another size; what fits of the old bytes is copied on the current stream.
void resize_storage(c10::StorageImpl* storage, size_t nbytes) {
  if (storage->nbytes() == nbytes) return;
  int device = storage->device().index();
  c10::DataPtr data = allocate_on(device, nbytes);
  size_t kept = std::min(nbytes, storage->nbytes());
  if (kept > 0) {
    void* from = shadow(storage->data());
    void* to = shadow(data.get());
    issue(current_queue(device), [=] { std::memcpy(to, from, kept); });
  }
  storage->set_data_ptr_noswap(std::move(data));
  storage->set_nbytes(nbytes);
}

namespace {

int index_of(std::optional<at::Device> device) {
  return device && device->has_index() ? device->index() : current_device();
}

c10::ScalarType type_of(std::optional<at::ScalarType> dtype) {
  return dtype ? *dtype : c10::get_default_dtype_as_scalartype();
}

at::Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool> pin) {
  TORCH_CHECK(!pin.value_or(false), "fake: only tensors of the CPU can be pinned");
  at::detail::check_size_nonnegative(size);
  return empty_strided_on(index_of(device), size, stride, type_of(dtype));
}

at::Tensor empty(c10::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout> layout,
                 std::optional<at::Device> device, std::optional<bool> pin,
                 std::optional<at::MemoryFormat> memory_format) {
  at::detail::check_size_nonnegative(size);
  std::vector<int64_t> stride(size.size(), 1);
  for (size_t i = size.size(); i-- > 1;) stride[i - 1] = stride[i] * std::max<int64_t>(size[i], 1);
  at::Tensor tensor = empty_strided(size, stride, dtype, layout, device, pin);
  at::MemoryFormat format = memory_format.value_or(at::MemoryFormat::Contiguous);
  if (format != at::MemoryFormat::Contiguous) tensor.unsafeGetTensorImpl()->empty_tensor_restride(format);
  return tensor;
}

// Makes the storage large enough for the shape, as resize_ and set_ need it.
void grow(c10::TensorImpl* impl) {
  size_t item = impl->itemsize();
  size_t need = at::detail::computeStorageNbytes(impl->sizes(), impl->strides(), item, impl->storage_offset());
  c10::StorageImpl* storage = impl->unsafe_storage().unsafeGetStorageImpl();
  if (need > storage->nbytes()) resize_storage(storage, need);
}

const at::Tensor& resize_(const at::Tensor& self, c10::IntArrayRef size, std::optional<at::MemoryFormat> format) {
  at::detail::check_size_nonnegative(size);
  c10::TensorImpl* impl = self.unsafeGetTensorImpl();
  if (self.sizes() != size) impl->set_sizes_contiguous(size);
  if (format && *format != at::MemoryFormat::Preserve) impl->empty_tensor_restride(*format);
  grow(impl);
  return self;
}

at::Tensor& set_storage(at::Tensor& self, at::Storage source, int64_t offset, c10::IntArrayRef size,
                        c10::IntArrayRef stride) {
  TORCH_CHECK(source.device() == self.device() || source.nbytes() == 0, "fake: cannot set a tensor of ", self.device(),
              " to a storage of ", source.device());
  c10::TensorImpl* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(source));
  if (stride.size() == size.size()) {
    impl->set_sizes_and_strides(size, stride, offset);
  } else {
    impl->set_storage_offset(offset);
    impl->set_sizes_contiguous(size);
  }
  grow(impl);
  return self;
}

at::Tensor& set_whole_storage(at::Tensor& self, at::Storage source) {
  int64_t length = static_cast<int64_t>(source.nbytes() / self.element_size());
  return set_storage(self, std::move(source), 0, {length}, {1});
}

at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
  return set_storage(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

at::Tensor& set_nothing(at::Tensor& self) {
  return set_whole_storage(self, c10::Storage(c10::Storage::use_byte_size_t(), 0, allocate_on(self.get_device(), 0),
                                              &device_allocator(), true));
}

void record_stream(at::Tensor& self, c10::Stream stream) {
  record_use(self.storage().data_ptr(), find_queue(stream.device_index(), stream.id()));
}

// The CPU and the device swap storages in `tensor.data = other`, as the CPU and CUDA do.
bool can_swap(const at::Tensor&, const at::Tensor& from) {
  return from.layout() == c10::kStrided && (from.is_cpu() || from.is_privateuseone());
}

at::Scalar read_value(const at::Tensor& self) {
  Queue& queue = current_queue(self.get_device());
  Views views;
  views.add(self);
  at::Scalar value;
  issue(queue, [&] {
    PlainDispatch plain;
    value = views.over_bytes()[0].item();
  });
  counters(queue.device).d2h_bytes += static_cast<int64_t>(self.element_size());
  ++counters(queue.device).blocking_copies;
  host_wait(queue.end());
  return value;
}

}  // namespace

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&run_operator>()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("resize_", &resize_);
  m.impl("set_.source_Storage_storage_offset", &set_storage);
  m.impl("set_.source_Storage", &set_whole_storage);
  m.impl("set_.source_Tensor", &set_tensor);
  m.impl("set_", &set_nothing);
  m.impl("record_stream", &record_stream);
  m.impl("_has_compatible_shallow_copy_type", &can_swap);
  m.impl("_local_scalar_dense", &read_value);
  // These have a composite kernel, but it wants a backend, warns, or rounds differently from the CPU's own.
  for (const char* name : {"convolution", "convolution_backward", "native_layer_norm", "native_layer_norm_backward",
                           "native_group_norm", "native_group_norm_backward", "mse_loss"}) {
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&run_operator>());
  }
}

}  // namespace fake
