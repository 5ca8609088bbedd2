#include "run/device.hpp"

#include "muster/error.hpp"
#include "muster/launch.hpp"

#include <ATen/detail/CUDAHooksInterface.h>

namespace muster::detail::run {

at::Device choose_device(bool use_gpu, const Launch& launch) {
  if (!use_gpu) return at::kCPU;
  const auto& hosts = launch.communicator().topology().hosts;
  const int gpus = at::detail::getCUDAHooks().deviceCount();
  if (gpus < 1)
    throw Error(ExitCode::data, "choosing the device",
                "use_gpu is set and host " + hosts[static_cast<std::size_t>(launch.rank())] +
                    " has no GPU that this libtorch can use",
                "Set use_gpu to false, or run where there is a GPU with a CUDA build of libtorch");
  return at::Device(at::kCUDA, static_cast<at::DeviceIndex>(launch.local_process_index() % gpus));
}

}  // namespace muster::detail::run
