#include "group/backends.hpp"
#include "muster/error.hpp"

namespace muster::group {
namespace {

[[noreturn]] void refuse(std::string_view part) {
  throw Error(ExitCode::usage, "starting the process group", "there is no backend \"" + std::string(part) + "\"",
              "Use auto, mpi, gloo or nccl, or name them by device, as in cpu:mpi,cuda:nccl");
}

void choose_one(Choice& choice, std::string_view part) {
  if (part == "mpi" || part == "cpu:mpi")
    choice.cpu = "mpi";
  else if (part == "gloo" || part == "cpu:gloo")
    choice.cpu = "gloo";
  else if (part == "nccl" || part == "cuda:nccl")
    choice.cuda = "nccl";
  else
    refuse(part);
}

}  // namespace

Choice choose(std::string_view text) {
  Choice choice;
  if (text == "auto") return choice;
  for (;;) {
    const auto comma = text.find(',');
    choose_one(choice, text.substr(0, comma));
    if (comma == std::string_view::npos) return choice;
    text.remove_prefix(comma + 1);
  }
}

}  // namespace muster::group
