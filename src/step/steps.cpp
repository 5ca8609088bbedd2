#include "step/steps.hpp"

#include "base/text.hpp"
#include "muster/error.hpp"

#include <algorithm>
#include <sstream>

namespace muster::detail::step {
namespace {

/// Returns why the current batches of two passes may have different weights; empty if their weights are equal.
std::string conflict_of(const OpenPass& a, const OpenPass& b) {
  const auto shown = [](const OpenPass& pass, bool plan) {
    std::string text = "\"" + pass.name + "\"";
    if (!plan) return text;
    if (pass.plan.global_batch == 0) return text + " (from a sampler of its own)";
    return str(text, " (", pass.plan.is_stream() ? "a stream" : str(pass.plan.samples, " samples"), ", ",
               pass.plan.global_batch, " a step", pass.plan.drop_last ? ", the last dropped)" : ")");
  };
  if (a.plan.global_batch == 0 && b.plan.global_batch == 0) return {};  // all ranks weigh the same in both
  const bool plans = a.plan != b.plan || a.plan.is_stream();            // the length of a stream is unknown
  if (!plans && a.position == b.position && a.batch->micro_batch == b.batch->micro_batch) return {};
  return "batches of " + shown(a, plans) + " and of " + shown(b, plans) +
         " are in hand, and they need not weigh the same: " +
         (plans ? "their steps are not alike" : "they stand at different places of their passes");
}

/// The Steps in which this thread has begun a batch most recently.
thread_local const Steps* current = nullptr;

}  // namespace

Steps::~Steps() {
  if (current == this) current = nullptr;
}

bool is_step_complete() noexcept { return current == nullptr || current->is_step_complete(); }

BatchWeightPtr with_weight(const BatchWeightPtr& batch, double weight) {
  constexpr double least = 1e-9, most = 1e12;  // these fit into gradients/exchange.hpp's exact sums
  if (!(weight == 0 || (weight >= least && weight <= most))) {
    std::ostringstream fact;
    fact << weight << " is no weight";
    throw Error(ExitCode::usage, "weighing a batch", fact.str(),
                "Give what this rank's loss is a mean over, such as a number of tokens: 0, or 1e-9 to 1e12");
  }
  auto weighted = batch ? *batch : BatchWeight{};
  const bool is_empty = weighted.global > 0 && weighted.local == 0;  // its sample is a copy of another rank's
  weighted.given = is_empty ? 0 : weight;
  return std::make_shared<const BatchWeight>(weighted);
}

double Steps::weight() const {
  if (!conflict_.empty())
    throw Error(ExitCode::usage, "weighing a gradient by its batch's samples", conflict_,
                "Say which batch counts: auto scope = session.step(batch); around backward() and the optimizer's step");
  return batch_->given.value_or(batch_->relative());
}

std::vector<BatchOfPass> Steps::begin_pass(OpenPass pass) {
  if (const auto other = std::ranges::find(passes_, pass.source, &OpenPass::source); other != passes_.end()) {
    other->is_replaced = other->is_replaced || other->in_loop == pass.in_loop;
    replaced_.push_back(std::move(*other));
    passes_.erase(other);
  }
  std::vector<BatchOfPass> others;
  for (const auto& other : passes_)
    if (other.in_loop == pass.in_loop) others.push_back({other.number, other.batches});
  passes_.push_back(std::move(pass));
  choose_batch();
  return others;
}

void Steps::begin_batch(std::int64_t number, const BatchWeightPtr& batch, std::int64_t samples) {
  auto pass = std::ranges::find(passes_, number, &OpenPass::number);
  if (pass == passes_.end()) {
    const auto before = std::ranges::find(replaced_, number, &OpenPass::number);
    pass = passes_.insert(pass, std::move(*before));
    replaced_.erase(before);
  }
  if (batch->micro_batch == 0) pass->position += batch->global;
  current = this;
  ++pass->batches;
  pass->taken = ++taken_;
  pass->batch = batch;
  choose_batch();
  if (batch->completes_step()) {
    ++global_step;
    samples_since_report += samples;
  }
  if (const auto live = listener.lock()) live->batch_begun(*pass);
}

void Steps::end_pass(std::int64_t number) {
  const auto is_it = [&](const OpenPass& pass) { return pass.number == number; };
  if (const auto live = listener.lock())
    for (const auto* const passes : {&passes_, &replaced_})
      if (const auto found = std::ranges::find_if(*passes, is_it); found != passes->end()) live->pass_ended(*found);
  std::erase_if(replaced_, is_it);
  std::erase_if(whole_, is_it);
  if (std::erase_if(passes_, is_it) > 0) choose_batch();
}

void Steps::mark_of_earlier_epoch(std::int64_t number) noexcept {
  for (auto* const passes : {&passes_, &replaced_})
    for (auto& pass : *passes)
      if (pass.number == number) pass.is_of_earlier_epoch = true;
}

bool Steps::is_current(const BatchOfPass& batch) const {
  return std::ranges::any_of(
      passes_, [&](const OpenPass& pass) { return pass.number == batch.pass && pass.batches == batch.batch; });
}

bool Steps::has_other_open_pass(std::int64_t number, bool in_loop) const {
  const auto is_other = [&](const OpenPass& pass) { return pass.number != number && pass.in_loop == in_loop; };
  return std::ranges::any_of(passes_, is_other) || std::ranges::any_of(replaced_, is_other);
}

const OpenPass* Steps::find_unresumable_pass() const {
  const auto found = std::ranges::find(passes_, false, &OpenPass::resumable);
  return found == passes_.end() ? nullptr : &*found;
}

const OpenPass* Steps::find_unsaved_pass() const {
  for (const auto* const passes : {&passes_, &replaced_})
    if (const auto found = std::ranges::find_if(
            *passes, [](const auto& pass) { return pass.is_replaced || pass.is_of_earlier_epoch; });
        found != passes->end())
      return &*found;
  return passes_.empty() && !whole_.empty() ? &whole_.back() : nullptr;
}

bool Steps::is_step_complete() const noexcept {
  return std::ranges::all_of(passes_, [](const auto& pass) { return !pass.batch || pass.batch->completes_step(); });
}

bool Steps::is_boundary() const noexcept {
  return passes_.size() <= 1 && std::ranges::none_of(replaced_, &OpenPass::is_replaced) && is_step_complete() &&
         std::ranges::none_of(passes_, &OpenPass::is_of_earlier_epoch);
}

std::int64_t Steps::enter_scope(BatchWeightPtr batch) {
  const auto scope = next_number();
  scopes_.emplace_back(scope, std::move(batch));
  choose_batch();
  return scope;
}

void Steps::leave_scope(std::int64_t scope) {
  std::erase_if(scopes_, [&](const auto& known) { return known.first == scope; });
  choose_batch();
}

void Steps::choose_batch() {
  BatchWeightPtr batch;
  conflict_.clear();
  if (!scopes_.empty()) {
    batch = scopes_.back().second;
  } else if (const auto last = std::ranges::max_element(passes_, {}, &OpenPass::taken); last != passes_.end()) {
    batch = last->batch;  // null if no open pass has handed out a batch
    for (const auto& pass : passes_)
      if (pass.batch && &pass != &*last && conflict_.empty()) conflict_ = conflict_of(pass, *last);
  }
  batch_ = batch ? std::move(batch) : none_;
  if (const auto live = listener.lock()) live->micro_batch_changed(batch_->global > 0 ? batch_->micro_batch : -1);
}

}  // namespace muster::detail::step
