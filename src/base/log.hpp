// Logging by rank: rank 0 writes to the terminal, and every rank may write a file. Uses neither MPI nor torch.
#pragma once

#include "base/export.hpp"
#include "base/text.hpp"  // messages are made with str()

#include <filesystem>
#include <string>
#include <string_view>

namespace muster::detail::log {

enum class Level { trace, debug, info, warn, error, off };

/// The level of that name ("trace" … "off"); an Error with ExitCode::usage for any other.
Level level_from_name(std::string_view name);

/// Sets this process's rank and the lowest level that is logged. Before the first call they are 0 and info.
MUSTER_INTERNAL_API void configure(int rank, Level level);

/// Sets the rank and keeps the level, unless this process has a rank already. For programs without a Launch.
void configure_if_unset(int rank);

/// The lowest level that is logged.
MUSTER_INTERNAL_API Level level() noexcept;
/// Changes the level and keeps the rank.
void set_level(Level level);

/// The log file of a rank in its run's folder.
MUSTER_INTERNAL_API std::filesystem::path file_of_rank(const std::filesystem::path& run, int rank);
/// From now on, writes the logged messages of this rank also to the file `path` (its folder must exist), instead of to
/// an earlier `path`. An empty path ends that.
void write_to(const std::filesystem::path& path);
/// The file of write_to(); empty if there is none.
const std::filesystem::path& path() noexcept;

// The terminal (stderr) shows rank 0's messages. Messages of other ranks, even errors, go only to their log files.
void debug(const std::string& text);
MUSTER_INTERNAL_API void info(const std::string& text);
MUSTER_INTERNAL_API void warn(const std::string& text);
MUSTER_INTERNAL_API void error(const std::string& text);
/// Writes only to this rank's file, if it has one, whatever the level. Errors in writing are ignored.
MUSTER_INTERNAL_API void write_to_file_only(const std::string& text) noexcept;

/// Writes out buffered messages.
void flush() noexcept;

/// The destructor restores the rank, the level and the file that were set when this object was constructed.
class MUSTER_INTERNAL_API Scope {
 public:
  Scope();
  Scope(const Scope&) = delete;
  Scope& operator=(const Scope&) = delete;
  ~Scope();

 private:
  int rank_;
  bool has_rank_;
  Level level_;
  std::filesystem::path path_;
};

}  // namespace muster::detail::log
