#include "checkpoint/newest.hpp"

#include "base/log.hpp"
#include "checkpoint/files.hpp"
#include "checkpoint/manifest.hpp"
#include "checkpoint/names.hpp"
#include "checkpoint/steps_back.hpp"
#include "muster/error.hpp"

namespace muster::detail::checkpoint {

std::optional<std::filesystem::path> newest_readable(const std::filesystem::path& run) {
  auto found = find_checkpoints(run);
  const auto steps = read_steps_back(run);
  while (const auto newest = newest_of(found, steps)) {
    const auto& [index, path] = *newest;
    try {
      verify_sizes(path, read_manifest(path));
      return path;
    } catch (const NewerFormat&) {
      throw;
    } catch (const Error& error) {
      if (error.code() != ExitCode::data) throw;
      log::warn(path.string() + " is damaged and passed over: " + error.what());
    }
    found.published.erase(index);
  }
  return {};
}

}  // namespace muster::detail::checkpoint
