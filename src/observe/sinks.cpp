#include "observe/sinks.hpp"

#include "base/log.hpp"
#include "comm/agreement.hpp"
#include "comm/on_ranks.hpp"
#include "observe/history.hpp"

namespace muster::detail::observe {
namespace {

/// A callback of the user's.
class CallbackSink final : public Sink {
 public:
  static constexpr auto runs_on = RunsOn::every_worker;
  explicit CallbackSink(std::shared_ptr<Callback> callback) : callback_(std::move(callback)) {}
  void report(const Json& row, std::int64_t) override { callback_->on_report(row); }

 private:
  std::shared_ptr<Callback> callback_;
};

/// Adds a sink if it runs on this worker.
template <class S, class... Arguments>
S* add(std::vector<std::unique_ptr<Sink>>& sinks, bool first_worker, const Arguments&... arguments) {
  if (S::runs_on == RunsOn::first_worker && !first_worker) return nullptr;
  sinks.push_back(std::make_unique<S>(arguments...));
  return static_cast<S*>(sinks.back().get());
}

}  // namespace

Sinks::Sinks(bool first_worker, const std::filesystem::path& run, Progress progress,
             const std::vector<std::shared_ptr<Callback>>& callbacks) {
  add<History>(sinks_, first_worker, run);
  line_ = add<ProgressLine>(sinks_, first_worker, progress);
  for (const auto& callback : callbacks) add<CallbackSink>(sinks_, first_worker, callback);
}

void Sinks::start(const Communicator& workers, const Start& start) {
  comm::on_root(workers, [&] { tell(&Sink::start, start); });
  if (workers.rank() != 0) tell(&Sink::start, start);
}

void Sinks::finish(const std::optional<Error>& failure) noexcept {
  for (const auto& sink : sinks_) try {
      failure ? sink->failure(*failure) : sink->end();
    } catch (...) {
      log::warn("telling an observer that training is over: " + comm::caught().text);
    }
}

}  // namespace muster::detail::observe
