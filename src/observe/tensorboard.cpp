#include "observe/tensorboard.hpp"

#include "base/log.hpp"
#include "muster/error.hpp"
#include "observe/history.hpp"

#ifdef MUSTER_HAS_TENSORBOARD
#include "tensorboard/event_file.hpp"

#include <ATen/ops/clamp.h>
#endif

#include <exception>
#include <map>
#include <optional>
#include <set>
#include <utility>

namespace muster::detail::observe {

#ifdef MUSTER_HAS_TENSORBOARD

namespace {

using tensorboard::EventFile;

/// Returns the step at which TensorBoard shows a row's values.
std::int64_t step_of(const Json& row) {
  const auto step = row.value("global_step", std::int64_t{0});
  return step > 0 ? step : row.value("training_iteration", std::int64_t{0});
}

tensorboard::Image to_image(const at::Tensor& image) {
  auto pixels = image.detach().cpu();
  if (pixels.dim() == 2) pixels = pixels.unsqueeze(0);
  if (at::isFloatingType(pixels.scalar_type())) pixels = pixels.to(at::kFloat).mul(255).add(0.5).clamp(0, 255);
  pixels = pixels.to(at::kByte).permute({1, 2, 0}).contiguous();
  const auto* const begin = pixels.const_data_ptr<std::uint8_t>();
  return {.height = static_cast<int>(pixels.size(0)),
          .width = static_cast<int>(pixels.size(1)),
          .channels = static_cast<int>(pixels.size(2)),
          .pixels = {begin, begin + pixels.numel()}};
}

class TensorBoard final : public Observer {
 public:
  TensorBoard(std::filesystem::path run, Json config) : run_(std::move(run)), config_(std::move(config)) {}

  void start(const AttemptStart& start) override {
    if (start.global_step > 0)
      first_step_ = start.global_step + 1;
    else if (start.training_iteration > 0)
      first_step_ = start.training_iteration + 1;
    for (const auto& row : History::read(run_))
      if (row.value("training_iteration", std::int64_t{0}) <= start.training_iteration) note_awaited(row);
  }

  void report(const Json& row, std::int64_t /*epochs*/) override {
    note_awaited(row);
    write([&](EventFile& file) {
      add_fields(file, row, step_of(row));
      file.flush();
    });
  }

  void validated(std::int64_t training_iteration, const Json& fields) override {
    const auto awaited = awaited_.find(training_iteration);
    if (awaited == awaited_.end()) return;  // its values are in a file already, or there is no such report
    const auto& [step, reported] = awaited->second;
    auto shown = Json::object();
    // A value that the report had is in the file already, so the validation's value gets a curve of its own.
    for (const auto& [name, value] : fields.items())
      shown[reported.contains(name) ? "validation/" + name : name] = value;
    write([&](EventFile& file) {
      add_fields(file, shown, step);
      file.flush();
    });
    awaited_.erase(awaited);
  }

  void scalar(const std::string& name, double value, std::int64_t step) override {
    write([&](EventFile& file) { file.add_scalar(name, value, step); });
  }

  void image(const std::string& name, const at::Tensor& image, std::int64_t step) override {
    write([&](EventFile& file) { file.add_image(name, to_image(image), step); });
  }

  void histogram(const std::string& name, const at::Tensor& values, std::int64_t step) override {
    const auto numbers = values.detach().to(at::kCPU, at::kFloat).contiguous();
    const std::span all(numbers.const_data_ptr<float>(), static_cast<std::size_t>(numbers.numel()));
    write([&](EventFile& file) { file.add_histogram(name, tensorboard::histogram_of(all), step); });
  }

  void checkpoint(const Checkpoint& /*checkpoint*/) override {
    // A start that resumes from this checkpoint does not repeat what was logged so far, so it must be on the disk.
    if (file_) write([](EventFile& file) { file.flush(); });
  }

  // Called only after success: TensorBoard shows the first end in the files forever, so a failure after which training
  // resumes must not write one. A start that finds nothing left to train opens its file here: the start before may have
  // been stopped before it wrote the end.
  void end() override {
    write([](EventFile& file) { file.add_success(); });
    file_.reset();
  }

 private:
  /// Adds the numbers among the fields, except the number of the report, the step and the time of day. A list has one
  /// number for each rank.
  static void add_fields(EventFile& file, const Json& fields, std::int64_t step) {
    static const std::set<std::string> left_out{"training_iteration", "global_step", "timestamp"};
    static const std::set<std::string> of_run{"epoch",       "time_this_iter_s", "time_total_s",
                                              "num_samples", "samples_per_s",    "world_size"};
    for (const auto& [name, value] : fields.items()) {
      if (left_out.contains(name)) continue;
      const auto tag = of_run.contains(name) ? "run/" + name : name;
      if (value.is_number()) file.add_scalar(tag, value.get<double>(), step);
      if (!value.is_array()) continue;
      for (std::size_t rank = 0; rank < value.size(); ++rank)
        if (value[rank].is_number()) file.add_scalar(str(tag, "/", rank), value[rank].get<double>(), step);
    }
  }

  /// Remembers a report whose validation is pending.
  void note_awaited(const Json& row) {
    if (row.value("checkpoint_status", Json()) != "pending_validation") return;
    auto& awaited = awaited_[row.value("training_iteration", std::int64_t{0})] = {.step = step_of(row)};
    for (const auto& [name, value] : row.items()) awaited.reported.insert(name);
  }

  template <class Write>
  void write(const Write& add) {
    if (is_broken_) return;
    try {
      if (!file_) {
        file_.emplace(run_, first_step_);
        file_->add_hyperparameters(config_, run_.filename().string());
      }
      add(*file_);
    } catch (const std::exception& error) {
      is_broken_ = true;
      file_.reset();
      log::warn(str("TensorBoard's files end here: ", error.what()));
    }
  }

  std::filesystem::path run_;
  Json config_;
  std::int64_t first_step_ = 0;
  std::optional<EventFile> file_ = {};
  struct Awaited {
    std::int64_t step = 0;
    std::set<std::string> reported = {};  ///< the names in the report's row
  };
  std::map<std::int64_t, Awaited> awaited_ = {};  // reports whose validations are pending, by training iteration
  bool is_broken_ = false;
};

}  // namespace

void require_tensorboard() {}

std::unique_ptr<Observer> make_tensorboard(const std::filesystem::path& run, const Json& config) {
  return std::make_unique<TensorBoard>(run, config);
}

#else

void require_tensorboard() {
  throw Error(ExitCode::missing_package, "writing files for TensorBoard",
              "muster was built without protozero or without libpng",
              "Install them (libprotozero-dev and libpng-dev on Debian) and build muster again");
}

std::unique_ptr<Observer> make_tensorboard(const std::filesystem::path& /*run*/, const Json& /*config*/) {
  return std::make_unique<Observer>();
}

#endif

}  // namespace muster::detail::observe
