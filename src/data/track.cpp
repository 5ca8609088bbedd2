#include "data/track.hpp"

#include "base/log.hpp"
#include "data/passes.hpp"
#include "muster/error.hpp"

#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <limits>

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

void Track::begin_epoch(std::int64_t value) {
  if (value == epoch) return;
  epoch = value;
  passes = finished = replays = asides = consumed = 0;
  under_way = straddled = false;
}

void Track::set_epoch(std::int64_t value) {
  begin_epoch(value);
  epoch_set = true;
  if (const auto all = owner.lock()) all->set_epoch(value);
}

bool Track::unfinished() const noexcept { return split && (under_way || consumed > 0); }

/// Where one dataset is begun again and again inside passes over another, the pass under way is the next of those that
/// its first begin() began: a program that goes on begins once and gets the one under way.
std::int64_t Track::to_replay() const noexcept { return under_way && late && straddled ? finished - 1 : finished; }

Json Track::position() const {
  if (!split) return nullptr;
  return {{"epoch", epoch},       {"passes", passes}, {"finished", to_replay()},           {"asides", asides},
          {"consumed", consumed}, {"window", window}, {"global_batch_size", global_batch}, {"workers", workers},
          {"samples", samples},   {"seed", seed}};
}

void Track::restore(const Json& position) {
  if (position.is_null()) return;
  try {
    epoch = position.at("epoch");
    passes = position.at("passes");
    finished = replays = position.value("finished", passes);
    asides = position.value("asides", std::int64_t{0});
    consumed = position.at("consumed");
    outside = consumed > 0 && !position.value("inside", false);
    window = position.at("window");
    samples = position.at("samples");
    seed = position.at("seed");
    under_way = straddled = false;
  } catch (const Json::exception& error) {
    refuse_position(name, error.what());
  }
  if (finished < 0 || finished > passes || consumed < 0 || consumed > samples)
    refuse_position(name, "its numbers do not go together");
  remember(position);
}

void Track::remember(const Json& position) {
  if (position.is_null()) return;
  try {
    global_batch = position.at("global_batch_size");
    workers = position.value("workers", 0);
    restored = true;
  } catch (const Json::exception& error) {
    refuse_position(name, error.what());
  }
}

Pass Track::plan(const BatchOptions& options, std::int64_t count) const {
  const auto mine = split ? share : step::Share{};
  const auto per_worker =
      split || !options.global_batch_size ? options.batch_size : (*options.global_batch_size - 1) / share.total + 1;
  const auto batch = split && options.global_batch_size ? *options.global_batch_size : times(per_worker, mine.total);
  Pass pass{.order = Order(count, {}),
            .plan = {count, resumable ? batch : 0, options.drop_last},
            .share = mine,
            .training = split && options.training && at::GradMode::is_enabled()};
  if (pass.training && replays > 0) {
    pass.position = count;
    return pass;
  }
  const bool resumes = pass.training && !under_way && consumed > 0;
  OrderOptions order{
      .shuffle = options.shuffle,
      .window = options.local_shuffle_buffer_size ? times(*options.local_shuffle_buffer_size, mine.total) : 0,
      .seed = seed,
      .window_seed = options.local_shuffle_seed.value_or(seed),
      .epoch = epoch,
      .pass = split ? -1 - asides : asides};
  if (pass.training) order.pass = passes + (under_way ? 1 : 0);
  if (resumes) {
    order.window = window;
    pass.position = consumed;
  }
  pass.order = Order(count, order);
  return pass;
}

void Track::say_if_steps_changed(const Pass& pass, const BatchOptions& options) {
  if (!std::exchange(restored, false) || global_batch == 0 || options.global_batch_size) return;
  if (pass.plan.global_batch == global_batch) return;
  if (consumed == 0 && workers == share.total) return;  // an epoch's steps may be as large as the program wants
  log::warn((loader ? "data loader \"" : "dataset \"") + name + "\": a step now takes " +
            std::to_string(pass.plan.global_batch) + " samples over " + std::to_string(share.total) +
            " workers, it took " + std::to_string(global_batch) +
            " before the restart; global_batch_size keeps it the same at any number of workers");
}

Pass Track::begin_pass(const BatchOptions& options, std::int64_t count) {
  Pass pass = plan(options, count);
  pass.number = steps->next_number();
  if (!pass.training) {
    ++asides;
    watched = true;
    return pass;
  }
  if (replays > 0) {
    --replays;
    return pass;
  }
  if (under_way) finish();
  if (consumed > 0 && samples != count)
    throw Error(ExitCode::data, "continuing in dataset \"" + name + "\"",
                "it has " + std::to_string(count) + " samples and had " + std::to_string(samples) +
                    " when the checkpoint was saved",
                "Resume with the same files, or start a new run");
  if (resumable) say_if_steps_changed(pass, options);
  if (consumed == 0) {
    outside = false;
    window = options.local_shuffle_buffer_size ? times(*options.local_shuffle_buffer_size, share.total) : 0;
  }
  samples = count;
  global_batch = pass.plan.global_batch;
  workers = share.total;
  under_way = true;
  ticket = pass.number;
  inside = steps->open({.number = pass.number,
                        .source = this,
                        .name = name,
                        .plan = pass.plan,
                        .resumable = resumable,
                        .position = pass.position});
  late = std::any_of(inside.begin(), inside.end(), [](const auto& other) { return other.second > 1; });
  return pass;
}

void Track::take(const Pass& pass, const step::BatchWeightPtr& batch, std::int64_t samples_of_step) {
  if (!pass.training) return;
  if (resumable && batch->completes_step() && under_way && pass.number == ticket) consumed += batch->global;
  steps->take(pass.number, batch, samples_of_step);
}

void Track::leave(const Pass& pass) {
  if (!pass.training || !resumable || !under_way || pass.number != ticket) return;
  steps->leave();
}

void Track::end_pass(const Pass& pass) {
  if (!pass.training) return;
  if (under_way && pass.number == ticket) finish();
  steps->close(pass.number);
}

bool Track::contained() const {
  return !outside && std::any_of(inside.begin(), inside.end(), [&](const auto& other) { return steps->is_at(other); });
}

/// The pass under way is over.
void Track::finish() {
  under_way = false;
  ++passes;
  consumed = 0;
  if (contained() || late) return;
  ++finished;
  straddled = steps->others_open(ticket);
}

}  // namespace muster::detail::data
