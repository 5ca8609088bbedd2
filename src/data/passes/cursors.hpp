// The cursors of a session, by the names of its datasets and data loaders.
#pragma once

#include "data/passes/cursor.hpp"
#include "muster/json.hpp"
#include "step/steps.hpp"

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <utility>

namespace muster::detail::data {

/// Belongs to the thread that runs the training function.
class Cursors : public std::enable_shared_from_this<Cursors> {
 public:
  explicit Cursors(std::shared_ptr<step::Steps> of = std::make_shared<step::Steps>()) : steps(std::move(of)) {}

  const std::shared_ptr<step::Steps> steps;  ///< counts what the passes hand out

  /// An Error if a dataset and a loader have the same name.
  void add(const std::shared_ptr<Cursor>& cursor);
  /// Null if no loader has that name.
  std::shared_ptr<Cursor> find_loader(const std::string& name) const;
  /// Of all of them.
  void begin_epoch(std::int64_t epoch);
  /// The training function has set the epoch of one of them.
  void set_epoch(std::int64_t epoch);
  /// Positions by name, of this epoch, as JSON; and back, before or after a name is added. `complete`: of an epoch that
  /// is over.
  Json positions() const;
  void restore(const std::string& name, const Json& position, bool complete);
  /// Whether every training pass that was begun in this epoch is over, and there was one if there is data.
  bool epoch_complete() const;

 private:
  struct Saved {
    Json position;
    bool complete;
  };
  void enter_epoch(std::int64_t epoch);

  std::map<std::string, std::shared_ptr<Cursor>> cursors_;
  std::map<std::string, Saved> early_;  ///< positions whose dataset or loader has not come yet
};

}  // namespace muster::detail::data
