#include "thread_team.h"

#include <dlfcn.h>
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
  std::atomic<int64_t> next{0};

  void work() {
    const DefaultArithmetic arithmetic;
    for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < count;) task(context, i);
  }

  static void enter(void* job) { static_cast<Job*>(job)->work(); }
};

int cores() {
#if defined(__linux__)
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof set, &set) == 0) return std::max(1, CPU_COUNT(&set));
#endif
  return std::max(1u, std::thread::hardware_concurrency());
}

std::atomic<int> limit{cores()};
std::atomic<int> most_lanes{0};

// Runs one function on a team of threads, the caller among them. GNU's entry point of OpenMP; others offer it too.
using Team = void (*)(void (*function)(void*), void* data, unsigned threads, unsigned flags);

// Not linked but looked up: torch brings its own copy, and only that one has threads that are awake already.
Team find_team() { return reinterpret_cast<Team>(dlsym(RTLD_DEFAULT, "GOMP_parallel")); }

// The team where the process has no OpenMP: threads for this call alone. Fewer of them cost speed only (libgomp
// ends the process when it cannot make a thread; torch has asked it for as many before us).
void run_on_new_threads(void (*function)(void*), void* data, unsigned threads, unsigned) {
  std::vector<std::thread> team;
  try {
    for (unsigned i = 1; i < threads; ++i) team.emplace_back(function, data);
  } catch (const std::system_error&) {
  }
  function(data);
  for (std::thread& thread : team) thread.join();
}

class ThreadTeam {
 public:
  explicit ThreadTeam(Team team) : team_(team) {}

  void run(Job& job, int wanted) {
    const int lanes = take(wanted);
    if (lanes == 1) {
      job.work();
    } else {
      team_(Job::enter, &job, unsigned(lanes), 0);
    }
    give_back(lanes);
  }

  // Wakes those who wait for a lane, after the limit has changed.
  void look_again() {
    const std::lock_guard<std::mutex> lock(mutex_);
    freed_.notify_all();
  }

 private:
  // Waits until a lane is free, then takes as many as there are, up to `wanted`.
  int take(int wanted) {
    std::unique_lock<std::mutex> lock(mutex_);
    int free = 0;  // the limit may change at any moment: it is read once for the test and its use
    freed_.wait(lock, [&] { return (free = team_limit() - lanes_) > 0; });
    const int lanes = std::min(wanted, free);
    lanes_ += lanes;
    most_lanes.store(std::max(most_lanes.load(), lanes_));
    return lanes;
  }

  void give_back(int lanes) {
    const std::lock_guard<std::mutex> lock(mutex_);
    lanes_ -= lanes;
    freed_.notify_all();
  }

  const Team team_;
  std::mutex mutex_;
  std::condition_variable freed_;
  int lanes_ = 0;  // taken now, over all jobs
};

// Never destroyed: a thread may still be in it when the process ends. After fork() the child starts a team of its own:
// the old one may be locked for ever. OpenMP does not survive a fork either (its threads are gone, and it waits for
// them), so the child's team does without.
std::atomic<ThreadTeam*> the_team{nullptr};
std::atomic<bool> forked{false};

// When the library is loaded, not at the first call: a fork may come while another thread makes that call.
[[maybe_unused]] const int registered = pthread_atfork(nullptr, nullptr, team_assume_forked);

ThreadTeam& team() {
  ThreadTeam* now = the_team.load();
  if (now == nullptr) {
    const Team team = forked.load() ? nullptr : find_team();
    ThreadTeam* fresh = new ThreadTeam(team != nullptr ? team : run_on_new_threads);
    if (the_team.compare_exchange_strong(now, fresh)) return *fresh;
    delete fresh;
  }
  return *now;
}

}  // namespace

void team_assume_forked() {
  the_team.store(nullptr);
  forked.store(true);
}

int team_limit() { return limit.load(); }

void team_set_limit(int lanes) {
  limit.store(std::max(1, lanes));
  if (ThreadTeam* now = the_team.load()) now->look_again();
}

int team_most_lanes() { return most_lanes.exchange(0); }

void team_run(int64_t count, int lanes, Task task, const void* context) {
  if (count <= 0) return;
  const int most = team_limit();
  const int wanted = int(std::min<int64_t>(count, lanes > 0 ? std::min(lanes, most) : most));
  Job job{task, context, count};
  team().run(job, wanted);
}

}  // namespace offload
