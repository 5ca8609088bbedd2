#include "muster/live.hpp"

#include "base/duration.hpp"
#include "base/hash.hpp"
#include "base/text.hpp"
#include "comm/mpi_scope.hpp"
#include "comm/mpi_threads.hpp"
#include "comm/on_ranks.hpp"
#include "data/sources/source.hpp"
#include "live/receiver.hpp"
#include "muster/error.hpp"
#include "state/stateful.hpp"

#include <ATen/ATen.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <numeric>
#include <utility>

namespace muster {
namespace {

using detail::str;
using detail::live::Fates;
using detail::live::LiveColumn;
using detail::live::Receiver;
using detail::live::Reservoir;
using detail::live::Sample;
using Lock = std::unique_lock<std::mutex>;

at::ScalarType type_of(const LiveColumn& column) {
  constexpr std::array types{at::kFloat, at::kDouble, at::kInt, at::kLong, at::kByte};
  return types[static_cast<std::size_t>(column.type)];
}

std::vector<std::int64_t> shape_of(const LiveColumn& column, std::int64_t rows) {
  auto shape = column.shape;
  shape.insert(shape.begin(), rows);
  return shape;
}

void check(const LiveOptions& options, const std::string& doing) {
  const auto refuse = [&](bool is_wrong, const char* fact, const char* remedy) {
    if (is_wrong) throw Error(ExitCode::usage, doing, fact, remedy);
  };
  refuse(options.bytes < 1 || options.samples_per_epoch < 1 || options.solvers < 1,
         "bytes, samples_per_epoch or solvers is less than 1", "Give at least 1");
  refuse(options.watermark < 0 || options.max_uses < 0 || options.after_end.value_or(0) < 0 ||
             options.validation_every < 0 || options.validation_samples < 0,
         "an option is negative", "Give numbers from 0 on");
  refuse(!(options.min_fresh >= 0 && options.min_fresh <= 1), "min_fresh is not a share", "Give a number from 0 to 1");
  refuse((options.rule == LiveRule::fifo || options.rule == LiveRule::firo) && options.max_uses > 1,
         "max_uses is more than 1, and the rule uses each sample once", "Leave out max_uses, or take another rule");
  refuse(options.rule == LiveRule::uniform && options.min_fresh > 0,
         "min_fresh is set, and the rule uniform throws away samples that were never used",
         "Leave out min_fresh, or take another rule");
}

}  // namespace

namespace detail::live {

struct LiveState {
  LiveState(Communicator trainers, Stream of, std::int64_t number)
      : launched(std::move(trainers)),
        ranks(launched),
        receiver(std::move(of)),
        options(receiver.stream.options),
        number(number) {}

  const Communicator launched;
  Communicator ranks;  ///< of the present State: a failed attempt may have left collectives of the last one unfinished
  Receiver receiver;
  const LiveOptions& options;
  std::int64_t weights_version = 0;
  bool has_solver = false;  ///< a solver's first sample has come on all ranks
  static inline std::atomic<std::int64_t> last_number{0};
  const std::int64_t number;  ///< the same on all ranks, and another one for each Live of a process
  // With the receiver's mutex locked:
  bool has_begun = false;            ///< the watermark was reached
  std::int64_t draws_after_end = 0;  ///< of this rank
  double wait_s = 0;

  int rank() const noexcept { return ranks.rank(); }
  /// Waits for the first solver. Collective at the first call.
  void require_solver() {
    if (has_solver) return;
    comm::run_on_all(launched, [&] { receiver.wait_for_solver(); });
    has_solver = true;
  }
  /// What all solvers have sent and dropped themselves, not less than what has come to any rank when it calls this.
  /// Collective.
  Receiver::Sent all_sent(const Communicator& over) {
    std::vector<std::int64_t> of_solvers;
    std::array<std::int64_t, 3> all{};
    {
      const Lock lock(receiver.mutex);
      for (const auto& sent : receiver.sent())
        of_solvers.insert(of_solvers.end(), {sent.sent, sent.dropped, sent.waited_ms});
      all = {receiver.sent_before().sent, receiver.sent_before().dropped, 0};
    }
    over.all_reduce(std::span(of_solvers), ReduceOp::max);  // a rank knows more than others of solvers on other nodes
    over.all_reduce(std::span(all));
    for (std::size_t i = 0; i < of_solvers.size(); ++i) all[i % 3] += of_solvers[i];
    return {all[0], all[1], all[2]};
  }
  LiveLedger ledger(const Communicator& over);
  /// Identifies this Live among all of all jobs, the same on all ranks.
  std::int64_t identity() const {
    return static_cast<std::int64_t>(std::stoull(receiver.stream.token.substr(0, 15), nullptr, 16)) + number;
  }
  std::int64_t share_of(std::int64_t count) const noexcept {
    return count / ranks.size() + (rank() < count % ranks.size() ? 1 : 0);
  }
  std::string doing() const { return "reading the live stream \"" + receiver.stream.name + "\""; }

  /// Waits until `ready`, or the stream has failed, with the lock held. False if no sample has come in time. Calls
  /// `between` from time to time, without the lock.
  bool wait(Lock& lock, const std::function<void()>& between, const auto& ready) {
    using Clock = std::chrono::steady_clock;
    constexpr std::chrono::milliseconds slice{50};
    const auto begin = Clock::now();
    auto last_change = begin;
    for (auto came = receiver.reservoir().fates().received; !receiver.has_failed() && !ready();) {
      receiver.changed.wait_for(lock, slice);
      if (std::exchange(came, receiver.reservoir().fates().received) != came) last_change = Clock::now();
      if (Clock::now() - last_change > options.timeout) return false;
      lock.unlock();
      between();
      lock.lock();
    }
    wait_s += std::chrono::duration<double>(Clock::now() - begin).count();
    return true;
  }
  /// Throws the Error after a wait: the stream's, or that no sample has come.
  void check_wait(bool has_come) const {
    receiver.check();
    if (!has_come)
      throw Error(ExitCode::retry, doing(), str("no sample has come for ", options.timeout.count(), " s"),
                  "Look whether the solvers still run, or raise LiveOptions::timeout");
  }

  void wait_for_watermark(Lock& lock, const std::function<void()>& between) {
    receiver.resume();
    if (has_begun) return;
    const auto needed = (options.watermark + ranks.size() - 1) / ranks.size();
    const bool has_come = wait(lock, between, [&] {
      return receiver.reservoir().size() >= needed || receiver.reservoir().fates().used > 0 || receiver.all_ended();
    });
    check_wait(has_come);
    has_begun = true;
  }

  /// How many samples may be drawn now, up to `count`, after all solvers have ended.
  std::int64_t draws_left(std::int64_t count) {
    auto& reservoir = receiver.reservoir();
    if (reservoir.size() == 0) return 0;
    const auto most = options.after_end ? share_of(*options.after_end) - draws_after_end : reservoir.waiting();
    return std::max<std::int64_t>(0, std::min({count, most, reservoir.uses_once() ? reservoir.waiting() : count}));
  }

  std::optional<Batch> draw(std::int64_t count, const std::function<void()>& between) {
    Lock lock(receiver.mutex);
    wait_for_watermark(lock, between);
    auto& reservoir = receiver.reservoir();
    const auto fresh_share = static_cast<std::int64_t>(std::ceil(options.min_fresh * static_cast<double>(count)));
    std::vector<Batch> parts;
    for (std::int64_t rows = 0; rows < count;) {
      const auto fresh = std::min({fresh_share, count - rows, reservoir.drawable_capacity()});
      const bool has_come = wait(lock, between, [&] {
        return receiver.all_ended() || (reservoir.size() > 0 && reservoir.waiting() >= fresh);
      });
      if (rows == 0) check_wait(has_come);
      if (!has_come || receiver.has_failed()) break;  // what was drawn is used, and the next draw throws
      const bool has_ended = receiver.all_ended();
      auto now = count - rows;
      if (reservoir.uses_once()) now = std::min(now, reservoir.waiting());
      if (has_ended) now = draws_left(now);
      if (now <= 0) break;
      // Each sample is to be used before the end.
      const auto first = has_ended && !options.after_end ? now : fresh;
      const auto slots = reservoir.draw(now, std::min(first, reservoir.waiting()));
      if (slots.empty()) break;
      if (has_ended) draws_after_end += static_cast<std::int64_t>(slots.size());
      parts.push_back(rows_of(slots));
      rows += static_cast<std::int64_t>(slots.size());
      receiver.resume();
    }
    return joined(parts);
  }

  std::optional<Batch> draw_held_out(std::int64_t count, const std::function<void()>& between) {
    Lock lock(receiver.mutex);
    wait_for_watermark(lock, between);
    if (receiver.reservoir().held_out() == 0) return {};
    return rows_of(receiver.reservoir().next_held_out(count));
  }

  /// Samples in memory by index, round and round, without drawing them.
  Batch look(std::span<const std::int64_t> indices, bool of_validation) {
    Lock lock(receiver.mutex);
    wait_for_watermark(lock, [] {});
    const auto& reservoir = receiver.reservoir();
    const auto count = of_validation ? reservoir.held_out() : reservoir.size();
    if (count == 0)
      throw Error(ExitCode::data, doing(), "no sample is there to look at", "Look at samples while solvers send them");
    std::vector<std::int64_t> slots;
    for (const auto index : indices)
      slots.push_back(of_validation ? reservoir.held_out_slots()[static_cast<std::size_t>(index % count)]
                                    : reservoir.slot(index % count));
    return rows_of(slots);
  }

  /// The values of these samples. With the receiver's mutex locked.
  Batch rows_of(const std::vector<std::int64_t>& slots) {
    const auto rows = static_cast<std::int64_t>(slots.size());
    std::vector<Batch::Item> items;
    for (const auto& column : receiver.columns()) {
      const auto values = at::empty(shape_of(column, rows), type_of(column));
      auto* to = static_cast<std::byte*>(values.mutable_data_ptr());
      for (const auto slot : slots) {
        std::memcpy(to, column.data + slot * column.bytes, static_cast<std::size_t>(column.bytes));
        to += column.bytes;
      }
      items.emplace_back(column.name, values);
    }
    const auto samples = at::empty({rows, 2}, at::kLong);
    auto* at = samples.mutable_data_ptr<std::int64_t>();
    for (const auto slot : slots) {
      *at++ = receiver.reservoir()[slot].solver;
      *at++ = receiver.reservoir()[slot].number;
    }
    items.emplace_back("sample", samples);
    return Batch(std::move(items));
  }

  static std::optional<Batch> joined(std::vector<Batch>& parts) {
    if (parts.size() < 2) return parts.empty() ? std::nullopt : std::optional(std::move(parts.front()));
    std::vector<Batch::Item> items;
    for (const auto& [name, unused] : parts.front()) {
      std::vector<at::Tensor> values;
      for (const auto& part : parts) values.push_back(part[name]);
      items.emplace_back(name, at::cat(values));
    }
    return Batch(std::move(items));
  }
};

LiveLedger LiveState::ledger(const Communicator& over) {
  std::array<std::int64_t, 9> all{};
  double waited_s = 0;
  {
    const Lock lock(receiver.mutex);
    receiver.end_pause();
    const auto& reservoir = receiver.reservoir();
    const auto& fates = reservoir.fates();
    all = {reservoir.waiting(),
           fates.used,
           fates.validation,
           fates.dropped,
           fates.lost,
           fates.draws,
           reservoir.size(),
           reservoir.drawable_capacity(),
           receiver.all_ended() ? 0 : 1};
    waited_s = wait_s;
  }
  over.all_reduce(std::span(all));
  const auto sent = all_sent(over);  // after the others, so that nothing that has come is missing in it
  LiveLedger ledger{.sent = sent.sent,
                    .waiting = all[0],
                    .used = all[1],
                    .validation = all[2],
                    .dropped_by_solver = sent.dropped,
                    .dropped_by_trainer = all[3],
                    .lost = all[4],
                    .draws = all[5],
                    .in_memory = all[6],
                    .room = all[7],
                    .solver_wait_s = static_cast<double>(sent.waited_ms) / 1000,
                    .trainer_wait_s = over.all_reduce(waited_s) / over.size()};
  const auto rest = ledger.sent - ledger.waiting - ledger.used - ledger.validation - ledger.dropped_by_solver -
                    ledger.dropped_by_trainer - ledger.lost;
  // What is still missing when all solvers have ended will not come any more.
  (all[8] > 0 ? ledger.on_its_way : ledger.lost) += rest;
  return ledger;
}

}  // namespace detail::live

namespace {

using detail::data::DatasetFingerprint;
using detail::data::ReadBatch;
using detail::live::LiveState;

/// Which of a stream's samples a source has.
enum class Part { training, validation, first };

class LiveSource final : public detail::data::Source {
 public:
  LiveSource(std::shared_ptr<LiveState> state, Part part) : state_(std::move(state)), part_(part) {
    for (const auto& column : state_->receiver.columns())
      schema_.push_back({column.name, type_of(column), column.shape});
    schema_.push_back({"sample", at::kLong, {2}});
  }

  bool draws() const noexcept override { return true; }
  std::optional<ReadBatch> draw(std::int64_t count, std::uint64_t, const std::function<void()>& between) override {
    auto drawn = part_ == Part::validation ? state_->draw_held_out(count, between) : state_->draw(count, between);
    return drawn ? std::optional(ReadBatch(std::move(*drawn))) : std::nullopt;
  }
  std::shared_ptr<Source> to_fit() override { return std::make_shared<LiveSource>(state_, Part::first); }
  Json ledger(const Communicator& workers) override {
    if (part_ != Part::training) return {};
    const auto all = state_->ledger(workers);
    const auto used = static_cast<double>(std::max<std::int64_t>(all.used, 1));
    return {{state_->receiver.stream.name,
             {{"sent", all.sent},
              {"on_its_way", all.on_its_way},
              {"waiting", all.waiting},
              {"used", all.used},
              {"validation", all.validation},
              {"dropped_by_solver", all.dropped_by_solver},
              {"dropped_by_trainer", all.dropped_by_trainer},
              {"lost", all.lost},
              {"in_memory", all.in_memory},
              {"room", all.room},
              {"uses_per_sample", static_cast<double>(all.draws) / used},
              {"solver_wait_s", all.solver_wait_s},
              {"trainer_wait_s", all.trainer_wait_s}}}};
  }

  std::int64_t count() override {
    const auto& options = state_->options;
    const auto ranks = state_->ranks.size();
    return part_ == Part::training     ? options.samples_per_epoch
           : part_ == Part::validation ? options.validation_samples
                                       : std::max<std::int64_t>((options.watermark + ranks - 1) / ranks, 1);
  }
  const Schema& schema() override { return schema_; }
  Batch read(std::span<const std::int64_t> samples) override {
    return state_->look(samples, part_ == Part::validation);
  }
  DatasetFingerprint fingerprint() override { return {.count = count(), .schema = detail::data::schema_text(schema_)}; }
  std::string shown() const override { return "the live stream \"" + state_->receiver.stream.name + "\""; }

 private:
  const std::shared_ptr<LiveState> state_;
  const Part part_;
  Schema schema_;
};

/// The samples in memory and their ledger, in checkpoints.
class SavedLive final : public detail::state::Stateful {
 public:
  using StateDict = muster::StateDict;
  using Paths = detail::state::ParameterPaths;

  explicit SavedLive(std::shared_ptr<LiveState> state) : state_(std::move(state)) {}

  detail::state::Replication replication() const override { return detail::state::Replication::per_rank; }

  /// The tensors have the same shape on all ranks.
  void gather() override {
    const auto own = [&] {
      Lock lock(state_->receiver.mutex);
      state_->receiver.pause(lock);
      return state_->receiver.reservoir().slot_count();
    }();
    slots_ = state_->ranks.all_reduce(own, ReduceOp::max);
    sent_ = state_->all_sent(state_->ranks);
  }

  StateDict save(const Paths&) const override {
    auto& receiver = state_->receiver;
    Lock lock(receiver.mutex);
    receiver.pause(lock);
    const auto& reservoir = receiver.reservoir();
    const auto slots = std::max({slots_, reservoir.slot_count(), std::int64_t{1}});
    const auto table = at::zeros({slots, fields}, at::kLong);
    const auto write = [&](std::int64_t slot) {
      const auto& sample = reservoir[slot];
      const std::array<std::int64_t, fields> row{sample.solver,  sample.number,      sample.uses,
                                                 sample.arrival, sample.is_held_out, 1};
      std::ranges::copy(row, table.mutable_data_ptr<std::int64_t>() + slot * fields);
    };
    for (std::int64_t i = 0; i < reservoir.size(); ++i) write(reservoir.slot(i));
    for (const auto slot : reservoir.held_out_slots()) write(slot);
    StateDict saved{.tensors = {{"samples", table}}};
    for (const auto& column : receiver.columns())
      saved.tensors["columns/" + column.name] = at::from_blob(column.data, shape_of(column, slots), type_of(column));
    const auto& fates = reservoir.fates();
    const auto sent = state_->rank() == 0 ? sent_ : Receiver::Sent{};
    saved.tensors["ledger"] = at::tensor({sent.sent, sent.dropped, fates.received, fates.used, fates.validation,
                                          fates.dropped, fates.lost, fates.draws, state_->draws_after_end});
    saved.tensors["next"] = at::tensor(receiver.next);
    saved.tensors["identity"] = at::tensor({state_->identity()});
    return saved;
  }

  void compare(const StateDict& saved, const Paths&, detail::state::Differences& differences) const override {
    if (std::ranges::any_of(std::array{"samples", "ledger", "next", "identity"},
                            [&](const char* name) { return !saved.tensors.contains(name); })) {
      differences.push_back({"", "a live stream here, something else in the checkpoint"});
      return;
    }
    for (const auto& column : state_->receiver.columns()) {
      const auto found = saved.tensors.find("columns/" + column.name);
      if (found == saved.tensors.end())
        differences.push_back({"columns/" + column.name, "missing in the checkpoint"});
      else if (found->second.sizes().slice(1) != at::IntArrayRef(column.shape) ||
               found->second.scalar_type() != type_of(column))
        differences.push_back({found->first, "of another shape or type than the solvers' field"});
    }
  }

  void load(const StateDict& saved, const Paths&) override {
    auto& receiver = state_->receiver;
    const auto ledger = values_of(saved.tensors.at("ledger")), next = values_of(saved.tensors.at("next"));
    std::array<std::int64_t, 3> sums{ledger[0], ledger[1], ledger[2]};  // sent, dropped by the solvers, received
    state_->ranks.all_reduce(std::span(sums));
    // Another attempt with the same Live has the same solvers, which go on counting. Otherwise what was on its way when
    // the checkpoint was saved is lost.
    const bool is_same = values_of(saved.tensors.at("identity"))[0] == state_->identity();
    const auto lost = is_same ? 0 : sums[0] - sums[1] - sums[2];
    auto all_next = next;
    state_->ranks.all_reduce(std::span(all_next), ReduceOp::max);
    const Lock lock(receiver.mutex);
    auto& reservoir = receiver.reservoir();
    // What this attempt had received after the checkpoint is thrown away.
    const auto discarded = is_same ? std::max<std::int64_t>(0, reservoir.fates().received - ledger[2]) : 0;
    reservoir.clear();
    Fates fates{.received = ledger[2],
                .used = ledger[3],
                .validation = ledger[4],
                .dropped = ledger[5],
                .lost = ledger[6],
                .draws = ledger[7]};
    fates.received += discarded, fates.lost += discarded;
    if (state_->rank() == 0) fates.received += lost, fates.lost += lost;
    const auto table = saved.tensors.at("samples").contiguous();
    const auto* const rows = table.const_data_ptr<std::int64_t>();
    std::vector<std::int64_t> order;
    for (std::int64_t row = 0; row < table.size(0); ++row)
      if (rows[row * fields + 5] != 0) order.push_back(row);
    std::ranges::sort(order, {}, [&](std::int64_t row) { return rows[row * fields + 3]; });
    for (const auto row : order) {
      const auto* const at = rows + row * fields;
      const Sample sample{.solver = at[0], .number = at[1], .uses = at[2], .arrival = at[3], .is_held_out = at[4] != 0};
      const auto slot = reservoir.restore(sample);
      if (!slot) {  // a used one stays used
        if (sample.is_held_out) --fates.validation;
        if (sample.is_held_out || sample.uses == 0) ++fates.lost;
        continue;
      }
      for (const auto& column : receiver.columns()) {
        const auto values = saved.tensors.at("columns/" + column.name).contiguous();
        std::memcpy(column.data + *slot * column.bytes,
                    static_cast<const std::byte*>(values.const_data_ptr()) + row * column.bytes,
                    static_cast<std::size_t>(column.bytes));
      }
    }
    reservoir.restore(fates);
    if (!is_same) receiver.restore(state_->rank() == 0 ? Receiver::Sent{sums[0], sums[1]} : Receiver::Sent{}, all_next);
    state_->draws_after_end = ledger[8];
  }

  bool may_throw() const override { return true; }

  /// The samples of all ranks are dealt out to these, in the order of arrival.
  std::optional<StateDict> redistribute(const StateDict& all, detail::state::RankInGroup here) const override {
    const auto samples = all.tensors.find("samples"), ledger = all.tensors.find("ledger");
    if (samples == all.tensors.end() || ledger == all.tensors.end() || !all.tensors.contains("next") ||
        !all.tensors.contains("identity"))
      return StateDict{};
    const auto table = samples->second.flatten(0, 1).contiguous();
    const auto* const values = table.const_data_ptr<std::int64_t>();
    std::vector<std::int64_t> order, rows;
    for (std::int64_t row = 0; row < table.size(0); ++row)
      if (values[row * fields + 5] != 0) order.push_back(row);
    std::ranges::stable_sort(order, {}, [&](std::int64_t row) { return values[row * fields + 3]; });
    for (auto i = static_cast<std::size_t>(here.rank); i < order.size(); i += static_cast<std::size_t>(here.size))
      rows.push_back(order[i]);
    const auto index = at::tensor(rows, at::kLong);
    StateDict mine{.values = all.values.at(0)};
    for (const auto& [path, tensor] : all.tensors)
      if (path == "samples" || path.starts_with("columns/"))
        mine.tensors[path] = tensor.flatten(0, 1).index_select(0, index);
    const auto sums = ledger->second.sum(0);
    mine.tensors["ledger"] = sums.div(here.size, "floor") + sums.remainder(here.size).gt(here.rank);
    mine.tensors["next"] = std::get<0>(all.tensors.at("next").max(0));
    mine.tensors["identity"] = all.tensors.at("identity").select(0, 0);
    return mine;
  }

 private:
  static constexpr std::int64_t fields = 6;  ///< of a sample: solver, number, uses, arrival, held out, present

  static std::vector<std::int64_t> values_of(const at::Tensor& tensor) {
    const auto all = tensor.contiguous();
    return {all.const_data_ptr<std::int64_t>(), all.const_data_ptr<std::int64_t>() + all.numel()};
  }

  const std::shared_ptr<LiveState> state_;
  std::int64_t slots_ = 0;  ///< the most that a rank had at the last gather()
  Receiver::Sent sent_;     ///< then
};

}  // namespace

Live::Live(const Launch& launch, const std::string& name, const LiveOptions& options) {
  const auto doing = "opening the live stream \"" + name + "\"";
  const auto ranks = launch.communicator().duplicate();
  detail::comm::require_same_options(ranks, "the live stream",
                                     {{"name", name},
                                      {"rule", static_cast<int>(options.rule)},
                                      {"bytes", options.bytes},
                                      {"watermark", options.watermark},
                                      {"max_uses", options.max_uses},
                                      {"min_fresh", options.min_fresh},
                                      {"after_end", options.after_end.value_or(-1)},
                                      {"samples_per_epoch", options.samples_per_epoch},
                                      {"validation_every", options.validation_every},
                                      {"validation_samples", options.validation_samples},
                                      {"solvers", options.solvers},
                                      {"seed", options.seed.value_or(launch.flags().seed)},
                                      {"on_solver_death", static_cast<int>(options.on_solver_death)},
                                      {"timeout", options.timeout.count()}});
  auto own_options = options;
  own_options.timeout = std::min(options.timeout, detail::longest_time);  // so that no sum of times overflows
  const auto number = ranks.all_reduce(LiveState::last_number + 1, ReduceOp::max);
  LiveState::last_number = number;
  std::string token;
  const auto own_rank = detail::comm::rank_and_size().first;
  const auto world_ranks = detail::comm::run_on_all(ranks, [&] { return own_rank; });
  bool has_other_nodes = false;
  detail::comm::run_on_all(ranks, [&] {
    check(options, doing);
    if (live_is_name(name.c_str()) == 0)
      throw Error(ExitCode::usage, doing, "it is no name of a stream",
                  str("Give up to ", static_cast<int>(MUSTER_LIVE_MAX_NAME), " letters, digits, '-', '_' and '.'"));
    if (ranks.size() == detail::comm::rank_and_size().second)
      throw Error(ExitCode::usage, doing, "no rank of the job is left for a solver",
                  "Start both, as in mpirun -n 6 ./solver : -n 2 ./trainer, and give Launch the part of a LiveWorld");
    std::array<char, 33> digits{};
    std::array<char, LIVE_TEXT> text{};
    if (live_join(static_cast<double>(own_options.timeout.count()), digits.data(), text.data()) != MUSTER_LIVE_OK)
      throw Error(ExitCode::retry, doing, "not all ranks of MPI_COMM_WORLD have come in time",
                  "Ranks that neither simulate nor train call muster_live_world(NULL)");
    token = digits.data();
    for (int rank = 0; rank < detail::comm::rank_and_size().second; ++rank)
      has_other_nodes =
          has_other_nodes || (live_share_node(own_rank, rank) == 0 && std::ranges::count(world_ranks, rank) == 0);
    if (has_other_nodes && !detail::comm::threads_may_call_mpi())
      throw Error(ExitCode::usage, doing,
                  "a solver may be on another node, and MPI was not initialised for several threads",
                  "Ask for MPI_THREAD_MULTIPLE in MPI_Init_thread, or start all ranks on one node");
  });
  const bool any_has_other_nodes = ranks.all_reduce(std::int64_t{has_other_nodes}, ReduceOp::max) > 0;
  detail::comm::run_on_all(ranks, [&] {
    state_ = std::make_shared<LiveState>(
        ranks,
        detail::live::Stream{.token = token,
                             .name = name,
                             .rank = ranks.rank(),
                             .ranks = ranks.size(),
                             .tag = static_cast<int>(1 + 2 * (number % detail::live::most_streams)),
                             .has_other_nodes = has_other_nodes,
                             .any_has_other_nodes = any_has_other_nodes,
                             .options = own_options,
                             .seed = detail::scrambled(options.seed.value_or(launch.flags().seed) +
                                                       static_cast<std::uint64_t>(ranks.rank()))},
        number);
  });
  detail::comm::run_on_all(ranks, [&] { state_->receiver.start(); });
  if (ranks.rank() == 0) detail::live::announce(state_->receiver.stream, world_ranks);
}

Live::~Live() {
  if (state_->rank() == 0 && !detail::comm::mpi_is_finalised()) detail::live::announce(state_->receiver.stream, {});
}

Dataset Live::dataset() const {
  state_->require_solver();
  return detail::data::dataset_of(std::make_shared<LiveSource>(state_, Part::training));
}

Dataset Live::validation() const {
  if (state_->options.validation_every == 0)
    throw Error(ExitCode::usage, state_->doing(), "no sample is held out for validation",
                "Set LiveOptions::validation_every");
  state_->require_solver();
  return detail::data::dataset_of(std::make_shared<LiveSource>(state_, Part::validation));
}

Live::operator StateEntry() const {
  state_->require_solver();
  state_->ranks = state_->launched.duplicate();
  return StateEntry(std::make_shared<SavedLive>(state_));
}

std::int64_t Live::send_weights(const std::string& bytes) {
  detail::comm::run_on_root(state_->ranks, [&] { state_->receiver.send_weights(bytes); });
  return ++state_->weights_version;
}

void Live::stop_solvers() { state_->receiver.stop_solvers(); }

bool Live::ended() const {
  state_->require_solver();
  std::int64_t left = 0;
  {
    const Lock lock(state_->receiver.mutex);
    state_->receiver.end_pause();
    left = state_->receiver.all_ended() ? state_->draws_left(1) : 1;
  }
  return state_->ranks.all_reduce(left) == 0;
}

LiveLedger Live::ledger() const {
  state_->require_solver();
  return state_->ledger(state_->ranks);
}

}  // namespace muster
