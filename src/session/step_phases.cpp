#include "session/step_phases.hpp"

#include "gradients/hooks.hpp"
#include "watch/trace.hpp"

#include <memory>
#include <string_view>
#include <unordered_set>
#include <utility>

namespace muster::detail::session {
namespace {

/// libtorch's callbacks are plain functions; they find the object here. Threads of autograd call them, too.
std::atomic<StepPhases*> the_phases{nullptr};

}  // namespace

struct StepPhases::Running final : at::ObserverContext {
  std::int64_t begin_ns = watch::trace_begin();
};

StepPhases::StepPhases(bool operators) : operators_(operators) {
  the_phases = this;
  std::unordered_set<at::RecordScope> scopes{at::RecordScope::BACKWARD_FUNCTION};
  if (operators) scopes.insert({at::RecordScope::FUNCTION, at::RecordScope::USER_SCOPE});
  callback_ = at::addThreadLocalCallback(
      at::RecordFunctionCallback(&StepPhases::begin_operator, &StepPhases::end_operator).scopes(scopes));
}

StepPhases::~StepPhases() {
  at::removeCallback(callback_);
  the_phases = nullptr;
}

void StepPhases::begin_step() noexcept {
  is_in_backward_ = false;  // an exception may have ended the last backward()
  forward_begin_ns_ = watch::trace_begin();
}

std::unique_ptr<at::ObserverContext> StepPhases::begin_operator(const at::RecordFunction& function) {
  auto* const phases = the_phases.load();
  if (phases == nullptr) return nullptr;
  // Skip evaluate_function: autograd wraps each of its functions in one.
  if (std::string_view(function.name()).starts_with("autograd::engine::evaluate_function")) return nullptr;
  if (function.scope() == at::RecordScope::BACKWARD_FUNCTION && !phases->is_in_backward_.exchange(true))
    phases->begin_backward();
  return phases->operators_ ? std::make_unique<Running>() : nullptr;
}

void StepPhases::end_operator(const at::RecordFunction& function, at::ObserverContext* context) {
  if (context == nullptr || function.isAsync()) return;  // collectives are recorded by the code that starts them
  watch::record_until_now(
      {.name = watch::interned(function.name()), .begin_ns = static_cast<Running*>(context)->begin_ns});
}

void StepPhases::begin_backward() {
  watch::record_until_now({.name = "forward", .begin_ns = std::exchange(forward_begin_ns_, 0)});
  backward_begin_ns_ = watch::trace_begin();
  gradients::at_end_of_backward([] {
    if (auto* const phases = the_phases.load()) phases->end_backward();
  });
}

void StepPhases::end_backward() noexcept {
  watch::record_until_now({.name = "backward", .begin_ns = std::exchange(backward_begin_ns_, 0)});
  forward_begin_ns_ = watch::trace_begin();
  is_in_backward_ = false;
}

}  // namespace muster::detail::session
