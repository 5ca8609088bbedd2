#include "storage/tier.hpp"

#include "base/text.hpp"
#include "storage/folder_tier.hpp"

#include <charconv>

namespace muster::detail::storage {
namespace {

constexpr std::string_view prefix = "checkpoint_";

}  // namespace

std::string Tier::name_of(int index) { return str(prefix, formatted("%06d", index)); }

std::optional<int> Tier::index_of(const std::string& name) {
  const auto index = leading_index(name);
  return index && name == name_of(*index) ? index : std::nullopt;
}

std::optional<int> leading_index(std::string_view name) {
  if (!name.starts_with(prefix)) return {};
  name = name.substr(prefix.size(), 9);  // as many digits as Tier::max_index has
  int index = 0;
  if (std::from_chars(name.data(), name.data() + name.size(), index).ec != std::errc{} || index < 0) return {};
  return index;
}

void Tier::put(int index, const std::string& name, std::string_view content) const {
  create(index, name, content.size());
  const auto file = open(index, name, Alignment::any);
  file->write_at(std::as_bytes(std::span(content)), 0);
  file->finish();
}

std::unique_ptr<Tier> tier_of(const std::filesystem::path& run) { return std::make_unique<FolderTier>(run); }

}  // namespace muster::detail::storage
