#include "run/failures.hpp"

#include "base/file.hpp"
#include "base/json.hpp"
#include "checkpoint/files/manifest.hpp"
#include "checkpoint/files/pieces.hpp"
#include "checkpoint/inspect.hpp"
#include "checkpoint/rollbacks.hpp"
#include "state/training_position.hpp"
#include "storage/tier.hpp"

#include <algorithm>
#include <cstddef>
#include <span>
#include <string_view>
#include <vector>

namespace muster::detail::run {
namespace {

constexpr std::chrono::seconds longest_wait{60};

std::filesystem::path file_of(const std::filesystem::path& run) { return run / ".failures.json"; }

/// Replaces the checksums of those pieces of the state file that hold the random state: computes them anew, with zeros
/// in place of the random state.
void leave_out_random_state(checkpoint::Manifest& manifest, const std::filesystem::path& folder) {
  const auto random =
      std::ranges::find(manifest.tensors, std::string_view(checkpoint::random_name), &checkpoint::TensorEntry::name);
  if (random == manifest.tensors.end()) return;
  const auto state =
      std::ranges::find(manifest.files, std::string_view(checkpoint::state_name), &checkpoint::FileEntry::name);
  const File file(folder / checkpoint::state_name, File::Mode::read);
  const auto end = random->offset + random->bytes;
  for (auto piece = random->offset / state->piece_bytes; piece * state->piece_bytes < end; ++piece) {
    const auto range = checkpoint::piece_range(state->bytes, state->piece_bytes, piece);
    std::vector<std::byte> bytes(range.end - range.begin);
    file.read_at(bytes, range.begin);
    const auto begin = std::max(random->offset, range.begin);
    std::ranges::fill(std::span(bytes).subspan(begin - range.begin, std::min(end, range.end) - begin), std::byte{});
    state->piece_checksums[piece] = checkpoint::piece_checksum(bytes);
  }
}

/// Returns a CRC-32 over the JSON values and the checksums of the files; empty if the program has saved neither state
/// nor files. torch's random state does not count: drawing numbers is no progress.
std::string content_of(checkpoint::Manifest manifest, const std::filesystem::path& folder) {
  const bool has_tensors =
      std::ranges::any_of(manifest.tensors, [](const auto& tensor) { return tensor.name != checkpoint::random_name; });
  if (!has_tensors && manifest.values.empty() && manifest.files.size() == 1) return {};
  leave_out_random_state(manifest, folder);
  const auto text = json_text(Json{manifest.values, manifest.files});
  return std::to_string(checkpoint::crc32(std::as_bytes(std::span(text))));
}

}  // namespace

Json to_json(const RunPoints& points) {
  auto json = Json::object();
  for (const auto& [name, point] : points)
    json[name] = {point.global_step, point.epoch, point.training_iteration, point.rollbacks, point.content};
  return json;
}

RunPoints points_from(const Json& json) {
  RunPoints points;
  for (const auto& [name, point] : json.items())
    points[name] = {point.at(0), point.at(1), point.at(2), point.at(3), point.at(4)};
  return points;
}

bool RunPoint::is_beyond(const RunPoint& before) const noexcept {
  if (rollbacks > before.rollbacks || global_step > before.global_step || epoch > before.epoch) return true;
  return global_step == 0 && training_iteration > before.training_iteration &&
         (content.empty() || content != before.content);
}

bool is_progress(const RunPoints& now, const RunPoints& before) noexcept {
  return std::ranges::any_of(now, [&](const auto& item) {
    const auto known = before.find(item.first);
    return known == before.end() || item.second.is_beyond(known->second);
  });
}

Failures Failures::with_one_more(const RunPoints& now) const {
  Failures next{.count = is_progress(now, furthest) ? 1 : count + 1, .furthest = furthest};
  for (const auto& [name, point] : now) {
    const auto [at, is_new] = next.furthest.try_emplace(name, point);
    auto& before = at->second;
    if (is_new || !point.is_beyond(before)) continue;
    auto beyond = point;
    if (point.rollbacks == before.rollbacks) {
      beyond.global_step = std::max(point.global_step, before.global_step);
      beyond.epoch = std::max(point.epoch, before.epoch);
    }
    before = beyond;
  }
  return next;
}

bool is_refusal(ExitCode code) noexcept { return code == ExitCode::data || code == ExitCode::usage; }

std::chrono::seconds retry_delay(const Failures& failures) noexcept {
  if (failures.count < 2) return {};
  return std::min(longest_wait, std::chrono::seconds(1) * (1 << std::min(failures.count - 2, 30)));
}

int newest_checkpoint_index(const std::filesystem::path& run) {
  const auto published = storage::tier_of(run)->list().published;
  return published.empty() ? -1 : published.rbegin()->first;
}

std::optional<RunPoint> point_of(const std::filesystem::path& run) {
  const auto rollbacks = checkpoint::read_rollbacks(run);
  auto there = storage::tier_of(run)->list();
  while (const auto newest = checkpoint::newest_own(there, rollbacks)) try {
      const auto manifest = checkpoint::read_manifest(newest->second);
      const auto position = state::training_position_from_json(manifest.position_json);
      return RunPoint{.global_step = position.global_step,
                      // If the program did not count epochs, `epoch` is the number of reports.
                      .epoch = position.epoch_counted ? position.epoch : 0,
                      .training_iteration = position.training_iteration,
                      .rollbacks = static_cast<std::int64_t>(rollbacks.size()),
                      .content = content_of(manifest, newest->second)};
    } catch (const Error&) {  // a damaged checkpoint: the next start resumes from an earlier one
      there.published.erase(newest->first);
    }
  return {};
}

RunPoints points_of(const std::filesystem::path& run) {
  RunPoints points;
  if (const auto point = point_of(run)) points.emplace("", *point);
  return points;
}

Failures add_failure(const Failures& before, const std::filesystem::path& run,
                     RunPoints (*points)(const std::filesystem::path&)) {
  try {
    return before.with_one_more(points(run));
  } catch (const std::exception&) {  // ignored, so that the failure itself is reported
    return before.with_one_more({});
  }
}

std::optional<Failures> read_failures(const std::filesystem::path& run, const std::string& supervisor) {
  try {
    const auto saved = read_json(file_of(run));
    if (saved.at("supervisor") != supervisor) return {};
    return Failures{saved.at("failures"), points_from(saved.at("furthest"))};
  } catch (const std::exception&) {  // the file is missing or incomplete, so nothing was counted
    return {};
  }
}

void write_failures(const std::filesystem::path& run, const std::string& supervisor, const Failures& failures) {
  // Not synced: only processes of the same `muster run` read it, and none of them survives a power loss.
  write_file_unsynced(file_of(run), json_text(Json{{"supervisor", supervisor},
                                                   {"failures", failures.count},
                                                   {"furthest", to_json(failures.furthest)}}));
}

}  // namespace muster::detail::run
