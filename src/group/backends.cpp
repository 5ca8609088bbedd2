#include "group/backends.hpp"
#include "base/text.hpp"
#include "muster/error.hpp"

#include <set>

namespace muster::detail::group {
namespace {

[[noreturn]] void refuse(const std::string& fact) {
  throw Error(ExitCode::usage, "starting the process group", fact,
              "Use auto, mpi, gloo or nccl, or name them by device, as in cpu:mpi,cuda:nccl");
}

void choose_one(BackendChoice& choice, std::set<std::string_view>& devices, std::string_view part) {
  const auto colon = part.find(':');
  const bool all = colon == std::string_view::npos;
  const auto device = all ? "" : part.substr(0, colon);
  const auto name = all ? part : part.substr(colon + 1);
  const bool everywhere = name == "mpi" || name == "gloo";
  if ((!all && device != "cpu" && device != "cuda") || (!everywhere && (name != "nccl" || device == "cpu")))
    refuse(str("there is no backend \"", part, "\""));
  if (devices.contains(device) || (all && !devices.empty()) || devices.contains(""))
    refuse(str("\"", part, "\" is for a device that has a backend already"));
  devices.insert(device);
  if (everywhere && device != "cuda") choice.cpu = name;
  if (device != "cpu") choice.cuda = name;
}

}  // namespace

BackendChoice parse_backends(std::string_view text) {
  BackendChoice choice;
  if (text == "auto") return choice;
  for (std::set<std::string_view> devices;;) {
    const auto comma = text.find(',');
    choose_one(choice, devices, text.substr(0, comma));
    if (comma == std::string_view::npos) return choice;
    text.remove_prefix(comma + 1);
  }
}

std::string backends_for_gpus(std::string_view text, bool has_nccl) {
  const bool open = text == "auto" || (text.starts_with("cpu:") && text.find(',') == std::string_view::npos);
  if (!open || !has_nccl) return std::string(text);
  return text == "auto" ? "nccl" : str(text, ",cuda:nccl");
}

#if !defined(MUSTER_HAS_GLOO)
bool has_gloo() noexcept { return false; }
c10::intrusive_ptr<c10d::Backend> make_gloo(const Communicator&, const c10::intrusive_ptr<c10d::Store>&,
                                            std::chrono::milliseconds) {
  throw Error(ExitCode::usage, "starting the process group",
              "this muster has no gloo backend, since gloo's headers were not there when it was built",
              "Install libgloo-dev and build again, or use --backend mpi");
}
#endif

#if !defined(MUSTER_HAS_NCCL)
bool has_nccl() noexcept { return false; }
c10::intrusive_ptr<c10d::Backend> make_nccl(const Communicator&, const c10::intrusive_ptr<c10d::Store>&,
                                            std::chrono::milliseconds) {
  throw Error(ExitCode::usage, "starting the process group",
              "this muster has no NCCL backend, since it was built with a libtorch without CUDA and NCCL",
              "Build it with a CUDA build of libtorch (Torch_DIR names one), or use --backend mpi");
}
#endif

}  // namespace muster::detail::group
