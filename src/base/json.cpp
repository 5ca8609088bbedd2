#include "base/json.hpp"

#include "base/file.hpp"
#include "base/text.hpp"
#include "muster/error.hpp"

#include <cmath>
#include <set>
#include <utility>
#include <vector>

namespace muster::detail {
namespace {

/// The error's text without the library's prefix "[json.exception.parse_error.101]".
std::string reason_of(const Json::exception& error) {
  const std::string text = error.what();
  const auto end = text.starts_with('[') ? text.find("] ") : std::string::npos;
  return end == std::string::npos ? text : text.substr(end + 2);
}

}  // namespace

Json parse_json(std::string_view text, const std::string& doing, bool comments) {
  using Event = Json::parse_event_t;
  std::vector<std::set<std::string>> keys;  // the keys so far of each object that is open at this position
  const auto check = [&](int depth, Event event, const Json& value) {
    const bool begins = event == Event::object_start || event == Event::array_start;
    if (begins && depth >= max_json_depth)
      throw Error(ExitCode::data, doing, str("it is nested more than ", max_json_depth, " levels deep"),
                  "Write it flatter, or use another file");
    if (event == Event::object_start) keys.emplace_back();
    if (event == Event::object_end) keys.pop_back();
    if (event == Event::key && !keys.back().insert(value.get<std::string>()).second)
      throw Error(ExitCode::data, doing, "the key " + value.dump() + " comes twice", "Leave one of them out");
    return true;
  };
  try {
    return Json::parse(text.begin(), text.end(), check, /*allow_exceptions=*/true, comments);
  } catch (const Json::exception& error) {
    throw Error(ExitCode::data, doing, reason_of(error), "Correct it there");
  }
}

Json read_json(const std::filesystem::path& path, std::string doing, bool comments) {
  if (doing.empty()) doing = "reading " + path.string();
  return parse_json(read_file(path, max_json_bytes), doing, comments);
}

Json read_json_if_intact(const std::filesystem::path& file) {
  try {
    return read_json(file);
  } catch (const Error& error) {
    if (error.code() != ExitCode::data) throw;
    return {};
  }
}

std::string json_text(const Json& json, int indent) { return json.dump(indent); }

std::string json_text_lossy(const Json& json, int indent) {
  return json.dump(indent, ' ', /*ensure_ascii=*/false, Json::error_handler_t::replace);
}

Json json_from_text(std::string_view text) { return Json::parse(text.begin(), text.end()); }

std::optional<Json> json_if_valid(std::string_view text) {
  auto json = Json::parse(text.begin(), text.end(), nullptr, /*allow_exceptions=*/false);
  return json.is_discarded() ? std::nullopt : std::optional(std::move(json));
}

std::string json_to_cbor(const Json& json) {
  std::string bytes;
  Json::to_cbor(json, bytes);
  return bytes;
}

Json json_from_cbor(std::string_view bytes) {
  // `store` keeps the subtype that a binary value may have, which is a tag in CBOR.
  return Json::from_cbor(bytes.begin(), bytes.end(), /*strict=*/true, /*allow_exceptions=*/true,
                         Json::cbor_tag_handler_t::store);
}

bool is_utf8(const std::string& text) {
  try {
    static_cast<void>(Json(text).dump());
    return true;
  } catch (const Json::exception&) {
    return false;
  }
}

double number_at(const Json& object, const char* name) {
  if (!object.is_object()) return 0;
  const auto at = object.find(name);
  return at != object.end() && at->is_number() ? at->get<double>() : 0;
}

void require_json_readable(const Json& value, const std::string& doing) {
  constexpr int most = max_json_depth - 16;  // leaves levels for the JSON that encloses it
  const auto check = [&](const auto& self, const Json& inner, int levels) -> void {
    if (inner.is_binary())
      throw Error(ExitCode::user_error, doing, "it holds a binary value, which JSON does not keep",
                  "Keep bytes in a tensor of torch::kUInt8");
    if (!inner.is_structured()) return;
    if (levels == most)
      throw Error(ExitCode::user_error, doing, str("it is nested more than ", most, " levels deep"), "Make it flatter");
    for (const auto& child : inner) self(self, child, levels + 1);
  };
  check(check, value, 0);
}

namespace {

void require_values_kept(const Json& value, const std::string& path, const std::string& remedy) {
  const auto refuse_text = [&](const char* what) {
    throw Error(ExitCode::user_error, "saving " + path, str(what, " is not UTF-8, which JSON does not keep"),
                "Keep other bytes in a tensor of torch::kUInt8");
  };
  if (value.is_number_float() && !std::isfinite(value.get<double>()))
    throw Error(ExitCode::user_error, "saving " + path,
                str("it is ", value.get<double>(), ", which JSON does not keep"), remedy);
  if (value.is_string() && !is_utf8(value.get_ref<const std::string&>())) refuse_text("its text");
  if (!value.is_structured()) return;
  for (const auto& [name, child] : value.items()) {
    if (!is_utf8(name)) refuse_text("a key in it");
    require_values_kept(child, path + '/' + name, remedy);
  }
}

}  // namespace

void require_json_lossless(const Json& value, const std::string& path, const std::string& remedy) {
  require_json_readable(value, "saving " + path);
  require_values_kept(value, path, remedy);
}

void muster_was_built_with(ThisNlohmannJson) {}

}  // namespace muster::detail
