// The passes of a session over its datasets and data loaders: which batch a backward() counts, and every position.
#pragma once

#include "data/track.hpp"
#include "muster/json.hpp"
#include "step/step_weight.hpp"

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace muster::detail::data {

/// Belongs to the thread that runs the training function.
class Passes : public std::enable_shared_from_this<Passes> {
 public:
  /// Who wants to hear of training passes, as long as he lives.
  struct Watch {
    /// A batch is handed out; `samples` of its step count over all ranks.
    std::function<void(const Track&, const step::StepWeight& step, std::int64_t samples)> on_batch;
    /// The batch that counts is of that shard of the rank's; −1: none is.
    std::function<void(int shard)> on_shard;
    /// A batch is done with, and the next one asked for; of no other training pass is there one in hand.
    std::function<void()> on_next;
    /// The training function has set the epoch of a track.
    std::function<void(std::int64_t epoch)> on_epoch;
  };

  /// What a backward() counts now: by the innermost scope, else the training passes in hand.
  const std::shared_ptr<step::StepWeight> weight = std::make_shared<step::StepWeight>();
  std::weak_ptr<const Watch> watch = {};

  // By name. An Error if a dataset and a loader have the same one.
  void add(const std::shared_ptr<Track>& track);
  std::shared_ptr<Track> find_loader(const std::string& name) const;
  /// Of all of them.
  void begin_epoch(std::int64_t epoch);
  /// Positions by name, of this epoch, as JSON; and back, before or after a name is added. `complete`: of an epoch that
  /// is over.
  Json positions() const;
  void restore(const std::string& name, const Json& position, bool complete);
  /// Whether every training pass that was begun in this epoch is over, and there was one if there is data.
  bool epoch_complete() const;
  /// A training pass in hand whose position cannot be saved, if there is one.
  const Track* without_position() const;
  /// Whether the steps are complete of which batches are in hand.
  bool complete_steps() const;

  // For the tracks.
  void set_epoch(std::int64_t epoch);
  using Place = std::pair<std::int64_t, std::int64_t>;  ///< a pass in hand, and how many batches it has given
  std::int64_t next_number() noexcept { return ++number_; }
  /// A training pass begins; gives the others in hand.
  std::vector<Place> begin(const Track& track, const Pass& pass);
  void take(const Track& track, const Pass& pass, const std::shared_ptr<const step::StepWeight>& step,
            std::int64_t samples);
  void leave();
  void end(std::int64_t pass);
  /// Whether that pass is still in hand, and at the same batch.
  bool is_at(const Place& place) const;
  bool others_in_hand(std::int64_t pass) const;

  // For scopes: until leave(), `step` counts; null where all ranks count the same.
  std::int64_t enter(std::shared_ptr<const step::StepWeight> step);
  void leave(std::int64_t scope);

 private:
  /// A training pass in hand.
  struct Hand {
    const Track* track;
    std::string name;
    std::int64_t pass;
    Plan plan;
    std::int64_t position = 0;  ///< where its step ends
    std::int64_t batches = 0;
    std::int64_t taken = 0;  ///< orders the batches in hand
    std::shared_ptr<const step::StepWeight> step = {};
  };
  struct Unclaimed {
    Json position;
    bool complete;
  };
  void enter_epoch(std::int64_t epoch);
  Hand& hand_of(const Track& track, const Pass& pass);
  static std::string conflict(const Hand& a, const Hand& b);
  void refresh();

  std::int64_t number_ = 0, epoch_ = 0, takes_ = 0;
  std::map<std::string, std::shared_ptr<Track>> tracks_;
  std::map<std::string, Unclaimed> unclaimed_;  ///< positions whose dataset or loader has not come yet
  std::vector<Hand> hands_;
  std::vector<std::pair<std::int64_t, std::shared_ptr<const step::StepWeight>>> scopes_;
};

}  // namespace muster::detail::data
