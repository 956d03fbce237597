// Device memory: addresses that cannot be read, the bytes behind them, and the caching allocator.
#pragma once

#include "stream.h"

#include <c10/core/CachingDeviceAllocator.h>

namespace fake {

// Every byte of device memory, fresh or freed, holds this until it is written: NaN in all floating point types.
constexpr int kPoison = 0xFF;

// The bytes behind a device address (null for null). Only work that runs on a stream may touch them.
void* shadow(const void* address);

// The device that owns an address, or -1 for host memory.
int device_of(const void* address);

c10::DeviceAllocator& device_allocator();
c10::DataPtr allocate_on(int device, size_t nbytes);

// The memory may be reused only after the stream has passed the point where the tensor is freed.
void record_use(const c10::DataPtr& data, Queue& queue);

// The most bytes that a device may hold, cached blocks included. What is held already stays.
void set_budget(int device, size_t nbytes);

}  // namespace fake
