// Reads comma-separated numbers. A line is a sample, and its last field is the target. Quotes, spaces around a number,
// CRLF and a byte-order mark are understood; blank lines are skipped.
#include "base/log.hpp"
#include "convert/convert.hpp"

#include <algorithm>
#include <array>
#include <bit>
#include <charconv>
#include <cmath>
#include <optional>
#include <string_view>
#include <utility>

namespace muster {
namespace {

using detail::convert::InputColumn, detail::convert::InputFile, detail::convert::NumberType;

constexpr std::size_t longest_line = 64 << 20;

/// The lines of a file, without their line ends.
class Lines {
 public:
  explicit Lines(InputFile& file) : file_(file) {}

  /// Reads the next line. Returns false at the end of the file.
  bool next(std::string& line) {
    line.clear();
    for (bool any = false;; any = true) {
      if (rest_.empty()) rest_ = {buffer_.data(), file_.read_some(std::as_writable_bytes(std::span(buffer_)))};
      if (rest_.empty()) {
        if (!any) return false;
        break;
      }
      const auto end = rest_.find('\n');
      line += rest_.substr(0, end);
      rest_.remove_prefix(end == std::string_view::npos ? rest_.size() : end + 1);
      if (end != std::string_view::npos) break;
      if (line.size() > longest_line) file_.reject("it has a line of more than 64 MB", "Check that it is a CSV file");
    }
    if (!line.empty() && line.back() == '\r') line.pop_back();
    if (number_++ == 0 && line.starts_with("\xEF\xBB\xBF")) line.erase(0, 3);
    return true;
  }
  /// Throws an Error that names the line read last.
  [[noreturn]] void fail(const std::string& fact, const std::string& remedy = {}) const {
    throw Error(ExitCode::data, "reading " + file_.shown() + ", line " + std::to_string(number_), fact, remedy);
  }

 private:
  InputFile& file_;
  std::array<char, 1 << 16> buffer_{};
  std::string_view rest_;
  std::int64_t number_ = 0;
};

std::string_view trimmed(std::string_view text) {
  const auto begin = text.find_first_not_of(" \t");
  if (begin == std::string_view::npos) return {};
  return text.substr(begin, text.find_last_not_of(" \t") - begin + 1);
}

/// The fields of a line, without quotes and surrounding spaces; commas inside quotes do not separate.
void split(std::string_view line, std::vector<std::string_view>& fields) {
  fields.clear();
  bool quoted = false;
  std::size_t begin = 0;
  for (std::size_t i = 0; i <= line.size(); ++i) {
    if (i < line.size() && line[i] == '"') quoted = !quoted;
    if (i < line.size() && (line[i] != ',' || quoted)) continue;
    auto field = trimmed(line.substr(begin, i - begin));
    if (field.size() > 1 && field.front() == '"' && field.back() == '"')
      field = trimmed(field.substr(1, field.size() - 2));
    fields.push_back(field);
    begin = i + 1;
  }
}

template <class Number>
std::errc parse(std::string_view field, Number& value) {
  if (field.starts_with('+') && !field.starts_with("+-")) field.remove_prefix(1);
  const auto [end, error] = std::from_chars(field.data(), field.data() + field.size(), value);
  if (error == std::errc{} && end != field.data() + field.size()) return std::errc::invalid_argument;
  return error;
}

std::optional<float> number(std::string_view field) {
  float value = 0;
  const auto error = parse(field, value);
  if (error == std::errc{}) return value;
  // A number too small for float becomes zero. from_chars reports it like one that is too large.
  double wide = 0;
  if (error == std::errc::result_out_of_range && parse(field, wide) == std::errc{} && std::abs(wide) < 1)
    return static_cast<float>(wide);
  return {};
}

bool is_missing(std::string_view field) {
  return field.empty() || field == "?" || field == "NA" || field == "N/A" || field == "null" || field == "NULL";
}

template <class Number>
void append(std::vector<std::byte>& values, Number value) {
  const auto bytes = std::as_bytes(std::span(&value, 1));
  values.insert(values.end(), bytes.begin(), bytes.end());
}

/// Fills both columns line by line.
class Table {
 public:
  explicit Table(std::optional<bool> header) : header_(header) {}

  void read(const std::filesystem::path& path) {
    InputFile file(path);
    if (shown_.empty()) shown_ = file.shown();
    Lines lines(file);
    std::string line;
    std::vector<std::string_view> fields;
    for (bool first = true; lines.next(line);) {
      if (trimmed(line).empty()) continue;
      split(line, fields);
      if (fields.size() < 2) lines.fail("it has one field", "Separate features and target by commas");
      if (width_ == 0) width_ = fields.size();
      if (fields.size() != width_)
        lines.fail(
            "it has " + std::to_string(fields.size()) + " fields, the lines before it have " + std::to_string(width_),
            "Give every line the same number of fields");
      if (!std::exchange(first, false) || !is_header(fields, file))
        add(fields, lines);
      else
        compare_header(fields, lines);
    }
  }

  std::vector<InputColumn> columns() {
    if (samples_ == 0)
      throw Error(ExitCode::data, "reading " + shown_, "it holds no sample",
                  "Give a file that has some, a line for each");
    constexpr bool big = std::endian::native == std::endian::big;
    const NumberType real{'f', 4, big}, integer{'i', 8, big};
    std::vector<InputColumn> both;
    both.emplace_back(real, std::vector{samples_, width_ - 1}, shown_, std::move(features_));
    both.emplace_back(integers_ ? integer : real, std::vector{samples_}, shown_,
                      std::move(integers_ ? integer_targets_ : targets_));
    return both;
  }

 private:
  /// True if the first line of a file is a header. Logs a warning if it could also be a sample.
  bool is_header(const std::vector<std::string_view>& fields, const InputFile& file) const {
    if (header_) return *header_;
    const bool header = !is_missing(fields.back()) && !number(fields.back());
    const auto is_number = [](std::string_view field) { return number(field).has_value(); };
    const auto say = [&](const std::string& why, const char* taken) {
      detail::log::warn("reading " + file.shown() + ": the first line " + why + " and is taken as a " + taken +
                        "; set --header yes or no (ConvertOptions::header) to decide it");
    };
    if (header && std::all_of(fields.begin(), fields.end() - 1, is_number))
      say("has numbers and ends in \"" + std::string(fields.back().substr(0, 40)) + "\",", "header");
    else if (!header && counts_columns(fields))
      say("counts the columns", "sample");
    return header;
  }

  /// Throws an Error if the header differs from the one of the first file: the rows of all files become one dataset.
  void compare_header(const std::vector<std::string_view>& fields, const Lines& lines) {
    if (names_.empty()) names_.assign(fields.begin(), fields.end());
    for (std::size_t i = 0; i < fields.size(); ++i)
      if (fields[i] != names_[i])
        lines.fail("its header names column " + std::to_string(i + 1) + " \"" + std::string(fields[i].substr(0, 40)) +
                       "\", but an earlier file names it \"" + names_[i].substr(0, 40) + '"',
                   "Give files of the same columns in the same order");
  }

  /// True if the fields are 0, 1, 2, …, the names that pandas gives to columns without names.
  static bool counts_columns(const std::vector<std::string_view>& fields) {
    for (std::size_t i = 0; i < fields.size(); ++i) {
      std::size_t value = 0;
      if (parse(fields[i], value) != std::errc{} || value != i) return false;
    }
    return true;
  }

  void add(const std::vector<std::string_view>& fields, const Lines& lines) {
    for (std::size_t i = 0; i < fields.size(); ++i) {
      const auto value = number(fields[i]);
      if (!value || std::isnan(*value)) refuse(fields[i], i + 1, lines);
      append(i + 1 < fields.size() ? features_ : targets_, *value);
    }
    std::int64_t integer = 0;
    integers_ = integers_ && parse(fields.back(), integer) == std::errc{};
    if (integers_) append(integer_targets_, integer);
    ++samples_;
  }

  [[noreturn]] static void refuse(std::string_view field, std::size_t column, const Lines& lines) {
    const std::string where = "field " + std::to_string(column);
    if (is_missing(field) || number(field))  // the only number that is refused is NaN
      lines.fail(where + " is missing", "Fill it in, or leave the line out");
    lines.fail(where + ", \"" + std::string(field.substr(0, 40)) + "\", is not a number that float32 holds",
               "Turn names into numbers first");
  }

  std::vector<std::string> names_;  ///< fields of the first header
  std::optional<bool> header_;
  std::string shown_;
  std::uint64_t samples_ = 0;
  std::uint64_t width_ = 0;  ///< fields per line; 0 before the first line
  bool integers_ = true;     ///< all targets so far are integers
  std::vector<std::byte> features_, targets_, integer_targets_;
};

}  // namespace

std::vector<std::filesystem::path> convert_csv(const std::vector<std::filesystem::path>& inputs,
                                               const std::filesystem::path& output, const ConvertOptions& options) {
  const auto names = detail::convert::names_of(2, options);
  detail::convert::check_conversion(inputs, 2, names, output, options);
  Table table(options.header);
  for (const auto& input : inputs) table.read(input);
  return detail::convert::convert_columns(table.columns(), names, output, options);
}

}  // namespace muster
