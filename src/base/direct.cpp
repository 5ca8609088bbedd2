#include "base/direct.hpp"

#include "muster/error.hpp"

#include <fcntl.h>

#include <cerrno>
#include <cstring>

namespace muster::detail {
namespace {

bool bypass_cache(const File& file) noexcept {
  const int flags = ::fcntl(file.descriptor(), F_GETFL);
  return flags >= 0 && ::fcntl(file.descriptor(), F_SETFL, flags | O_DIRECT) == 0;
}

}  // namespace

void allocate(File& file, std::uint64_t size) {
  int status;
  do status = ::fallocate(file.descriptor(), 0, 0, static_cast<off_t>(size));
  while (status != 0 && errno == EINTR);
  if (status == 0) return;
  if (errno != EOPNOTSUPP && errno != ENOSYS)
    throw Error(ExitCode::retry, "taking space for " + file.path().string(), std::strerror(errno),
                "Free some space there, or choose another folder (of runs: --storage)");
  file.truncate(size);
}

void write_directly(File& file) noexcept { bypass_cache(file); }

bool read_directly(File& file) noexcept { return bypass_cache(file); }

void write_through_cache(int descriptor) noexcept {
  if (const int flags = ::fcntl(descriptor, F_GETFL); flags >= 0) ::fcntl(descriptor, F_SETFL, flags & ~O_DIRECT);
}

}  // namespace muster::detail
