// What torch asks a device for: the guard (devices, streams, events) and the hooks (memory, generators).
#include "generator.h"
#include "host.h"
#include "memory.h"
#include "view.h"

#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace fake {

void resize_storage(c10::StorageImpl* storage, size_t nbytes);

namespace {

Queue& queue_of(const c10::Stream& stream) { return find_queue(stream.device_index(), stream.id()); }

c10::Stream stream_of(const Queue& queue) {
  c10::Device device(kFake, static_cast<c10::DeviceIndex>(queue.device));
  return c10::Stream(c10::Stream::UNSAFE, device, queue.id);
}

int index_of(c10::Device device) { return device.has_index() ? device.index() : current_device(); }

Place place_of(void* event) { return event ? *static_cast<Place*>(event) : Place{}; }

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kFake; }

  c10::Device exchangeDevice(c10::Device device) const override {
    return {kFake, static_cast<c10::DeviceIndex>(exchange_device(index_of(device)))};
  }
  c10::Device getDevice() const override { return {kFake, static_cast<c10::DeviceIndex>(current_device())}; }
  void setDevice(c10::Device device) const override { exchange_device(index_of(device)); }
  void uncheckedSetDevice(c10::Device device) const noexcept override { exchange_device(index_of(device)); }
  c10::DeviceIndex deviceCount() const noexcept override { return kDevices; }
  c10::DeviceCapability getDeviceCapability(c10::Device) const override { return {}; }

  c10::Stream getStream(c10::Device device) const override { return stream_of(current_queue(index_of(device))); }
  c10::Stream getDefaultStream(c10::Device device) const override { return stream_of(default_queue(index_of(device))); }
  c10::Stream getNewStream(c10::Device device, int) const override { return stream_of(new_queue(index_of(device))); }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return getNewStream(device, 0); }
  c10::Stream exchangeStream(c10::Stream stream) const override { return stream_of(exchange_queue(queue_of(stream))); }
  void* getStreamNativeHandle(const c10::Stream stream) const override { return &queue_of(stream); }
  bool queryStream(const c10::Stream& stream) const override { return query(queue_of(stream).end()); }
  void synchronizeStream(const c10::Stream& stream) const override { host_wait(queue_of(stream).end()); }
  void synchronizeDevice(const c10::DeviceIndex device) const override { host_wait_device(device); }

  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag) const override {
    Lock lock;
    if (!*event) *event = new Place;
    *static_cast<Place*>(*event) = queue_of(stream).end();
  }
  void block(void* event, const c10::Stream& stream) const override { wait(queue_of(stream), place_of(event)); }
  bool queryEvent(void* event) const override { return query(place_of(event)); }
  void synchronizeEvent(void* event) const override { host_wait(place_of(event)); }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete static_cast<Place*>(event); }

  // There is no time on this device.
  double elapsedTime(void* event1, void* event2, const c10::DeviceIndex) const override {
    TORCH_CHECK(place_of(event1).passed() && place_of(event2).passed(), "fake: both events must be completed");
    return 0.0;
  }

  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    record_use(data, queue_of(stream));
  }
};

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return kDevices; }
  void setCurrentDevice(c10::DeviceIndex device) const override { exchange_device(device); }
  c10::DeviceIndex getCurrentDevice() const override { return static_cast<c10::DeviceIndex>(current_device()); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    return static_cast<c10::DeviceIndex>(device < 0 ? current_device() : exchange_device(device));
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override { return exchangeDevice(device); }

  bool isPinnedPtr(const void* data) const override { return is_locked(data, 1); }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator(); }
  at::Device getDeviceFromPtr(void* data) const override {
    TORCH_CHECK(device_of(data) >= 0, "fake: this address is not in device memory");
    return {kFake, static_cast<c10::DeviceIndex>(device_of(data))};
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override { return default_generator(device); }
  at::Generator getNewGenerator(c10::DeviceIndex device) const override {
    return new_generator(device < 0 ? current_device() : device);
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t newsize) const override {
    resize_storage(storage.unsafeGetStorageImpl(), newsize);
  }
};

c10::impl::DeviceGuardImplRegistrar guard_registration(kFake, new Guard);

bool hooks_registration = [] {
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  c10::SetAllocator(kFake, &device_allocator());
  at::setHostAllocator(kFake, &pinned_allocator());
  return true;
}();

}  // namespace
}  // namespace fake
