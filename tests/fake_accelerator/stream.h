// Streams, events and the rule by which queued work runs.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <string>
#include <vector>

namespace fake {

constexpr int kDevices = 2;

// One lock for the whole machine. A thread that must wait for it lets go of Python's lock first, so a holder may take
// Python's lock (shape rules written in Python do) without a deadlock.
class Lock {
 public:
  Lock();
  ~Lock();
  Lock(const Lock&) = delete;
  Lock& operator=(const Lock&) = delete;
};

struct Queue;

// A place in a queue: what an event is. Passed once that many items of the queue are done.
struct Place {
  Queue* queue = nullptr;
  uint64_t number = 0;
  bool passed() const;
};

// One entry of a queue: work, or (without work) a wait for a place of another queue.
struct Item {
  std::function<void()> work;
  Place wait;
};

// A stream. Queues live as long as the process: streams are handed around by number.
struct Queue {
  int device = 0;
  int64_t id = 0;
  int bit = 0;
  uint64_t issued = 0;
  uint64_t done = 0;
  std::deque<Item> items;
  Place end() { return {this, issued}; }
};

enum class Schedule { eager, lazy, seeded };

// Finishes all work, then changes the rule. Side streams made from now on use the seed's bits 1, 2, ... again.
void set_schedule(Schedule schedule, uint64_t seed);

Queue& default_queue(int device);
Queue& new_queue(int device);
Queue& find_queue(int device, int64_t id);

int current_device();
int exchange_device(int device);
Queue& current_queue(int device);
Queue& exchange_queue(Queue& queue);

// Adds work to a stream; the schedule says whether it runs now. It must own what it reads, or use raw addresses.
void issue(Queue& queue, std::function<void()> work);
void wait(Queue& queue, Place place);

// True if the place is passed. If not, one item that leads to it is run first: polling ends, but never at once.
bool query(Place place);

// Runs what the place needs and nothing else of the late streams. Errors of work stay for `host_wait`.
void force(Place place);
void force_device(int device);

// The host waits: counts, forces, and throws the first error of deferred work, once.
void host_wait(Place place);
void host_wait_device(int device);

// What the tests can read. Per device; see the README for what each one counts.
struct Counters {
  std::atomic<int64_t> h2d_bytes{0}, d2h_bytes{0}, d2d_bytes{0}, pageable_bytes{0};
  std::atomic<int64_t> blocking_copies{0}, host_syncs{0}, kernels{0}, stream_waits{0};
};
Counters& counters(int device);

}  // namespace fake
