#include "checkpoint/names.hpp"

#include "base/file.hpp"
#include "muster/error.hpp"

#include <algorithm>
#include <charconv>
#include <cstdio>
#include <string_view>

namespace muster::detail::checkpoint {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view prefix = "checkpoint_";

}  // namespace

std::string published_name(int index) {
  char digits[16];
  std::snprintf(digits, sizeof digits, "%06d", index);
  return std::string(prefix) + digits;
}

std::string saving_name(int index) { return "." + published_name(index) + ".saving"; }

std::string pruning_name(int index) { return "." + published_name(index) + ".pruning"; }

std::optional<int> index_of(const std::string& name) {
  int index = 0;
  if (!name.starts_with(prefix)) return {};
  const char* const begin = name.data() + prefix.size();
  const auto problem = std::from_chars(begin, begin + std::min<std::size_t>(name.size() - prefix.size(), 9), index).ec;
  if (problem != std::errc{} || index < 0 || name != published_name(index)) return {};
  return index;
}

Found find_checkpoints(const fs::path& run) {
  Found found;
  std::error_code error;
  for (fs::directory_iterator at(run, error), end; !error && at != end; at.increment(error)) {
    const auto name = at->path().filename().string();
    std::string_view rest = name;
    const bool hidden = rest.starts_with('.');
    if (hidden) rest.remove_prefix(1);
    if (!rest.starts_with(prefix)) continue;
    rest.remove_prefix(prefix.size());
    int index = 0;
    const auto [last, problem] =
        std::from_chars(rest.data(), rest.data() + std::min<std::size_t>(rest.size(), 9), index);
    if (problem != std::errc{} || index < 0) continue;
    if (status_of(at->path()).type() != fs::file_type::directory) continue;
    if (name == published_name(index))
      found.published.emplace(index, at->path());
    else if (name == saving_name(index) || name == pruning_name(index))
      found.leftovers.push_back(at->path());
    else if (name.starts_with(published_name(index) + ".damaged"))
      found.damaged.emplace(index, at->path());
    else
      continue;
    found.next_index = std::max(found.next_index, index + 1);
  }
  if (error)
    throw Error(code_of_reading(error.value()), "looking for checkpoints in " + run.string(), error.message(),
                "Check the path");
  return found;
}

fs::path set_aside(const fs::path& checkpoint) {
  auto to = checkpoint;
  to += ".damaged";
  for (int n = 1; fs::exists(status_of(to)); ++n) {
    to = checkpoint;
    to += ".damaged." + std::to_string(n);
  }
  rename_new(checkpoint, to);
  sync_directory(checkpoint.parent_path());
  return to;
}

}  // namespace muster::detail::checkpoint
