#include <Python.h>

#include "stream.h"

#include <c10/util/Exception.h>

#include <array>
#include <exception>
#include <mutex>

namespace fake {
namespace {

struct Machine {
  std::recursive_mutex mutex;
  Schedule schedule = Schedule::eager;
  uint64_t seed = 0;
  std::array<std::vector<Queue*>, kDevices> queues;
  std::array<int, kDevices> next_bit{};
  std::array<Counters, kDevices> counters;
  std::exception_ptr error;

  Machine() {
    for (int device = 0; device < kDevices; ++device) add(device);
  }

  Queue& add(int device) {
    auto* queue = new Queue;
    queue->device = device;
    queue->id = static_cast<int64_t>(queues[device].size());
    queue->bit = 16 * device + next_bit[device]++ % 16;
    queues[device].push_back(queue);
    return *queue;
  }
};

// Never destroyed: tensors may be freed after main has ended.
Machine& machine() {
  static auto* one = new Machine;
  return *one;
}

thread_local int the_device = 0;
thread_local std::array<Queue*, kDevices> the_queues{};

bool early(const Queue& queue) {
  switch (machine().schedule) {
    case Schedule::eager: return true;
    case Schedule::lazy: return false;
    case Schedule::seeded: return (machine().seed >> queue.bit) & 1;
  }
  return false;
}

bool runnable(const Item& item) { return item.work || item.wait.passed(); }

void run_head(Queue& queue) {
  Item item = std::move(queue.items.front());
  queue.items.pop_front();
  if (item.work) {
    try {
      item.work();
    } catch (...) {
      if (!machine().error) machine().error = std::current_exception();
    }
  }
  ++queue.done;
}

// Lets every early stream run as far as its waits allow.
void advance() {
  if (machine().schedule == Schedule::lazy) return;
  for (bool moved = true; moved;) {
    moved = false;
    for (auto& queues : machine().queues) {
      for (Queue* queue : queues) {
        while (early(*queue) && !queue->items.empty() && runnable(queue->items.front())) {
          run_head(*queue);
          moved = true;
        }
      }
    }
  }
}

// The queue whose head has to run next for the place to be passed. Waits point to what was issued before them, so the
// search ends.
Queue& next_towards(Place place) {
  Queue* queue = place.queue;
  while (!runnable(queue->items.front())) queue = queue->items.front().wait.queue;
  return *queue;
}

void throw_error() {
  if (std::exception_ptr error = std::exchange(machine().error, nullptr)) std::rethrow_exception(error);
}

void check_device(int device) {
  TORCH_CHECK(device >= 0 && device < kDevices, "fake: device ", device, " does not exist; there are ", kDevices);
}

}  // namespace

Lock::Lock() {
  std::recursive_mutex& mutex = machine().mutex;
  if (mutex.try_lock()) return;
  if (Py_IsInitialized() && PyGILState_Check()) {
    PyThreadState* state = PyEval_SaveThread();
    mutex.lock();
    PyEval_RestoreThread(state);
  } else {
    mutex.lock();
  }
}

Lock::~Lock() { machine().mutex.unlock(); }

bool Place::passed() const { return queue == nullptr || queue->done >= number; }

void set_schedule(Schedule schedule, uint64_t seed) {
  Lock lock;
  for (int device = 0; device < kDevices; ++device) force_device(device);
  machine().schedule = schedule;
  machine().seed = seed;
  machine().next_bit.fill(1);
  throw_error();
}

Queue& default_queue(int device) { return find_queue(device, 0); }

Queue& new_queue(int device) {
  Lock lock;
  check_device(device);
  return machine().add(device);
}

Queue& find_queue(int device, int64_t id) {
  Lock lock;
  check_device(device);
  auto& queues = machine().queues[device];
  TORCH_CHECK(id >= 0 && id < static_cast<int64_t>(queues.size()), "fake:", device, " has no stream ", id);
  return *queues[id];
}

int current_device() { return the_device; }

int exchange_device(int device) {
  check_device(device);
  return std::exchange(the_device, device);
}

Queue& current_queue(int device) {
  check_device(device);
  Queue* queue = the_queues[device];
  return queue ? *queue : default_queue(device);
}

Queue& exchange_queue(Queue& queue) {
  Queue& before = current_queue(queue.device);
  the_queues[queue.device] = &queue;
  return before;
}

void issue(Queue& queue, std::function<void()> work) {
  Lock lock;
  queue.items.push_back({std::move(work), {}});
  ++queue.issued;
  advance();
}

void wait(Queue& queue, Place place) {
  Lock lock;
  ++machine().counters[queue.device].stream_waits;
  if (place.passed() || place.queue == &queue) return;
  queue.items.push_back({nullptr, place});
  ++queue.issued;
}

bool query(Place place) {
  Lock lock;
  if (place.passed()) return true;
  run_head(next_towards(place));
  advance();
  return false;
}

void force(Place place) {
  Lock lock;
  while (!place.passed()) {
    run_head(next_towards(place));
    advance();
  }
}

void force_device(int device) {
  Lock lock;
  check_device(device);
  for (Queue* queue : machine().queues[device]) force(queue->end());
}

void host_wait(Place place) {
  Lock lock;
  if (place.queue) ++machine().counters[place.queue->device].host_syncs;
  force(place);
  throw_error();
}

void host_wait_device(int device) {
  Lock lock;
  check_device(device);
  ++machine().counters[device].host_syncs;
  force_device(device);
  throw_error();
}

Counters& counters(int device) {
  check_device(device);
  return machine().counters[device];
}

}  // namespace fake
