// One validation of a checkpoint on this rank.
#pragma once

#include "comm/wait.hpp"
#include "muster/communicator.hpp"
#include "muster/error.hpp"
#include "run/resolve.hpp"
#include "run/run_folder.hpp"

#include <c10/core/Device.h>

#include <chrono>
#include <filesystem>
#include <future>
#include <memory>
#include <optional>
#include <thread>

namespace muster::detail::session {

/// What a validation uses. Shared, since a validation function that does not end keeps it after fit() has returned.
struct ValidationContext {
  std::shared_ptr<const run::ResolvedOptions> resolved;
  std::shared_ptr<const run::RunFolder> run;
  at::Device device;
  Communicator ranks;  ///< those that validate, in a world of their own whose time limit is the validation's time-out
};

/// Runs the validation function on a thread of its own, so that the rank still receives messages. If only one thread
/// may call MPI, the constructor runs the function and returns when it is over.
class ValidationJob {
 public:
  using Clock = std::chrono::steady_clock;

  struct Outcome {
    Json metrics = Json::object();    ///< reduced over the ranks
    std::optional<Error> error = {};  ///< why there are no metrics; the same on all ranks
    bool is_in_step = true;           ///< all ranks have reached the end, so they can run the next validation
  };

  /// Begins. Collective over `context->ranks`; each of them keeps the job until it is over, or gives it up.
  ValidationJob(std::shared_ptr<const ValidationContext> context, const std::filesystem::path& checkpoint);
  ValidationJob(const ValidationJob&) = delete;
  ValidationJob& operator=(const ValidationJob&) = delete;
  ~ValidationJob();
  /// Gives the validation up, unless it is over. False if this rank can no longer validate in that context.
  bool leave() noexcept;

  bool is_over() const { return outcome_.wait_for(std::chrono::seconds(0)) == std::future_status::ready; }
  /// The time since it has begun, without gaps in which this process did not run. Call it often while it runs.
  Clock::duration elapsed() const { return ran_ + time_.until(); }
  /// The result. Only after is_over().
  const Outcome& outcome() const { return outcome_.get(); }

 private:
  /// True if the work in the context was given up, and not only waited for.
  bool give_up() noexcept;

  std::shared_ptr<const ValidationContext> context_;
  mutable comm::WaitTime time_;
  Clock::duration ran_{};  ///< in the constructor
  std::shared_future<Outcome> outcome_;
  std::thread thread_;
  bool is_given_up_ = false;
};

}  // namespace muster::detail::session
