#include "base/text.hpp"
#include "doctor/checks.hpp"
#include "hdf5/library.hpp"
#include "muster/version.hpp"

#include <ATen/Parallel.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <torch/version.h>

#include <regex>

namespace muster::detail::doctor {
namespace {

/// Counts the device files of NVIDIA's GPUs, such as /dev/nvidia0.
int gpus_of_node(const std::filesystem::path& root) {
  int count = 0;
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator(root / "dev", error))
    count += std::regex_match(entry.path().filename().string(), std::regex("nvidia[0-9]+")) ? 1 : 0;
  return count;
}

std::string hdf5_series(const std::string& version) { return version.substr(0, version.rfind('.')); }

}  // namespace

Json look_at_libraries(const std::filesystem::path& root) {
  const auto& cuda = at::detail::getCUDAHooks();
  return {{"muster", MUSTER_VERSION},
          {"libtorch", TORCH_VERSION},
          {"torch_threads", at::get_num_threads()},
          {"cuda", cuda.hasCUDART()},
          {"gpus", static_cast<int>(cuda.deviceCount())},
          {"gpus_of_node", gpus_of_node(root)},
          {"hdf5", hdf5::loaded_version()},
          {"hdf5_built", hdf5::compiled_version()},
          {"hdf5_parallel", hdf5::is_parallel()},
          {"hdf5_thread_safe", hdf5::is_thread_safe()}};
}

Findings check_libraries(const Json& facts) {
  using enum Finding::Severity;
  const bool cuda = facts.at("cuda");
  const int gpus = facts.at("gpus"), of_node = facts.at("gpus_of_node");
  const auto gpu = [](int count) { return counted(count, "GPU"); };
  Finding torch{ok, "libtorch",
                facts.at("libtorch").get<std::string>() + (cuda ? ", CUDA build, " + gpu(gpus) : ", CPU build")};
  if (of_node > 0 && !cuda)
    torch = {warning, "libtorch", "the node has " + gpu(of_node) + ", and this libtorch is built for CPUs alone",
             "To use them build muster with a CUDA build of libtorch (scripts/setup --gpu)"};
  else if (of_node > 0 && gpus == 0)
    torch = {warning, "libtorch", "the node has " + gpu(of_node) + ", and libtorch sees none",
             "Look at CUDA_VISIBLE_DEVICES, at the GPUs of the job, and at the driver with nvidia-smi"};
  else if (cuda && gpus == 0)
    torch = {warning, "libtorch", "it is built for GPUs, and the node has none", "Leave use_gpu off here"};

  const auto loaded = facts.at("hdf5").get<std::string>(), built = facts.at("hdf5_built").get<std::string>();
  Finding hdf5{ok, "HDF5",
               loaded + (facts.at("hdf5_parallel") == true ? ", parallel" : ", serial") +
                   (facts.at("hdf5_thread_safe") == true ? ", thread-safe" : "; muster lets in one thread at a time")};
  if (hdf5_series(loaded) != hdf5_series(built))  // if they differ, HDF5 ends the process
    hdf5 = {to_mend, "HDF5", "version " + loaded + " is loaded, and muster was built with " + built,
            "Load the module of that version, correct LD_LIBRARY_PATH, or build muster again"};
  return {torch, hdf5};
}

}  // namespace muster::detail::doctor
