#include "observe/status_file.hpp"

#include "base/file.hpp"
#include "base/host.hpp"
#include "base/json.hpp"
#include "base/log.hpp"
#include "base/run_names.hpp"
#include "muster/error.hpp"

#include <unistd.h>

#include <algorithm>
#include <ctime>
#include <utility>

namespace muster::detail::observe {
namespace {

constexpr std::chrono::seconds write_interval{5};

/// Returns the whole number at `key`; 0 if there is none, since other programs may have written the file.
std::int64_t count_at(const Json& object, const char* key) {
  const auto found = object.find(key);
  return found != object.end() && found->is_number_integer() ? found->get<std::int64_t>() : 0;
}

}  // namespace

Json read_status(const std::filesystem::path& run) try {
  const auto path = run / run_names::status;
  if (!std::filesystem::exists(status_of(path))) return nullptr;
  auto status = read_json(path);
  return status.is_object() ? status : Json();
} catch (const Error&) {
  return nullptr;
}

StatusFile::StatusFile(std::filesystem::path run, int world_size, const CheckpointConfig& score, const History* history)
    : run_(std::move(run)),
      world_size_(world_size),
      started_(std::time(nullptr)),
      account_(run_, world_size),
      best_{.attribute = score.checkpoint_score_attribute,
            .is_max = score.checkpoint_score_order == ScoreOrder::max,
            .history = history} {}

void StatusFile::update_best() {
  const auto& rows = best_.history->rows();
  for (; best_.rows_seen < rows.size(); ++best_.rows_seen) {
    const auto found = rows[best_.rows_seen].find(best_.attribute);
    if (found == rows[best_.rows_seen].end() || !found->is_number()) continue;
    if (best_.value.is_null() || (best_.is_max ? *found > best_.value : *found < best_.value)) best_.value = *found;
  }
}

void StatusFile::start(const AttemptStart& start) {
  account_.start(start);
  best_.rows_seen = 0;
  best_.value = nullptr;
  last_report_ = start.last_row;
  position_.global_step = start.global_step;
  if (start.global_step == 0 && start.training_iteration == 0) return;
  // If there is nothing left to train, no batch and no report will tell the position, so it is read from the file.
  const auto before = read_status(run_);
  if (!before.is_object() || count_at(before, "global_step") != start.global_step ||
      count_at(before, "training_iteration") != start.training_iteration)
    return;
  if (const auto report = before.value("last_report", Json()); last_report_.is_null() && report.is_object())
    last_report_ = report;
  position_ = {.epoch = count_at(before, "epoch"),
               .epochs = count_at(before, "epochs"),
               .consumed = count_at(before, "consumed"),
               .samples = count_at(before, "samples"),
               .global_step = start.global_step};
}

void StatusFile::batch(const EpochPosition& position) {
  position_ = position;
  write_sometimes();
}

void StatusFile::report(const Json& row, std::int64_t epochs) {
  last_report_ = row;
  account_.report(row);
  position_.epochs = epochs;
  // In a loop over data that muster does not know, there are no events of batches: take the epoch from the row.
  const auto epoch = row.find("epoch");
  if (epoch != row.end() && epoch->is_number_integer() && *epoch > position_.epoch && *epoch < epochs)
    position_ = {.epoch = *epoch, .epochs = epochs, .global_step = position_.global_step};
  write_sometimes();
}

void StatusFile::failure(const Error& error) {
  // A start that was refused must not change the run.
  if (!written_at_ && (error.code() == ExitCode::usage || error.code() == ExitCode::data)) return;
  write(error.code() == ExitCode::stopped ? "stopped" : "failed", error.what());
}

void StatusFile::end() { write("finished"); }

void StatusFile::write_sometimes() {
  if (!written_at_ || Clock::now() - *written_at_ >= write_interval) write("training");
}

double StatusFile::samples_per_second() const {
  if (written_at_ && position_.epoch == written_position_.epoch && position_.consumed > written_position_.consumed)
    return static_cast<double>(position_.consumed - written_position_.consumed) /
           std::chrono::duration<double>(Clock::now() - *written_at_).count();
  return last_report_.is_object() ? last_report_.value("samples_per_s", 0.0) : 0;
}

void StatusFile::write(const char* state, const std::string& error) noexcept try {
  if (is_broken_) return;
  const double rate = samples_per_second();
  const auto samples = static_cast<double>(position_.samples);
  const double left_in_epoch = std::max(0.0, samples - static_cast<double>(position_.consumed));
  Json status{{"state", state},
              {"epoch", position_.epoch},
              {"epochs", position_.epochs},
              {"consumed", position_.consumed},
              {"samples", position_.samples},
              {"global_step", position_.global_step},
              {"training_iteration", last_report_.is_object() ? last_report_.value("training_iteration", 0) : 0},
              {"samples_per_s", rate > 0 ? Json(rate) : Json()},
              {"epoch_s_left", rate > 0 && samples > 0 ? Json(left_in_epoch / rate) : Json()},
              {"run_s_left", nullptr},
              {"last_report", last_report_},
              {"ranks", last_window_.times.empty() ? Json() : summary_of(last_window_.times)},
              {"world_size", world_size_},
              {"host", host_name()},
              {"pid", ::getpid()},
              {"started", started_},
              {"updated", static_cast<std::int64_t>(std::time(nullptr))}};
  if (rate > 0 && samples > 0 && position_.epochs > position_.epoch)
    status["run_s_left"] =
        (left_in_epoch + samples * static_cast<double>(position_.epochs - position_.epoch - 1)) / rate;
  if (best_.history != nullptr) {
    status["best"] = Json::object();
    if (!best_.attribute.empty()) {
      update_best();
      status["best"][best_.attribute] = best_.value;
    }
  }
  if (!error.empty()) status["error"] = error;
  account_.add_to(status, state, error);
  written_at_ = Clock::now();
  written_position_ = position_;
  write_file_unsynced(run_ / run_names::status, json_text_lossy(status, 2) + "\n");
} catch (const std::exception& failed) {
  is_broken_ = true;
  log::warn(str("status.json is not written any more: ", failed.what()));
}

}  // namespace muster::detail::observe
