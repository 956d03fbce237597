#include "kernel.h"

#include "generator.h"
#include "stream.h"
#include "view.h"

#include <ATen/EmptyTensor.h>
#include <ATen/core/List.h>

#include <memory>
#include <optional>
#include <set>
#include <sstream>
#include <unordered_map>

namespace fake {
namespace {

using torch::jit::Stack;

enum class Kind { value, tensor, tensors, optional_tensors };

// One argument or result: a plain value, or tensors by slot (-1 for none).
struct Argument {
  Kind kind = Kind::value;
  c10::IValue value;
  std::vector<int> slots;
  bool out = false;  // an `out=` tensor, which the operator may resize
};

// An operator and all it needs to run later.
struct Call {
  c10::OperatorHandle op;
  int device = 0;
  std::vector<Argument> arguments;
  std::vector<Argument> results;  // slots of the new tensors; other results have none
  Views views;
  std::optional<uint64_t> seed;

  explicit Call(const c10::OperatorHandle& handle) : op(handle) {}
};

std::set<std::string>& shapeless() {
  static auto* names = new std::set<std::string>;
  return *names;
}

bool writes(const c10::Argument& argument) { return argument.alias_info() && argument.alias_info()->isWrite(); }

bool is_view(const c10::FunctionSchema& schema) {
  return !schema.returns().empty() && schema.returns()[0].alias_info() && !writes(schema.returns()[0]);
}

// CUDA lets the host hand over index tensors (it copies them); everything else must be on the device.
bool takes_host_tensors(const std::string& name) { return name == "aten::index" || name == "aten::_index_put_impl_"; }

void check_tensor(const Call& call, const at::Tensor& tensor) {
  if (tensor.is_privateuseone()) {
    TORCH_CHECK(tensor.get_device() == call.device, call.op.operator_name(),
                ": expected all tensors on the same device, but found fake:", call.device, " and ", tensor.device());
    return;
  }
  TORCH_CHECK(tensor.is_cpu() && (tensor.dim() == 0 || takes_host_tensors(call.op.operator_name().name)),
              call.op.operator_name(), ": expected all tensors on the same device, but found fake:", call.device,
              " and ", tensor.device());
  if (tensor.dim() > 0) {
    Counters& count = counters(call.device);
    count.h2d_bytes += static_cast<int64_t>(tensor.nbytes());
    count.pageable_bytes += static_cast<int64_t>(tensor.nbytes());
  }
}

int add_tensor(Call& call, const at::Tensor& tensor) {
  if (!tensor.defined()) return -1;
  check_tensor(call, tensor);
  return tensor.is_privateuseone() ? call.views.add(tensor) : call.views.add_copy(tensor);
}

// Calls f for each tensor in a value.
template <typename F>
void each_tensor(const c10::IValue& value, F f) {
  if (value.isTensor()) {
    f(value.toTensor());
  } else if (value.isTensorList()) {
    for (const at::Tensor& tensor : value.toTensorVector()) f(tensor);
  } else if (value.isOptionalTensorList()) {
    for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorVector()) f(tensor.value_or(at::Tensor()));
  }
}

int device_for(const Stack& stack, size_t first) {
  int device = -1;
  for (size_t i = first; i < stack.size() && device < 0; ++i) {
    each_tensor(stack[i], [&](const at::Tensor& tensor) {
      if (device < 0 && tensor.defined() && tensor.is_privateuseone()) device = tensor.get_device();
    });
    if (device < 0 && stack[i].isDevice() && stack[i].toDevice().type() == kFake) device = stack[i].toDevice().index();
  }
  return device < 0 ? current_device() : device;
}

void capture_argument(Call& call, const c10::Argument& schema, const c10::IValue& value) {
  Argument argument;
  argument.out = writes(schema) && schema.kwarg_only();
  if (value.isTensor()) argument.kind = Kind::tensor;
  if (value.isTensorList()) argument.kind = Kind::tensors;
  if (value.isOptionalTensorList()) argument.kind = Kind::optional_tensors;
  each_tensor(value, [&](const at::Tensor& tensor) { argument.slots.push_back(add_tensor(call, tensor)); });
  if (argument.kind == Kind::value && !value.isGenerator()) argument.value = value;
  call.arguments.push_back(std::move(argument));
}

std::shared_ptr<Call> capture(const c10::OperatorHandle& op, const Stack& stack) {
  auto call = std::make_shared<Call>(op);
  const auto& arguments = op.schema().arguments();
  size_t first = stack.size() - arguments.size();
  call->device = device_for(stack, first);
  for (size_t i = 0; i < arguments.size(); ++i) capture_argument(*call, arguments[i], stack[first + i]);
  return call;
}

// A number from the device's generator if the operator is random.
std::optional<uint64_t> draw_seed(const Call& call, const Stack& stack) {
  const auto& arguments = call.op.schema().arguments();
  bool random = call.op.hasTag(at::Tag::nondeterministic_seeded);
  at::Generator generator;
  for (size_t i = 0; i < arguments.size(); ++i) {
    const c10::IValue& value = stack[stack.size() - arguments.size() + i];
    if (value.isGenerator()) generator = value.toGenerator();
  }
  random = random || call.op.schema().argumentIndexWithName("generator");
  return random ? std::optional<uint64_t>(draw(generator, call.device)) : std::nullopt;
}

// Calls f(tensor, slot) for each `out=` tensor.
template <typename F>
void each_out(const Call& call, const Stack& stack, F f) {
  size_t first = stack.size() - call.arguments.size();
  for (size_t i = 0; i < call.arguments.size(); ++i) {
    if (!call.arguments[i].out) continue;
    size_t n = 0;
    each_tensor(stack[first + i], [&](const at::Tensor& out) {
      int slot = call.arguments[i].slots[n++];
      if (slot >= 0) f(out, slot);
    });
  }
}

c10::IValue fill(const Argument& argument, const std::vector<at::Tensor>& tensors, c10::Device device) {
  auto at_slot = [&](int slot) { return slot < 0 ? at::Tensor() : tensors[slot]; };
  switch (argument.kind) {
    case Kind::tensor: return at_slot(argument.slots[0]);
    case Kind::tensors: {
      c10::List<at::Tensor> list;
      for (int slot : argument.slots) list.push_back(at_slot(slot));
      return list;
    }
    case Kind::optional_tensors: {
      c10::List<std::optional<at::Tensor>> list;
      for (int slot : argument.slots) {
        list.push_back(slot < 0 ? std::optional<at::Tensor>() : std::optional<at::Tensor>(tensors[slot]));
      }
      return list;
    }
    case Kind::value: break;
  }
  bool ours = argument.value.isDevice() && argument.value.toDevice().type() == kFake;
  return ours ? c10::IValue(device) : argument.value;
}

Stack filled(const Call& call, const std::vector<at::Tensor>& tensors, c10::DeviceType type) {
  Stack stack;
  for (const Argument& argument : call.arguments) stack.push_back(fill(argument, tensors, c10::Device(type)));
  return stack;
}

// Whether the host has to see data before it can go on.
bool needs_data(const Call& call, const Stack& stack) {
  const auto& schema = call.op.schema();
  for (const c10::Argument& result : schema.returns()) {
    auto kind = result.type()->kind();
    bool list = kind == c10::TypeKind::ListType;
    if (kind != c10::TypeKind::TensorType && !list) return true;
  }
  if (call.op.operator_name().name == "aten::index") {  // masks: the number of results depends on the data
    bool mask = false;
    each_tensor(stack[stack.size() - schema.arguments().size() + 1], [&](const at::Tensor& index) {
      mask = mask || (index.defined() && (index.scalar_type() == at::kBool || index.scalar_type() == at::kByte));
    });
    return mask;
  }
  return call.op.hasTag(at::Tag::dynamic_output_shape) || call.op.hasTag(at::Tag::data_dependent_output);
}

// In-place operators know their shapes, and so do `out=` tensors that torch has just made or that are inputs as well
// (the in-place form). New tensors and other `out=` tensors need the Meta kernel.
bool needs_shapes(const Call& call, const Stack& stack) {
  for (const c10::Argument& result : call.op.schema().returns()) {
    if (!writes(result)) return true;
  }
  std::set<int> inputs;
  for (const Argument& argument : call.arguments) {
    if (!argument.out) inputs.insert(argument.slots.begin(), argument.slots.end());
  }
  bool unknown = false;
  each_out(call, stack, [&](const at::Tensor& out, int slot) {
    unknown = unknown || !(is_new(out) || (inputs.count(slot) && out.numel() > 0));
  });
  return unknown;
}

// What the Meta kernel says: the results, and all tensors of the call by slot (it may have resized the `out=` ones).
struct Shapes {
  Stack results;
  std::vector<at::Tensor> tensors;
};

// A text that decides the shapes, or nothing if an argument cannot be written down.
std::optional<std::string> shapes_key(const Call& call) {
  std::ostringstream text;
  text << call.op.operator_name() << c10::get_default_dtype() << call.views.shapes();
  for (const Argument& argument : call.arguments) {
    const c10::IValue& value = argument.value;
    bool plain = value.isNone() || value.isScalar() || value.isBool() || value.isString() || value.isDevice() ||
                 value.isIntList() || value.isDoubleList() || value.isBoolList();
    if (!plain) return std::nullopt;
    text << '|' << value.tagKind() << value;
    for (int slot : argument.slots) text << ',' << slot;
  }
  return text.str();
}

// Nothing if there is no Meta kernel. Many of them are written in Python and slow, so their answers are kept.
std::shared_ptr<Shapes> shapes(const Call& call) {
  static auto* known = new std::unordered_map<std::string, std::shared_ptr<Shapes>>;
  if (!call.op.hasComputedKernelForDispatchKey(c10::DispatchKey::Meta)) return nullptr;
  std::optional<std::string> key = shapes_key(call);
  if (key) {
    Lock lock;
    auto found = known->find(*key);
    if (found != known->end()) return found->second;
  }
  PlainDispatch plain;
  auto answer = std::make_shared<Shapes>();
  answer->tensors = call.views.without_bytes();
  answer->results = filled(call, answer->tensors, c10::DeviceType::Meta);
  try {
    call.op.callBoxed(&answer->results);
  } catch (const c10::NotImplementedError&) {
    return nullptr;
  }
  Lock lock;
  if (key) known->emplace(*key, answer);
  return answer;
}

// Device tensors like the given ones; their slots go into the call's results.
c10::IValue new_tensors(Call& call, const c10::IValue& like) {
  Argument result;
  std::vector<at::Tensor> made;
  each_tensor(like, [&](const at::Tensor& one) {
    bool some = one.defined();
    made.push_back(some ? empty_strided_on(call.device, one.sizes(), one.strides(), one.scalar_type()) : at::Tensor());
    result.slots.push_back(some ? call.views.add(made.back()) : -1);
  });
  result.kind = like.isTensor() ? Kind::tensor : Kind::tensors;
  call.results.push_back(std::move(result));
  return like.isTensor() ? c10::IValue(made[0]) : c10::IValue(made);
}

// The stack that the caller gets: the arguments that were written, and new tensors.
Stack make_results(Call& call, const Stack& stack, const Stack& like) {
  const auto& schema = call.op.schema();
  size_t first = stack.size() - schema.arguments().size();
  Stack results;
  for (size_t i = 0; i < schema.returns().size(); ++i) {
    if (!writes(schema.returns()[i])) {
      bool tensors = like[i].isTensor() || like[i].isTensorList();
      if (!tensors) call.results.emplace_back();
      results.push_back(tensors ? new_tensors(call, like[i]) : like[i]);
      continue;
    }
    call.results.emplace_back();
    for (size_t j = 0; j < schema.arguments().size(); ++j) {
      const c10::Argument& argument = schema.arguments()[j];
      if (!writes(argument)) continue;
      if (argument.alias_info()->beforeSets() != schema.returns()[i].alias_info()->beforeSets()) continue;
      results.push_back(stack[first + j]);
    }
  }
  return results;
}

// Gives the `out=` tensors the shapes of the given ones; true if one changed.
bool resize_outs(const Call& call, const Stack& stack, const std::vector<at::Tensor>& like) {
  bool changed = false;
  each_out(call, stack, [&](const at::Tensor& out, int slot) {
    if (out.sizes() == like[slot].sizes()) return;
    out.resize_(like[slot].sizes());
    changed = true;
  });
  return changed;
}

Stack run_on_cpu(const Call& call, const std::vector<at::Tensor>& tensors) {
  PlainDispatch plain;
  Stack stack = filled(call, tensors, c10::DeviceType::CPU);
  std::optional<SeededHost> seeded;
  if (call.seed) {
    std::optional<int> index = call.op.schema().argumentIndexWithName("generator");
    if (index) stack[*index] = host_generator(*call.seed);
    if (!index) seeded.emplace(*call.seed);
  }
  call.op.callBoxed(&stack);
  return stack;
}

// An `out=` tensor that the CPU kernel gave another shape was not the size we took it for.
void check_outs(const Call& call, const std::vector<at::Tensor>& tensors) {
  std::vector<at::Tensor> before = call.views.without_bytes();
  for (const Argument& argument : call.arguments) {
    for (int slot : argument.out ? argument.slots : std::vector<int>()) {
      TORCH_CHECK(slot < 0 || tensors[slot].sizes() == before[slot].sizes(), call.op.operator_name(),
                  ": an out= tensor has the shape ", before[slot].sizes(), ", but the result ", tensors[slot].sizes());
    }
  }
}

void store(const at::Tensor& place, const at::Tensor& result, const Call& call) {
  TORCH_CHECK(place.sizes() == result.sizes() && place.scalar_type() == result.scalar_type(), call.op.operator_name(),
              ": the Meta kernel said ", place.sizes(), " ", place.scalar_type(), ", the CPU kernel gave ",
              result.sizes(), " ", result.scalar_type());
  place.copy_(result);
}

void store_results(const Call& call, const std::vector<at::Tensor>& tensors, const Stack& values) {
  PlainDispatch plain;
  for (size_t i = 0; i < call.results.size(); ++i) {
    size_t n = 0;
    if (call.results[i].kind == Kind::value) continue;
    each_tensor(values[i], [&](const at::Tensor& result) {
      int slot = call.results[i].slots[n++];
      if (slot >= 0) store(tensors[slot], result, call);
    });
  }
}

void give_back(const Call& call, Stack* stack, const Stack& results) {
  torch::jit::drop(*stack, call.arguments.size());
  stack->insert(stack->end(), results.begin(), results.end());
}

// Waits for the stream, runs the kernel, and queues the stores of what it gave. `out=` tensors get their values the
// same way, because only now their shapes are known.
void run_now(const std::shared_ptr<Call>& call, Stack* stack) {
  Queue& queue = current_queue(call->device);
  Stack values;
  std::vector<at::Tensor> tensors;
  issue(queue, [&] {
    tensors = call->views.over_bytes();
    each_out(*call, *stack, [&](const at::Tensor& out, int slot) {
      tensors[slot] = at::Tensor(at::detail::empty_cpu({0}, out.scalar_type()));
    });
    values = run_on_cpu(*call, tensors);
  });
  host_wait(queue.end());
  resize_outs(*call, *stack, tensors);
  Stack results = make_results(*call, *stack, values);
  Views outs;
  std::vector<std::pair<int, at::Tensor>> given;
  each_out(*call, *stack, [&](const at::Tensor& out, int slot) { given.emplace_back(outs.add(out), tensors[slot]); });
  issue(queue, [call, values, outs, given] {
    store_results(*call, call->views.over_bytes(), values);
    PlainDispatch plain;
    std::vector<at::Tensor> places = outs.over_bytes();
    for (const auto& [slot, result] : given) store(places[slot], result, *call);
  });
  give_back(*call, stack, results);
}

// Queues the kernel. Only addresses go with it.
void run_later(const std::shared_ptr<Call>& call, Stack* stack, const Stack& like) {
  Stack results = make_results(*call, *stack, like);
  issue(current_queue(call->device), [call] {
    std::vector<at::Tensor> tensors = call->views.over_bytes();
    Stack values = run_on_cpu(*call, tensors);
    check_outs(*call, tensors);
    store_results(*call, tensors, values);
  });
  give_back(*call, stack, results);
}

}  // namespace

void run_operator(const c10::OperatorHandle& op, Stack* stack) {
  if (is_view(op.schema())) {  // the CPU's view kernels touch shapes only and keep the tensor's device
    forget_new();
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
    return;
  }
  std::shared_ptr<Call> call = capture(op, *stack);
  ++counters(call->device).kernels;
  std::optional<uint64_t> seed = call->seed = draw_seed(*call, *stack);
  bool unknown = needs_shapes(*call, *stack);
  forget_new();
  if (needs_data(*call, *stack)) return run_now(call, stack);
  if (!unknown) return run_later(call, stack, {});
  std::shared_ptr<Shapes> like = shapes(*call);
  if (!like) {
    Lock lock;
    shapeless().insert(toString(op.operator_name()));
    return run_now(call, stack);
  }
  if (resize_outs(*call, *stack, like->tensors)) {  // new memory, so new addresses
    call = capture(op, *stack);
    call->seed = seed;
  }
  run_later(call, stack, like->results);
}

std::vector<std::string> operators_without_shapes() {
  Lock lock;
  return {shapeless().begin(), shapeless().end()};
}

}  // namespace fake
