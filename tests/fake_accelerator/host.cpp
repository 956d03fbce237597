#include "host.h"

#include "memory.h"

#include <cstdlib>
#include <cstring>
#include <map>
#include <vector>

namespace fake {
namespace {

constexpr size_t kAlignment = 4096;

struct Range {
  size_t size = 0;
  bool registered = false;
  std::map<Queue*, uint64_t> uses;  // the last use on each stream

  bool busy() const {
    for (auto [queue, number] : uses) {
      if (!Place{queue, number}.passed()) return true;
    }
    return false;
  }
};

struct HostMemory {
  std::map<uintptr_t, Range> ranges;            // in use, by first address
  std::map<uintptr_t, Range> deferred;          // freed, but queued work still uses them
  std::map<size_t, std::vector<void*>> cached;  // free pinned blocks by size
  at::HostStats stats;
};

HostMemory& host() {
  static auto* one = new HostMemory;
  return *one;
}

// The range that holds all these bytes, or null.
Range* find(uintptr_t address, size_t nbytes) {
  auto after = host().ranges.upper_bound(address);
  if (after == host().ranges.begin()) return nullptr;
  auto range = std::prev(after);
  return address + nbytes <= range->first + range->second.size ? &range->second : nullptr;
}

// Freed pinned blocks that no queued work uses go back to the cache, poisoned: who still reads them should notice.
void settle_host() {
  for (auto range = host().deferred.begin(); range != host().deferred.end();) {
    if (range->second.busy()) {
      ++range;
      continue;
    }
    auto* bytes = reinterpret_cast<void*>(range->first);
    std::memset(bytes, kPoison, range->second.size);
    host().cached[range->second.size].push_back(bytes);
    range = host().deferred.erase(range);
  }
}

void free_pinned(void* bytes) {
  if (!bytes) return;
  Lock lock;
  auto found = host().ranges.find(reinterpret_cast<uintptr_t>(bytes));
  TORCH_INTERNAL_ASSERT(found != host().ranges.end());
  host().stats.active_requests.decrease(1);
  host().stats.active_bytes.decrease(found->second.size);
  host().deferred.insert(std::move(*found));
  host().ranges.erase(found);
  settle_host();
}

class PinnedAllocator final : public at::HostAllocator {
 public:
  c10::DataPtr allocate(size_t nbytes) override {
    if (nbytes == 0) return {nullptr, nullptr, &free_pinned, c10::DeviceType::CPU};
    Lock lock;
    settle_host();
    size_t size = (nbytes + kAlignment - 1) / kAlignment * kAlignment;
    auto& blocks = host().cached[size];
    void* bytes = nullptr;
    if (!blocks.empty()) {
      bytes = blocks.back();
      blocks.pop_back();
    } else {
      bytes = std::aligned_alloc(kAlignment, size);
      TORCH_CHECK(bytes, "fake: no host memory for ", size, " pinned bytes");
      std::memset(bytes, kPoison, size);
      host().stats.allocated_bytes.increase(size);
      host().stats.allocations.increase(1);
    }
    host().ranges[reinterpret_cast<uintptr_t>(bytes)].size = size;
    host().stats.active_requests.increase(1);
    host().stats.active_bytes.increase(size);
    return {bytes, bytes, &free_pinned, c10::DeviceType::CPU};
  }

  c10::DeleterFnPtr raw_deleter() const override { return &free_pinned; }
  void copy_data(void* dest, const void* src, size_t count) const override { default_copy_data(dest, src, count); }

  bool record_event(void* ptr, void*, c10::Stream stream) override {
    if (!is_locked(ptr, 1)) return false;
    record_host_use(ptr, find_queue(stream.device_index(), stream.id()).end());
    return true;
  }

  void empty_cache() override {
    Lock lock;
    settle_host();
    for (auto& [size, blocks] : host().cached) {
      for (void* bytes : blocks) {
        std::free(bytes);
        host().stats.allocated_bytes.decrease(size);
        host().stats.allocations.decrease(1);
      }
    }
    host().cached.clear();
  }

  at::HostStats get_stats() override {
    Lock lock;
    return host().stats;
  }

  void reset_accumulated_stats() override {
    each_stat([](at::Stat& stat) { stat.reset_accumulated(); });
  }

  void reset_peak_stats() override {
    each_stat([](at::Stat& stat) { stat.reset_peak(); });
  }

 private:
  template <typename F>
  void each_stat(F change) {
    Lock lock;
    at::HostStats& stats = host().stats;
    for (auto* one : {&stats.active_requests, &stats.active_bytes, &stats.allocations, &stats.allocated_bytes}) {
      change(*one);
    }
  }
};

}  // namespace

at::HostAllocator& pinned_allocator() {
  static auto* one = new PinnedAllocator;
  return *one;
}

bool is_locked(const void* address, size_t nbytes) {
  Lock lock;
  return find(reinterpret_cast<uintptr_t>(address), nbytes) != nullptr;
}

void record_host_use(const void* address, Place place) {
  Lock lock;
  if (Range* range = find(reinterpret_cast<uintptr_t>(address), 1)) range->uses[place.queue] = place.number;
}

void register_host_memory(uintptr_t address, size_t nbytes) {
  Lock lock;
  TORCH_CHECK(address != 0 && nbytes > 0, "fake: cannot register ", nbytes, " bytes at address ", address);
  auto next = host().ranges.lower_bound(address);
  bool overlap = next != host().ranges.end() && next->first < address + nbytes;
  if (next != host().ranges.begin()) {
    auto before = std::prev(next);
    overlap = overlap || before->first + before->second.size > address;
  }
  TORCH_CHECK(!overlap, "fake: some of the ", nbytes, " bytes at address ", address, " are registered already");
  Range& range = host().ranges[address];
  range.size = nbytes;
  range.registered = true;
}

void unregister_host_memory(uintptr_t address) {
  Lock lock;
  auto found = host().ranges.find(address);
  TORCH_CHECK(found != host().ranges.end() && found->second.registered, "fake: address ", address,
              " is not the start of a registered range");
  TORCH_CHECK(!found->second.busy(), "fake: queued copies still use the range at address ", address,
              "; synchronise before you unregister it");
  host().ranges.erase(found);
}

}  // namespace fake
