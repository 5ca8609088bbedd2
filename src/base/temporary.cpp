#include "base/temporary.hpp"

#include "muster/error.hpp"

#include <pwd.h>
#include <stdlib.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <system_error>

namespace muster::detail {

std::filesystem::path temporary_parent() {
  const char* const named = std::getenv("TMPDIR");
  const bool is_named = named != nullptr && *named != '\0';
  const std::filesystem::path path = is_named ? named : "/tmp";
  std::error_code ignored;
  if (std::filesystem::is_directory(path, ignored)) return path;
  throw Error(ExitCode::usage, "making a folder for temporary files",
              is_named ? "TMPDIR is " + path.string() + ", and that is no folder" : "there is no /tmp",
              "Set TMPDIR to a folder that is there");
}

TemporaryFolder::TemporaryFolder(const std::string& prefix, const std::filesystem::path& parent) {
  auto name = (parent / (prefix + "XXXXXX")).string();
  if (::mkdtemp(name.data()) == nullptr)
    throw Error(ExitCode::retry, "making a folder in " + parent.string(), std::strerror(errno),
                "Name another one with TMPDIR");
  path_ = name;
}

TemporaryFolder::~TemporaryFolder() {
  std::error_code ignored;
  std::filesystem::remove_all(path_, ignored);
}

void ensure_home() noexcept {
  if (std::getenv("HOME") == nullptr && ::getpwuid(::geteuid()) == nullptr) ::setenv("HOME", "/nonexistent", 0);
}

}  // namespace muster::detail
