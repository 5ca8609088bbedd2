#include "live/state.hpp"

#include <algorithm>
#include <array>
#include <cstring>
#include <utility>

namespace muster::detail::live {
namespace {

using Lock = std::unique_lock<std::mutex>;

class SavedLive final : public state::Stateful {
 public:
  using StateDict = muster::StateDict;
  using Paths = state::ParameterPaths;

  explicit SavedLive(std::shared_ptr<LiveState> state) : state_(std::move(state)) {}

  state::Replication replication() const override { return state::Replication::per_rank; }

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
    const auto sent = state_->rank() == 0 ? sent_ : Sent{};
    saved.tensors["ledger"] = at::tensor({sent.sent, sent.dropped, fates.received, fates.used, fates.validation,
                                          fates.dropped, fates.lost, fates.draws, state_->draws_after_end});
    saved.tensors["next"] = at::tensor(receiver.next());
    saved.tensors["identity"] = at::tensor({state_->identity()});
    return saved;
  }

  void compare(const StateDict& saved, const Paths&, state::Differences& differences) const override {
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
    if (!is_same) receiver.restore(state_->rank() == 0 ? Sent{sums[0], sums[1]} : Sent{}, all_next);
    state_->draws_after_end = ledger[8];
  }

  bool may_throw() const override { return true; }

  /// The samples of all ranks are dealt out to these, in the order of arrival.
  std::optional<StateDict> redistribute(const StateDict& all, state::RankInGroup here) const override {
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
  Sent sent_;               ///< then
};

}  // namespace

std::shared_ptr<state::Stateful> saved(std::shared_ptr<LiveState> state) {
  return std::make_shared<SavedLive>(std::move(state));
}

}  // namespace muster::detail::live
