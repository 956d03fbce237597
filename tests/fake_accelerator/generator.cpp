#include "generator.h"

#include "stream.h"
#include "view.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>

#include <cstring>
#include <mutex>

namespace fake {
namespace {

class Generator final : public c10::GeneratorImpl {
 public:
  explicit Generator(int device)
      : GeneratorImpl(c10::Device(kFake, static_cast<c10::DeviceIndex>(device)),
                      c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)) {}

  void set_current_seed(uint64_t seed) override {
    seed_ = seed;
    offset_ = 0;
  }
  uint64_t current_seed() const override { return seed_; }
  void set_offset(uint64_t offset) override { offset_ = offset; }
  uint64_t get_offset() const override { return offset_; }

  uint64_t seed() override {
    set_current_seed(c10::detail::getNonDeterministicRandom());
    return seed_;
  }

  void set_state(const c10::TensorImpl& state) override {
    TORCH_CHECK(state.numel() == kState && state.device().is_cpu(), "fake: a state has ", kState, " bytes on the CPU");
    const auto* bytes = static_cast<const char*>(state.data());
    std::memcpy(&seed_, bytes, sizeof(seed_));
    std::memcpy(&offset_, bytes + sizeof(seed_), sizeof(offset_));
  }

  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    at::TensorBase state = at::detail::empty_cpu({kState}, at::kByte);
    auto* bytes = static_cast<char*>(state.mutable_data_ptr());
    std::memcpy(bytes, &seed_, sizeof(seed_));
    std::memcpy(bytes + sizeof(seed_), &offset_, sizeof(offset_));
    return state.getIntrusivePtr();
  }

  // splitmix64 over (seed, offset)
  uint64_t next() {
    uint64_t z = seed_ * 0xD1342543DE82EF95ull + ++offset_ * 0x9E3779B97F4A7C15ull;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
    return z ^ (z >> 31);
  }

 private:
  Generator* clone_impl() const override {
    auto* copy = new Generator(device_.index());
    copy->seed_ = seed_;
    copy->offset_ = offset_;
    return copy;
  }

  static constexpr int64_t kState = 16;
  uint64_t seed_ = c10::default_rng_seed_val;
  uint64_t offset_ = 0;
};

}  // namespace

at::Generator new_generator(int device) { return at::make_generator<Generator>(device); }

const at::Generator& default_generator(int device) {
  static auto* all = new std::vector<at::Generator>([] {
    std::vector<at::Generator> made;
    for (int index = 0; index < kDevices; ++index) made.push_back(new_generator(index));
    return made;
  }());
  return all->at(device < 0 ? current_device() : device);
}

uint64_t draw(const at::Generator& generator, int device) {
  const at::Generator& used = generator.defined() ? generator : default_generator(device);
  TORCH_CHECK(used.device().type() == kFake, "fake: expected a generator of this device, got one of ", used.device());
  std::lock_guard<std::mutex> guard(used.unsafeGetGeneratorImpl()->mutex_);
  return static_cast<Generator*>(used.unsafeGetGeneratorImpl())->next();
}

at::Generator host_generator(uint64_t seed) { return at::detail::createCPUGenerator(seed); }

SeededHost::SeededHost(uint64_t seed) {
  const at::Generator& host = at::detail::getDefaultCPUGenerator();
  std::lock_guard<std::mutex> guard(host.unsafeGetGeneratorImpl()->mutex_);
  state_ = host.unsafeGetGeneratorImpl()->get_state();
  host.unsafeGetGeneratorImpl()->set_current_seed(seed);
}

SeededHost::~SeededHost() {
  const at::Generator& host = at::detail::getDefaultCPUGenerator();
  std::lock_guard<std::mutex> guard(host.unsafeGetGeneratorImpl()->mutex_);
  host.unsafeGetGeneratorImpl()->set_state(*state_);
}

}  // namespace fake
