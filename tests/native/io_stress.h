// What the stress program of the native I/O engines works with: random numbers, guarded memory, unnamed files, and a
// Desk that submits requests and checks that each of them ends exactly once.
#pragma once

#include <dirent.h>
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cinttypes>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <type_traits>
#include <vector>

#include "checksum.h"
#include "io_engine.h"

namespace stress {

using namespace offload;

using Sum = std::remove_pointer_t<decltype(IoRequest::sums)>;

constexpr int64_t piece = 128 << 10, block = 4096, most_bytes = 3 << 20, slot_bytes = 4 << 20;
constexpr int depth = 8;
constexpr double hang_s = 60.0;  // nothing takes that long, however slow the machine

inline std::atomic<int> wrongs{0};

inline bool check(bool right, const char* what, int64_t a = 0, int64_t b = 0) {
  if (!right) {
    ++wrongs;
    fprintf(stderr, "io_stress: WRONG: %s (%" PRId64 ", %" PRId64 ")\n", what, a, b);
  }
  return right;
}

struct Random {
  uint64_t state;
  uint64_t next() {
    state = state * 6364136223846793005u + 1442695040888963407u;
    const uint64_t mixed = (state ^ (state >> 33)) * 0xff51afd7ed558ccdu;
    return mixed ^ (mixed >> 29);
  }
  int64_t below(int64_t n) { return int64_t(next() % uint64_t(n)); }
};

inline void sleep_ms(int64_t milliseconds) { std::this_thread::sleep_for(std::chrono::milliseconds(milliseconds)); }

// True once `condition` holds; polls it every millisecond, for `hang_s` seconds at most.
inline bool wait_until(const std::function<bool()>& condition) {
  for (int i = 0; i < int(hang_s * 1000); ++i) {
    if (condition()) return true;
    sleep_ms(1);
  }
  return false;
}

inline int64_t entries_of(const char* directory) {
  DIR* found = opendir(directory);
  int64_t count = 0;
  while (found != nullptr && readdir(found) != nullptr) ++count;
  if (found != nullptr) closedir(found);
  return count;
}

// --- memory, file, engine -------------------------------------------------------------------------------------------

// Bytes at a chosen distance from a block's begin, between guards.
class Memory {
 public:
  Memory(int64_t bytes, int64_t shift) : bytes_(bytes), shift_(shift), all_(size_t(bytes + 3 * block), guard) {
    const auto address = reinterpret_cast<uintptr_t>(all_.data());
    begin_ = all_.data() + block + (block - address % block) % block + shift_;
  }
  char* begin() { return begin_; }
  int64_t bytes() const { return bytes_; }
  void fill(uint64_t seed) {
    Random random{seed};
    for (int64_t i = 0; i < bytes_; i += 8) {
      const uint64_t word = random.next();
      memcpy(begin_ + i, &word, size_t(std::min<int64_t>(8, bytes_ - i)));
    }
  }
  bool holds(uint64_t seed) const {
    Memory expected(bytes_, 0);
    expected.fill(seed);
    return memcmp(begin_, expected.begin_, size_t(bytes_)) == 0;
  }
  bool guards_stand() const {
    const std::vector<char> intact(3 * block, guard);
    const char* end = begin_ + bytes_;
    return memcmp(all_.data(), intact.data(), size_t(begin_ - all_.data())) == 0 &&
           memcmp(end, intact.data(), size_t(all_.data() + all_.size() - end)) == 0;
  }

 private:
  static constexpr char guard = 0x5a;
  int64_t bytes_, shift_;
  std::vector<char> all_;
  char* begin_;
};

struct File {
  int fd = -1;
  int64_t align = 1;
};

// Unnamed; past the page cache where `direct` is wished for and to be had.
inline File open_file(const std::string& directory, bool direct, int64_t bytes) {
  std::string name = directory + "/io_stress.XXXXXX";
  File file;
  file.fd = mkstemp(name.data());
  if (file.fd < 0) {
    perror(name.c_str());
    exit(2);
  }
  unlink(name.c_str());
  check(ftruncate(file.fd, bytes) == 0, "ftruncate", errno);
#ifdef O_DIRECT
  if (direct && fcntl(file.fd, F_SETFL, O_DIRECT) == 0) file.align = block;
#endif
  return file;
}

using Maker = std::function<std::shared_ptr<IoEngine>(const std::vector<int>& files, const std::vector<IoRegion>&)>;

inline std::shared_ptr<IoEngine> make_threads(const std::vector<int>&, const std::vector<IoRegion>&) {
  return make_thread_engine(depth, piece);
}

inline std::shared_ptr<IoEngine> make_ring(const std::vector<int>& files, const std::vector<IoRegion>& memory) {
  std::vector<std::string> notes;
  return make_uring_engine(depth, piece, memory, files, notes);
}

// One operation and everything that must outlive it.
struct Op {
  Op(int64_t bytes, int64_t shift) : memory(bytes, shift), sums(size_t((bytes + piece - 1) / piece) + 1) {}
  Memory memory;
  std::vector<Sum> sums;
};

// An engine, and a thread that collects what ends. Ids are given out here; each must end exactly once.
class Desk {
 public:
  Desk(std::shared_ptr<IoEngine> engine, double give_up_s = 2 * hang_s)
      : engine_(std::move(engine)), give_up_s_(give_up_s), collector_([this] { collect(); }) {}

  ~Desk() {
    close();
    for (const auto& [id, op] : kept_) check(op->memory.guards_stand(), "guards at the end", id);
  }

  void close() {
    if (closed_.exchange(true)) return;
    check(engine_->stop(hang_s), "stop");
    check(wait_until([this] { return open() == 0; }), "requests that never ended", open());
    collector_.join();
    engine_.reset();
  }

  IoEngine& engine() { return *engine_; }
  std::shared_ptr<IoEngine> share() { return engine_; }

  int64_t submit(const std::shared_ptr<Op>& op, const File& file, bool write, int64_t offset, int priority = 1) {
    int64_t id;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      id = ++last_;
      kept_[id] = op;
    }
    engine_->submit(
        {id, write, file.fd, op->memory.begin(), op->memory.bytes(), offset, file.align, op->sums.data(), priority});
    return id;
  }

  IoDone wait(int64_t id) {
    std::unique_lock<std::mutex> lock(mutex_);
    const auto there = [&] { return done_.count(id) > 0; };
    if (!check(came_.wait_for(lock, std::chrono::duration<double>(hang_s), there), "a request hangs", id)) _exit(1);
    return done_[id];
  }

  IoDone run(const std::shared_ptr<Op>& op, const File& file, bool write, int64_t offset, int priority = 1) {
    return wait(submit(op, file, write, offset, priority));
  }

  int64_t open() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return last_ - int64_t(done_.size());
  }

  bool came_late(int64_t id) {
    const std::lock_guard<std::mutex> lock(mutex_);
    return late_.count(id) > 0;
  }

 private:
  void collect() {
    while (!closed_ || open() > 0) {
      take_in(engine_->reap(0.01));
      engine_->write_off(give_up_s_, give_up_s_ / 4);
      const std::vector<int64_t> late = engine_->late();
      const std::lock_guard<std::mutex> lock(mutex_);
      for (int64_t id : late) {
        check(done_.count(id) == 1 && done_[id].error == ETIMEDOUT, "late, but never given up", id);
        check(++late_[id] == 1, "late twice", id);
        kept_.erase(id);
      }
    }
    take_in(engine_->reap(0.0));
  }

  void take_in(const std::vector<IoDone>& found) {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (const IoDone& one : found) {
      check(kept_.count(one.id) == 1, "an end without a begin", one.id);
      check(done_.emplace(one.id, one).second, "ended twice", one.id, one.error);
      if (one.error != ETIMEDOUT) kept_.erase(one.id);  // else the kernel may still use its memory
    }
    came_.notify_all();
  }

  std::shared_ptr<IoEngine> engine_;
  const double give_up_s_;
  std::mutex mutex_;
  std::condition_variable came_;
  std::map<int64_t, std::shared_ptr<Op>> kept_;
  std::map<int64_t, IoDone> done_;
  std::map<int64_t, int> late_;
  int64_t last_ = 0;
  std::atomic<bool> closed_{false};
  std::thread collector_;
};

inline int64_t some_size(Random& random) {
  constexpr int64_t awkward[] = {0, 1, 511, 512, 4095, 4096, 4097, piece - 1, piece, piece + 1, 2 * piece, most_bytes};
  return random.below(2) ? awkward[random.below(int64_t(std::size(awkward)))] : 1 + random.below(most_bytes);
}

inline std::shared_ptr<Op> some_op(int64_t bytes, Random& random) {
  constexpr int64_t shifts[] = {0, 0, 512, 8, 1};
  return std::make_shared<Op>(bytes, shifts[random.below(5)]);
}

// The sums of a write are those of its bytes, piece by piece.
inline bool sums_right(Op& op) {
  for (int64_t at = 0, i = 0; at < op.memory.bytes(); at += piece, ++i) {
    if (op.sums[size_t(i)] != checksum(op.memory.begin() + at, std::min(piece, op.memory.bytes() - at))) return false;
  }
  return true;
}

}  // namespace stress
