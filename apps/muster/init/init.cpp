// muster init: makes a project that builds and trains.
#include "../commands.hpp"
#include "../text.hpp"
#include "templates.hpp"

#include <muster/error.hpp>

#include <algorithm>
#include <cctype>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <memory>
#include <string>
#include <system_error>
#include <utility>

namespace muster::tool {
namespace {

namespace fs = std::filesystem;

std::string replaced(std::string text, const std::string& what, const std::string& by) {
  for (auto at = text.find(what); at != std::string::npos; at = text.find(what, at + by.size()))
    text.replace(at, what.size(), by);
  return text;
}

/// True if a CMake project and a program may have this name.
bool is_name(const std::string& name) {
  return !name.empty() && name.size() <= 60 && std::isalpha(static_cast<unsigned char>(name.front())) != 0 &&
         std::ranges::all_of(
             name, [](unsigned char c) { return c < 0x80 && (std::isalnum(c) != 0 || c == '_' || c == '-'); });
}

/// Returns where find_package() must look for muster, if this program is an installed one; otherwise empty.
std::string hints() {
  std::error_code ignored;
  const auto prefix = fs::canonical("/proc/self/exe", ignored).parent_path().parent_path();
  for (const char* libraries : {"lib", "lib64"})
    for (const auto& folder : {prefix / libraries / "cmake/muster"})
      if (fs::exists(folder / "musterConfig.cmake", ignored)) return " HINTS \"" + prefix.string() + "\"";
  return {};
}

void write(const fs::path& path, const std::string& text) {
  std::error_code error;
  fs::create_directories(path.parent_path(), error);
  std::ofstream file(path);
  file << text;
  if (error || !file.flush())
    throw Error(ExitCode::retry, "writing " + path.string(), error ? error.message() : std::strerror(errno),
                "Check the space and the permissions");
}

void init(const fs::path& folder) {
  if (folder.empty() || folder.string().starts_with("~/"))
    throw Error(ExitCode::usage, "making a project",
                folder.empty() ? "its folder has no name" : "the shell has not replaced the ~ in " + folder.string(),
                folder.empty() ? "Name a new one, as in muster init spirals" : "Leave the ~ out of quotes");
  const auto whole = fs::absolute(folder).lexically_normal();
  const auto name = (whole.has_filename() ? whole : whole.parent_path()).filename().string();
  const auto doing = "making the project " + folder.string();
  if (!is_name(name))
    throw Error(ExitCode::usage, doing, "\"" + name + "\" cannot be the name of a program",
                "Choose a folder whose name begins with a letter and has only letters, digits, - and _");
  std::error_code error;
  const auto status = fs::symlink_status(folder, error);
  const bool is_new = !fs::exists(status);
  if (!is_new && !(fs::is_directory(folder, error) && fs::is_empty(folder, error)))
    throw Error(ExitCode::usage, doing, "it exists and is not an empty folder", "Choose a new folder");
  const std::pair<fs::path, const char*> files[] = {{"CMakeLists.txt", cmake_template},
                                                    {name + ".cpp", program_template},
                                                    {"train.sbatch", batch_template},
                                                    {"README.md", readme_template},
                                                    {".github/workflows/test.yml", ci_template},
                                                    {".gitignore", gitignore_template}};
  const auto where = hints();
  try {
    for (const auto& [file, text] : files)
      write(folder / file, replaced(replaced(text, "%NAME%", name), "%HINTS%", where));
  } catch (...) {
    // Remove what was written: half a project would be in the way of the next try.
    if (is_new)
      fs::remove_all(folder, error);
    else
      for (const auto& entry : fs::directory_iterator(folder, error)) fs::remove_all(entry.path(), error);
    throw;
  }
  std::cout << "made " << printable(folder.string()) << "; now\n"
            << "  cd " << printable(folder.string()) << "\n"
            << "  cmake -B build" << (where.empty() ? " -DCMAKE_PREFIX_PATH=PREFIX" : "") << " && cmake --build build\n"
            << "  mpirun -n 2 build/bin/" << name << " --name demo\n";
  if (where.empty()) std::cout << "PREFIX is where muster is installed. For its sources: -DMUSTER_SOURCE=FOLDER\n";
}

}  // namespace

void add_init(CLI::App& app) {
  auto folder = std::make_shared<fs::path>();
  auto* command = app.add_subcommand("init", "Make a project that builds and trains");
  command->add_option("folder", *folder, "New folder; its name is the program's")->option_text("FOLDER")->required();
  command->footer("Example:\n  muster init spirals");
  command->callback([folder] { init(*folder); });
}

}  // namespace muster::tool
