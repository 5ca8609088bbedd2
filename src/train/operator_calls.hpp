// The calls that main makes of an operator's trainer. They are kept in every checkpoint, so that a run that goes on
// gives main what they gave.
#pragma once

#include "muster/error.hpp"
#include "muster/json.hpp"

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace muster::detail::train {

/// A call that is over.
struct OperatorCall {
  std::string name;
  Json result = {};                   ///< null where it was refused
  bool registers_data = false;        ///< data are in no checkpoint: a run that goes on makes the call again
  std::optional<Error> refused = {};  ///< it has changed nothing
};

class OperatorCalls {
 public:
  OperatorCalls() { restore(std::string()); }

  bool empty() const noexcept { return calls_.empty(); }
  std::size_t size() const noexcept { return calls_.size(); }
  const OperatorCall& operator[](std::size_t number) const { return calls_.at(number); }
  void add(OperatorCall call);

  /// All calls, a line of JSON each; and back. An Error (ExitCode::data) if a line is no call.
  std::string text() const;
  void restore(const std::string& text);
  /// The same as bytes for a checkpoint, with zeros behind the text. There is a power of two of them, so that most
  /// checkpoints have the layout of the one before, and no call costs more than its own line.
  const at::Tensor& bytes() const noexcept { return bytes_; }
  void restore(const at::Tensor& bytes);

 private:
  void append(const std::string& text);

  std::vector<OperatorCall> calls_;
  at::Tensor bytes_;
  std::int64_t length_ = 0;  ///< of the text in them
};

}  // namespace muster::detail::train
