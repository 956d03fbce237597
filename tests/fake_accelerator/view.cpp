#include "view.h"

#include "memory.h"

#include <ATen/EmptyTensor.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <algorithm>
#include <sstream>

namespace fake {
namespace {

constexpr size_t kMostNew = 8;  // results of one operator
thread_local std::vector<const c10::TensorImpl*> made;

}  // namespace

bool is_new(const at::Tensor& tensor) {
  return tensor.numel() > 0 && std::find(made.begin(), made.end(), tensor.unsafeGetTensorImpl()) != made.end();
}

void forget_new() { made.clear(); }

at::Tensor empty_strided_on(int device, c10::IntArrayRef sizes, c10::IntArrayRef strides, c10::ScalarType dtype) {
  size_t nbytes = at::detail::computeStorageNbytes(sizes, strides, c10::elementSize(dtype));
  c10::Storage storage(c10::Storage::use_byte_size_t(), nbytes, allocate_on(device, nbytes), &device_allocator(), true);
  auto tensor = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::scalarTypeToTypeMeta(dtype));
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides);
  if (made.size() == kMostNew) made.erase(made.begin());
  made.push_back(tensor.unsafeGetTensorImpl());
  return tensor;
}

struct PlainDispatch::State {
  c10::impl::ForceDispatchKeyGuard keys;
  c10::AutoGradMode grad;

  static c10::DispatchKeySet excluded() {
    return c10::autograd_dispatch_keyset_with_ADInplaceOrView | c10::autocast_dispatch_keyset |
           c10::default_excluded_set |
           c10::DispatchKeySet(
               {c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot, c10::DispatchKey::PythonDispatcher});
  }
  State() : keys(c10::DispatchKeySet(c10::DispatchKey::BackendSelect), excluded()), grad(false) {}
};

PlainDispatch::PlainDispatch() : state_(new State) {}
PlainDispatch::~PlainDispatch() { delete state_; }

int Views::add(const at::Tensor& tensor) {
  TORCH_CHECK(tensor.layout() == c10::kStrided, "fake: only strided tensors are supported, got ", tensor.layout());
  c10::TensorImpl* impl = tensor.unsafeGetTensorImpl();
  for (size_t slot = 0; slot < views_.size(); ++slot) {
    if (views_[slot].identity == impl) return static_cast<int>(slot);
  }
  c10::StorageImpl* storage = impl->unsafe_storage().unsafeGetStorageImpl();
  size_t which = 0;
  while (which < bytes_.size() && bytes_[which].identity != storage) ++which;
  if (which == bytes_.size()) {
    void* address = const_cast<void*>(storage->data());
    bytes_.push_back({storage, tensor.is_privateuseone() ? shadow(address) : address, storage->nbytes()});
  }
  views_.push_back({impl,
                    which,
                    tensor.sizes().vec(),
                    tensor.strides().vec(),
                    tensor.storage_offset(),
                    tensor.dtype(),
                    impl->is_wrapped_number(),
                    tensor.is_conj(),
                    tensor.is_neg(),
                    {}});
  return static_cast<int>(views_.size()) - 1;
}

int Views::add_copy(const at::Tensor& tensor) {
  PlainDispatch plain;
  at::Tensor copy = tensor.clone();
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) copy.unsafeGetTensorImpl()->set_wrapped_number(true);
  int slot = add(copy);
  views_[slot].copy = copy;
  return slot;
}

std::string Views::shapes() const {
  std::ostringstream text;
  for (const View& view : views_) {
    text << view.dtype << view.wrapped << view.copy.defined() << c10::IntArrayRef(view.sizes)
         << c10::IntArrayRef(view.strides);
  }
  return text.str();
}

std::vector<at::Tensor> Views::make(c10::DeviceType type) const {
  bool meta = type == c10::DeviceType::Meta;
  std::vector<c10::Storage> storages;
  for (const Bytes& bytes : bytes_) {
    c10::DataPtr data(meta ? nullptr : bytes.address, c10::Device(type));
    c10::Allocator* allocator = meta ? c10::GetAllocator(type) : nullptr;
    storages.emplace_back(c10::Storage::use_byte_size_t(), bytes.size, std::move(data), allocator, meta);
  }
  std::vector<at::Tensor> tensors;
  for (const View& view : views_) {
    if (view.copy.defined()) {  // numbers stay on the host; Meta kernels mix them with meta tensors
      tensors.push_back(view.copy);
      continue;
    }
    c10::DispatchKeySet key(meta ? c10::DispatchKey::Meta : c10::DispatchKey::CPU);
    auto tensor = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(storages[view.bytes]), key, view.dtype);
    c10::TensorImpl* impl = tensor.unsafeGetTensorImpl();
    impl->set_sizes_and_strides(view.sizes, view.strides, view.offset);
    if (view.wrapped) impl->set_wrapped_number(true);
    if (view.conj) impl->_set_conj(true);
    if (view.neg) impl->_set_neg(true);
    tensors.push_back(std::move(tensor));
  }
  return tensors;
}

}  // namespace fake
