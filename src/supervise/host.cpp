#include "supervise/host.hpp"

#include <sys/ioctl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <string_view>

namespace muster::detail::supervise {

std::string host_name() {
  std::array<char, 256> name{};
  return ::gethostname(name.data(), name.size() - 1) == 0 ? name.data() : "";
}

std::vector<std::string> flag_variables() {
  std::vector<std::string> names;
  for (char** entry = environ; *entry != nullptr; ++entry)
    if (const std::string_view text = *entry; text.starts_with("MUSTER_"))
      names.emplace_back(text.substr(0, text.find('=')));
  return names;
}

bool has_input() {
  struct stat input {};
  if (::fstat(STDIN_FILENO, &input) != 0) return false;
  if (S_ISREG(input.st_mode)) return ::lseek(STDIN_FILENO, 0, SEEK_CUR) < input.st_size;
  int bytes = 0;
  return S_ISFIFO(input.st_mode) && ::ioctl(STDIN_FILENO, FIONREAD, &bytes) == 0 && bytes > 0;
}

}  // namespace muster::detail::supervise
