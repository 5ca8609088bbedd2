#include "data/sources/source.hpp"

#include "live/state.hpp"

#include <algorithm>

namespace muster::detail::live {
namespace {

using data::DatasetFingerprint;
using data::ReadBatch;

class LiveSource final : public data::Source {
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
  DatasetFingerprint fingerprint() override { return {.count = count(), .schema = data::schema_text(schema_)}; }
  std::string shown() const override { return "the live stream \"" + state_->receiver.stream.name + "\""; }

 private:
  const std::shared_ptr<LiveState> state_;
  const Part part_;
  Schema schema_;
};

}  // namespace

Dataset dataset_of(std::shared_ptr<LiveState> state, Part part) {
  return data::dataset_of(std::make_shared<LiveSource>(std::move(state), part));
}

}  // namespace muster::detail::live
