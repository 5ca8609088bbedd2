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

constexpr const char* pending = "pending_validation";

/// The step at which a row's values are shown.
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
      if (const auto number = row.value("training_iteration", std::int64_t{0}); number <= start.training_iteration)
        if (const auto status = row.value("checkpoint_status", Json()); status.is_string() && status != pending)
          shown_.insert(number);
  }

  void report(const Json& row, std::int64_t /*epochs*/) override {
    auto shown = row;
    if (row.contains("checkpoint_status")) {
      auto& awaited = awaited_[row.value("training_iteration", std::int64_t{0})] = {.step = step_of(row)};
      for (const auto& name : validated_names_)
        if (shown.contains(name)) {
          awaited.replaced[name] = shown[name];
          shown.erase(name);
        }
    }
    write([&](EventFile& file) {
      add_fields(file, shown, step_of(row));
      file.flush();
    });
  }

  void validated(std::int64_t training_iteration, const Json& fields) override {
    for (const auto& [name, value] : fields.items()) validated_names_.insert(name);
    if (shown_.contains(training_iteration)) return;
    auto shown = Json::object();
    if (const auto found = awaited_.find(training_iteration); found != awaited_.end()) shown = found->second.replaced;
    shown.update(fields);
    write([&](EventFile& file) {
      if (const auto step = step_of_report(training_iteration)) add_fields(file, shown, *step);
      file.flush();
    });
    awaited_.erase(training_iteration);
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
    // What a start from it does not make again must be on the disk.
    if (file_) write([](EventFile& file) { file.flush(); });
  }

  // After a failure the run may go on: TensorBoard would show the first end that it reads for ever. A start that finds
  // nothing left to train has logged nothing, and opens its file here: the start before it may have been stopped.
  void end() override {
    write([](EventFile& file) { file.add_success(); });
    file_.reset();
  }

 private:
  /// Adds the numbers among the fields; a list has one of each rank.
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
        if (value[rank].is_number()) file.add_scalar(tag + "/" + std::to_string(rank), value[rank].get<double>(), step);
    }
  }

  /// Returns the step of an earlier report, perhaps one of an earlier start.
  std::optional<std::int64_t> step_of_report(std::int64_t training_iteration) const {
    if (const auto found = awaited_.find(training_iteration); found != awaited_.end()) return found->second.step;
    for (const auto& row : History::read(run_))
      if (row.value("training_iteration", std::int64_t{0}) == training_iteration) return step_of(row);
    return {};
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
      log::warn(std::string("TensorBoard's files end here: ") + error.what());
    }
  }

  std::filesystem::path run_;
  Json config_;
  std::int64_t first_step_ = 0;
  std::optional<EventFile> file_ = {};
  /// A report whose validation is to come.
  struct Awaited {
    std::int64_t step = 0;
    Json replaced = Json::object();  ///< metrics that the validation may replace, since an earlier one gave them, too
  };
  std::map<std::int64_t, Awaited> awaited_ = {};  // by report
  std::set<std::string> validated_names_ = {};    // fields that validations have given
  std::set<std::int64_t> shown_ = {};             // reports whose validations are in the files of earlier starts
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
