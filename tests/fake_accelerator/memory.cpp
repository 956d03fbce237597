#include "memory.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <unordered_map>
#include <utility>
#include <vector>

namespace fake {
namespace {

using c10::CachingAllocator::Stat;
using c10::CachingDeviceAllocator::DeviceStats;

constexpr size_t kHalf = size_t{1} << 36;  // address space of one device; the budget limits the bytes
constexpr size_t kPage = 4096;
constexpr size_t kBlock = 512;  // allocations are rounded up to this, as on CUDA

size_t round_up(size_t nbytes, size_t unit) { return (nbytes + unit - 1) / unit * unit; }

struct Block {
  char* address = nullptr;
  size_t size = 0;
  Queue* owner = nullptr;        // the stream that was current when it was allocated
  std::vector<Queue*> recorded;  // other streams that use it
  std::vector<Place> until;      // after the free: reusable once all of these are passed
};

// The memory of one device: a half that cannot be read, whose addresses tensors get, and the half with the bytes.
struct Memory {
  char* base = nullptr;
  size_t budget = size_t{1} << 30;
  std::map<char*, size_t> holes;                                    // address space not in use
  std::map<std::pair<Queue*, size_t>, std::vector<Block*>> cached;  // free blocks, by stream and size
  std::vector<Block*> deferred;                                     // freed, but a recorded stream is behind
  DeviceStats stats;
};

struct Memories {
  Memory of[kDevices];
  std::unordered_map<const void*, Block*> live;

  Memories() {
    for (Memory& memory : of) {
      void* base = mmap(nullptr, 2 * kHalf, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
      TORCH_CHECK(base != MAP_FAILED, "fake: could not reserve ", 2 * kHalf, " bytes of address space");
      memory.base = static_cast<char*>(base);
      memory.holes[memory.base] = kHalf;
    }
  }
};

Memories& memories() {
  static auto* all = new Memories;
  return *all;
}

Stat& whole(c10::CachingAllocator::StatArray& stats) {
  return stats[static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE)];
}

void poison(const Block& block) {
  issue(*block.owner, [bytes = shadow(block.address), size = block.size] { std::memset(bytes, kPoison, size); });
}

// A block of fresh memory, or null if the budget does not allow it.
Block* create(Memory& memory, Queue& owner, size_t size) {
  if (static_cast<size_t>(whole(memory.stats.reserved_bytes).current) + size > memory.budget) return nullptr;
  size_t span = round_up(size, kPage);
  auto hole = std::find_if(memory.holes.begin(), memory.holes.end(), [&](auto& one) { return one.second >= span; });
  if (hole == memory.holes.end()) return nullptr;
  auto [address, room] = *hole;
  memory.holes.erase(hole);
  if (room > span) memory.holes[address + span] = room - span;
  int error = mprotect(address + kHalf, span, PROT_READ | PROT_WRITE);
  TORCH_CHECK(error == 0, "fake: the system gave no memory for ", span, " bytes");
  auto* block = new Block;
  block->address = address;
  block->size = size;
  block->owner = &owner;
  whole(memory.stats.reserved_bytes).increase(size);
  whole(memory.stats.segment).increase(1);
  ++memory.stats.num_device_alloc;
  return block;
}

// Gives the bytes back to the system. Nothing on the device may use the block any more.
void destroy(Memory& memory, Block* block) {
  size_t span = round_up(block->size, kPage);
  madvise(block->address + kHalf, span, MADV_DONTNEED);
  mprotect(block->address + kHalf, span, PROT_NONE);
  auto after = memory.holes.emplace(block->address, span).first;
  auto next = std::next(after);
  if (next != memory.holes.end() && after->first + after->second == next->first) {
    after->second += next->second;
    memory.holes.erase(next);
  }
  if (after != memory.holes.begin()) {
    auto before = std::prev(after);
    if (before->first + before->second == after->first) {
      before->second += after->second;
      memory.holes.erase(after);
    }
  }
  whole(memory.stats.reserved_bytes).decrease(block->size);
  whole(memory.stats.segment).decrease(1);
  ++memory.stats.num_device_free;
  delete block;
}

// From here on the block belongs to the next allocation on its stream. Later work of that stream may overwrite it, so
// the poison is queued at once: who reads it from another stream without a record_stream reads NaN.
void recycle(Memory& memory, Block* block) {
  block->recorded.clear();
  block->until.clear();
  poison(*block);
  whole(memory.stats.active_bytes).decrease(block->size);
  memory.cached[{block->owner, block->size}].push_back(block);
}

void settle(Memory& memory) {
  std::vector<Block*> waiting = std::exchange(memory.deferred, {});
  for (Block* block : waiting) {
    bool over = std::all_of(block->until.begin(), block->until.end(), [](const Place& p) { return p.passed(); });
    if (over) {
      recycle(memory, block);
    } else {
      memory.deferred.push_back(block);
    }
  }
}

// Gives all free blocks back. Waits for the device, as cudaFree does.
void release(int device) {
  Memory& memory = memories().of[device];
  if (memory.cached.empty() && memory.deferred.empty()) return;
  ++counters(device).host_syncs;
  for (Block* block : memory.deferred) {
    for (const Place& place : block->until) force(place);
  }
  settle(memory);
  force_device(device);
  for (auto& [key, blocks] : memory.cached) {
    for (Block* block : blocks) destroy(memory, block);
  }
  memory.cached.clear();
}

Block* take(Memory& memory, Queue& owner, size_t size) {
  auto found = memory.cached.find({&owner, size});
  if (found == memory.cached.end() || found->second.empty()) return create(memory, owner, size);
  Block* block = found->second.back();
  found->second.pop_back();
  return block;
}

Block* allocate_block(int device, size_t nbytes) {
  Memory& memory = memories().of[device];
  Queue& owner = current_queue(device);
  size_t size = round_up(nbytes, kBlock);
  settle(memory);
  Block* block = take(memory, owner, size);
  if (!block) {
    ++memory.stats.num_alloc_retries;
    release(device);
    block = take(memory, owner, size);
  }
  if (!block) {
    ++memory.stats.num_ooms;
    TORCH_CHECK_WITH(OutOfMemoryError, false, "fake:", device, " is out of memory: tried to allocate ", nbytes,
                     " bytes with ", whole(memory.stats.allocated_bytes).current, " in use of ", memory.budget);
  }
  poison(*block);
  whole(memory.stats.allocation).increase(1);
  whole(memory.stats.allocated_bytes).increase(size);
  whole(memory.stats.active_bytes).increase(size);
  return block;
}

void free_block(void* address) {
  if (!address) return;
  Lock lock;
  auto found = memories().live.find(address);
  TORCH_INTERNAL_ASSERT(found != memories().live.end());
  Block* block = found->second;
  memories().live.erase(found);
  Memory& memory = memories().of[block->owner->device];
  whole(memory.stats.allocation).decrease(1);
  whole(memory.stats.allocated_bytes).decrease(block->size);
  for (Queue* queue : block->recorded) block->until.push_back(queue->end());
  memory.deferred.push_back(block);
  settle(memory);
}

class DeviceMemoryAllocator final : public c10::DeviceAllocator {
 public:
  c10::DataPtr allocate(size_t nbytes) override { return allocate_on(current_device(), nbytes); }
  c10::DeleterFnPtr raw_deleter() const override { return &free_block; }
  bool initialized() override { return true; }

  void copy_data(void* dest, const void* src, size_t count) const override {
    if (count == 0) return;
    issue(current_queue(device_of(dest)), [=] { std::memcpy(shadow(dest), shadow(src), count); });
  }

  void emptyCache(c10::MempoolId_t) override {
    Lock lock;
    for (int device = 0; device < kDevices; ++device) release(device);
  }

  void recordStream(const c10::DataPtr& data, c10::Stream stream) override {
    record_use(data, find_queue(stream.device_index(), stream.id()));
  }

  DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    Lock lock;
    return memories().of[device].stats;
  }

  void resetAccumulatedStats(c10::DeviceIndex device) override {
    each_stat(device, [](Stat& stat) { stat.reset_accumulated(); });
    DeviceStats& stats = memories().of[device].stats;
    stats.num_alloc_retries = stats.num_ooms = stats.num_device_alloc = stats.num_device_free = 0;
  }

  void resetPeakStats(c10::DeviceIndex device) override {
    each_stat(device, [](Stat& stat) { stat.reset_peak(); });
  }

  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override {
    Lock lock;
    Memory& memory = memories().of[device];
    size_t held = whole(memory.stats.reserved_bytes).current;
    return {memory.budget > held ? memory.budget - held : 0, memory.budget};
  }

 private:
  template <typename F>
  void each_stat(int device, F change) {
    Lock lock;
    DeviceStats& stats = memories().of[device].stats;
    for (auto* one :
         {&stats.allocation, &stats.segment, &stats.allocated_bytes, &stats.reserved_bytes, &stats.active_bytes}) {
      change(whole(*one));
    }
  }
};

}  // namespace

void* shadow(const void* address) { return address ? static_cast<char*>(const_cast<void*>(address)) + kHalf : nullptr; }

int device_of(const void* address) {
  auto* at = static_cast<const char*>(address);
  for (int device = 0; device < kDevices; ++device) {
    const char* base = memories().of[device].base;
    if (at >= base && at < base + kHalf) return device;
  }
  return -1;
}

c10::DeviceAllocator& device_allocator() {
  static auto* one = new DeviceMemoryAllocator;
  return *one;
}

c10::DataPtr allocate_on(int device, size_t nbytes) {
  c10::Device place(c10::DeviceType::PrivateUse1, static_cast<c10::DeviceIndex>(device));
  if (nbytes == 0) return {nullptr, nullptr, &free_block, place};
  Lock lock;
  Block* block = allocate_block(device, nbytes);
  memories().live[block->address] = block;
  return {block->address, block->address, &free_block, place};
}

void record_use(const c10::DataPtr& data, Queue& queue) {
  Lock lock;
  auto found = memories().live.find(data.get());
  if (found == memories().live.end() || found->second->owner == &queue) return;
  auto& recorded = found->second->recorded;
  if (std::find(recorded.begin(), recorded.end(), &queue) == recorded.end()) recorded.push_back(&queue);
}

void set_budget(int device, size_t nbytes) {
  TORCH_CHECK(device >= 0 && device < kDevices, "fake: device ", device, " does not exist; there are ", kDevices);
  TORCH_CHECK(nbytes <= kHalf, "fake: a budget of ", nbytes, " bytes is more than the possible ", kHalf);
  Lock lock;
  memories().of[device].budget = nbytes;
}

}  // namespace fake
