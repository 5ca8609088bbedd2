#include "observe/callbacks.hpp"

#include "base/log.hpp"
#include "comm/agreement.hpp"

#include <c10/util/Type.h>

#include <algorithm>
#include <set>
#include <string>
#include <typeinfo>
#include <utility>

namespace muster::detail::observe {
namespace {

std::string class_of(const Callback& callback) { return c10::demangle(typeid(callback).name()); }

/// Returns the callback's class, with its name() if it has one.
std::string name_of(const Callback& callback) {
  const auto name = callback.name();
  return name.empty() ? class_of(callback) : class_of(callback) + ": " + name;
}

/// Returns the key of a callback's state: the callback's name, with a number if an earlier callback has the same name.
/// Two callbacks may also have the same name because two source files have classes of the same name.
std::string key_of(const std::vector<std::shared_ptr<Callback>>& callbacks, const Callback& callback) {
  const auto name = name_of(callback);
  int number = 1;
  for (const auto& other : callbacks) {
    if (other.get() == &callback) break;
    number += name_of(*other) == name;
  }
  return number == 1 ? name : str(name, " ", number);
}

/// True if `key`, as key_of() returns it, is that of a callback of class `name`.
bool is_of_class(const std::string& key, const std::string& name) {
  return key.starts_with(name) && (key.size() == name.size() || key[name.size()] == ':' || key[name.size()] == ' ');
}

}  // namespace

Callbacks::Callbacks(std::vector<std::shared_ptr<Callback>> run_callbacks) : callbacks_(std::move(run_callbacks)) {
  std::erase(callbacks_, nullptr);
  run_callbacks_ = callbacks_.size();
}

void Callbacks::begin(const std::shared_ptr<Callback>& callback, Session& session) {
  callback->on_start(session);
  if (!saved_.is_object()) return;
  const auto key = key_of(callbacks_, *callback);
  const auto saved = saved_.find(key);
  const bool found = saved != saved_.end();
  if (!found && !warn_of_lost_state(*callback, key)) return;
  try {
    if (found || !callback->name().empty()) callback->load_state(found ? *saved : Json());
  } catch (const Json::exception& error) {
    throw Error(ExitCode::data, "restoring the callback " + key, error.what(),
                "Give the run the same callbacks as when it was saved");
  }
}

bool Callbacks::warn_of_lost_state(const Callback& callback, const std::string& key) const {
  const auto of_class = class_of(callback);
  std::set<std::string> taken;
  for (const auto& other : callbacks_) taken.insert(key_of(callbacks_, *other));
  for (const auto& [other, state] : saved_.items()) {
    if (!is_of_class(other, of_class) || taken.contains(other)) continue;
    log::warn("the callback " + key + " starts without a saved state: the checkpoint has the state of " + other +
              ", which has another configuration");
    return true;
  }
  return false;
}

void Callbacks::begin_attempt(Session& session, Json saved) {
  saved_ = std::move(saved);
  has_begun_ = true;
  for (const auto& callback : callbacks_) begin(callback, session);
}

void Callbacks::add(std::shared_ptr<Callback> callback, Session& session) {
  if (!callback) return;
  callbacks_.push_back(std::move(callback));
  begin(callbacks_.back(), session);
}

void Callbacks::failure(const Error& error) {
  if (has_begun_)
    tell_and_log_errors("the end of training", callbacks_, [&](Callback& callback) { callback.on_failure(error); });
}

void Callbacks::end() {
  if (has_begun_) tell_and_log_errors("the end of training", callbacks_, [](Callback& callback) { callback.on_end(); });
}

void Callbacks::validated(std::int64_t training_iteration, const Json& fields) {
  auto row = fields;
  row["training_iteration"] = training_iteration;
  tell(&Callback::on_validated, row);
}

std::string Callbacks::awaited_metric(const Json& row) const {
  for (const auto& callback : callbacks_)
    if (auto metric = callback->decides_by(); !metric.empty() && !row.contains(metric)) return metric;
  return {};
}

Metrics Callbacks::with_callback_metrics(Metrics metrics) {
  before_report_.clear();
  for (const auto& callback : callbacks_) before_report_.push_back(callback->state());
  for (const auto& callback : callbacks_) metrics.merge(callback->metrics());
  return metrics;
}

void Callbacks::report_failed() {
  // Empty if the report has failed before with_callback_metrics() was called.
  const auto before = std::exchange(before_report_, {});
  const std::vector told(callbacks_.begin(), callbacks_.begin() + static_cast<std::ptrdiff_t>(before.size()));
  auto state = before.begin();
  tell_and_log_errors("a report that has failed", told,
                      [&](Callback& callback) { callback.on_failed_report(*state++); });
}

bool Callbacks::should_stop() const {
  return std::ranges::any_of(callbacks_, [](const auto& callback) { return callback->should_stop(); });
}

Json Callbacks::state() const {
  Json all;
  for (const auto& callback : callbacks_)
    if (auto state = callback->state(); !state.is_null()) all[key_of(callbacks_, *callback)] = std::move(state);
  return all;
}

void tell_and_log_errors(const char* what, const std::vector<std::shared_ptr<Callback>>& callbacks,
                         const std::function<void(Callback&)>& tell) noexcept {
  for (const auto& callback : callbacks) try {
      if (callback) tell(*callback);
    } catch (...) {
      log::warn(str("telling a callback of ", what, ": ", comm::current_outcome().text));
    }
}

}  // namespace muster::detail::observe
