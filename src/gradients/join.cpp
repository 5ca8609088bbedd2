#include "base/log.hpp"
#include "gradients/data_parallel.hpp"
#include "gradients/reducer.hpp"
#include "muster/error.hpp"
#include "muster/model.hpp"

#include <exception>
#include <string>
#include <utility>

namespace muster {
namespace {

[[noreturn]] void refuse(const char* fact, const char* remedy) {
  throw Error(ExitCode::usage, "joining ranks with different numbers of batches", fact, remedy);
}

/// The one model whose gradients are averaged.
std::shared_ptr<detail::gradients::DataParallel> only(
    const std::vector<std::shared_ptr<detail::gradients::DataParallel>>& models) {
  std::shared_ptr<detail::gradients::DataParallel> found;
  for (const auto& each : models) {
    if (!each->reducer()) continue;
    if (found) refuse("several models are prepared", "Prepare one model that holds them all");
    found = each;
  }
  if (!found) refuse("no model is prepared", "Call prepare_model first");
  if (found->reducer()->joined()) refuse("such a scope is open already", "End it first");
  return found;
}

}  // namespace

Join::Join(const std::vector<std::shared_ptr<detail::gradients::DataParallel>>& models, const JoinOptions& options)
    : model_(only(models)), exceptions_(std::uncaught_exceptions()) {
  model_->reducer()->join(model_->channel(), options.divide_by_initial_world_size);
}

Join::~Join() {
  const auto reducer = model_->reducer();
  if (!finished_ && std::uncaught_exceptions() == exceptions_) try {
      finish();
    } catch (const std::exception& error) {
      detail::log::error(std::string("At the end of join(): ") + error.what());
      reducer->fail(std::current_exception());
    }
  reducer->part();
}

void Join::finish() {
  if (std::exchange(finished_, true)) return;
  const auto reducer = model_->reducer();
  while (reducer->shadow()) {
  }
  const auto& channel = model_->channel();
  const auto last = channel.all_reduce(reducer->part() * channel.size() + channel.rank(), ReduceOp::max);
  model_->copy_from(static_cast<int>(last % channel.size()));
}

}  // namespace muster
