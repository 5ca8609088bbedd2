// JSON from files and flags, which is untrusted input; and JSON as text and as bytes. Code that calls dump(), parse()
// and the like of nlohmann::json itself compiles several seconds longer for each file.
#pragma once

#include "base/export.hpp"
#include "muster/json.hpp"

#include <filesystem>
#include <optional>
#include <string>
#include <string_view>

namespace muster::detail {

/// The most levels of nested lists and objects, and the most bytes of a file. Deeper JSON would overflow the stack when
/// it is copied or written; a larger file would fill the memory.
inline constexpr int max_json_depth = 256;
inline constexpr std::uint64_t max_json_bytes = std::uint64_t{1} << 30;

/// Throws an Error (ExitCode::data), whose text begins with `doing`, if the text is not JSON, is nested deeper than
/// max_json_depth, or has an object with a duplicate key. With `comments`, // and /* */ comments are ignored.
MUSTER_INTERNAL_API Json parse_json(std::string_view text, const std::string& doing, bool comments = false);
/// Reads and parses a file; `doing` is "reading PATH" unless given.
MUSTER_INTERNAL_API Json read_json(const std::filesystem::path& path, std::string doing = {}, bool comments = false);

/// Reads a file that can be made again. Returns null if it is missing or damaged; throws on other read errors.
MUSTER_INTERNAL_API Json read_json_if_intact(const std::filesystem::path& file);

/// JSON as text: in one line, or indented by `indent` spaces. Throws Json::type_error for text that is not UTF-8.
MUSTER_INTERNAL_API std::string json_text(const Json& json, int indent = -1);
/// Like json_text(), but with U+FFFD in place of bytes that are not UTF-8.
MUSTER_INTERNAL_API std::string json_text_lossy(const Json& json, int indent = -1);
/// The JSON in a text that muster has written. Throws Json::parse_error if it is not JSON.
MUSTER_INTERNAL_API Json json_from_text(std::string_view text);
/// The JSON in a text, if it is JSON.
MUSTER_INTERNAL_API std::optional<Json> json_if_valid(std::string_view text);
/// JSON as bytes in CBOR, which also holds NaN, infinity, text that is not UTF-8, and binary values.
MUSTER_INTERNAL_API std::string json_to_cbor(const Json& json);
/// The JSON in bytes that json_to_cbor() has made. Throws Json::parse_error if they are not CBOR.
MUSTER_INTERNAL_API Json json_from_cbor(std::string_view bytes);

/// True if the text is valid UTF-8, so that JSON keeps it unchanged.
MUSTER_INTERNAL_API bool is_utf8(const std::string& text);

/// Returns the object's number of that name; 0 if it is no object or has no such number.
double number_at(const Json& object, const char* name);

/// Throws an Error (ExitCode::user_error) if `value`, written as part of a larger JSON document, could not be read
/// again because it is nested too deep or holds binary values. `doing` begins the error's text.
void require_json_readable(const Json& value, const std::string& doing);

/// Like require_json_readable(), and also throws an Error if JSON would not keep `value` unchanged: for a number that
/// is not finite, which would come back as null, and for text that is not UTF-8. `path` is the name of `value` in the
/// error; `remedy` is the remedy for numbers.
void require_json_lossless(const Json& value, const std::string& path, const std::string& remedy);

}  // namespace muster::detail
