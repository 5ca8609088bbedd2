// The datasets and data loaders of a session by name, and where it stands in each.
#pragma once

#include "data/track.hpp"
#include "muster/json.hpp"
#include "step/steps.hpp"

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <utility>

namespace muster::detail::data {

/// Belongs to the thread that runs the training function.
class Passes : public std::enable_shared_from_this<Passes> {
 public:
  explicit Passes(std::shared_ptr<step::Steps> of = std::make_shared<step::Steps>()) : steps(std::move(of)) {}

  const std::shared_ptr<step::Steps> steps;  ///< what the passes count in

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
  /// The training function has set the epoch of a track.
  void set_epoch(std::int64_t epoch);

 private:
  struct Unclaimed {
    Json position;
    bool complete;
  };
  void enter_epoch(std::int64_t epoch);

  std::map<std::string, std::shared_ptr<Track>> tracks_;
  std::map<std::string, Unclaimed> unclaimed_;  ///< positions whose dataset or loader has not come yet
};

}  // namespace muster::detail::data
