// Free space as pure integers: offload/core/extents.py in C++, which is its judge in the tests. The disk store asks for every
// write; a call is done or not done: no signal leaves it half done.
#pragma once

#include <cstdint>
#include <map>
#include <set>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <utility>

namespace offload {

// The range [0, capacity), cut into taken and free pieces whose borders are multiples of `align`. Best fit, lowest first;
// neighbours that are free are always one piece. Not thread-safe. Where there is no memory, nothing has changed.
class Extents {
 public:
  Extents(int64_t capacity, int64_t align) : capacity_(capacity), align_(align) {
    if (capacity < 0 || align < 1 || capacity % align != 0) {
      throw std::invalid_argument("extents: capacity " + std::to_string(capacity) + " is not a multiple of " +
                                  std::to_string(align));
    }
    if (capacity > 0) {
      free_.emplace(0, capacity);
      by_size_.emplace(capacity, 0);
    }
  }

  // Begin of the smallest free piece of at least `size`; negative: there is none. Nothing is changed.
  int64_t find(int64_t size) const {
    if (size < 1) throw std::invalid_argument("extents: expected a size from 1 on, got " + std::to_string(size));
    if (size > capacity_) return -1;  // also what cannot be rounded up
    const auto found = by_size_.lower_bound({round_up(size), 0});
    return found == by_size_.end() ? -1 : found->second;
  }

  // Takes the first `size` of the free piece that starts at `begin`.
  void take_at(int64_t begin, int64_t size) {
    const auto found = free_.find(begin);
    if (found == free_.end() || size < 1 || size > found->second || round_up(size) > found->second) {
      throw std::invalid_argument("extents: " + std::to_string(size) + " are not free at " + std::to_string(begin));
    }
    size = round_up(size);
    taken_.emplace(begin, size);
    used_ += size;
    auto piece = free_.extract(found);  // the nodes are used again: no memory is asked for
    auto place = by_size_.extract({piece.mapped(), begin});
    if (piece.mapped() == size) return;
    piece.key() = begin + size;
    piece.mapped() -= size;
    place.value() = {piece.mapped(), piece.key()};
    free_.insert(std::move(piece));
    by_size_.insert(std::move(place));
  }

  // Makes the piece that starts at `begin` free again, joined with its free neighbours.
  void give_back(int64_t begin) {
    const auto taken = taken_.find(begin);
    if (taken == taken_.end()) throw std::invalid_argument("extents: nothing is taken at " + std::to_string(begin));
    const int64_t size = taken->second;
    const auto after = free_.lower_bound(begin);
    const bool joins_after = after != free_.end() && after->first == begin + size;
    auto before = after;
    const bool joins_before = after != free_.begin() && (--before)->first + before->second == begin;
    const int64_t whole = size + (joins_after ? after->second : 0) + (joins_before ? before->second : 0);
    const auto place = by_size_.emplace(whole, joins_before ? before->first : begin).first;
    if (joins_before) {
      by_size_.erase({before->second, before->first});
      before->second = whole;
    } else {
      try {
        free_.emplace_hint(after, begin, whole);
      } catch (...) {
        by_size_.erase(place);
        throw;
      }
    }
    if (joins_after) {
      by_size_.erase({after->second, after->first});
      free_.erase(after);
    }
    taken_.erase(taken);
    used_ -= size;
  }

  bool is_taken(int64_t begin) const { return taken_.count(begin) > 0; }
  int64_t capacity() const { return capacity_; }
  int64_t used() const { return used_; }
  int64_t largest_free() const { return by_size_.empty() ? 0 : by_size_.rbegin()->first; }

 private:
  int64_t round_up(int64_t size) const { return (size + align_ - 1) / align_ * align_; }

  const int64_t capacity_, align_;
  std::map<int64_t, int64_t> free_;                // begin -> size
  std::set<std::pair<int64_t, int64_t>> by_size_;  // the same as (size, begin)
  std::unordered_map<int64_t, int64_t> taken_;     // begin -> size
  int64_t used_ = 0;
};

}  // namespace offload
