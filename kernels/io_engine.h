// Asynchronous reads and writes of files: what all native engines share.
//
// A request is any number of bytes between memory and a file. It is cut into pieces; at most `depth` pieces are in
// flight, the others wait by priority. A piece that comes back short is continued, EINTR and EAGAIN are tried again,
// anything else ends the request with its errno. Each sum_bytes() of a piece have a checksum: of the caller's memory when
// they are written, compared before the request is done when they are read. Both are computed when the drive has had the
// bytes and before the request ends: the drive's queue is full then, and the bytes are often still in a cache. The
// caller may know the sums of a write already. Memory need not be aligned: where direct I/O asks for it, a piece goes
// through a buffer of the engine's own, padded with zeros.
//
// Every request ends exactly once in reap(). Memory, sums and file must live until then in any case; an operation
// that the kernel never answers can be written off, and if it ends after all, that is reported too.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

namespace offload {

enum class Priority : int { waited_for = 0, prefetch = 1, write_back = 2 };
constexpr int priorities = 3;

struct IoRequest {
  int64_t id;
  bool write;
  int fd;
  char* memory;
  int64_t bytes;
  int64_t offset;  // in the file; a multiple of align
  int64_t align;   // of addresses, lengths and offsets for direct I/O; 1: anything goes
  uint64_t* sums;  // one for each sum_bytes(): result of a write, expectation of a read; nullptr: none
  int priority;
  bool known = false;  // a write's sums that are not 0 are those of its bytes
};

struct IoDone {
  int64_t id;
  // 0: all bytes moved; EBADMSG: a checksum differs; ETIMEDOUT: written off, its memory may still be used; ETIME: not
  // started, for all that is in flight was written off; else errno
  int error;
  int64_t error_at;  // where in the request
};

struct IoFlight {
  int64_t id;
  bool write;
  int64_t offset, bytes;
  double seconds;  // since the kernel has it; negative: still waits in the queue
};

// Faults for tests: the n-th attempt of an operation (from 1, over all operations) goes wrong, or all from then on.
enum class FaultKind : int { none, error, short_half, short_zero, flip, lost_write, lost_completion, delay };
struct Fault {
  FaultKind kind = FaultKind::none;
  int code = 0;  // errno for `error`, milliseconds for `delay`
  int64_t nth = 0;
  bool forever = false;
  uint64_t seed = 0;
};

class IoEngine : public std::enable_shared_from_this<IoEngine> {
 public:
  IoEngine(int depth, int64_t piece_bytes);
  virtual ~IoEngine();
  IoEngine(const IoEngine&) = delete;

  // Once, before anything else; the threads keep the engine alive. Throws std::system_error if there are none.
  void start(int threads);

  void submit(const IoRequest& request);
  void promote(int64_t id, int priority);      // does nothing for a request that is past its queue
  bool knows(int64_t id);                      // submitted, and not yet given out by reap()
  std::vector<IoDone> reap(double timeout_s);  // stop() ends its wait
  std::vector<IoFlight> in_flight();
  // Gives up operations that the kernel has had for longer than `age_s`, and, when no slot is left, all that wait. Called
  // in rounds; each counts for `round_s` at most, so that nothing is given up because the whole process was stopped.
  // Their requests end in reap() with ETIMEDOUT and ETIME; pieces that still come back are then reported by late().
  void write_off(double age_s, double round_s);
  std::vector<int64_t> late();  // requests written off whose memory is no longer in use
  void inject(const Fault& fault);
  int64_t attempts();  // operations so far, for tests
  // No more requests; what waits ends with ECANCELED. Waits for what is in flight; false if something never ended.
  bool stop(double timeout_s);
  int64_t piece_bytes() const { return piece_bytes_; }
  // offload::sum_bytes, or a piece, where that is not a number of these.
  int64_t sum_bytes() const { return sum_bytes_; }

 protected:
  struct Work;
  struct Piece {
    Work* work;
    int64_t begin, length;  // within the request
    char* buffer;           // where the I/O goes: the caller's memory or a buffer of ours
    bool bounced;           // a buffer of ours
    int64_t io_length;      // length rounded up to the alignment
    int64_t moved = 0;      // so far
    int tries = 0;          // in a row that moved nothing
    double since = 0.0;     // when it was taken from the queue
    double waited = 0.0;    // as write_off has counted it
    bool landed = false;    // it is no longer the kernel's, but ours
    bool written_off = false;
    Fault fault;  // of the attempt that is under way
  };
  struct Work {  // a request on its way
    IoRequest request;
    int64_t next_begin = 0;  // of the next piece to cut
    int64_t out = 0;         // pieces in flight
    int error = 0;
    int64_t error_at = 0;
    bool reported = false;  // by write_off
  };

  // The next piece to do, ready for the kernel; nullptr: nothing to do now, or (wait) no more until the end.
  // spare: pieces that have come back but are not yet settled, and so do not count against the depth. Those that come
  // back short are not over: there are never more than twice `depth` pieces.
  Piece* take(bool wait, int spare = 0);
  // One attempt has ended with `result` (bytes or -errno). True: try again, the rest of it; false: the piece is over.
  bool again(Piece& piece, int64_t result);
  // Decides on this attempt's fault. True: nothing is to be done, `result` is known already; `never` means that
  // the piece will not be heard of again.
  static constexpr int64_t never = INT64_MIN;
  bool faulted(Piece& piece, int64_t& result);
  char* at(const Piece& piece) const { return piece.buffer + piece.moved; }
  int64_t left(const Piece& piece) const;  // bytes of this attempt
  bool stopping() const { return stopping_.load(); }
  virtual void wake() {}       // there is something to do for take(), which had found nothing, or the engine stops
  virtual void hand_over() {}  // something slow follows: what is ready goes to the kernel now
  virtual void drive() = 0;    // one thread's work, until stopping and nothing is in flight

  const int depth_;
  const int64_t piece_bytes_, sum_bytes_;
  std::mutex mutex_;

 private:
  std::condition_variable work_there_, done_there_, quiet_;
  Piece* cut(bool wait, int spare);
  bool prepare(Piece& piece);                       // false: there is no memory for it
  void settle(Piece& piece, int error);             // the piece is over
  void fail(Work& work, int error, int64_t where);  // the first error counts; no more pieces are cut
  bool end_if_over(Work& work);  // true: reap() has something to give, and its waiters are to be told
  Work* first_waiting();
  void sum_up(const Piece& piece);               // fills in what is not known
  int64_t find_wrong(const Piece& piece) const;  // where in the request; -1: nowhere
  char* borrow();                                // nullptr: there is no memory
  void give_back(char* buffer);

  std::deque<Work*> queues_[priorities];
  std::unordered_map<int64_t, std::unique_ptr<Work>> works_;
  std::unordered_map<Piece*, std::unique_ptr<Piece>> pieces_;  // in flight
  int slots_lost_ = 0;
  double looked_ = 0.0;  // when write_off was called last
  bool hungry_ = false;  // take() has found room and nothing to do
  std::vector<IoDone> done_;
  bool nudged_ = false;  // reap() is to return although nothing has ended
  std::vector<int64_t> late_;
  std::vector<char*> buffers_;  // free ones
  std::atomic<bool> stopping_{false};
  const pid_t owner_;  // a forked child has no buffers: other memory may lie at their addresses
  int threads_running_ = 0;
  Fault fault_;
  int64_t attempts_ = 0;
};

std::shared_ptr<IoEngine> make_thread_engine(int depth, int64_t piece_bytes);

struct IoRegion {
  char* address;
  int64_t bytes;
};
// Throws std::system_error when the kernel forbids rings. `notes` gets what was asked for and refused.
std::shared_ptr<IoEngine> make_uring_engine(int depth, int64_t piece_bytes, const std::vector<IoRegion>& memory,
                                            const std::vector<int>& files, std::vector<std::string>& notes);
int probe_uring();  // 0, or the errno with which the kernel refuses

}  // namespace offload
