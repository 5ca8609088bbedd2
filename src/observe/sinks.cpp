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
  explicit CallbackSink(std::shared_ptr<Callback> callback) : callback_(std::move(callback)) {}
  void report(const Json& row, std::int64_t) override { callback_->on_report(row); }

 private:
  std::shared_ptr<Callback> callback_;
};

}  // namespace

Sinks::Sinks(bool first_worker, const std::filesystem::path& run, Progress progress,
             const std::vector<std::shared_ptr<Callback>>& callbacks) {
  if (first_worker) {
    sinks_.push_back(std::make_unique<History>(run));
    auto line = std::make_unique<ProgressLine>(progress);
    line_ = line.get();
    sinks_.push_back(std::move(line));
  }
  for (const auto& callback : callbacks) sinks_.push_back(std::make_unique<CallbackSink>(callback));
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
