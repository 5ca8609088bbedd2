#include "base/log.hpp"
#include "data/passes/cursors.hpp"
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

/// Positions of a local shuffle's windows; 0 without one.
std::int64_t window_of(const BatchOptions& options, const step::Share& share) {
  return options.local_shuffle_buffer_size ? times(*options.local_shuffle_buffer_size, share.total) : 0;
}

/// FNV-1a: the same on every machine.
std::uint64_t hash_of(const std::string& name) noexcept {
  std::uint64_t hash = 0xcbf29ce484222325u;
  for (const unsigned char c : name) hash = (hash ^ c) * 0x100000001b3u;
  return hash;
}

[[noreturn]] void refuse_position(const std::string& name, const char* fact) {
  throw Error(ExitCode::data, "restoring the position in dataset \"" + name + "\"", fact,
              "Resume from another checkpoint");
}

}  // namespace

void Cursor::begin_epoch(std::int64_t epoch) {
  if (epoch == epoch_.number) return;
  epoch_ = {.number = epoch};
  awaited_ = false;
  last_.consumed = 0;
  last_.under_way = false;
}

void Cursor::set_epoch(std::int64_t epoch) {
  begin_epoch(epoch);
  epoch_set_ = true;
  if (const auto all = owner_.lock()) all->set_epoch(epoch);
}

void Cursor::set_epoch_aside(std::int64_t epoch) {
  if (last_.workers == 0) begin_epoch(epoch);
}

bool Cursor::unfinished() const noexcept { return options_.split && (last_.under_way || last_.consumed > 0); }

/// Where one dataset is begun again and again inside passes over another, the pass under way is the next of those that
/// its first begin() began: a program that goes on begins once and gets the one under way.
std::int64_t Cursor::to_run_again() const noexcept {
  return last_.under_way && last_.late && epoch_.straddled ? epoch_.finished - 1 : epoch_.finished;
}

Json Cursor::position() const {
  if (!options_.split) return nullptr;
  return {{"epoch", epoch_.number},
          {"passes", epoch_.passes},
          {"finished", to_run_again()},
          {"asides", epoch_.evaluations},
          {"consumed", last_.consumed},
          {"window", last_.window},
          {"global_batch_size", last_.global_batch},
          {"workers", last_.workers},
          {"samples", last_.samples},
          {"seed", options_.seed}};
}

void Cursor::restore(const Json& position, bool complete) {
  if (position.is_null()) return;
  try {
    if (!complete) {
      const std::int64_t passes = position.at("passes"), finished = position.value("finished", passes);
      epoch_ = {.number = position.at("epoch"),
                .passes = passes,
                .finished = finished,
                .to_skip = finished,
                .evaluations = position.value("asides", std::int64_t{0})};
      last_.consumed = position.at("consumed");
      awaited_ = last_.consumed > 0;
      last_.outside = last_.consumed > 0 && !position.value("inside", false);
      last_.window = position.at("window");
      last_.samples = position.at("samples");
      last_.under_way = false;
      options_.seed = position.at("seed");
      if (finished < 0 || finished > passes || last_.consumed < 0 || last_.consumed > last_.samples)
        refuse_position(options_.name, "its numbers do not go together");
    }
    last_.global_batch = position.at("global_batch_size");
    last_.workers = position.value("workers", 0);
    auto& full = options_.full;
    if (full > 0 && last_.workers > 0) full = last_.workers;
    restored_ = true;
  } catch (const Json::exception& error) {
    refuse_position(options_.name, error.what());
  }
}

Pass Cursor::plan(const BatchOptions& options, std::int64_t count) const {
  const bool split = options_.split;
  const auto share = split ? options_.share : step::Share{};
  const auto per_worker = split || !options.global_batch_size
                              ? options.batch_size
                              : (*options.global_batch_size - 1) / options_.share.total + 1;
  const auto batch = split && options.global_batch_size ? *options.global_batch_size
                                                        : times(per_worker, split ? options_.batches_in_step() : 1);
  Pass pass{.order = Order(count, {}),
            .plan = {count, options_.weighs() ? batch : 0, options.drop_last},
            .share = share,
            .training = split && options.training && at::GradMode::is_enabled(),
            .epoch = epoch_.number};
  if (pass.training && epoch_.to_skip > 0) {
    pass.position = count;
    pass.was = true;
    return pass;
  }
  OrderOptions order{.shuffle = options.shuffle,
                     .window = window_of(options, share),
                     .seed = options_.seed,
                     .window_seed = options.local_shuffle_seed.value_or(options_.seed),
                     .random_seed = options_.seed ^ hash_of(options_.name),
                     .epoch = epoch_.number,
                     .pass = split ? -1 - epoch_.evaluations : epoch_.evaluations};
  if (pass.training) {
    order.pass = epoch_.passes + (last_.under_way ? 1 : 0);
    if (!last_.under_way && last_.consumed > 0) {  // goes on
      order.window = last_.window;
      pass.position = last_.consumed;
    }
  }
  pass.order = Order(count, order);
  return pass;
}

std::string Cursor::named() const {
  return (options_.loader ? "data loader \"" : "dataset \"") + options_.name + "\": ";
}

void Cursor::say_if_steps_changed(const Pass& pass, const BatchOptions& options) {
  if (!std::exchange(restored_, false) || last_.global_batch == 0 || options.global_batch_size) return;
  const auto what = named();
  if (pass.plan.global_batch == last_.global_batch) {
    if (options_.batches_in_step() != options_.share.total)
      log::info(what + "a step still takes " + std::to_string(last_.global_batch) + " samples, now over " +
                std::to_string(options_.share.total) + " workers, and not batch_size on each");
    return;
  }
  // An epoch's steps may be as large as the program wants.
  if (last_.consumed == 0 && last_.workers == options_.batches_in_step()) return;
  log::warn(what + "a step now takes " + std::to_string(pass.plan.global_batch) + " samples over " +
            std::to_string(options_.share.total) + " workers, it took " + std::to_string(last_.global_batch) +
            " before the restart; global_batch_size keeps it the same at any number of workers");
}

Pass Cursor::begin_pass(const BatchOptions& options, std::int64_t count, const std::shared_ptr<const void>& loader) {
  Pass pass = plan(options, count);
  if (!pass.training) {
    pass.number = steps_->next_number();
    ++epoch_.evaluations;
    evaluated_ = true;
    return pass;
  }
  if (const auto other = trained_by_.lock(); last_.under_way && other && other != loader)
    throw Error(ExitCode::usage, "iterating over a data loader",
                "a pass over another one is under way that is called \"" + options_.name + "\" too",
                "Give each a name, DataLoaderOptions{.name = …}; one that does not train has .training = false");
  trained_by_ = loader;
  pass.number = steps_->next_number();
  if (epoch_.to_skip > 0) {
    if (!steps_->counted && epoch_.to_skip == epoch_.finished)
      log::warn(named() +
                "a pass that was finished before the restart comes back empty. A loop that counts epochs of "
                "its own, and goes on with the next one, calls set_epoch(epoch), or is one over session.epochs(n)");
    --epoch_.to_skip;
    return pass;
  }
  if (last_.under_way) finish();
  awaited_ = false;
  if (pass.position == 0 && count > 0 && pass.plan.global_batch > count && options.drop_last)
    log::warn(named() + "a step takes " + std::to_string(pass.plan.global_batch) +
              " samples over all workers, there are " + std::to_string(count) +
              ", and drop_last leaves them out: nothing is trained");
  if (steps_->counted && std::exchange(steps_->complete_epoch, -1) == epoch_.number)
    log::warn(named() +
              "this epoch was saved between two of its passes, and is over for a run that goes on from there. "
              "Report a State at the end of the epoch, or inside a pass");
  if (last_.consumed > 0 && last_.samples != count)
    throw Error(ExitCode::data, "continuing in dataset \"" + options_.name + "\"",
                "it has " + std::to_string(count) + " samples and had " + std::to_string(last_.samples) +
                    " when the checkpoint was saved",
                "Resume with the same files, or start a new run");
  if (options_.weighs()) say_if_steps_changed(pass, options);
  const bool goes_on = last_.consumed > 0;
  last_ = {.number = pass.number,
           .under_way = true,
           .consumed = last_.consumed,
           .window = goes_on ? last_.window : window_of(options, options_.share),
           .global_batch = pass.plan.global_batch,
           .workers = options_.batches_in_step(),
           .samples = count,
           .others = steps_->begin_pass({.number = pass.number,
                                         .source = this,
                                         .name = options_.name,
                                         .plan = pass.plan,
                                         .resumable = options_.resumable,
                                         .position = pass.position}),
           .outside = goes_on && last_.outside};
  last_.late = std::ranges::any_of(last_.others, [](const auto& other) { return other.batch > 1; });
  return pass;
}

void Cursor::begin_batch(const Pass& pass, const step::BatchWeightPtr& batch, std::int64_t samples) {
  if (!pass.training) return;
  if (options_.resumable && batch->completes_step() && last_.under_way && pass.number == last_.number)
    last_.consumed += batch->global;
  steps_->begin_batch(pass.number, batch, samples);
}

void Cursor::end_batch(const Pass& pass) {
  if (pass.training && options_.resumable && last_.under_way && pass.number == last_.number) steps_->end_batch();
}

void Cursor::end_pass(const Pass& pass) {
  if (!pass.training) return;
  if (last_.under_way && pass.number == last_.number) finish();
  steps_->end_pass(pass.number);
}

/// The pass under way is over. A program that goes on begins it again unless it was all inside one batch of another's.
void Cursor::finish() {
  last_.under_way = false;
  last_.consumed = 0;
  ++epoch_.passes;
  const bool contained =
      !last_.outside && std::ranges::any_of(last_.others, [&](const auto& o) { return steps_->is_in_hand(o); });
  if (contained || last_.late) return;
  ++epoch_.finished;
  epoch_.straddled = steps_->others_open(last_.number);
}

}  // namespace muster::detail::data
