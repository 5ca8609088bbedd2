// Ends a program whose working directory has been removed, before libtorch's libraries are initialised: oneMKL would
// end it with an unclear message.
#include "muster/error.hpp"

#include <unistd.h>

#include <cerrno>
#include <climits>
#include <string_view>

namespace muster::detail::launch {
namespace {

[[gnu::constructor]] void require_working_directory() noexcept {
  char path[PATH_MAX];
  if (::getcwd(path, sizeof path) != nullptr || errno != ENOENT) return;
  constexpr std::string_view text =
      "muster: error: starting: the working directory is gone. Change to a folder that is there\n";
  static_cast<void>(!::write(STDERR_FILENO, text.data(), text.size()));
  ::_exit(static_cast<int>(ExitCode::usage));
}

}  // namespace
}  // namespace muster::detail::launch
