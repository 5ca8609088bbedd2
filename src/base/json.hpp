// JSON from files and flags, which may be anybody's.
#pragma once

#include "muster/json.hpp"

#include <filesystem>
#include <string>
#include <string_view>

namespace muster::detail {

/// Levels of lists and objects inside each other, and bytes of a file: what is beyond would end the process when it is
/// copied or written, or fill the memory.
inline constexpr int deepest_json = 256;
inline constexpr std::uint64_t longest_json = std::uint64_t{1} << 30;

/// An Error (ExitCode::data) that begins with `doing` if it is not JSON, deeper than that, or has an object in which a
/// key comes twice. With `comments` // and /* */ are left out.
Json parse_json(std::string_view text, const std::string& doing, bool comments = false);
/// The file's; `doing` is "reading PATH" unless given.
Json read_json(const std::filesystem::path& path, std::string doing = {}, bool comments = false);

/// Whether JSON keeps the text as it is.
bool is_utf8(const std::string& text);

/// An Error (ExitCode::user_error) if `value`, written as JSON inside some other, could not be read again: it is nested
/// too deep, or holds binary values. `doing` begins the message.
void require_readable(const Json& value, const std::string& doing);

/// The same and an Error for what JSON does not keep in `value`: a number that is not finite, which would
/// come back as null, and text that is not UTF-8. `path` names the value, of which others are inside; `remedy` is that
/// of numbers.
void require_kept(const Json& value, const std::string& path, const std::string& remedy);

}  // namespace muster::detail
