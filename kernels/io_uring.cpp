// The engine on io_uring, by its system calls alone. One thread owns the ring: it prepares, submits, and settles what
// comes back; others only put requests into the queue and ring its bell, an eventfd that the ring itself reads.
#include "io_engine.h"

#include <cerrno>
#include <system_error>

#if defined(__linux__) && __has_include(<linux/io_uring.h>)
#include <linux/io_uring.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <utility>

namespace offload {
namespace {

constexpr int64_t most_region_bytes = int64_t(1) << 30;  // the kernel's limit for one registered buffer

// IORING_SETUP_COOP_TASKRUN, as a number for headers that do not know it: what comes back does not interrupt the thread
// in the middle of a checksum, but is taken in with its next call.
constexpr unsigned do_not_interrupt = 1u << 8;

int call_setup(unsigned entries, io_uring_params* params) { return int(syscall(__NR_io_uring_setup, entries, params)); }
int call_enter(int ring, unsigned submit, unsigned wait, unsigned flags) {
  return int(syscall(__NR_io_uring_enter, ring, submit, wait, flags, nullptr, 0));
}
int call_register(int ring, unsigned what, const void* data, unsigned count) {
  return int(syscall(__NR_io_uring_register, ring, what, data, count));
}

[[noreturn]] void give_up(const char* what) { throw std::system_error(errno, std::generic_category(), what); }

// The two queues that we share with the kernel.
class Ring {
 public:
  explicit Ring(unsigned entries) {
    io_uring_params params{};
    params.flags = IORING_SETUP_CLAMP | do_not_interrupt;
    fd_ = call_setup(entries, &params);
    if (fd_ < 0 && errno == EINVAL) {  // older than 5.19
      params = {};
      params.flags = IORING_SETUP_CLAMP;
      fd_ = call_setup(entries, &params);
    }
    if (fd_ < 0) give_up("io_uring_setup");
    if (!(params.features & IORING_FEAT_SINGLE_MMAP) || !(params.features & IORING_FEAT_RW_CUR_POS)) {
      close(fd_);  // older than 5.6: no plain reads and writes
      errno = ENOSYS;
      give_up("io_uring_setup");
    }
    bytes_ = std::max(params.sq_off.array + params.sq_entries * sizeof(uint32_t),
                      params.cq_off.cqes + params.cq_entries * sizeof(io_uring_cqe));
    sqes_bytes_ = params.sq_entries * sizeof(io_uring_sqe);
    memory_ = map(bytes_, IORING_OFF_SQ_RING);
    sqes_ = reinterpret_cast<io_uring_sqe*>(map(sqes_bytes_, IORING_OFF_SQES));
    if (memory_ == nullptr || sqes_ == nullptr) {
      const int code = errno;
      release();
      errno = code;
      give_up("mmap of the ring");
    }
    entries_ = params.sq_entries;
    sq_head_ = number(params.sq_off.head);
    sq_tail_ = number(params.sq_off.tail);
    sq_mask_ = *number(params.sq_off.ring_mask);
    array_ = number(params.sq_off.array);
    cq_head_ = number(params.cq_off.head);
    cq_tail_ = number(params.cq_off.tail);
    cq_mask_ = *number(params.cq_off.ring_mask);
    cqes_ = reinterpret_cast<io_uring_cqe*>(memory_ + params.cq_off.cqes);
  }
  ~Ring() { release(); }
  Ring(const Ring&) = delete;

  int fd() const { return fd_; }
  unsigned entries() const { return entries_; }

  // A fresh entry, to be filled in; it goes to the kernel with the next enter(), or when the queue is full.
  io_uring_sqe& push() {
    while (*sq_tail_ + unsubmitted_ - __atomic_load_n(sq_head_, __ATOMIC_ACQUIRE) >= entries_) enter(0);
    const unsigned tail = *sq_tail_ + unsubmitted_;
    io_uring_sqe& entry = sqes_[tail & sq_mask_];
    memset(&entry, 0, sizeof entry);
    array_[tail & sq_mask_] = tail & sq_mask_;
    ++unsubmitted_;
    return entry;
  }

  // Hands over what was pushed and waits for `wait` completions. 0, or the errno.
  int enter(unsigned wait) {
    if (unsubmitted_ > 0) {
      __atomic_store_n(sq_tail_, *sq_tail_ + unsubmitted_, __ATOMIC_RELEASE);
      owed_ += unsubmitted_;
      unsubmitted_ = 0;
    }
    if (owed_ == 0 && wait == 0) return 0;
    const int taken = call_enter(fd_, owed_, wait, wait > 0 ? IORING_ENTER_GETEVENTS : 0);
    if (taken < 0) return errno;
    owed_ -= unsigned(taken);  // a partial submission: the rest goes with the next call
    return 0;
  }

  bool pop(io_uring_cqe& entry) {
    const unsigned head = *cq_head_;
    if (head == __atomic_load_n(cq_tail_, __ATOMIC_ACQUIRE)) return false;
    entry = cqes_[head & cq_mask_];
    __atomic_store_n(cq_head_, head + 1, __ATOMIC_RELEASE);
    return true;
  }

 private:
  char* map(size_t bytes, off_t what) {
    void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd_, what);
    if (memory == MAP_FAILED) return nullptr;
    madvise(memory, bytes, MADV_DONTFORK);  // a child must not be able to touch the parent's ring
    return static_cast<char*>(memory);
  }
  unsigned* number(unsigned offset) { return reinterpret_cast<unsigned*>(memory_ + offset); }
  void release() {
    close(fd_);
    if (getpid() != owner_) return;  // a forked child has no ring: other memory may lie at its addresses
    if (memory_ != nullptr) munmap(memory_, bytes_);
    if (sqes_ != nullptr) munmap(sqes_, sqes_bytes_);
  }

  int fd_ = -1;
  const pid_t owner_ = getpid();
  char* memory_ = nullptr;
  size_t bytes_ = 0, sqes_bytes_ = 0;
  io_uring_sqe* sqes_ = nullptr;
  io_uring_cqe* cqes_ = nullptr;
  unsigned *sq_head_ = nullptr, *sq_tail_ = nullptr, *array_ = nullptr, *cq_head_ = nullptr, *cq_tail_ = nullptr;
  unsigned entries_ = 0, sq_mask_ = 0, cq_mask_ = 0, unsubmitted_ = 0, owed_ = 0;
};

class UringEngine final : public IoEngine {
 public:
  UringEngine(int depth, int64_t piece_bytes, const std::vector<IoRegion>& memory, const std::vector<int>& files,
              std::vector<std::string>& notes)
      : IoEngine(depth, piece_bytes), ring_(unsigned(depth) * 2 + 2), bell_(eventfd(0, EFD_CLOEXEC)) {
    if (bell_ < 0) give_up("eventfd");
    if (ring_.entries() < unsigned(depth) * 2 + 2) {  // clamped; an entry that waits for a place would wait for ever
      close(bell_);
      errno = EINVAL;
      give_up("io_uring_setup");
    }
    register_memory(memory, notes);
    if (!files.empty() && call_register(ring_.fd(), IORING_REGISTER_FILES, files.data(), unsigned(files.size())) == 0) {
      files_ = files;
    } else if (!files.empty()) {
      notes.push_back(std::string("files are not registered with io_uring: ") + strerror(errno));
    }
  }
  ~UringEngine() override { close(bell_); }

 private:
  void register_memory(const std::vector<IoRegion>& memory, std::vector<std::string>& notes) {
    std::vector<iovec> parts;
    for (const IoRegion& region : memory) {
      for (int64_t at = 0; at < region.bytes; at += most_region_bytes) {
        parts.push_back({region.address + at, size_t(std::min(most_region_bytes, region.bytes - at))});
      }
    }
    if (parts.empty()) return;
    if (call_register(ring_.fd(), IORING_REGISTER_BUFFERS, parts.data(), unsigned(parts.size())) == 0) {
      regions_ = parts;
    } else {
      notes.push_back(std::string("memory is not registered with io_uring: ") + strerror(errno) +
                      " (raise the memlock limit)");
    }
  }

  void wake() override {
    const uint64_t one = 1;
    // Fails only when the counter is full, and then the bell rings already.
    [[maybe_unused]] const ssize_t written = write(bell_, &one, sizeof one);
  }

  void hand_over() override { ring_.enter(0); }  // what is wrong shows at the next wait

  void listen() {
    io_uring_sqe& entry = ring_.push();
    entry.opcode = IORING_OP_READ;
    entry.fd = bell_;
    entry.addr = reinterpret_cast<uint64_t>(&rung_);
    entry.len = sizeof rung_;
    entry.user_data = 0;
    ++in_kernel_;  // the kernel will write to rung_, so the engine may not go before it has
  }

  void push(Piece& piece) {
    const IoRequest& r = piece.work->request;
    io_uring_sqe& entry = ring_.push();
    entry.opcode = r.write ? IORING_OP_WRITE : IORING_OP_READ;
    entry.fd = r.fd;
    entry.addr = reinterpret_cast<uint64_t>(at(piece));
    entry.len = unsigned(left(piece));
    entry.off = uint64_t(r.offset + piece.begin + piece.moved);
    entry.user_data = reinterpret_cast<uint64_t>(&piece);
    const auto file = std::find(files_.begin(), files_.end(), r.fd);
    if (file != files_.end()) {
      entry.fd = int(file - files_.begin());
      entry.flags |= IOSQE_FIXED_FILE;
    }
    for (size_t i = 0; i < regions_.size(); ++i) {
      const char* begin = static_cast<const char*>(regions_[i].iov_base);
      if (at(piece) >= begin && at(piece) + entry.len <= begin + regions_[i].iov_len) {
        entry.opcode = r.write ? IORING_OP_WRITE_FIXED : IORING_OP_READ_FIXED;
        entry.buf_index = uint16_t(i);
      }
    }
    ++in_kernel_;
  }

  // Starts an attempt, and all that follow from it without the kernel.
  void attempt(Piece* piece) {
    int64_t result = 0;
    while (faulted(*piece, result)) {
      if (result == never || !again(*piece, result)) return;
    }
    push(*piece);
  }

  void drive() override {
    listen();
    while (!stopping() || in_kernel_ > 0 || !back_.empty()) {
      fill(int(back_.size()));
      settle_back();
      fill(0);
      const int code = ring_.enter(in_kernel_ == 0 ? 0 : 1);  // 0: it stops, and the bell has rung
      if (code != 0 && code != EINTR && code != EAGAIN && code != EBUSY) return die(code);
      collect();
    }
    // The owner may keep a stopped engine for long; its files and memory are not to be kept with it.
    if (!files_.empty()) call_register(ring_.fd(), IORING_UNREGISTER_FILES, nullptr, 0);
    if (!regions_.empty()) call_register(ring_.fd(), IORING_UNREGISTER_BUFFERS, nullptr, 0);
  }

  void fill(int spare) {
    while (Piece* piece = take(false, spare)) attempt(piece);
  }

  void collect() {
    io_uring_cqe entry;
    while (ring_.pop(entry)) {
      --in_kernel_;
      if (entry.user_data == 0) {
        if (!stopping()) listen();
        continue;
      }
      back_.push_back({reinterpret_cast<Piece*>(entry.user_data), entry.res});
    }
  }

  // Checksums and copies of what has come back, after the freed places in the drive's queue are filled.
  void settle_back() {
    for (const auto& [piece, result] : std::exchange(back_, {})) {
      if (again(*piece, result)) attempt(piece);
    }
  }

  // The ring itself is broken: nothing will come back any more. What is in flight is left to be written off.
  void die(int code) {
    Fault everything;
    everything.kind = FaultKind::error;
    everything.code = code;
    everything.nth = 0;
    everything.forever = true;
    inject(everything);
    while (Piece* piece = take(true)) {
      int64_t result = 0;
      do {
        faulted(*piece, result);
      } while (again(*piece, result));
    }
  }

  Ring ring_;
  const int bell_;
  uint64_t rung_ = 0;
  int in_kernel_ = 0;
  std::vector<std::pair<Piece*, int64_t>> back_;
  std::vector<iovec> regions_;
  std::vector<int> files_;
};

}  // namespace

std::shared_ptr<IoEngine> make_uring_engine(int depth, int64_t piece_bytes, const std::vector<IoRegion>& memory,
                                            const std::vector<int>& files, std::vector<std::string>& notes) {
  auto engine = std::make_shared<UringEngine>(depth, piece_bytes, memory, files, notes);
  engine->start(1);
  return engine;
}

int probe_uring() {
  try {
    const Ring ring(4);
    return 0;
  } catch (const std::system_error& error) {
    return error.code().value();
  }
}

}  // namespace offload

#else

namespace offload {
std::shared_ptr<IoEngine> make_uring_engine(int, int64_t, const std::vector<IoRegion>&, const std::vector<int>&,
                                            std::vector<std::string>&) {
  throw std::system_error(ENOSYS, std::generic_category(), "io_uring");
}
int probe_uring() { return ENOSYS; }
}  // namespace offload

#endif
