#include "replace_file.hpp"

#include <muster/error.hpp>

#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <fstream>
#include <system_error>

namespace muster::tool {

namespace fs = std::filesystem;

void replace_file(const fs::path& output, const std::string& text) {
  std::error_code error, ignored;
  const auto target = fs::is_symlink(output, ignored) ? fs::canonical(output, ignored) : output;
  auto unfinished = target;
  unfinished += "." + std::to_string(::getpid()) + ".new";
  std::ofstream file(unfinished, std::ios::binary | std::ios::trunc);
  file << text << std::flush;
  const bool is_written = file.good();
  const std::string reason = std::strerror(errno);
  file.close();
  if (const auto before = fs::status(target, ignored); fs::exists(before))
    fs::permissions(unfinished, before.permissions(), ignored);
  if (is_written) fs::rename(unfinished, target, error);
  if (is_written && !error) return;
  fs::remove(unfinished, ignored);
  throw Error(ExitCode::retry, "writing " + output.string(), is_written ? error.message() : reason,
              "Check the space and the permissions there");
}

}  // namespace muster::tool
