#include "data.hpp"

#include <filesystem>

namespace example {

std::string data(const std::string& name, const std::string& file) {
  std::error_code ignored;
  const auto program = std::filesystem::read_symlink("/proc/self/exe", ignored);
  const auto installed = (program.parent_path() / EXAMPLES_INSTALLED / name / file).lexically_normal();
  return std::filesystem::exists(installed, ignored) ? installed.string() : EXAMPLES "/" + name + "/data/" + file;
}

}  // namespace example
