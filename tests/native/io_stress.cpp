// The native I/O engines under load: many threads with reads and writes of every size and alignment, faults of every
// kind, operations that are given up, stops while busy, engines that come and go, forks. Every byte and every sum is
// checked. Exits with 1 if anything is wrong. Stand-alone, so that it runs under AddressSanitizer and ThreadSanitizer.
//
//   io_stress [seed] [directory]
#include "io_stress.h"

#include <pthread.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/wait.h>

#include <system_error>

using namespace stress;

namespace {

// --- load -----------------------------------------------------------------------------------------------------------

// What one thread believes to be in its slots of the file. `known`: the last write of it ended well.
struct Slot {
  bool known = false, dead = false;  // dead: a write that was given up may still come
  int64_t bytes = 0;
  uint64_t seed = 0;
  std::vector<Sum> sums;
};

// One thread with slots of its own. With `faults` an operation may fail; what ends well is right all the same.
void work(Desk& desk, const File& file, int number, uint64_t seed, int rounds, bool faults) {
  constexpr int slots = 2;
  Random random{seed + uint64_t(number) * 7919};
  std::vector<Slot> model(slots);
  for (int round = 0; round < rounds; ++round) {
    const int which = int(random.below(slots));
    Slot& slot = model[size_t(which)];
    const int64_t offset = (int64_t(number) * slots + which) * slot_bytes;
    if (slot.dead) continue;
    if (!slot.known || random.below(2)) {
      slot.bytes = some_size(random), slot.seed = random.next();
      const auto op = some_op(slot.bytes, random);
      op->memory.fill(slot.seed);
      const int64_t id = desk.submit(op, file, true, offset, int(random.below(priorities)));
      desk.engine().promote(id, int(random.below(priorities)));
      const IoDone done = desk.wait(id);
      slot.known = done.error == 0, slot.dead = done.error == ETIMEDOUT;
      check(faults || done.error == 0, "write failed", done.error, slot.bytes);
      check(done.error == 0 || (done.error_at % piece == 0 && done.error_at <= slot.bytes), "place", done.error_at);
      if (slot.known) {
        check(sums_right(*op), "sums of a write", slot.bytes);
        check(op->memory.guards_stand() && op->memory.holds(slot.seed), "a write changed its memory", slot.bytes);
        slot.sums = op->sums;
      }
    } else {
      const auto op = some_op(slot.bytes, random);
      op->sums = slot.sums;
      const IoDone done = desk.run(op, file, false, offset, int(random.below(priorities)));
      check(faults || done.error == 0, "read failed", done.error, slot.bytes);
      if (done.error == ETIMEDOUT) continue;  // its memory is not ours yet
      check(op->memory.guards_stand(), "a read left its range", slot.bytes);
      check(done.error != 0 || op->memory.holds(slot.seed), "wrong bytes from a read", slot.bytes);
    }
  }
}

constexpr int workers = 5;
constexpr int64_t file_bytes = workers * 2 * slot_bytes;

void run_workers(Desk& desk, const File& file, uint64_t seed, int rounds, bool faults) {
  std::vector<std::thread> threads;
  for (int i = 0; i < workers; ++i) {
    threads.emplace_back([&, i] { work(desk, file, i, seed, rounds, faults); });
  }
  for (std::thread& thread : threads) thread.join();
}

void round_trips(const Maker& make, const std::string& directory, uint64_t seed) {
  for (bool direct : {true, false}) {
    const File file = open_file(directory, direct, file_bytes);
    {
      Desk desk(make(direct ? std::vector<int>{file.fd} : std::vector<int>{}, {}));
      std::atomic<bool> over{false};
      std::thread watcher([&] {
        while (!over) {
          for (const IoFlight& f : desk.engine().in_flight()) check(f.bytes > 0 && f.offset >= 0, "flight", f.bytes);
          desk.engine().attempts();
          sleep_ms(1);
        }
      });
      run_workers(desk, file, seed, 25, false);
      over = true;
      watcher.join();
    }
    close(file.fd);
  }
}

// Memory that the ring knows, and memory that it does not, in one file.
void registered_memory(const Maker& make, const std::string& directory, uint64_t seed) {
  const File file = open_file(directory, true, 2 * slot_bytes);
  const auto known = std::make_shared<Op>(most_bytes, 0), back = std::make_shared<Op>(most_bytes, 0);
  {
    Desk desk(make({file.fd}, {{known->memory.begin(), known->memory.bytes()}}));
    known->memory.fill(seed);
    check(desk.run(known, file, true, 0).error == 0 && sums_right(*known), "write of registered memory");
    back->sums = known->sums;
    check(desk.run(back, file, false, 0).error == 0 && back->memory.holds(seed), "read beside registered memory");
    known->memory.fill(seed + 1);
    check(desk.run(known, file, false, 0).error == 0 && known->memory.holds(seed), "read to registered memory");
  }
  close(file.fd);
}

// --- faults ---------------------------------------------------------------------------------------------------------

Fault fault_of(FaultKind kind, int code, int64_t nth, bool forever, uint64_t seed) {
  Fault fault;
  fault.kind = kind, fault.code = code, fault.nth = nth, fault.forever = forever, fault.seed = seed;
  return fault;
}

struct FaultCase {
  const char* name;
  Fault fault;
  int write_error, read_error;  // of the operation that has the fault; -1: the write ends well, a later read sees it
};

void planned_faults(const Maker& make, const std::string& directory, uint64_t seed) {
  const FaultCase cases[] = {
      {"EIO", fault_of(FaultKind::error, EIO, 2, false, 0), EIO, EIO},
      {"EINTR once", fault_of(FaultKind::error, EINTR, 1, false, 0), 0, 0},
      {"EAGAIN once", fault_of(FaultKind::error, EAGAIN, 2, false, 0), 0, 0},
      {"EAGAIN for ever", fault_of(FaultKind::error, EAGAIN, 1, true, 0), EAGAIN, EAGAIN},
      {"half once", fault_of(FaultKind::short_half, 0, 1, false, 0), 0, 0},
      {"half for ever", fault_of(FaultKind::short_half, 0, 1, true, 0), EIO, ENODATA},
      {"nothing once", fault_of(FaultKind::short_zero, 0, 1, false, 0), 0, 0},
      {"nothing for ever", fault_of(FaultKind::short_zero, 0, 1, true, 0), EIO, ENODATA},
      {"flip", fault_of(FaultKind::flip, 0, 2, false, seed), -1, EBADMSG},
      {"lost write", fault_of(FaultKind::lost_write, 0, 2, false, 0), -1, EBADMSG},
      {"delay", fault_of(FaultKind::delay, 5, 1, false, 0), 0, 0},
  };
  const Fault none;
  Random random{seed};
  for (bool direct : {true, false}) {
    const File file = open_file(directory, direct, slot_bytes);
    {
      Desk desk(make({file.fd}, {}));
      for (const FaultCase& one : cases) {
        const int64_t bytes = 3 * piece - random.below(2) * random.below(block);
        const auto op = some_op(bytes, random);
        op->memory.fill(++seed);  // never what is there already
        desk.engine().inject(one.fault);
        IoDone done = desk.run(op, file, true, 0);
        desk.engine().inject(none);
        check(done.error == std::max(one.write_error, 0), one.name, done.error, 1);
        check(op->memory.holds(seed) && op->memory.guards_stand(), one.name, 2);
        auto back = some_op(bytes, random);
        back->sums = op->sums;
        if (one.write_error <= 0) {
          done = desk.run(back, file, false, 0);
          check(done.error == (one.write_error < 0 ? EBADMSG : 0), one.name, done.error, 3);
        }
        op->memory.fill(++seed);
        check(desk.run(op, file, true, 0).error == 0, one.name, 4);
        back->sums = op->sums;
        desk.engine().inject(one.fault);
        done = desk.run(back, file, false, 0);
        desk.engine().inject(none);
        // A read that never happened is seen, unless its buffer holds the very bytes since they were written.
        const bool same = one.fault.kind == FaultKind::lost_write && done.error == 0;
        check(done.error == one.read_error || same, one.name, done.error, 5);
        check(done.error != 0 || back->memory.holds(seed), one.name, 6);
        check(desk.run(back, file, false, 0).error == 0 && back->memory.holds(seed), one.name, 7);
        check(back->memory.guards_stand(), one.name, 8);
      }
    }
    close(file.fd);
  }
}

// Faults of all kinds at random moments while many threads work.
void random_faults(const Maker& make, const std::string& directory, uint64_t seed) {
  const File file = open_file(directory, true, file_bytes);
  {
    Desk desk(make({file.fd}, {}), 0.3);
    std::atomic<bool> over{false};
    std::thread saboteur([&] {
      Random random{seed ^ 0xabcdef};
      constexpr int codes[] = {EIO, EINTR, EAGAIN, ENOSPC};
      int lost = 0;
      while (!over) {
        auto kind = FaultKind(random.below(8));
        if (kind == FaultKind::lost_completion && ++lost > depth / 2) kind = FaultKind::none;
        const int code = kind == FaultKind::delay ? 3 : codes[random.below(4)];
        desk.engine().inject(fault_of(kind, code, 1 + random.below(4), false, random.next()));
        sleep_ms(random.below(4));
      }
      desk.engine().inject(Fault{});
    });
    run_workers(desk, file, seed, 25, true);
    over = true;
    saboteur.join();
  }
  close(file.fd);
}

// --- operations that are given up ------------------------------------------------------------------------------------

void lost_completions(const Maker& make, const std::string& directory, uint64_t seed) {
  const File file = open_file(directory, true, file_bytes);
  Random random{seed};
  {
    Desk desk(make({file.fd}, {}), 0.2);
    const auto good = some_op(2 * piece, random), lost = some_op(most_bytes - 5, random);
    good->memory.fill(seed);
    desk.engine().inject(fault_of(FaultKind::lost_completion, 0, 1, false, 0));
    IoDone done = desk.run(lost, file, true, 0);
    check(done.error == ETIMEDOUT, "a lost write", done.error);
    check(desk.run(good, file, true, slot_bytes).error == 0, "a write beside a lost one");
    // All places are lost: what waits must not wait for ever.
    desk.engine().inject(fault_of(FaultKind::lost_completion, 0, 1, true, 0));
    std::vector<int64_t> ids;
    for (int i = 0; i < 2 * depth; ++i) ids.push_back(desk.submit(some_op(piece, random), file, false, 0));
    for (int64_t id : ids) {
      const int error = desk.wait(id).error;
      check(error == ETIMEDOUT || error == ETIME, "no place is left", id, error);
    }
  }
  close(file.fd);
}

// Slow rather than lost: it is given up, comes back, and its memory is free again.
void late_ends(const Maker& make, const std::string& directory, uint64_t seed) {
  const File file = open_file(directory, true, slot_bytes);
  Random random{seed};
  {
    Desk desk(make({file.fd}, {}), 0.05);
    desk.engine().inject(fault_of(FaultKind::delay, 400, 1, false, 0));
    const int64_t id = desk.submit(some_op(piece - 3, random), file, true, 0);
    check(desk.wait(id).error == ETIMEDOUT, "a slow write is given up");
    check(wait_until([&] { return desk.came_late(id); }), "a slow write never came back");
  }
  close(file.fd);
}

// One piece fails, another is lost. A caller that is told anything but ETIMEDOUT would reuse memory still in use.
void failed_and_lost(const Maker& make, const std::string& directory, uint64_t seed) {
  const File file = open_file(directory, true, piece);  // the second piece lies behind the end: ENODATA
  Random random{seed};
  for (int i = 0; i < 3; ++i) {
    Desk desk(make({file.fd}, {}), 0.3);
    desk.engine().inject(fault_of(FaultKind::lost_completion, 0, 1, false, 0));
    const IoDone done = desk.run(some_op(2 * piece, random), file, false, 0);
    check(done.error == ETIMEDOUT, "one piece failed, one is lost", done.error);
  }
  close(file.fd);
}

// --- begin and end --------------------------------------------------------------------------------------------------

void stop_while_busy(const Maker& make, const std::string& directory, uint64_t seed) {
  const File file = open_file(directory, true, file_bytes);
  Random random{seed};
  for (int round = 0; round < 12; ++round) {
    Desk desk(make({file.fd}, {}));
    std::vector<std::thread> threads;
    for (int i = 0; i < 3; ++i) {
      threads.emplace_back([&, i, mine = Random{random.next()}]() mutable {
        for (int n = 0; n < 8; ++n) {
          const auto op = some_op(1 + mine.below(most_bytes), mine);
          desk.submit(op, file, true, int64_t(i) * slot_bytes, int(mine.below(priorities)));
        }
      });
    }
    sleep_ms(random.below(12));
    std::thread second([&] { check(desk.engine().stop(hang_s), "second stop"); });
    check(desk.engine().stop(hang_s), "stop while busy", round);
    second.join();
    for (std::thread& thread : threads) thread.join();
    // Threads are gone: everything has ended, as done or as cancelled.
    for (int64_t id = 1; id <= 24; ++id) {
      const int error = desk.wait(id).error;
      check(error == 0 || error == ECANCELED, "end of a request at a stop", id, error);
    }
    check(desk.engine().in_flight().empty(), "in flight after a stop");
    check(desk.run(some_op(1, random), file, true, 0).error == ECANCELED, "a request after the stop");
  }
  close(file.fd);
}

void come_and_go(const Maker& make, const std::string& directory, uint64_t seed) {
  const File file = open_file(directory, true, slot_bytes);
  Random random{seed};
  const int64_t fds = entries_of("/proc/self/fd"), threads = entries_of("/proc/self/task");
  for (int round = 0; round < 40; ++round) {
    std::weak_ptr<IoEngine> rest;
    if (round % 4 == 0) {  // used, with an operation that never ends
      Desk desk(make({file.fd}, {}), 0.02);
      rest = desk.share();
      if (round % 8 == 0) desk.engine().inject(fault_of(FaultKind::lost_completion, 0, 1, false, 0));
      desk.run(some_op(piece - 1, random), file, true, 0);
    } else {  // idle
      const auto engine = make({file.fd}, {});
      rest = engine;
      check(engine->stop(hang_s), "stop of an idle engine");
    }
    check(wait_until([&] { return rest.expired(); }), "an engine stays after its last owner", round);
  }
  check(wait_until([&] { return entries_of("/proc/self/fd") == fds; }), "files left open", fds);
  check(wait_until([&] { return entries_of("/proc/self/task") == threads; }), "threads left", threads);
  close(file.fd);
}

// A child inherits neither the ring nor our buffers, but the addresses; other memory of its own may lie there.
void fork_after_stop(const Maker& make, const std::string& directory, uint64_t) {
  const File file = open_file(directory, true, file_bytes);
  std::shared_ptr<IoEngine> engine;
  {
    Desk desk(make({file.fd}, {}));
    std::vector<int64_t> ids;
    for (int i = 0; i < depth; ++i) ids.push_back(desk.submit(std::make_shared<Op>(most_bytes, 1), file, true, 0));
    for (int64_t id : ids) check(desk.wait(id).error == 0, "write before a fork", id);
    engine = desk.share();
  }
  check(wait_until([&] { return engine.use_count() == 1; }), "the engine's threads");
  const pid_t child = fork();
  if (child == 0) {
    // So many that they fill every hole in the address space.
    std::vector<std::pair<void*, size_t>> areas;
    for (int64_t bytes : {block, 2 * block, piece}) {
      for (int i = 0; i < 1000; ++i) {
        void* area = mmap(nullptr, size_t(bytes), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (area == MAP_FAILED) _exit(2);
        areas.emplace_back(area, bytes);
      }
    }
    engine.reset();
    for (const auto& [area, bytes] : areas) {
      unsigned char there[piece / block];
      if (mincore(area, bytes, there) != 0) _exit(3);  // not all of it is mapped any more
    }
    _exit(0);
  }
  int status = 0;
  check(waitpid(child, &status, 0) == child, "waitpid", errno);
  check(status == 0, "a child that drops an engine loses memory", status);
  engine.reset();
  close(file.fd);
}

[[maybe_unused]] int64_t mapped_bytes() {
  long pages = 0;
  FILE* file = fopen("/proc/self/statm", "r");
  check(file != nullptr && fscanf(file, "%ld", &pages) == 1, "statm");
  if (file != nullptr) fclose(file);
  return pages * sysconf(_SC_PAGESIZE);
}

[[maybe_unused]] uint64_t blocked_signals() {
  sigset_t set;
  pthread_sigmask(SIG_SETMASK, nullptr, &set);
  uint64_t found = 0;
  for (int signal = 1; signal < 64; ++signal) found |= uint64_t(sigismember(&set, signal) == 1) << signal;
  return found;
}

// The system has no threads left: an error, and everything as before.
void no_threads_left(const Maker& make, const std::string&, uint64_t) {
// Sanitizers start threads in their own way, and map memory without bound.
#if defined(__GLIBC__) && !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
  const uint64_t signals = blocked_signals();
  const int64_t fds = entries_of("/proc/self/fd"), threads = entries_of("/proc/self/task");
  // Room for three stacks and a half.
  constexpr int64_t stack = 64 << 20;
  pthread_attr_t usual, large;
  pthread_getattr_default_np(&usual);
  pthread_attr_init(&large);
  check(pthread_attr_setstacksize(&large, stack) == 0 && pthread_setattr_default_np(&large) == 0, "stacks");
  rlimit unlimited, tight;
  getrlimit(RLIMIT_AS, &unlimited);
  tight = {rlim_t(mapped_bytes() + 7 * stack / 2), unlimited.rlim_max};
  setrlimit(RLIMIT_AS, &tight);
  int code = 0;
  std::vector<std::shared_ptr<IoEngine>> engines;
  try {
    for (int i = 0; i < 5; ++i) engines.push_back(make({}, {}));
  } catch (const std::system_error& error) {
    code = error.code().value();
  }
  setrlimit(RLIMIT_AS, &unlimited);
  pthread_setattr_default_np(&usual);
  for (const auto& engine : engines) engine->stop(hang_s);
  engines.clear();
  check(code == EAGAIN, "no error when no thread can be had", code);
  check(blocked_signals() == signals, "signals stay blocked", int64_t(signals));
  check(wait_until([&] { return entries_of("/proc/self/task") == threads; }), "threads left by a failure", threads);
  check(wait_until([&] { return entries_of("/proc/self/fd") == fds; }), "files left by a failure", fds);
#else
  (void)make;
#endif
}

void run_all(const char* name, const Maker& make, const std::string& directory, uint64_t seed) {
  const std::pair<const char*, void (*)(const Maker&, const std::string&, uint64_t)> parts[] = {
      {"round trips", round_trips},           {"registered memory", registered_memory},
      {"planned faults", planned_faults},     {"random faults", random_faults},
      {"lost completions", lost_completions}, {"late ends", late_ends},
      {"failed and lost", failed_and_lost},   {"stop while busy", stop_while_busy},
      {"come and go", come_and_go},           {"fork after stop", fork_after_stop},
      {"no threads left", no_threads_left},
  };
  for (const auto& [what, part] : parts) {
    const int before = wrongs;
    const auto begin = std::chrono::steady_clock::now();
    part(make, directory, seed);
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
    printf("%s: %s: %s (%.1f s)\n", name, what, wrongs == before ? "ok" : "WRONG", took.count());
    fflush(stdout);
  }
}

}  // namespace

int main(int argc, char** argv) {
  const uint64_t seed = argc > 1 ? strtoull(argv[1], nullptr, 10) : 20261116;
  const std::string directory = argc > 2 ? argv[2] : "/tmp";
  printf("io_stress: seed %" PRIu64 " in %s\n", seed, directory.c_str());
  run_all("threads", make_threads, directory, seed);
  const int refused = probe_uring();
  if (refused == 0) {
    run_all("io_uring", make_ring, directory, seed);
  } else {
    printf("io_uring: not tried: %s\n", strerror(refused));
  }
  printf("io_stress: %s\n", wrongs == 0 ? "ok" : "WRONG");
  return wrongs == 0 ? 0 : 1;
}
