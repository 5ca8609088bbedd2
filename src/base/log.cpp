#include "base/log.hpp"

#include "base/file.hpp"
#include "base/printable.hpp"
#include "muster/error.hpp"

#include <spdlog/sinks/base_sink.h>
#include <spdlog/sinks/stdout_color_sinks.h>
#include <spdlog/spdlog.h>

#include <array>
#include <memory>
#include <mutex>

namespace muster::detail::log {
namespace {

constexpr std::array<std::string_view, 6> names{"trace", "debug", "info", "warn", "error", "off"};

spdlog::level::level_enum spdlog_level(Level level) {
  using enum spdlog::level::level_enum;
  return std::array{trace, debug, info, warn, err, off}[static_cast<std::size_t>(level)];
}

/// Appends lines to a file, which must not be a link, without buffering.
class FileSink final : public spdlog::sinks::base_sink<std::mutex> {
 public:
  explicit FileSink(const std::filesystem::path& path) : file_(path, File::Mode::append) {}

 private:
  void sink_it_(const spdlog::details::log_msg& message) override {
    spdlog::memory_buf_t line;
    formatter_->format(message, line);
    file_.append({line.data(), line.size()});
  }
  void flush_() override {}

  File file_;
};

/// The places to which this process's messages go, and the settings of logging.
struct Sinks {
  std::shared_ptr<spdlog::sinks::sink> terminal = std::make_shared<spdlog::sinks::stderr_color_sink_mt>();
  std::shared_ptr<spdlog::logger> logger = std::make_shared<spdlog::logger>("muster", terminal);
  int rank = 0;
  bool has_rank = false;
  Level level = Level::info;
  std::filesystem::path path;

  Sinks() {
    terminal->set_pattern("%^muster:%$ %v");
    logger->flush_on(spdlog::level::warn);
  }
};

// One instance, since the process has one terminal. It is never destroyed: static objects may log at the exit.
Sinks& sinks() {
  static auto& instance = *new Sinks;
  return instance;
}

}  // namespace

Level level_from_name(std::string_view name) {
  for (std::size_t i = 0; i < names.size(); ++i)
    if (names[i] == name) return static_cast<Level>(i);
  throw Error(ExitCode::usage, "choosing what is logged", str("\"", name, "\" is not a level"),
              "Choose one of trace, debug, info, warn, error, off");
}

void configure(int rank, Level level) {
  sinks().rank = rank;
  sinks().has_rank = true;
  sinks().level = level;
  sinks().terminal->set_level(rank == 0 ? spdlog_level(level) : spdlog::level::off);
  sinks().logger->set_level(spdlog_level(level));
}

void configure_if_unset(int rank) {
  if (!sinks().has_rank) configure(rank, level());
}

Level level() noexcept { return sinks().level; }

void set_level(Level level) {
  const bool has_rank = sinks().has_rank;
  configure(sinks().rank, level);
  sinks().has_rank = has_rank;
}

std::filesystem::path file_of_rank(const std::filesystem::path& run, int rank) {
  return run / "logs" / formatted("rank_%05d.log", rank);
}

void write_to(const std::filesystem::path& path) {
  auto& logger = *sinks().logger;
  logger.sinks().resize(1);
  sinks().path = path;
  if (path.empty()) return;
  auto file = std::make_shared<FileSink>(path);
  file->set_pattern("%Y-%m-%dT%H:%M:%S.%e %l %v");
  logger.sinks().push_back(std::move(file));
}

const std::filesystem::path& path() noexcept { return sinks().path; }

void debug(const std::string& text) { sinks().logger->debug("{}", printable(text)); }
void info(const std::string& text) { sinks().logger->info("{}", printable(text)); }
void warn(const std::string& text) { sinks().logger->warn("warning: {}", printable(text)); }
void error(const std::string& text) { sinks().logger->error("error: {}", printable(text)); }
void write_to_file_only(const std::string& text) noexcept {
  const auto& all = sinks().logger->sinks();
  for (std::size_t i = 1; i < all.size(); ++i) try {
      all[i]->log({"muster", spdlog::level::info, text});
    } catch (...) {
    }
}
void flush() noexcept {
  try {
    sinks().logger->flush();
  } catch (...) {
  }
}

Scope::Scope() : rank_(sinks().rank), has_rank_(sinks().has_rank), level_(sinks().level), path_(sinks().path) {}

Scope::~Scope() {
  configure(rank_, level_);
  sinks().has_rank = has_rank_;
  try {
    write_to(path_);
  } catch (const Error& error) {
    warn(error.what());
  }
}

}  // namespace muster::detail::log
