// Operators as stream work: the boxed kernel for every operator that has none of its own on the device.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

#include <string>
#include <vector>

namespace fake {

// Shapes come from the Meta kernel when the operator is issued; the CPU kernel runs over the bytes when the stream
// gets there. Operators whose result the host must know (shape from data, or a value) wait for the stream instead.
void run_operator(const c10::OperatorHandle& op, torch::jit::Stack* stack);

// Operators that waited because they have no Meta kernel: a limit of this device, not what CUDA would do.
std::vector<std::string> operators_without_shapes();

}  // namespace fake
