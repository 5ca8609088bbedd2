// The callbacks of a run, which are told of its moments as the sinks are, and are asked for more than that.
#pragma once

#include "muster/callback.hpp"

#include <functional>
#include <memory>
#include <optional>
#include <vector>

namespace muster::detail::observe {

/// For one attempt on one worker.
class Callbacks {
 public:
  explicit Callbacks(std::vector<std::shared_ptr<Callback>> of_the_run);

  /// Training begins; `saved` is what a checkpoint has of the callbacks' state(), null where there is none.
  void start(Session& session, Json saved);
  /// One of the training function's own, which begins now. It refers to what that function has, and is told of nothing
  /// after forget_added().
  void add(std::shared_ptr<Callback> callback, Session& session);
  void forget_added() noexcept { callbacks_.resize(of_the_run_); }

  /// Any other moment of training: callbacks.tell(&Callback::on_epoch, epoch).
  template <class... Parameters, class... Arguments>
  void tell(void (Callback::*moment)(Parameters...), const Arguments&... arguments) {
    for (const auto& callback : callbacks_) (callback.get()->*moment)(arguments...);
  }
  /// Training is over on this worker, with an error or without; nothing where it has not begun. What a callback throws
  /// is a warning.
  void finish(const std::optional<Error>& failure) noexcept;

  bool empty() const noexcept { return callbacks_.empty(); }
  /// With what the callbacks have besides.
  Metrics with_theirs(Metrics metrics) const;
  bool should_stop() const;
  /// By the class and the name of each; null if none has any.
  Json state() const;

 private:
  void begin(const std::shared_ptr<Callback>& callback, Session& session);
  /// Where `saved_` has nothing under its key, and something of its class that no other callback takes; else false.
  bool warn_of_lost_state(const Callback& callback, const std::string& key) const;

  std::vector<std::shared_ptr<Callback>> callbacks_;  ///< those of the run, then what was added
  std::size_t of_the_run_ = 0;
  bool begun_ = false;
  Json saved_ = {};
};

/// Calls `tell` with each; what it throws is a warning.
void tell_quietly(const std::vector<std::shared_ptr<Callback>>& callbacks,
                  const std::function<void(Callback&)>& tell) noexcept;

}  // namespace muster::detail::observe
