// Loaded before a CPU build of PyTorch is imported, this lets fake tensors on "cuda" go forward and backward: a device
// guard that does nothing, and hooks that say there is one device.
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace at {
namespace {

const Device FIRST(kCUDA, 0);

struct NoDevice : c10::impl::NoOpDeviceGuardImpl<kCUDA> {
  Device exchangeDevice(Device) const override { return FIRST; }
  Device getDevice() const override { return FIRST; }
  Stream getStream(Device) const noexcept override { return Stream(Stream::DEFAULT, FIRST); }
  Stream getDefaultStream(Device) const override { return Stream(Stream::DEFAULT, FIRST); }
  Stream exchangeStream(Stream) const noexcept override { return Stream(Stream::DEFAULT, FIRST); }
  void record(void**, const Stream&, const DeviceIndex, const EventFlag) const override {}
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const DeviceIndex) const noexcept override {}
};

C10_REGISTER_GUARD_IMPL(CUDA, NoDevice)

struct OneDevice : CUDAHooksInterface {
  OneDevice(CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return 1; }
  DeviceIndex getCurrentDevice() const override { return 0; }
};

C10_REGISTER_CLASS(CUDAHooksRegistry, CUDAHooks, OneDevice)

}  // namespace
}  // namespace at
