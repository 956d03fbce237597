// The engine for every POSIX system: as many threads as operations may be in flight, each with pread or pwrite.
#include <unistd.h>

#include <cerrno>

#include "io_engine.h"

namespace offload {
namespace {

class ThreadEngine final : public IoEngine {
 public:
  using IoEngine::IoEngine;

 private:
  void drive() override {
    while (Piece* piece = take(true)) {
      int64_t result;
      do {
        result = attempt(*piece);
      } while (result != never && again(*piece, result));
    }
  }

  int64_t attempt(Piece& piece) {
    int64_t result = 0;
    if (faulted(piece, result)) return result;
    const IoRequest& r = piece.work->request;
    const off_t offset = r.offset + piece.begin + piece.moved;
    result = r.write ? pwrite(r.fd, at(piece), size_t(left(piece)), offset)
                     : pread(r.fd, at(piece), size_t(left(piece)), offset);
    return result < 0 ? -errno : result;
  }
};

}  // namespace

std::shared_ptr<IoEngine> make_thread_engine(int depth, int64_t piece_bytes) {
  auto engine = std::make_shared<ThreadEngine>(depth, piece_bytes);
  engine->start(depth);
  return engine;
}

}  // namespace offload
