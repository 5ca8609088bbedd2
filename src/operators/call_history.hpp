// The history of main's calls of an operator's trainer. Every checkpoint holds it, so that a resumed run returns the
// saved results to main.
#pragma once

#include "muster/error.hpp"
#include "muster/json.hpp"

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace muster::detail::operators {

/// The calls of main. `step` is a step of a sweep's trial.
enum class Call { train, validate, apply_all_operators, update_scheduler, load_state_dict, save, load, step };
const char* name_of(Call call) noexcept;
/// True if the call may change the state that a checkpoint has, without saving it.
bool changes_state(Call call) noexcept;

/// A call that is over, and its result.
struct CallRecord {
  Call call;
  Json result = {};                   ///< null if the call was refused
  bool registers_data = false;        ///< a resumed run makes the call again, since no checkpoint holds data
  std::optional<Error> refusal = {};  ///< the error, if its check refused the call, which then changed nothing
};

/// Calls that are over: in this process and, if the run was resumed, before it. And which of them main has reached.
class CallHistory {
 public:
  CallHistory() { restore(std::string()); }

  bool empty() const noexcept { return calls_.empty(); }
  std::size_t size() const noexcept { return calls_.size(); }
  /// The number of calls that main has made in this process.
  std::size_t position() const noexcept { return position_; }
  /// The saved result of main's next call; null if that is a new one.
  const CallRecord* next() const { return position_ < calls_.size() ? &calls_[position_] : nullptr; }
  /// Call when main's call is over, or its saved result was returned.
  void step() noexcept { ++position_; }
  /// Adds the result of main's current call, unless it is there already: the call itself adds it if its checkpoint is
  /// to hold it.
  void add(CallRecord call);

  /// All calls, one line of JSON each.
  std::string text() const;
  /// Restores the calls. Throws an Error (ExitCode::data) if a line is not a call.
  void restore(const std::string& text);
  /// The text as bytes for a checkpoint, padded with zeros to a power of two. So most checkpoints have the same layout
  /// as the one before, and adding a call only writes its own line.
  const at::Tensor& bytes() const noexcept { return bytes_; }
  void restore(const at::Tensor& bytes);

 private:
  void append(const std::string& text);

  std::vector<CallRecord> calls_;
  std::size_t position_ = 0;
  at::Tensor bytes_;
  std::int64_t length_ = 0;  ///< of the text, in bytes
};

}  // namespace muster::detail::operators
