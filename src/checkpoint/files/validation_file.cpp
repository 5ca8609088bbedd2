#include "checkpoint/files/validation_file.hpp"

#include "base/file.hpp"
#include "base/json.hpp"
#include "muster/error.hpp"

#include <algorithm>
#include <array>
#include <string_view>

namespace muster::detail::checkpoint {
namespace {

// Names of the values of CheckpointStatus, in the same order.
constexpr std::array names{"committed", "pending_validation", "validated", "validation_timeout", "validation_failed"};

}  // namespace

const char* text_of(CheckpointStatus status) noexcept { return names[static_cast<std::size_t>(status)]; }

CheckpointStatus status_from(const Json& fields) {
  const auto at = fields.is_object() ? fields.find(status_name) : fields.end();
  if (at == fields.end() || !at->is_string()) return CheckpointStatus::committed;
  const auto name = std::ranges::find(names, std::string_view(at->get_ref<const std::string&>()));
  return name == names.end() ? CheckpointStatus::committed : static_cast<CheckpointStatus>(name - names.begin());
}

std::optional<Json> read_validation(const std::filesystem::path& checkpoint) {
  const auto file = checkpoint / validation_name;
  if (!std::filesystem::exists(status_of(file))) return {};
  try {
    auto fields = read_json(file);
    if (status_from(fields) > CheckpointStatus::pending_validation) return fields;
  } catch (const Error& error) {
    if (error.code() != ExitCode::data) throw;
  }
  return {};
}

void write_validation(const std::filesystem::path& checkpoint, const Json& fields) {
  const auto file = checkpoint / validation_name;
  remove_unfinished(file);
  write_file(file, json_text_lossy(fields, 2) + "\n");
}

Json with_validation(const std::filesystem::path& checkpoint, Json metrics) {
  if (status_from(metrics) != CheckpointStatus::pending_validation) return metrics;
  if (const auto found = read_validation(checkpoint)) metrics.update(*found);
  return metrics;
}

}  // namespace muster::detail::checkpoint
