// Host memory that the device may read and write by itself: pinned blocks and registered ranges.
#pragma once

#include "stream.h"

#include <ATen/core/CachingHostAllocator.h>

namespace fake {

at::HostAllocator& pinned_allocator();

// True if all these bytes lie in one pinned block or one registered range.
bool is_locked(const void* address, size_t nbytes);

// Stream work up to this place uses the bytes. A pinned block is not reused before, a range cannot be unregistered.
void record_host_use(const void* address, Place place);

// Stand-ins for cudaHostRegister and cudaHostUnregister. They throw on overlap, on an unknown address, and on a range
// that queued work still uses.
void register_host_memory(uintptr_t address, size_t nbytes);
void unregister_host_memory(uintptr_t address);

}  // namespace fake
