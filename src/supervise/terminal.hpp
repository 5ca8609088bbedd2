// Writes to this process's stderr (messages of the ranks and of this process) or stdout. The reader may have stopped
// reading (a full pipe, a terminal after Ctrl-S); this process must still react to its signals.
#pragma once

#include "supervise/signals.hpp"

#include <poll.h>

#include <string>

namespace muster::detail::supervise {

class Terminal {
 public:
  explicit Terminal(Signals& signals, int file) : signals_(signals), file_(file) {}

  /// Adds text that write_some() or flush() will write.
  void add(const std::string& text) { pending_ += text; }
  /// True if so much text waits to be written that no more should be read from the ranks.
  bool is_full() const noexcept { return pending_.size() >= most_pending; }
  /// Returns what to poll; when it is ready, call write_some().
  pollfd source() const noexcept;
  /// Writes as much as can be written without blocking.
  void write_some();
  /// Writes everything. After a second Ctrl-C, or if nothing can be written for some time after a request to stop,
  /// drops what is left and returns false.
  bool flush();

  void warn(const std::string& text);
  void error(const std::string& text);

 private:
  static constexpr std::size_t most_pending = 1 << 20;  // bytes

  bool is_writable() const noexcept;

  Signals& signals_;
  int file_;
  std::string pending_;
  bool is_unread_ = false;  ///< true if nothing could be written for too long
};

}  // namespace muster::detail::supervise
