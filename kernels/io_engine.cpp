#include "io_engine.h"

#include <pthread.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <system_error>
#include <thread>
#include <utility>

#include "checksum.h"

namespace offload {
namespace {

constexpr int most_tries = 64;  // of an operation that gets nowhere: EAGAIN, EINTR, nothing moved

using Clock = std::chrono::steady_clock;

double now() { return std::chrono::duration<double>(Clock::now().time_since_epoch()).count(); }

void sleep_ms(int milliseconds) { std::this_thread::sleep_for(std::chrono::milliseconds(milliseconds)); }

int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }
int64_t round_down(int64_t n, int64_t to) { return n / to * to; }

}  // namespace

IoEngine::IoEngine(int depth, int64_t piece_bytes)
    : depth_(depth),
      piece_bytes_(piece_bytes),
      sum_bytes_(piece_bytes % offload::sum_bytes == 0 ? offload::sum_bytes : piece_bytes),
      owner_(getpid()) {}

IoEngine::~IoEngine() {
  if (getpid() != owner_) return;
  for (char* buffer : buffers_) munmap(buffer, size_t(piece_bytes_));
}

void IoEngine::start(int threads) {
  // Signals belong to the threads of the program.
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  threads_running_ = threads;
  try {
    for (int i = 0; i < threads; ++i) {
      std::thread([self = shared_from_this()] {
        self->drive();
        const std::lock_guard<std::mutex> lock(self->mutex_);
        --self->threads_running_;
        self->quiet_.notify_all();
      }).detach();  // a thread that hangs in the kernel could never be joined
    }
  } catch (const std::system_error&) {  // the system has no more: those that run must not wait for ever
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    stop(0.0);
    throw;
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

// --- requests --------------------------------------------------------------------------------------------------------

void IoEngine::submit(const IoRequest& request) {
  bool awaited = false;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (stopping_ || request.bytes == 0) {
      done_.push_back({request.id, stopping_ ? ECANCELED : 0, 0});
      done_there_.notify_all();
      return;
    }
    auto work = std::make_unique<Work>();
    work->request = request;
    queues_[request.priority].push_back(work.get());
    works_[request.id] = std::move(work);
    awaited = std::exchange(hungry_, false);
  }
  work_there_.notify_one();  // the thread that takes a piece of it wakes the next one, if there are more
  if (awaited) wake();
}

void IoEngine::promote(int64_t id, int priority) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto found = works_.find(id);
  if (found == works_.end() || found->second->request.priority <= priority) return;
  Work* work = found->second.get();
  std::deque<Work*>& from = queues_[work->request.priority];
  const auto place = std::find(from.begin(), from.end(), work);
  if (place == from.end()) return;
  from.erase(place);
  work->request.priority = priority;
  queues_[priority].push_back(work);
}

bool IoEngine::knows(int64_t id) {
  const std::lock_guard<std::mutex> lock(mutex_);
  return works_.count(id) > 0 ||
         std::any_of(done_.begin(), done_.end(), [id](const IoDone& done) { return done.id == id; });
}

std::vector<IoDone> IoEngine::reap(double timeout_s) {
  std::unique_lock<std::mutex> lock(mutex_);
  done_there_.wait_for(lock, std::chrono::duration<double>(timeout_s), [this] { return !done_.empty() || nudged_; });
  nudged_ = false;
  return std::exchange(done_, {});
}

std::vector<int64_t> IoEngine::late() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return std::exchange(late_, {});
}

std::vector<IoFlight> IoEngine::in_flight() {
  const std::lock_guard<std::mutex> lock(mutex_);
  std::vector<IoFlight> found;
  const double moment = now();
  for (const auto& [piece, owner] : pieces_) {
    const IoRequest& r = piece->work->request;
    found.push_back({r.id, r.write, r.offset + piece->begin, piece->length, moment - piece->since});
  }
  for (const auto& queue : queues_) {
    for (const Work* work : queue) {
      const IoRequest& r = work->request;
      found.push_back({r.id, r.write, r.offset + work->next_begin, r.bytes - work->next_begin, -1.0});
    }
  }
  return found;
}

void IoEngine::write_off(double age_s, double round_s) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const double moment = now(), before = std::exchange(looked_, moment);
  for (const auto& [piece, owner] : pieces_) {
    piece->waited += std::min(moment - std::max(before, piece->since), round_s);
    if (piece->landed || piece->written_off || piece->waited <= age_s) continue;
    piece->written_off = true;
    ++slots_lost_;
    Work& work = *piece->work;
    fail(work, ETIMEDOUT, piece->begin);
    if (!work.reported) {
      if (work.error != ETIMEDOUT) {  // also after an earlier error: that memory is still in use matters more
        work.error = ETIMEDOUT;
        work.error_at = piece->begin;
      }
      work.reported = true;
      done_.push_back({work.request.id, work.error, work.error_at});
    }
  }
  if (slots_lost_ >= depth_) {
    for (auto& queue : queues_) {
      for (Work* work : std::exchange(queue, {})) {
        fail(*work, ETIME, work->next_begin);
        end_if_over(*work);
      }
    }
  }
  done_there_.notify_all();
}

void IoEngine::inject(const Fault& fault) {
  const std::lock_guard<std::mutex> lock(mutex_);
  fault_ = fault;
  attempts_ = 0;
}

int64_t IoEngine::attempts() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return attempts_;
}

bool IoEngine::stop(double timeout_s) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    stopping_ = true;
    nudged_ = true;
    for (auto& queue : queues_) {
      for (Work* work : std::exchange(queue, {})) {
        fail(*work, ECANCELED, work->next_begin);
        end_if_over(*work);
      }
    }
  }
  work_there_.notify_all();
  done_there_.notify_all();
  wake();
  std::unique_lock<std::mutex> lock(mutex_);
  return quiet_.wait_for(lock, std::chrono::duration<double>(timeout_s), [this] { return threads_running_ == 0; });
}

// --- pieces ----------------------------------------------------------------------------------------------------------

IoEngine::Work* IoEngine::first_waiting() {
  for (auto& queue : queues_) {
    while (!queue.empty()) {
      Work* work = queue.front();
      if (work->next_begin < work->request.bytes) return work;
      queue.pop_front();
    }
  }
  return nullptr;
}

IoEngine::Piece* IoEngine::take(bool wait, int spare) {
  while (Piece* piece = cut(wait, spare)) {
    if (prepare(*piece)) return piece;
    settle(*piece, ENOMEM);
  }
  return nullptr;
}

IoEngine::Piece* IoEngine::cut(bool wait, int spare) {
  std::unique_lock<std::mutex> lock(mutex_);
  Work* work = nullptr;
  const auto ready = [&] {
    const bool room = int(pieces_.size()) < depth_ + std::min(spare, depth_);
    work = room ? first_waiting() : nullptr;
    hungry_ = room && work == nullptr;
    return work != nullptr || stopping_;
  };
  if (wait) {
    work_there_.wait(lock, ready);
  } else {
    ready();
  }
  if (work == nullptr) return nullptr;
  const IoRequest& r = work->request;
  auto fresh = std::make_unique<Piece>();
  Piece* piece = fresh.get();
  piece->work = work;
  piece->begin = work->next_begin;
  piece->length = std::min(piece_bytes_, r.bytes - work->next_begin);
  piece->io_length = round_up(piece->length, r.align);
  piece->buffer = r.memory + piece->begin;
  const bool misplaced = reinterpret_cast<uintptr_t>(piece->buffer) % uintptr_t(r.align) != 0;
  piece->bounced = misplaced || piece->io_length != piece->length;
  piece->since = now();
  work->next_begin += piece->length;
  ++work->out;
  if (work->next_begin == r.bytes) queues_[r.priority].pop_front();
  pieces_[piece] = std::move(fresh);
  if (wait && first_waiting() != nullptr) work_there_.notify_one();
  return piece;
}

bool IoEngine::prepare(Piece& piece) {
  const IoRequest& r = piece.work->request;
  if (piece.bounced) {
    hand_over();
    char* buffer = borrow();
    piece.bounced = buffer != nullptr;
    if (!piece.bounced) return false;
    piece.buffer = buffer;
    if (r.write) {
      memcpy(piece.buffer, r.memory + piece.begin, size_t(piece.length));
      memset(piece.buffer + piece.length, 0, size_t(piece.io_length - piece.length));  // no foreign bytes in files
    }
  }
  return true;
}

int64_t IoEngine::left(const Piece& piece) const {
  const int64_t all = piece.io_length - piece.moved;
  return piece.fault.kind == FaultKind::short_half ? round_down(all / 2, piece.work->request.align) : all;
}

bool IoEngine::again(Piece& piece, int64_t result) {
  const IoRequest& r = piece.work->request;
  if (result > 0) {
    if (piece.fault.kind == FaultKind::flip && !r.write) {
      const int64_t last = std::min(piece.moved + result, piece.length);
      const int64_t bit = int64_t(piece.fault.seed % uint64_t(8 * std::max<int64_t>(1, last - piece.moved)));
      piece.buffer[piece.moved + bit / 8] ^= char(1 << (bit % 8));
    }
    // A broken block is moved again as a whole: direct I/O cannot start in the middle of one.
    const int64_t moved = std::min(piece.moved + result, piece.io_length);
    const int64_t before = piece.moved;
    piece.moved = moved == piece.io_length ? moved : round_down(moved, r.align);
    if (piece.moved == piece.io_length) {
      settle(piece, 0);
      return false;
    }
    if (piece.moved > before) {
      piece.tries = 0;
      return true;
    }
    result = 0;
  }
  const int code = int(-result);
  if (code != 0 && code != EINTR && code != EAGAIN) {
    settle(piece, code);
    return false;
  }
  if (++piece.tries >= most_tries) {
    settle(piece, code != 0 ? code : r.write ? EIO : ENODATA);
    return false;
  }
  if (code == EAGAIN) {
    hand_over();
    sleep_ms(std::min(piece.tries, 10));
  }
  return true;
}

void IoEngine::settle(Piece& piece, int error) {
  Work& work = *piece.work;
  const IoRequest& r = work.request;
  {
    // From here on it is not written off; if it was, its request has ended, and the caller's memory is not touched.
    const std::lock_guard<std::mutex> lock(mutex_);
    piece.landed = true;
    if (piece.written_off && error == 0) error = ETIMEDOUT;
  }
  if (error == 0) hand_over();
  int64_t where = piece.begin;
  if (error == 0 && r.write && r.sums != nullptr) sum_up(piece);
  if (error == 0 && !r.write) {
    const int64_t wrong = r.sums == nullptr ? -1 : find_wrong(piece);
    if (wrong >= 0) {
      error = EBADMSG;
      where = wrong;
    }
    if (error == 0 && piece.bounced) memcpy(r.memory + piece.begin, piece.buffer, size_t(piece.length));
  }
  if (piece.bounced) give_back(piece.buffer);
  bool over;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (error != 0) fail(work, error, where);
    if (piece.written_off) --slots_lost_;
    --work.out;
    pieces_.erase(&piece);
    over = end_if_over(work);
  }
  if (over) done_there_.notify_all();  // without the lock, which the woken thread takes at once
  work_there_.notify_one();
}

void IoEngine::sum_up(const Piece& piece) {
  const IoRequest& r = piece.work->request;
  const int64_t end = piece.begin + piece.length;
  for (int64_t at = piece.begin; at < end; at += sum_bytes_) {
    uint64_t& sum = r.sums[at / sum_bytes_];
    if (!r.known || sum == 0) sum = checksum(r.memory + at, std::min(sum_bytes_, end - at));
  }
}

int64_t IoEngine::find_wrong(const Piece& piece) const {
  const IoRequest& r = piece.work->request;
  for (int64_t at = 0; at < piece.length; at += sum_bytes_) {
    const int64_t bytes = std::min(sum_bytes_, piece.length - at);
    if (checksum(piece.buffer + at, bytes) != r.sums[(piece.begin + at) / sum_bytes_]) return piece.begin + at;
  }
  return -1;
}

void IoEngine::fail(Work& work, int error, int64_t where) {
  if (work.error != 0) return;
  work.error = error;
  work.error_at = where;
  if (work.next_begin < work.request.bytes) {
    std::deque<Work*>& queue = queues_[work.request.priority];
    const auto place = std::find(queue.begin(), queue.end(), &work);
    if (place != queue.end()) queue.erase(place);
  }
  work.next_begin = work.request.bytes;
}

bool IoEngine::end_if_over(Work& work) {
  if (work.out > 0 || work.next_begin < work.request.bytes) return false;
  const int64_t id = work.request.id;
  const bool told = !work.reported;
  if (told) {
    done_.push_back({id, work.error, work.error_at});
  } else {
    late_.push_back(id);
  }
  works_.erase(id);
  return told;
}

// --- buffers of our own ----------------------------------------------------------------------------------------------

char* IoEngine::borrow() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!buffers_.empty()) {
      char* buffer = buffers_.back();
      buffers_.pop_back();
      return buffer;
    }
  }
  // As many as pieces were ever in flight at once. A new fork must not share pages that the kernel writes to.
  void* fresh = mmap(nullptr, size_t(piece_bytes_), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (fresh == MAP_FAILED) return nullptr;
#ifdef MADV_DONTFORK
  madvise(fresh, size_t(piece_bytes_), MADV_DONTFORK);
#endif
  return static_cast<char*>(fresh);
}

void IoEngine::give_back(char* buffer) {
  const std::lock_guard<std::mutex> lock(mutex_);
  buffers_.push_back(buffer);
}

// --- faults ----------------------------------------------------------------------------------------------------------

bool IoEngine::faulted(Piece& piece, int64_t& result) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    ++attempts_;
    const bool hit = fault_.forever ? attempts_ >= fault_.nth : attempts_ == fault_.nth;
    piece.fault = hit ? fault_ : Fault{};
  }
  const bool write = piece.work->request.write;
  switch (piece.fault.kind) {
    case FaultKind::error: result = -piece.fault.code; return true;
    case FaultKind::short_zero: result = 0; return true;
    case FaultKind::short_half: result = 0; return left(piece) == 0;
    case FaultKind::lost_write: result = piece.io_length - piece.moved; return true;
    case FaultKind::lost_completion: result = never; return true;
    case FaultKind::delay:
      hand_over();
      sleep_ms(piece.fault.code);
      return false;
    case FaultKind::flip:
      if (write) {  // the caller's memory stays as it is: a spoilt copy goes out
        char* copy = piece.bounced ? piece.buffer : borrow();
        if (copy == nullptr) {
          result = -ENOMEM;
          return true;
        }
        if (!piece.bounced) memcpy(copy, piece.buffer, size_t(piece.io_length));
        piece.buffer = copy;
        piece.bounced = true;
        const int64_t bit = int64_t(piece.fault.seed % uint64_t(8 * piece.length));
        copy[bit / 8] ^= char(1 << (bit % 8));
      }
      return false;
    case FaultKind::none: return false;
  }
  return false;
}

}  // namespace offload
