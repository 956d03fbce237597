// Tensors as work sees them: addresses and shapes, nothing kept alive.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

namespace fake {

constexpr c10::DeviceType kFake = c10::DeviceType::PrivateUse1;

// A new device tensor, without a trip through the dispatcher.
at::Tensor empty_strided_on(int device, c10::IntArrayRef sizes, c10::IntArrayRef strides, c10::ScalarType dtype);

// Torch computes the shapes of many operators itself, makes the results, and calls the `out=` form with them. `is_new`
// says whether this thread made the tensor after its last operator: then its shape is right already.
bool is_new(const at::Tensor& tensor);
void forget_new();

// Dispatch state for kernels over plain CPU or meta tensors, in place of the caller's (autograd, autocast, modes).
class PlainDispatch {
 public:
  PlainDispatch();
  ~PlainDispatch();
  PlainDispatch(const PlainDispatch&) = delete;
  PlainDispatch& operator=(const PlainDispatch&) = delete;

 private:
  struct State;
  State* state_;
};

// The tensors of one piece of work. Device tensors are raw addresses: if their memory is freed and reused before the
// work runs, the work sees it, as a kernel on a GPU would.
class Views {
 public:
  // Adds a device tensor, or a host tensor by address. The same tensor gets the same slot, the same storage stays one.
  int add(const at::Tensor& tensor);

  // Adds a copy of a host tensor, made now.
  int add_copy(const at::Tensor& tensor);

  // CPU tensors over the bytes, or meta tensors of the same shapes; by slot.
  std::vector<at::Tensor> over_bytes() const { return make(c10::DeviceType::CPU); }
  std::vector<at::Tensor> without_bytes() const { return make(c10::DeviceType::Meta); }

  // All that a Meta kernel can see of the tensors, as text.
  std::string shapes() const;

 private:
  struct Bytes {
    const void* identity;
    void* address;
    size_t size;
  };
  struct View {
    const void* identity;
    size_t bytes;
    std::vector<int64_t> sizes, strides;
    int64_t offset;
    caffe2::TypeMeta dtype;
    bool wrapped, conj, neg;
    at::Tensor copy;
  };
  std::vector<at::Tensor> make(c10::DeviceType type) const;

  std::vector<Bytes> bytes_;
  std::vector<View> views_;
};

}  // namespace fake
