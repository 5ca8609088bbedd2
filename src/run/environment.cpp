#include "run/environment.hpp"

#include "base/cpus.hpp"
#include "base/host.hpp"
#include "comm/mpi_scope.hpp"
#include "launch/supervised.hpp"

#include <torch/version.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <fstream>
#include <sstream>
#include <string_view>
#include <system_error>
#include <vector>

namespace muster::detail::run {
namespace {

namespace fs = std::filesystem;

/// Returns the Git folder of the checkout around `folder`: .git, or the folder that the file .git names; empty if there
/// is none.
fs::path git_folder(fs::path folder) {
  for (std::error_code error; !folder.empty(); folder = folder.parent_path()) {
    const auto found = folder / ".git";
    if (fs::is_directory(found, error)) return found;
    if (fs::is_regular_file(found, error)) {
      constexpr std::string_view key = "gitdir: ";
      const auto line = first_line(found);
      return line.starts_with(key) ? folder / line.substr(key.size()) : fs::path();
    }
    if (folder == folder.root_path()) break;
  }
  return {};
}

bool is_commit(const std::string& text) {
  return text.size() >= 40 && std::ranges::all_of(text, [](char c) {
           return std::string_view("0123456789abcdef").find(c) != std::string_view::npos;
         });
}

/// Returns the words of a process's command line.
std::vector<std::string> command_of(int process) {
  std::ifstream file(fs::path("/proc") / std::to_string(process) / "cmdline", std::ios::binary);
  std::vector<std::string> words;
  for (std::string word; std::getline(file, word, '\0');) words.push_back(word);
  return words;
}

/// Returns the command line of the outermost launcher among this process's ancestors; empty if there is none.
std::vector<std::string> launcher() {
  constexpr std::array names{"mpirun", "mpiexec", "mpiexec.hydra", "orterun", "prterun", "srun", "muster"};
  std::vector<std::string> found;
  for (int process = ::getppid(); process > 1; process = launch::parent_of(process)) {
    const auto words = command_of(process);
    if (words.empty()) continue;
    const auto name = fs::path(words.front()).filename().string();
    if (std::ranges::find(names, name) != names.end()) found = words;
  }
  return found;
}

std::vector<std::string> loaded_modules() {
  std::istringstream text(value_of("LOADEDMODULES"));
  std::vector<std::string> modules;
  for (std::string module; std::getline(text, module, ':');)
    if (!module.empty()) modules.push_back(module);
  return modules;
}

}  // namespace

std::string git_commit(fs::path folder) {
  const auto git = git_folder(std::move(folder));
  if (git.empty()) return {};
  const auto head = first_line(git / "HEAD");
  constexpr std::string_view key = "ref: ";
  if (!head.starts_with(key)) return is_commit(head) ? head : "";
  const auto name = head.substr(key.size());
  // A working tree made by `git worktree` has its branches in the Git folder of the main checkout.
  const auto common = first_line(git / "commondir");
  const auto branches = common.empty() ? git : git / common;
  if (const auto commit = first_line(branches / name); is_commit(commit)) return commit;
  std::ifstream packed(branches / "packed-refs");
  for (std::string line; std::getline(packed, line);)
    if (const auto space = line.find(' '); space != std::string::npos && line.substr(space + 1) == name)
      if (const auto commit = line.substr(0, space); is_commit(commit)) return commit;
  return {};
}

Json environment() {
  Json found = Json::object();
  const auto add = [&](const char* key, const auto& value) {
    if (!value.empty()) found[key] = value;
  };
  std::error_code error;
  const auto program = fs::read_symlink("/proc/self/exe", error);
  auto commit = git_commit(program.parent_path());
  if (commit.empty()) commit = git_commit(fs::current_path(error));
  add("mpi", comm::mpi_library());
  add("libtorch", std::string(TORCH_VERSION));
  add("compiler", std::string(__VERSION__));
  add("cpu", cpu_model());
  add("modules", loaded_modules());
  add("program_commit", commit);
  add("command", command_of(::getpid()));
  add("launcher", launcher());
  return found;
}

}  // namespace muster::detail::run
