// Shows the progress of a long command in one line on the terminal.
#pragma once

#include <sys/ioctl.h>
#include <unistd.h>

#include <iostream>
#include <string>

namespace muster::tool {

/// Each show() rewrites the line; the destructor removes it. If stderr is not a terminal, show() writes nothing, unless
/// `forced`.
class ProgressLine {
 public:
  explicit ProgressLine(bool forced = false) : visible_(forced || ::isatty(STDERR_FILENO) == 1) {}
  ProgressLine(const ProgressLine&) = delete;
  ProgressLine& operator=(const ProgressLine&) = delete;
  ~ProgressLine() { erase(); }

  void erase() {
    if (shown_) std::cerr << "\r\033[K" << std::flush;
    shown_ = false;
  }
  void show(const std::string& text) {
    if (!visible_) return;
    shown_ = true;
    winsize size{};
    const bool knows_width = ::ioctl(STDERR_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 1;
    // A longer line would wrap, and could not be rewritten as a whole.
    std::cerr << "\r" << text.substr(0, knows_width ? size.ws_col - 1u : text.size()) << "\033[K" << std::flush;
  }
  /// Shows a text about what begins. If show() would write nothing, prints the text as an ordinary line.
  void announce(const std::string& text) {
    if (visible_)
      show(text);
    else
      print(text);
  }
  /// Prints a line that stays on the terminal.
  void print(const std::string& text) {
    erase();
    std::cerr << text << std::endl;
  }

 private:
  bool visible_;
  bool shown_ = false;
};

}  // namespace muster::tool
