// One validation of a checkpoint on this rank.
#pragma once

#include "muster/communicator.hpp"
#include "muster/error.hpp"
#include "train/resolve.hpp"
#include "train/run_folder.hpp"

#include <c10/core/Device.h>

#include <chrono>
#include <filesystem>
#include <future>
#include <memory>
#include <optional>
#include <thread>

namespace muster::detail::train {

/// What validations stand on: a function that does not end keeps it, when all else of fit() is gone.
struct ValidationGround {
  std::shared_ptr<const Plan> plan;
  std::shared_ptr<const RunFolder> run;
  at::Device device;
  Communicator ranks;  ///< those that validate: a world apart, with the time-out as its limit if there is one
};

/// On a thread of its own, so that the rank goes on to hear the others; where MPI may be called by one thread alone, it
/// is over when it has been made.
class ValidationJob {
 public:
  using Clock = std::chrono::steady_clock;

  struct Finding {
    Json metrics = Json::object();    ///< reduced over the ranks
    std::optional<Error> error = {};  ///< why there are none; the same on all ranks
    bool together = true;             ///< all ranks have come to its end, and can validate the next
  };

  /// Begins. Collective over the ranks of the ground, which go on to over() alike, unless they give it up.
  ValidationJob(std::shared_ptr<const ValidationGround> ground, const std::filesystem::path& checkpoint);
  ValidationJob(const ValidationJob&) = delete;
  ValidationJob& operator=(const ValidationJob&) = delete;
  /// Gives it up, unless it is over.
  ~ValidationJob();

  bool over() const { return finding_.wait_for(std::chrono::seconds(0)) == std::future_status::ready; }
  /// How long it has taken until now.
  Clock::duration taken() const noexcept { return Clock::now() - begun_; }
  /// Of one that is over.
  const Finding& finding() const { return finding_.get(); }

 private:
  void give_up() noexcept;

  std::shared_ptr<const ValidationGround> ground_;
  Clock::time_point begun_ = Clock::now();
  std::shared_future<Finding> finding_;
  std::thread thread_;
};

}  // namespace muster::detail::train
