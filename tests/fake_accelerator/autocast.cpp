// Mixed precision: which operators run in the lower type, in float32, or in the widest type of their inputs.
#include "view.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

// From ATen/autocast_mode.h, which includes every operator there is.
namespace at::autocast {
TORCH_API Tensor cached_cast(ScalarType to_type, const Tensor& arg, c10::DeviceType device_type);
TORCH_API ScalarType get_autocast_dtype(DeviceType device_type);
}  // namespace at::autocast

namespace fake {
namespace {

using torch::jit::Stack;

bool casts(const at::Tensor& tensor) {
  return tensor.defined() && tensor.is_privateuseone() && tensor.is_floating_point() &&
         tensor.scalar_type() != at::kDouble;
}

c10::IValue cast(const c10::IValue& value, c10::ScalarType type) {
  if (value.isTensor() && casts(value.toTensor())) return at::autocast::cached_cast(type, value.toTensor(), kFake);
  if (value.isTensorList()) {
    std::vector<at::Tensor> tensors = value.toTensorVector();
    for (at::Tensor& tensor : tensors) {
      if (casts(tensor)) tensor = at::autocast::cached_cast(type, tensor, kFake);
    }
    return tensors;
  }
  return value;
}

void call_cast(const c10::OperatorHandle& op, Stack* stack, c10::ScalarType type) {
  c10::impl::ExcludeDispatchKeyGuard off(c10::DispatchKey::AutocastPrivateUse1);
  for (size_t i = stack->size() - op.schema().arguments().size(); i < stack->size(); ++i) {
    (*stack)[i] = cast((*stack)[i], type);
  }
  op.callBoxed(stack);
}

void in_lower(const c10::OperatorHandle& op, Stack* stack) {
  call_cast(op, stack, at::autocast::get_autocast_dtype(kFake));
}

void in_float(const c10::OperatorHandle& op, Stack* stack) { call_cast(op, stack, at::kFloat); }

void in_widest(const c10::OperatorHandle& op, Stack* stack) {
  c10::ScalarType type = at::autocast::get_autocast_dtype(kFake);
  for (size_t i = stack->size() - op.schema().arguments().size(); i < stack->size(); ++i) {
    const c10::IValue& value = (*stack)[i];
    if (value.isTensor() && casts(value.toTensor()) && value.toTensor().scalar_type() == at::kFloat) type = at::kFloat;
    if (!value.isTensorList()) continue;
    for (const at::Tensor& tensor : value.toTensorVector()) {
      if (casts(tensor) && tensor.scalar_type() == at::kFloat) type = at::kFloat;
    }
  }
  call_cast(op, stack, type);
}

}  // namespace

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  // clang-format off: several names to a line
  for (const char* name :
       {"_convolution", "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d.input",
        "conv_transpose3d.input", "convolution", "prelu", "addmm", "addmv", "addr", "matmul", "einsum", "mm", "mv",
        "linear", "addbmm", "baddbmm", "bmm", "linalg_vecdot", "scaled_dot_product_attention"}) {
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&in_lower>());
  }
  for (const char* name :
       {"exp", "expm1", "log", "log10", "log2", "log1p", "reciprocal", "rsqrt", "pow.Tensor_Scalar",
        "pow.Tensor_Tensor", "pow.Scalar", "softplus", "layer_norm", "native_layer_norm", "group_norm", "softmax.int",
        "log_softmax.int", "cosine_similarity", "poisson_nll_loss", "cosine_embedding_loss", "nll_loss", "nll_loss2d",
        "hinge_embedding_loss", "kl_div", "l1_loss", "smooth_l1_loss", "huber_loss", "mse_loss",
        "margin_ranking_loss", "multilabel_margin_loss", "soft_margin_loss", "triplet_margin_loss",
        "multi_margin_loss", "binary_cross_entropy_with_logits", "dist", "cdist", "renorm", "logsumexp", "prod",
        "prod.dim_int", "cumsum", "cumprod", "sum", "sum.dim_IntList", "norm.Scalar", "norm.ScalarOpt_dim"}) {
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&in_float>());
  }
  // clang-format on
  for (const char* name : {"addcdiv", "addcmul", "atan2", "bilinear", "cross", "dot", "grid_sampler", "index_put",
                           "tensordot", "scatter_add", "cat", "stack"}) {
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&in_widest>());
  }
}

}  // namespace fake
