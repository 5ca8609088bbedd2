#include "base/hash.hpp"
#include "base/log.hpp"
#include "data/passes/pass_positions.hpp"
#include "muster/error.hpp"

#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <limits>
#include <utility>

namespace muster::detail::data {
namespace {

std::int64_t times(std::int64_t a, std::int64_t b) {
  std::int64_t product = 0;
  return __builtin_mul_overflow(a, b, &product) ? std::numeric_limits<std::int64_t>::max() : product;
}

[[noreturn]] void refuse_position(const std::string& name, const char* fact) {
  throw Error(ExitCode::data, "restoring the position in dataset \"" + name + "\"", fact,
              "Resume from another checkpoint");
}

}  // namespace

void PassPosition::PassRecord::begin_epoch(std::int64_t number) {
  if (number == epoch.number) return;
  epoch = {.number = number};
  resume_pending = false;
  section = {};
  last.consumed = 0;
  last.under_way = false;
}

void PassPosition::begin_epoch(std::int64_t epoch) {
  for (auto* const passes : {&in_loop_, &outside_}) {
    if (epoch != passes->epoch.number && passes->last.under_way && steps_)
      steps_->mark_of_earlier_epoch(passes->last.number);
    passes->begin_epoch(epoch);
  }
}

std::int64_t PassPosition::Section::number_of(std::int64_t evaluation) const noexcept {
  const auto number = [](std::int64_t value) { return static_cast<std::uint64_t>(value); };
  constexpr std::uint64_t most = std::numeric_limits<std::int64_t>::max();
  return static_cast<std::int64_t>(
      mix(mix(number(finished), 2 * number(step) + (after_loop ? 1 : 0)), number(evaluation)) & most);
}

std::int64_t PassPosition::PassRecord::number_of_evaluation(const Section& now) const noexcept {
  return now.number_of(now == section ? evaluations : 0);
}

void PassPosition::PassRecord::count_evaluation(const Section& now) noexcept {
  if (std::exchange(section, now) != now) evaluations = 0;
  ++evaluations;
}

PassPosition::Section PassPosition::section() const {
  const bool in_loop = steps_->epoch.is_in_loop();
  const auto epoch = passes_of(in_loop).epoch.number;
  const auto all = owner_.lock();
  return all ? all->section(epoch, in_loop) : Section{.epoch = epoch};
}

void PassPosition::set_epoch(std::int64_t epoch) {
  if (steps_->epoch.is_in_loop() && epoch != steps_->epoch.number)
    throw Error(ExitCode::usage, str(named(), "setting epoch ", epoch),
                str("the loop over session.epochs() is in epoch ", steps_->epoch.number),
                "Remove the call: the loop sets the epoch, and each pass of an epoch has its own order already");
  begin_epoch(epoch);
  epoch_set_ = true;
  if (const auto all = owner_.lock()) all->set_epoch(epoch);
}

void PassPosition::set_epoch_if_untrained(std::int64_t epoch) {
  if (in_loop_.last.workers == 0 && outside_.last.workers == 0) begin_epoch(epoch);
}

void PassPosition::enter_loop() {
  if (!std::exchange(loop_unknown_, false)) return;
  in_loop_ = std::exchange(outside_, {.epoch = {.number = outside_.epoch.number}});
}

bool PassPosition::unfinished() const noexcept {
  return options_.split && (in_loop_.unfinished() || outside_.unfinished());
}

/// The number of passes that a resumed program begins again. A loop over another dataset may take batches from this
/// one, and begin it anew at each end. While such a later pass is under way, none before it in that loop counts: the
/// resumed program begins this dataset once there, and must get that pass.
std::int64_t PassPosition::PassRecord::repeated_passes() const noexcept {
  return last.under_way && last.late && epoch.ended_in_other ? epoch.repeated - 1 : epoch.repeated;
}

Json PassPosition::PassRecord::position(std::int64_t global_step) const {
  Json position{
      {"epoch", epoch.number},         {"passes", epoch.passes},
      {"finished", repeated_passes()}, {"steps", last.under_way ? global_step - last.first_step : last.steps_before},
      {"consumed", last.consumed},     {"global_batch_size", last.global_batch},
      {"workers", last.workers}};
  last.order.add_to(position);
  return position;
}

Json PassPosition::position() const {
  if (!options_.split) return nullptr;
  const bool has_looped = steps_->epoch.has_looped();
  auto position = passes_of(has_looped).position(steps_->global_step);
  position["seed"] = options_.seed;
  position["in_loop"] = has_looped;
  if (has_looped && outside_.unfinished()) position["outside"] = outside_.position(steps_->global_step);
  return position;
}

void PassPosition::PassRecord::restore(const Json& position) {
  const std::int64_t number = position.at("epoch"), passes = position.at("passes"),
                     finished = position.value("finished", passes);
  // The program may have run finished passes again before it called restore().
  const auto run_here = number == epoch.number ? epoch.run_here + (last.under_way ? 1 : 0) : 0;
  epoch = {.number = number,
           .passes = passes,
           .repeated = finished,
           .run_here = run_here,
           .to_skip = finished - std::min(run_here, finished)};
  last.consumed = position.at("consumed");
  last.steps_before = position.value("steps", std::int64_t{0});
  resume_pending = last.consumed > 0;
  skipped = false;
  last.outside = last.consumed > 0 && !position.value("inside", false);
  last.order = PassOrder::from_json(position);
  last.under_way = false;
}

void PassPosition::restore(const Json& position, bool complete) {
  if (position.is_null()) return;
  const auto take = [&](PassRecord& passes, const Json& saved) {
    if (!complete) {
      passes.restore(saved);
      if (!passes.last.order.seed) passes.last.order.seed = position.at("seed").get<std::uint64_t>();
      const auto& epoch = passes.epoch;
      const auto& last = passes.last;
      if (epoch.repeated < 0 || epoch.repeated > epoch.passes || last.consumed < 0 ||
          last.consumed > last.order.samples || !last.order.is_possible())
        refuse_position(options_.name, "its numbers do not go together");
    }
    passes.last.global_batch = saved.at("global_batch_size");
    passes.last.workers = saved.value("workers", 0);
    passes.restored = true;
  };
  try {
    loop_unknown_ = !position.contains("in_loop") && !steps_->epoch.has_looped();
    auto& passes = passes_of(position.value("in_loop", steps_->epoch.has_looped()));
    take(passes, position);
    if (const auto outside = position.find("outside"); outside != position.end() && !complete) take(outside_, *outside);
    auto& full_worker_count = options_.full_worker_count;
    if (full_worker_count > 0 && passes.last.workers > 0) full_worker_count = passes.last.workers;
  } catch (const Json::exception& error) {
    refuse_position(options_.name, error.what());
  }
}

PassOrder PassPosition::order_of_new(const BatchOptions& options, const PassData& data) const {
  return PassOrder::of(options, data, options_.split ? options_.share : step::MicroBatchShare{}, options_.seed);
}

Pass PassPosition::plan(const BatchOptions& options, const PassData& data) const {
  const bool split = options_.split;
  const auto share = split ? options_.share : step::MicroBatchShare{};
  const auto per_worker = split || !options.global_batch_size
                              ? options.batch_size
                              : (*options.global_batch_size - 1) / options_.share.total + 1;
  const auto batch = split && options.global_batch_size ? *options.global_batch_size
                                                        : times(per_worker, split ? options_.batches_in_step() : 1);
  const bool in_loop = steps_->epoch.is_in_loop();
  const auto& passes = passes_of(in_loop);
  const auto& epoch = passes.epoch;
  const auto& last = passes.last;
  // A pass after the loop has the next epoch's order, as it has in a run that is resumed after its last epoch.
  const auto loop_end = steps_->epoch.last_loop_end;
  const bool in_next_epoch = !in_loop && steps_->epoch.number == loop_end && epoch.number == loop_end;
  const bool training = split && options.training && at::GradMode::is_enabled();
  const bool continues = training && !last.under_way && last.consumed > 0;  // a pass begun before the restart
  const auto now = order_of_new(options, data);
  const auto chosen = continues ? last.order.completed_by(now) : now;
  Pass pass{.order = Order(chosen.samples, {}),
            .plan = {chosen.samples, options_.weighs() ? batch : 0, options.drop_last},
            .share = share,
            .training = training,
            .in_loop = in_loop,
            .epoch = epoch.number};
  if (pass.training && epoch.to_skip > 0) {
    pass.position = chosen.samples;
    pass.is_already_finished = true;
    return pass;
  }
  auto order = chosen.options_for(data);
  order.seed = chosen.seed.value_or(options_.seed) ^ (chosen.uses_name ? hash_of_text(options_.name) : 0);
  order.epoch = epoch.number + (in_next_epoch ? 1 : 0);
  if (pass.training) {
    order.pass = epoch.passes + (last.under_way ? 1 : 0);
    if (continues) pass.position = last.consumed;
  } else {
    const auto evaluation = passes.number_of_evaluation(section());
    order.pass = split ? -1 - evaluation : evaluation;
  }
  pass.order = Order(chosen.samples, order);
  return pass;
}

std::string PassPosition::named() const {
  return (options_.loader ? "data loader \"" : "dataset \"") + options_.name + "\": ";
}

void PassPosition::warn_if_steps_changed(PassRecord& passes, const Pass& pass, const BatchOptions& options) {
  const auto& last = passes.last;
  if (!std::exchange(passes.restored, false) || last.global_batch == 0 || options.global_batch_size) return;
  const auto what = named();
  if (pass.plan.global_batch == last.global_batch) {
    if (options_.batches_in_step() != options_.share.total)
      log::info(str(what, "a step still takes ", last.global_batch, " samples, now over ", options_.share.total,
                    " workers, so not batch_size on each"));
    return;
  }
  // Between two passes the program may change the step size on purpose.
  if (last.consumed == 0 && last.workers == options_.batches_in_step()) return;
  log::warn(str(what, "a step now takes ", pass.plan.global_batch, " samples over ", options_.share.total,
                " workers, it took ", last.global_batch,
                " before the restart; global_batch_size keeps it the same at any number of workers"));
}

void PassPosition::require_same_data(const LastPass& last, const PassData& data) const {
  const auto doing = "continuing in dataset \"" + options_.name + "\"";
  if (last.order.dataset_samples() != data.count)
    throw Error(
        ExitCode::data, doing,
        str("it has ", data.count, " samples and had ", last.order.dataset_samples(), " when the checkpoint was saved"),
        "Resume with the same files, or start a new run");
  if (last.order.needs_other_weights(data))
    throw Error(ExitCode::data, doing, "the checkpoint was saved in the middle of a pass with other weights",
                "Give the same until that pass is over (save weights that change in the State), or start a new run");
  if (last.order.needs_other_lengths(data))
    throw Error(ExitCode::data, doing,
                "the checkpoint was saved in the middle of a pass in buckets, and the samples had other lengths",
                "Resume with the same files, or start a new run");
}

void PassPosition::warn_if_order_changed(const LastPass& last, const PassOrder& now) const {
  const auto changed = last.order.changed_option(now);
  if (changed.empty()) return;
  log::warn(named() + changed +
            " differs from its value when the run was saved in the middle of a pass. The rest of that pass keeps the "
            "order that it began with; the next pass has the new order");
}

Pass PassPosition::begin_pass(const BatchOptions& options, const PassData& data,
                              const std::shared_ptr<const void>& loader) {
  Pass pass = plan(options, data);
  auto& passes = passes_of(pass.in_loop);
  auto& last = passes.last;
  if (!pass.training) {
    pass.number = steps_->next_number();
    passes.count_evaluation(section());
    evaluated_ = true;
    pass.is_unsplit = !options_.split && options.training && pass.in_loop && at::GradMode::is_enabled();
    if (pass.is_unsplit)
      steps_->begin_whole_pass({.number = pass.number,
                                .source = this,
                                .name = options_.name,
                                .plan = pass.plan,
                                .resumable = false,
                                .in_loop = true});
    return pass;
  }
  if (const auto other = trained_by_.lock(); under_way() && other && other != loader)
    throw Error(ExitCode::usage, "iterating over a data loader",
                "a pass over another data loader with the name \"" + options_.name + "\" is under way",
                "Give each a name, DataLoaderOptions{.name = …}; one that does not train has .training = false");
  trained_by_ = loader;
  pass.number = steps_->next_number();
  if (passes.epoch.to_skip > 0) {
    if (!std::exchange(passes.skipped, true) && !steps_->epoch.is_counted())
      log::warn(named() +
                "a pass that was finished before the restart comes back empty. A loop that counts its own epochs and "
                "starts again at the next one must call set_epoch(epoch), or be a loop over session.epochs(n)");
    --passes.epoch.to_skip;
    return pass;
  }
  for (auto* const one : {&in_loop_, &outside_})
    if (one->last.under_way) finish(*one);
  passes.resume_pending = false;
  const auto count = pass.plan.samples;
  if (pass.position == 0 && count > 0 && pass.plan.global_batch > count && options.drop_last)
    log::warn(str(named(), "a step takes ", pass.plan.global_batch, " samples over all workers, the pass has only ",
                  count, ", and drop_last leaves out a step that is not full: nothing is trained"));
  auto& current = steps_->epoch;
  const bool counts = current.is_in_loop() == current.has_looped() && current.is_counted();
  if (counts && std::exchange(current.last_complete, -1) == pass.epoch)
    if (const auto all = owner_.lock()) all->note_more_passes();
  if (options_.weighs()) warn_if_steps_changed(passes, pass, options);
  passes.restored = false;
  const bool continues = last.consumed > 0;
  const auto now = order_of_new(options, data);
  if (continues) require_same_data(last, data);
  if (continues) warn_if_order_changed(last, now);
  last = {.number = pass.number,
          .under_way = true,
          .consumed = last.consumed,
          .first_step = steps_->global_step - (continues ? last.steps_before : 0),
          .order = continues ? last.order.completed_by(now) : now,
          .global_batch = pass.plan.global_batch,
          .workers = options_.batches_in_step(),
          .others = steps_->begin_pass(
              {.number = pass.number,
               .source = this,
               .name = options_.name,
               .plan = pass.plan,
               .options = options_.resumable ? now.compared_options(options) : std::map<std::string, std::string>(),
               .resumable = options_.resumable,
               .in_loop = pass.in_loop,
               .position = pass.position}),
          .outside = continues && last.outside};
  last.late = std::ranges::any_of(last.others, [](const auto& other) { return other.batch > 1; });
  return pass;
}

void PassPosition::begin_batch(const Pass& pass, const step::BatchWeightPtr& batch, std::int64_t samples) {
  if (!pass.training) return;
  auto& last = passes_of(pass.in_loop).last;
  if (options_.resumable && batch->completes_step() && last.under_way && pass.number == last.number)
    last.consumed += batch->global;
  steps_->begin_batch(pass.number, batch, samples);
}

void PassPosition::stop_if_asked(const Pass& pass) const {
  const auto& last = passes_of(pass.in_loop).last;
  const bool has_position = pass.training && options_.resumable && last.under_way && pass.number == last.number;
  if (!has_position || !steps_->is_boundary()) return;
  if (const auto all = owner_.lock(); all && all->stop_if_asked) all->stop_if_asked();
}

void PassPosition::end_pass(const Pass& pass) {
  if (pass.is_unsplit) steps_->end_pass(pass.number);
  if (!pass.training) return;
  if (auto& passes = passes_of(pass.in_loop); passes.last.under_way && pass.number == passes.last.number)
    finish(passes);
  steps_->end_pass(pass.number);
}

/// Ends the pass under way. A resumed program begins it again, unless the pass lay inside one batch of another pass or
/// began after the first batch of another pass.
void PassPosition::finish(PassRecord& passes) {
  auto& epoch = passes.epoch;
  auto& last = passes.last;
  last.under_way = false;
  last.consumed = 0;
  ++epoch.passes;
  const bool in_one_batch =
      !last.outside && std::ranges::any_of(last.others, [&](const auto& o) { return steps_->is_current(o); });
  if (in_one_batch || last.late) return;
  ++epoch.repeated;
  ++epoch.run_here;
  epoch.ended_in_other = steps_->has_other_open_pass(last.number, &passes == &in_loop_);
}

}  // namespace muster::detail::data
