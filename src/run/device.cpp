#include "run/device.hpp"

#include "base/claim.hpp"
#include "base/log.hpp"
#include "muster/error.hpp"
#include "muster/launch.hpp"

#include <ATen/detail/CUDAHooksInterface.h>
#include <dlfcn.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <map>
#include <optional>
#include <sstream>

namespace muster::detail::run {
namespace {

/// Returns the UUID of a GPU; empty if it is unknown. Asks CUDA's driver, which libtorch has loaded, so muster can be
/// built without CUDA's headers.
std::string uuid_of_gpu(int index) {
  void* const driver = ::dlopen("libcuda.so.1", RTLD_LAZY | RTLD_NOLOAD);
  if (driver == nullptr) return {};
  const auto function = [&]<class Function>(const char* name, Function*& found) {
    found = reinterpret_cast<Function*>(::dlsym(driver, name));
    return found != nullptr;
  };
  int (*get_device)(int*, int) = nullptr;
  int (*get_uuid)(std::array<unsigned char, 16>*, int) = nullptr;
  int device = 0;
  std::array<unsigned char, 16> bytes{};
  std::string text;
  // The first version of the function returns the same UUID for all MIG instances of a GPU.
  const bool known = function("cuDeviceGet", get_device) &&
                     (function("cuDeviceGetUuid_v2", get_uuid) || function("cuDeviceGetUuid", get_uuid)) &&
                     get_device(&device, index) == 0 && get_uuid(&bytes, device) == 0;
  for (std::size_t i = 0; known && i < bytes.size(); ++i)
    text += (i == 4 || i == 6 || i == 8 || i == 10 ? "-" : "") + formatted("%02x", bytes[i]);
  ::dlclose(driver);
  return text;
}

std::vector<std::string> visible_gpus() {
  std::vector<std::string> gpus;
  for (int index = 0; index < at::detail::getCUDAHooks().deviceCount(); ++index) {
    auto name = uuid_of_gpu(index);
    gpus.push_back(name.empty() ? gpu_in_list(std::getenv("CUDA_VISIBLE_DEVICES"), index) : std::move(name));
  }
  return gpus;
}

/// The GPU of this process. It stays the same for all runs of the process, since CUDA keeps its allocations on it.
struct OwnGpu {
  std::size_t index = 0;
  std::optional<Claim> claim = {};
  /// Describes the other launch that uses the GPU, for a warning; empty if there is none.
  std::string shared_with = {};
};

OwnGpu claim_gpu(const std::vector<std::string>& gpus, const Launch& launch) {
  const auto is_other = [&](std::optional<pid_t> process) {
    return process && !launch.processes_of_host().contains(*process);
  };
  std::map<std::string, pid_t> others;
  std::set<std::string> taken;
  const auto note = [&](const std::string& gpu, pid_t process) {
    others[gpu] = process;
    taken.insert(gpu);
  };
  for (const auto& gpu : gpus)
    if (const auto holder = holder_of("gpu/" + gpu); is_other(holder)) note(gpu, *holder);
  for (;;) {
    OwnGpu own{.index = choose_gpu(gpus, taken, launch.local_process_index())};
    const auto& gpu = gpus[own.index];
    if (const auto other = others.find(gpu); other != others.end()) {
      own.shared_with = str("another muster launch", other->second > 0 ? str(" (process ", other->second, ")") : "",
                            " uses GPU ", gpu);
      return own;
    }
    Claim claim("gpu/" + gpu);
    if (!is_other(claim.other())) {
      own.claim = std::move(claim);
      return own;
    }
    note(gpu, *claim.other());  // another launch has claimed it in between
  }
}

/// None until this process has chosen its GPU.
std::optional<OwnGpu> own_gpu;

}  // namespace

std::size_t choose_gpu(const std::vector<std::string>& gpus, const std::set<std::string>& taken, int process_index) {
  std::vector<std::size_t> free;
  for (std::size_t index = 0; index < gpus.size(); ++index)
    if (!taken.contains(gpus[index])) free.push_back(index);
  const auto process = static_cast<std::size_t>(process_index);
  return free.empty() ? process % gpus.size() : free[process % free.size()];
}

std::string gpu_in_list(const char* visible, int index) {
  std::istringstream names(visible == nullptr ? "" : visible);
  std::string name;
  for (int i = 0; i <= index; ++i)
    if (!std::getline(names, name, ',')) return std::to_string(index);
  return name;
}

at::Device choose_device(bool use_gpu, const Launch& launch) {
  if (!use_gpu) return at::kCPU;
  const auto& hosts = launch.communicator().topology().hosts;
  const int count = at::detail::getCUDAHooks().deviceCount();
  if (count < 1)
    throw Error(ExitCode::data, "choosing the device",
                "use_gpu is set and host " + hosts[static_cast<std::size_t>(launch.rank())] +
                    " has no GPU that this libtorch can use",
                "Set use_gpu to false, or run where there is a GPU with a CUDA build of libtorch");
  if (launch.flags().bind == Bind::none)
    return at::Device(at::kCUDA, static_cast<at::DeviceIndex>(launch.local_process_index() % count));
  if (!own_gpu) own_gpu = claim_gpu(visible_gpus(), launch);
  return at::Device(at::kCUDA, static_cast<at::DeviceIndex>(own_gpu->index));
}

void warn_of_shared_gpus(const Launch& launch) {
  const auto& world = launch.communicator();
  const auto shared = world.all_gather(own_gpu ? own_gpu->shared_with : "");
  const auto first = std::ranges::find_if(shared, [](const auto& text) { return !text.empty(); });
  if (first == shared.end()) return;
  const auto rank = static_cast<std::size_t>(first - shared.begin());
  log::warn(
      str(*first, " of ", world.topology().hosts[rank], ", which rank ", rank,
          " of this one uses: the two slow each other. Start them one after the other, or give each its own GPUs with "
          "CUDA_VISIBLE_DEVICES"));
}

}  // namespace muster::detail::run
