// Holds a save, or has it fail, where it makes its hidden folder: what is behind training is then still to come. It
// stands in for the C library's mkdir(), so a test that wants it is linked with saving_gate.cpp.
#pragma once

#include <string>

namespace muster::test {

/// While it lives, this process makes no folder whose path has `part` in it and ends with ".saving": it waits until
/// open(), or fails with `error` if one is given. One at a time.
class SavingGate {
 public:
  explicit SavingGate(std::string part = "", int error = 0);
  SavingGate(const SavingGate&) = delete;
  SavingGate& operator=(const SavingGate&) = delete;
  /// Opens it.
  ~SavingGate();

  void open();
  /// Returns when a save waits at it.
  void wait_for_one();
};

}  // namespace muster::test
