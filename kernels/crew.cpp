#include "crew.h"

#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace offload {
namespace {

// Default rounding, no flush of denormals, exceptions masked; the old setting comes back at the end.
class DefaultArithmetic {
 public:
#if defined(__x86_64__)
  DefaultArithmetic() : saved_(_mm_getcsr()) { _mm_setcsr(0x1f80); }
  ~DefaultArithmetic() { _mm_setcsr(saved_); }

 private:
  unsigned saved_;
#elif defined(__aarch64__)
  DefaultArithmetic() {
    asm volatile("mrs %0, fpcr" : "=r"(saved_));
    asm volatile("msr fpcr, %0" ::"r"(uint64_t{0}));
  }
  ~DefaultArithmetic() { asm volatile("msr fpcr, %0" ::"r"(saved_)); }

 private:
  uint64_t saved_;
#endif
};

struct Job {
  Task task;
  const void* context;
  int64_t count;
  int lanes_wanted;
  std::atomic<int64_t> next{0};
  int lanes = 0;  // guarded by the crew's mutex

  bool has_work() const { return next.load(std::memory_order_relaxed) < count; }
  bool is_open() const { return has_work() && lanes < lanes_wanted; }

  void work() {
    const DefaultArithmetic arithmetic;
    for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < count;) task(context, i);
  }
};

int cores() {
#if defined(__linux__)
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof set, &set) == 0) return std::max(1, CPU_COUNT(&set));
#endif
  return std::max(1u, std::thread::hardware_concurrency());
}

std::atomic<int> limit{0};  // 0: not asked yet
std::atomic<int> most_lanes{0};

class Crew {
 public:
  void run(Job& job) {
    std::unique_lock<std::mutex> lock(mutex_);
    jobs_.push_back(&job);
    hire(job.lanes_wanted - 1);
    if (job.lanes_wanted > 1) changed_.notify_all();
    while (job.has_work() || job.lanes > 0) {
      if (!join(job, lock)) changed_.wait(lock);
    }
    jobs_.erase(std::find(jobs_.begin(), jobs_.end(), &job));
  }

 private:
  // Lends this thread to the job as a lane, if it has work, wants one more, and a core is free.
  bool join(Job& job, std::unique_lock<std::mutex>& lock) {
    if (!job.is_open() || lanes_ >= crew_limit()) return false;
    ++job.lanes;
    most_lanes.store(std::max(most_lanes.load(), ++lanes_));
    lock.unlock();
    job.work();
    lock.lock();
    --job.lanes;
    --lanes_;
    changed_.notify_all();
    return true;
  }

  // Makes sure that there are `wanted` threads beside the callers. A system that gives no more threads costs speed only.
  void hire(int wanted) {
    while (workers_ < wanted) {
      try {
        std::thread([this] { serve(); }).detach();
      } catch (const std::system_error&) {
        return;
      }
      ++workers_;
    }
  }

  [[noreturn]] void serve() {
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      const auto open = std::find_if(jobs_.begin(), jobs_.end(), [](const Job* job) { return job->is_open(); });
      if (open == jobs_.end() || !join(**open, lock)) changed_.wait(lock);
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<Job*> jobs_;  // oldest first
  int lanes_ = 0;           // running now, over all jobs
  int workers_ = 0;
};

// Never destroyed: its threads sleep in it until the process ends. After fork() the child has none of them and
// maybe a locked mutex, so it starts a crew of its own and leaves the parent's memory alone.
std::atomic<Crew*> the_crew{nullptr};

Crew& crew() {
  static const int registered = pthread_atfork(nullptr, nullptr, [] { the_crew.store(nullptr); });
  (void)registered;
  Crew* now = the_crew.load();
  if (now == nullptr) {
    Crew* fresh = new Crew;
    if (the_crew.compare_exchange_strong(now, fresh)) return *fresh;
    delete fresh;
  }
  return *now;
}

}  // namespace

int crew_limit() {
  int now = limit.load();
  if (now == 0) {
    const int all = cores();
    now = limit.compare_exchange_strong(now, all) ? all : now;
  }
  return now;
}

void crew_set_limit(int lanes) { limit.store(std::max(1, lanes)); }

int crew_most_lanes() { return most_lanes.exchange(0); }

void crew_run(int64_t count, int lanes, Task task, const void* context) {
  if (count <= 0) return;
  const int most = crew_limit();
  const int wanted = int(std::min<int64_t>(count, lanes > 0 ? std::min(lanes, most) : most));
  Job job{task, context, count, wanted};
  crew().run(job);
}

}  // namespace offload
