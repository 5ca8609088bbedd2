// The progress of a long command, as one line on the terminal.
#pragma once

#include <sys/ioctl.h>
#include <unistd.h>

#include <iostream>
#include <string>

namespace muster::tool {

/// Each show() rewrites the line; the destructor removes it. show() writes nothing if stderr is not a terminal, unless
/// it is forced.
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
    // A longer line would not be rewritten as a whole.
    std::cerr << "\r" << text.substr(0, knows_width ? size.ws_col - 1u : text.size()) << "\033[K" << std::flush;
  }
  /// Shows what begins; where no line is shown, prints it.
  void announce(const std::string& text) {
    if (visible_)
      show(text);
    else
      print(text);
  }
  /// Prints a line that stays.
  void print(const std::string& text) {
    erase();
    std::cerr << text << std::endl;
  }

 private:
  bool visible_;
  bool shown_ = false;
};

}  // namespace muster::tool
