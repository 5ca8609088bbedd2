#include "train/failures.hpp"

#include "base/file.hpp"
#include "base/json.hpp"
#include "checkpoint/tier.hpp"

#include <algorithm>
#include <array>

namespace muster::detail::train {
namespace {

constexpr std::chrono::seconds longest_wait{60};

std::filesystem::path file_of(const std::filesystem::path& run) { return run / ".failures.json"; }

}  // namespace

bool may_help(ExitCode code) noexcept {
  using enum ExitCode;
  constexpr std::array final_ones{done, usage, data, missing_package, stopped, interrupted};
  return std::ranges::find(final_ones, code) == final_ones.end();
}

std::chrono::seconds back_off(const Failures& failures) noexcept {
  if (failures.count < 2) return {};
  return std::min(longest_wait, std::chrono::seconds(1) * (1 << std::min(failures.count - 2, 30)));
}

int newest_index(const std::filesystem::path& run) {
  const auto published = checkpoint::Tier(run).list().published;
  return published.empty() ? -1 : published.rbegin()->first;
}

Failures one_more(const Failures& before, const std::filesystem::path& run,
                  int (*progress)(const std::filesystem::path&)) {
  try {
    return before.after(progress(run));
  } catch (const std::exception&) {  // ignored, so that the failure itself is reported
    return before.after(before.newest);
  }
}

std::optional<Failures> read_failures(const std::filesystem::path& run, const std::string& supervisor) {
  try {
    const auto saved = read_json(file_of(run));
    if (saved.at("supervisor") != supervisor) return {};
    return Failures{saved.at("failures"), saved.at("checkpoint")};
  } catch (const std::exception&) {  // missing or incomplete: nothing was counted
    return {};
  }
}

void write_failures(const std::filesystem::path& run, const std::string& supervisor, const Failures& failures) {
  const auto file = file_of(run), unfinished = std::filesystem::path(file.string() + ".new");
  // Not synced: only processes of the same `muster run` read it, and none of them survives a power loss.
  std::filesystem::remove(unfinished);
  File out(unfinished, File::Mode::create);
  out.append(Json{{"supervisor", supervisor}, {"failures", failures.count}, {"checkpoint", failures.newest}}.dump());
  out.close();
  std::filesystem::rename(unfinished, file);
}

}  // namespace muster::detail::train
