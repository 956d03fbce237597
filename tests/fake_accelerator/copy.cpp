// Copies between host and device, and between devices, with CUDA's rules about who waits.
#include "host.h"
#include "memory.h"
#include "view.h"

#include <torch/library.h>

namespace fake {
namespace {

// Queues `to.copy_(from)` on a stream. Tensors go by address; a host copy that must live until then is captured.
void issue_copy(Queue& queue, const at::Tensor& from, const at::Tensor& to, at::Tensor keep = {}) {
  Views views;
  int source = views.add(from);
  int target = views.add(to);
  issue(queue, [views, source, target, keep] {
    PlainDispatch plain;
    std::vector<at::Tensor> tensors = views.over_bytes();
    tensors[target].copy_(tensors[source]);
  });
}

void wait_after_copy(Queue& queue) {
  ++counters(queue.device).blocking_copies;
  host_wait(queue.end());
}

// Whether the bytes of the host tensor can be moved as they are; otherwise CUDA goes through a pageable copy.
bool moves_directly(const at::Tensor& host, const at::Tensor& device) {
  if (host.scalar_type() != device.scalar_type() || host.is_conj() != device.is_conj() ||
      host.is_neg() != device.is_neg()) {
    return false;
  }
  return host.is_contiguous() || (host.is_non_overlapping_and_dense() && host.strides() == device.strides());
}

bool locked(const at::Tensor& host, const at::Tensor& device) {
  return moves_directly(host, device) && is_locked(host.const_data_ptr(), host.nbytes());
}

void host_to_device(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  Queue& queue = current_queue(to.get_device());
  Counters& count = counters(queue.device);
  count.h2d_bytes += static_cast<int64_t>(to.nbytes());
  if (locked(from, to)) {
    issue_copy(queue, from, to);
    record_host_use(from.const_data_ptr(), queue.end());
  } else {
    count.pageable_bytes += static_cast<int64_t>(to.nbytes());
    PlainDispatch plain;
    at::Tensor staged = from.to(to.scalar_type(), /*non_blocking=*/false, /*copy=*/true);
    issue_copy(queue, staged, to, staged);
  }
  if (!non_blocking) wait_after_copy(queue);
}

void device_to_host(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  Queue& queue = current_queue(from.get_device());
  Counters& count = counters(queue.device);
  bool direct = locked(to, from);
  count.d2h_bytes += static_cast<int64_t>(to.nbytes());
  if (!direct) count.pageable_bytes += static_cast<int64_t>(to.nbytes());
  issue_copy(queue, from, to);
  if (direct) record_host_use(to.const_data_ptr(), queue.end());
  if (!direct || !non_blocking) wait_after_copy(queue);
}

// Runs on the source's stream, with a wait on either side if the devices differ.
void device_to_device(const at::Tensor& from, const at::Tensor& to) {
  Queue& queue = current_queue(from.get_device());
  Queue& other = current_queue(to.get_device());
  counters(queue.device).d2d_bytes += static_cast<int64_t>(to.nbytes());
  if (&queue != &other) wait(queue, other.end());
  issue_copy(queue, from, to);
  if (&queue != &other) wait(other, queue.end());
}

at::Tensor copy_from(const at::Tensor& self, const at::Tensor& dst, bool non_blocking) {
  if (dst.numel() == 0 || self.is_same(dst)) return dst;
  at::Tensor from = self.sizes() == dst.sizes() ? self : self.expand(dst.sizes());
  if (from.is_cpu()) {
    host_to_device(from, dst, non_blocking);
  } else if (dst.is_cpu()) {
    device_to_host(from, dst, non_blocking);
  } else {
    TORCH_CHECK(from.is_privateuseone() && dst.is_privateuseone(), "fake: cannot copy from ", from.device(), " to ",
                dst.device());
    device_to_device(from, dst);
  }
  return dst;
}

at::Tensor copy_from_and_resize(const at::Tensor& self, const at::Tensor& dst) {
  if (self.sizes() != dst.sizes()) dst.resize_(self.sizes());
  return copy_from(self, dst, false);
}

}  // namespace

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
}

// Copies see conjugated and negated tensors as they are; torch would resolve them first, by a copy.
TORCH_LIBRARY_IMPL(aten, Conjugate, m) { m.impl("_copy_from", torch::CppFunction::makeFallthrough()); }

TORCH_LIBRARY_IMPL(aten, Negative, m) { m.impl("_copy_from", torch::CppFunction::makeFallthrough()); }

}  // namespace fake
