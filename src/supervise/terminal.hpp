// This process's stderr, to which the ranks' messages and our own go, or its stdout. The reader may have stopped
// reading (a pipe that is full, a terminal after Ctrl-S); that must not keep this process from its signals.
#pragma once

#include "supervise/signals.hpp"

#include <poll.h>

#include <string>

namespace muster::detail::supervise {

class Terminal {
 public:
  explicit Terminal(Signals& signals, int file) : signals_(signals), file_(file) {}

  /// Adds text to what is to be written.
  void add(const std::string& text) { pending_ += text; }
  /// True if so much text waits to be written that no more should be read from the ranks.
  bool is_full() const noexcept { return pending_.size() >= most_pending; }
  /// What to poll, so that write_some() is called in time.
  pollfd source() const noexcept;
  /// Writes what can be written now.
  void write_some();
  /// Writes everything. Returns false, and forgets what is left, after a second Ctrl-C, or if nothing can be written
  /// for some time after a request to stop.
  bool flush();

  void warn(const std::string& text);
  void error(const std::string& text);

 private:
  static constexpr std::size_t most_pending = 1 << 20;  // bytes

  bool is_writable() const noexcept;

  Signals& signals_;
  int file_;
  std::string pending_;
  bool is_unread_ = false;  ///< nothing could be written for too long
};

}  // namespace muster::detail::supervise
