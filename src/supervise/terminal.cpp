#include "supervise/terminal.hpp"

#include "base/log.hpp"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <climits>

namespace muster::detail::supervise {
namespace {

/// How long to wait, after a request to stop, for a reader that does not read.
constexpr int time_for_reader_ms = 5000;

}  // namespace

bool Terminal::is_writable() const noexcept {
  pollfd now{file_, POLLOUT, 0};
  return ::poll(&now, 1, 0) > 0;
}

pollfd Terminal::source() const noexcept {
  // Not polled if there is nothing to write: a file whose reader is gone would end every poll() at once.
  return {pending_.empty() ? -1 : file_, POLLOUT, 0};
}

void Terminal::write_some() {
  // Writing at most PIPE_BUF bytes to a pipe that is writable does not block.
  while (!pending_.empty() && is_writable()) {
    const auto count = ::write(file_, pending_.data(), std::min<std::size_t>(pending_.size(), PIPE_BUF));
    if (count < 0 && (errno == EINTR || errno == EAGAIN)) return;
    if (count < 0) return pending_.clear();  // the reader is gone
    pending_.erase(0, static_cast<std::size_t>(count));
  }
}

bool Terminal::flush() {
  for (write_some(); !pending_.empty() || !is_writable(); write_some()) {
    if (signals_.stop_immediately() || (signals_.stop_requested() && is_unread_)) {
      pending_.clear();
      return false;
    }
    std::array<pollfd, 2> sources{{{signals_.descriptor(), POLLIN, 0}, {file_, POLLOUT, 0}}};
    is_unread_ = ::poll(sources.data(), sources.size(), time_for_reader_ms) == 0;
    signals_.take();
  }
  return true;
}

void Terminal::warn(const std::string& text) {
  if (flush()) log::warn(text);
}
void Terminal::error(const std::string& text) {
  if (flush()) log::error(text);
}

}  // namespace muster::detail::supervise
