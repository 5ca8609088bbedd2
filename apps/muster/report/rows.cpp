#include "rows.hpp"

#include "base/text.hpp"

#include <muster/error.hpp>

#include <simdjson.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <deque>
#include <fstream>
#include <limits>
#include <string>
#include <utility>

namespace muster::tool::report {
namespace {

namespace od = simdjson::ondemand;

constexpr std::size_t block_bytes = std::size_t{1} << 20;
/// Limits: a longer line is not read as a row, and longer lists and deeper values are left out.
constexpr std::size_t max_line_bytes = std::size_t{16} << 20;
constexpr std::size_t max_list_length = 16;
constexpr int max_depth = 4;
constexpr double not_finite = std::numeric_limits<double>::quiet_NaN();

/// Parses a line into a row.
class RowParser {
 public:
  /// Returns false if the line is no JSON object. The caller must make at least SIMDJSON_PADDING bytes readable behind
  /// the line.
  bool parse(const char* line, std::size_t length, Row& row) {
    row.numbers.clear();
    row.texts.clear();
    row.left_out.clear();
    names_.clear();
    od::document document;
    od::object object;
    return parser_.iterate(simdjson::padded_string_view(line, length, length + simdjson::SIMDJSON_PADDING))
                   .get(document) == simdjson::SUCCESS &&
           document.get_object().get(object) == simdjson::SUCCESS && add_object(object, {}, 0, row) &&
           document.current_location().error() == simdjson::OUT_OF_BOUNDS;  // true only if nothing follows the object
  }

 private:
  bool add_object(od::object object, std::string_view name, int depth, Row& row) {
    for (auto field : object) {
      std::string_view key;
      od::value value;
      if (field.unescaped_key().get(key) != simdjson::SUCCESS || field.value().get(value) != simdjson::SUCCESS)
        return false;
      if (!add_value(value, name.empty() ? key : stored(detail::str(name, ".", key)), depth, row)) return false;
    }
    return true;
  }

  bool add_list(od::array list, std::string_view name, int depth, Row& row) {
    const auto number_count = row.numbers.size(), text_count = row.texts.size();
    std::size_t length = 0;
    for (auto element : list) {
      od::value value;
      if (element.get(value) != simdjson::SUCCESS) return false;
      if (length++ < max_list_length && !add_value(value, stored(detail::str(name, "[", length - 1, "]")), depth, row))
        return false;
    }
    if (length > max_list_length) {
      row.numbers.resize(number_count);
      row.texts.resize(text_count);
      row.left_out.push_back(name);
    }
    return true;
  }

  bool add_value(od::value value, std::string_view name, int depth, Row& row) {
    od::json_type type;
    if (value.type().get(type) != simdjson::SUCCESS) return false;
    switch (type) {
      case od::json_type::object:
      case od::json_type::array:
        if (depth == max_depth) {
          row.left_out.push_back(name);  // simdjson skips the value itself
          return true;
        }
        if (type == od::json_type::array) {
          od::array list;
          return value.get_array().get(list) == simdjson::SUCCESS && add_list(list, name, depth + 1, row);
        } else {
          od::object object;
          return value.get_object().get(object) == simdjson::SUCCESS && add_object(object, name, depth + 1, row);
        }
      case od::json_type::number: {
        double number = 0;
        const auto error = value.get_double().get(number);
        row.numbers.push_back({name, error == simdjson::SUCCESS ? number : not_finite});
        return error == simdjson::SUCCESS || error == simdjson::NUMBER_ERROR || error == simdjson::NUMBER_OUT_OF_RANGE;
      }
      case od::json_type::boolean: {
        bool flag = false;
        if (value.get_bool().get(flag) != simdjson::SUCCESS) return false;
        row.numbers.push_back({name, flag ? 1.0 : 0.0});
        return true;
      }
      case od::json_type::null:
        row.numbers.push_back({name, not_finite});
        return true;
      case od::json_type::string: {
        std::string_view text;
        if (value.get_string().get(text) != simdjson::SUCCESS) return false;
        row.texts.push_back({name, text});
        return true;
      }
    }
    return false;
  }

  std::string_view stored(std::string name) { return names_.emplace_back(std::move(name)); }

  od::parser parser_{max_line_bytes};
  std::deque<std::string> names_ = {};  // names of nested values, to which the row refers
};

/// Reads a file block by block and hands out its lines.
class Lines {
 public:
  explicit Lines(const std::filesystem::path& path) : path_(path), file_(path, std::ios::binary) {
    if (!file_.is_open()) fail(ExitCode::data, "Check the path and the permissions");
  }

  /// Calls visit(line, length, ends_with_newline) for each line that is not empty. At least SIMDJSON_PADDING bytes
  /// behind the line are readable. Skips lines that are too long, and returns how many.
  template <class Visit>
  std::uint64_t for_each(Visit visit) {
    std::vector<char> buffer(block_bytes + simdjson::SIMDJSON_PADDING);
    std::size_t filled = 0;
    std::uint64_t too_long = 0;
    bool skips = false;  // true while the rest of a line that is too long is skipped
    while (read_into(buffer, filled)) {
      std::size_t begin = 0;
      while (const void* found = std::memchr(buffer.data() + begin, '\n', filled - begin)) {
        const auto end = static_cast<std::size_t>(static_cast<const char*>(found) - buffer.data());
        if (end > begin && !skips) visit(buffer.data() + begin, end - begin, true);
        skips = false;
        begin = end + 1;
      }
      std::memmove(buffer.data(), buffer.data() + begin, filled - begin);
      filled -= begin;
      if (filled > max_line_bytes || (skips && filled > 0)) {
        too_long += skips ? 0 : 1;
        skips = true;
        filled = 0;
      }
    }
    if (filled > 0 && !skips) visit(buffer.data(), filled, false);
    return too_long;
  }

 private:
  /// Appends a block of the file to the buffer and enlarges it. Returns false at the end of the file.
  bool read_into(std::vector<char>& buffer, std::size_t& filled) {
    buffer.resize(std::max(buffer.size(), filled + block_bytes + simdjson::SIMDJSON_PADDING));
    file_.read(buffer.data() + filled, block_bytes);
    if (file_.bad()) fail(ExitCode::retry, "Check the disk or the file server, then try again");
    filled += static_cast<std::size_t>(file_.gcount());
    return file_.gcount() > 0;
  }

  [[noreturn]] void fail(ExitCode code, const char* remedy) const {
    throw Error(code, "reading " + path_.string(), std::strerror(errno), remedy);
  }

  std::filesystem::path path_;
  std::ifstream file_;
};

}  // namespace

double Row::number(std::string_view name) const {
  const auto found = std::ranges::find(numbers, name, &Number::name);
  return found == numbers.end() ? not_finite : found->value;
}

std::string_view Row::text(std::string_view name) const {
  const auto found = std::ranges::find(texts, name, &Text::name);
  return found == texts.end() ? std::string_view() : found->value;
}

RowCounts read_rows(const std::filesystem::path& file, const std::function<void(const Row&)>& visit) {
  RowCounts counts;
  std::error_code error;
  const auto status = std::filesystem::status(file, error);
  if (status.type() == std::filesystem::file_type::not_found) return counts;
  if (!std::filesystem::is_regular_file(status))
    throw Error(ExitCode::data, "reading " + file.string(), error ? error.message() : "it is no regular file",
                "Check the path and the permissions");
  RowParser parser;
  Row row;
  const auto too_long = Lines(file).for_each([&](const char* line, std::size_t length, bool is_complete) {
    if (parser.parse(line, length, row)) {
      ++counts.rows;
      visit(row);
    } else if (is_complete) {
      ++counts.damaged_lines;
    }
  });
  counts.damaged_lines += too_long;
  return counts;
}

}  // namespace muster::tool::report
