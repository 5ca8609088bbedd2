#include "observe/progress_line.hpp"

#include "base/host.hpp"
#include "base/json.hpp"
#include "base/readable.hpp"
#include "base/row_fields.hpp"

#include <fcntl.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>

namespace muster::detail::observe {
namespace {

constexpr int max_bar_width = 40;

/// Opens the terminal to which our stderr goes; returns −1 if there is none. mpirun reads its ranks' output from pipes,
/// so on mpirun's node this function looks where mpirun's stderr goes instead.
int open_terminal() {
  if (::isatty(STDERR_FILENO) != 0) return ::dup(STDERR_FILENO);
  const auto parent = std::filesystem::path("/proc") / std::to_string(::getppid());
  const auto name = first_line(parent / "comm");
  if (name != "mpirun" && name != "mpiexec" && name != "orterun" && name != "prterun") return -1;
  const int descriptor = ::open((parent / "fd" / "2").c_str(), O_WRONLY | O_NOCTTY | O_CLOEXEC);
  if (descriptor >= 0 && ::isatty(descriptor) == 0) return ::close(descriptor), -1;
  return descriptor;
}

int width_of(int terminal) {
  winsize size{};
  return ::ioctl(terminal, TIOCGWINSZ, &size) == 0 && size.ws_col > 0 ? size.ws_col : 80;
}

bool can_redraw() {
  const char* kind = std::getenv("TERM");
  return kind != nullptr && std::strcmp(kind, "dumb") != 0;
}

std::string epoch_of(std::int64_t epoch, std::int64_t epochs) {
  return str("epoch ", epoch + 1, epochs > 0 ? str("/", epochs) : "");
}

std::string speed(double samples_per_second) {
  if (samples_per_second >= 10'000) return number_text(samples_per_second / 1000) + "k samples/s";
  return str(std::llround(samples_per_second), " samples/s");
}

/// Returns "  1:05 left", the time to the end of the run; if the number of epochs is unknown, "  0:12 left in the
/// epoch"; empty if the speed or the number of samples is unknown, or if the time is longer than 1e8 s.
std::string time_left(const EpochPosition& position, double samples_per_second) {
  if (samples_per_second <= 0 || position.samples <= 0) return {};
  const bool knows_run = position.epochs > position.epoch;
  const auto samples = static_cast<double>(position.samples), consumed = static_cast<double>(position.consumed);
  const double epochs_after = knows_run ? static_cast<double>(position.epochs - position.epoch) - 1 : 0;
  const double seconds = (std::max(samples - consumed, 0.0) + samples * epochs_after) / samples_per_second;
  if (seconds > 1e8) return {};
  return "  " + clock_text(std::llround(seconds)) + (knows_run ? " left" : " left in the epoch");
}

}  // namespace

std::string progress_line(const EpochPosition& position, double samples_per_second, int width,
                          const std::string& metrics, const std::string& ranks, const std::string& live) {
  const auto samples = static_cast<double>(position.samples), consumed = static_cast<double>(position.consumed);
  const double share = samples > 0 ? std::clamp(consumed / samples, 0.0, 1.0) : 0;
  const auto before = epoch_of(position.epoch, position.epochs) + " ";
  auto after = formatted(" %3.0f%%", 100 * share);
  const auto room_beside = [&](const std::string& text) {
    return width - 1 - static_cast<int>(before.size() + after.size() + text.size());
  };
  for (const auto& field : {"  " + speed(samples_per_second), time_left(position, samples_per_second), metrics,
                            str("  step ", position.global_step), ranks, live}) {
    if (room_beside(field) < 0) break;
    after += field;
  }
  std::string bar;
  if (const int room = std::min(room_beside("[]"), max_bar_width); room >= 4) {
    const auto full = static_cast<std::size_t>(std::lround(share * room));
    bar = "[" + std::string(full, '#') + std::string(static_cast<std::size_t>(room) - full, '.') + "]";
  }
  auto line = before + bar + after;
  if (static_cast<int>(line.size()) >= width) line.resize(static_cast<std::size_t>(std::max(width - 1, 0)));
  return line;
}

std::string ranks_text(const StepWindow& window) {
  std::string text;
  if (window.times.size() > 1) {
    const auto slowest = std::ranges::max_element(window.times, {}, &RankTimes::own);
    const std::array<std::pair<double, const char*>, 4> parts{
        {{slowest->compute, "compute"}, {slowest->data, "data"}, {slowest->save, "save"}, {slowest->wait, "network"}}};
    text = str("  slowest ", slowest - window.times.begin(), " (", std::ranges::max(parts).second, ")");
  }
  const auto most = window.memory_bytes.empty() ? 0 : std::ranges::max(window.memory_bytes);
  if (most > 0) text += "  " + number_text(static_cast<double>(most) / 1e9) + " GB";
  return text;
}

std::string metrics_text(const Json& row) {
  std::string text;
  for (const auto& [key, value] : row.items()) {
    if (is_row_field(key)) continue;
    text += "  " + key + " " + (value.is_number_float() ? number_text(value.get<double>()) : json_text(value));
  }
  return text;
}

std::string live_text(const Json& row) {
  std::string text;
  const auto streams = row.value("live", Json::object());
  for (const auto& [name, ledger] : streams.items()) {
    const auto number = [&](const char* field) { return number_text(ledger.value(field, 0.0)); };
    const auto dropped = ledger.value("dropped_by_solver", 0) + ledger.value("dropped_by_trainer", 0);
    text += "  " + name + " " + number("in_memory") + "/" + number("room") + " in memory, " + number("on_its_way") +
            " on their way, " + number("uses_per_sample") + " uses each, solvers waited " + number("solver_wait_s") +
            " s, trainer " + number("trainer_wait_s") + " s";
    if (dropped > 0) text += str(", ", dropped, " dropped");
    if (ledger.value("lost", 0) > 0) text += ", " + number("lost") + " lost";
  }
  return text;
}

std::string report_line(const Json& row, std::int64_t epochs, std::int64_t first_epoch) {
  std::string line = row.contains("epoch") && row.at("epoch").is_number_integer()
                         ? epoch_of(row.at("epoch").get<std::int64_t>() - first_epoch, epochs)
                         : "report " + json_text(row.value("training_iteration", Json(0)));
  line += metrics_text(row);
  if (const auto rate = row.find("samples_per_s"); rate != row.end() && rate->is_number() && rate->get<double>() > 0)
    line += "  " + speed(rate->get<double>());
  if (const auto name = row.find("checkpoint_dir_name"); name != row.end() && name->is_string())
    line += "  " + name->get<std::string>();
  return line;
}

ProgressLine::ProgressLine(Progress mode, std::int64_t first_epoch)
    : first_epoch_(first_epoch),
      terminal_(mode == Progress::bar || mode == Progress::automatic ? open_terminal() : -1),
      redraws_(mode == Progress::bar || (terminal_ >= 0 && can_redraw())),
      prints_reports_(mode != Progress::none) {}

ProgressLine::~ProgressLine() {
  erase();
  if (terminal_ >= 0) ::close(terminal_);
}

void ProgressLine::erase() {
  if (drawn_) std::fputs("\r\033[K", stderr);
  drawn_ = false;
}

void ProgressLine::batch(const EpochPosition& position) {
  if (!redraws_) return;
  const auto now = Clock::now();
  if (position.epoch != previous_.epoch || position.consumed < previous_.consumed) {
    pass_begin_ = now;
    pass_first_ = position.consumed;
  }
  previous_ = position;
  if (now - last_draw_ < std::chrono::milliseconds(100)) return;
  last_draw_ = now;
  const auto seconds = std::chrono::duration<double>(now - pass_begin_).count();
  const double rate = seconds > 0 ? static_cast<double>(position.consumed - pass_first_) / seconds : 0;
  std::fprintf(stderr, "\r\033[K%s",
               progress_line(position, rate, width_of(terminal_), last_metrics_, ranks_, last_live_).c_str());
  drawn_ = true;
}

void ProgressLine::step_window(const StepWindow& window) {
  if (redraws_) ranks_ = ranks_text(window);
}

void ProgressLine::report(const Json& row, std::int64_t epochs) {
  last_metrics_ = metrics_text(row);
  last_live_ = live_text(row);
  if (!prints_reports_) return;
  erase();
  std::fprintf(stderr, "%s\n", report_line(row, epochs, first_epoch_).c_str());
}

}  // namespace muster::detail::observe
