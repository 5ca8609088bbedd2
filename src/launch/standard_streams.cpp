// Opens /dev/null in place of closed standard streams. Otherwise the next file or pipe that the process opens would get
// the number of standard output or error, and messages would be written into it.
#include <fcntl.h>
#include <unistd.h>

namespace muster::detail::launch {
namespace {

[[gnu::constructor(101)]] void open_closed_streams() noexcept {
  for (int descriptor = 0; descriptor <= 2; ++descriptor)
    if (::fcntl(descriptor, F_GETFD) == -1) static_cast<void>(::open("/dev/null", O_RDWR));  // gets the lowest number
}

}  // namespace
}  // namespace muster::detail::launch
