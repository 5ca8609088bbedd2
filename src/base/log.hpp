// Logging by rank: rank 0 speaks on the terminal, every rank keeps a file. Nothing here knows MPI or torch.
#pragma once

#include <filesystem>
#include <string>
#include <string_view>

namespace muster::detail::log {

enum class Level { trace, debug, info, warn, error, off };

/// The level of that name ("trace" … "off"); an Error with ExitCode::usage for any other.
Level level_from_name(std::string_view name);

/// Who is speaking and from which level on. Until it is called, this process is rank 0 and the level is info.
void start(int rank, Level level);

/// The level that it was started with.
Level level() noexcept;
/// Another one, for who is speaking already.
void set_level(Level level);

/// Also writes everything to `path` from now on (the folder must exist); an empty path ends that.
void write_to(const std::filesystem::path& path);
/// That file; empty where there is none.
const std::filesystem::path& path() noexcept;

// The terminal (stderr) shows what rank 0 says, and errors and warnings of any rank only in its file.
void debug(const std::string& text);
void info(const std::string& text);
void warn(const std::string& text);
void error(const std::string& text);
/// To the file of this rank alone, if it has one; what cannot be written there is nobody's trouble.
void keep(const std::string& text) noexcept;

/// Pushes out what is still buffered.
void flush() noexcept;

/// When it goes, who is speaking, from which level on and into which file are as they were when it was made.
class Scope {
 public:
  Scope();
  Scope(const Scope&) = delete;
  Scope& operator=(const Scope&) = delete;
  ~Scope();

 private:
  int rank_;
  Level level_;
  std::filesystem::path path_;
};

}  // namespace muster::detail::log
