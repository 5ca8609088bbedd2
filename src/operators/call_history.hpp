// The history of the calls that main() makes to an operator's trainer. Every checkpoint holds it, so that a resumed run
// can return the saved results to main().
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

/// The calls of main(). `step` is one step of a sweep's trial.
enum class Call { train, validate, apply_all_operators, update_scheduler, load_state_dict, save, load, step };
const char* name_of(Call call) noexcept;
/// True if the call may change the state that checkpoints hold, without saving it.
bool changes_state(Call call) noexcept;

/// A call that has ended, and its result.
struct CallRecord {
  Call call;
  Json result = {};             ///< null if the call was refused
  bool registers_data = false;  ///< true if the call has registered data, so that a resumed run must make it again
  std::optional<Error> refusal = {};  ///< the error with which the call was refused; it then has changed nothing
};

/// The calls that have ended, in this process and before the run was resumed, and main()'s position among them.
class CallHistory {
 public:
  CallHistory() { restore(std::string()); }

  bool empty() const noexcept { return calls_.empty(); }
  std::size_t size() const noexcept { return calls_.size(); }
  /// Number of calls that main() has made in this process.
  std::size_t position() const noexcept { return position_; }
  /// The saved result of main()'s next call; null if it is a new call.
  const CallRecord* next() const { return position_ < calls_.size() ? &calls_[position_] : nullptr; }
  /// Call it when main()'s call has ended, or when its saved result was returned.
  void advance() noexcept { ++position_; }
  /// Adds the result of main()'s current call, unless it was added already. (A call adds its result itself if its own
  /// checkpoint must hold it.)
  void add(CallRecord call);

  /// Returns all calls, as one line of JSON each.
  std::string text() const;
  /// Restores the calls from text(). Throws an Error (ExitCode::data) if a line is not a call.
  void restore(const std::string& text);
  /// The text as bytes, for a checkpoint. Padded with zeros to a power of two, so that most checkpoints have the layout
  /// of the previous one, and adding a call only writes its own line.
  const at::Tensor& bytes() const noexcept { return bytes_; }
  void restore(const at::Tensor& bytes);

 private:
  void append(const std::string& text);

  std::vector<CallRecord> calls_;
  std::size_t position_ = 0;
  at::Tensor bytes_;
  std::int64_t length_ = 0;  ///< length of the text in bytes
};

}  // namespace muster::detail::operators
