#include "base/json.hpp"

#include "base/file.hpp"
#include "muster/error.hpp"

#include <cmath>
#include <utility>

namespace muster::detail {

Json parse_json(std::string_view text, const std::string& doing, bool comments) {
  const auto limit = [&](int depth, Json::parse_event_t, const Json&) {
    if (depth >= deepest_json)
      throw Error(ExitCode::data, doing, "it is nested more than " + std::to_string(deepest_json) + " levels deep",
                  "Write it flatter, or use another file");
    return true;
  };
  try {
    return Json::parse(text.begin(), text.end(), limit, /*allow_exceptions=*/true, comments);
  } catch (const Json::exception& error) {
    throw Error(ExitCode::data, doing, error.what(), "Mend it at that place");
  }
}

Json read_json(const std::filesystem::path& path, std::string doing, bool comments) {
  if (doing.empty()) doing = "reading " + path.string();
  return parse_json(read_file(path, longest_json), doing, comments);
}

void require_finite(const Json& value, const std::string& path, const std::string& remedy) {
  if (value.is_number_float() && !std::isfinite(value.get<double>()))
    throw Error(ExitCode::user_error, "saving " + path,
                "it is " + std::to_string(value.get<double>()) + ", which JSON does not keep", remedy);
  if (!value.is_structured()) return;
  for (const auto& [name, child] : value.items()) require_finite(child, path + '/' + name, remedy);
}

}  // namespace muster::detail
