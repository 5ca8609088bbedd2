// Reads comma-separated numbers. A line is a sample, and its last field is the target. Quotes, also around line breaks,
// spaces around a number, CRLF and UTF-8's byte-order mark are understood; blank lines are skipped.
#include "base/log.hpp"
#include "convert/convert.hpp"

#include <algorithm>
#include <array>
#include <bit>
#include <charconv>
#include <cmath>
#include <cstring>
#include <optional>
#include <string_view>
#include <utility>

namespace muster {
namespace {

using detail::convert::InputColumn, detail::convert::InputFile, detail::convert::NumberType;

constexpr std::size_t longest_line = 64 << 20;

/// The lines of a file, without their line ends. A line break between quotes does not end a line.
class Lines {
 public:
  explicit Lines(InputFile& file) : file_(file) {}

  /// Reads the next line. Returns false at the end of the file.
  bool next(std::string& line) {
    line.clear();
    const auto first = number_ + 1;
    bool is_quoted = false;
    for (bool any = false;; any = true) {
      if (rest_.empty()) fill();
      if (rest_.empty()) {
        if (!any) return false;
        number_ = is_quoted ? first : number_ + 1;
        if (is_quoted) fail("it has a quote that nothing closes", "Close or remove it");
        break;
      }
      const auto end = rest_.find('\n');
      const auto part = rest_.substr(0, end);
      rest_.remove_prefix(end == std::string_view::npos ? rest_.size() : end + 1);
      is_quoted = is_quoted != (std::ranges::count(part, '"') % 2 == 1);
      line += part;
      if (end != std::string_view::npos) {
        ++number_;
        if (!is_quoted) break;
        line += ' ';
      }
      if (line.size() > longest_line) file_.reject("it has a line of more than 64 MB", "Check that it is a CSV file");
    }
    if (!line.empty() && line.back() == '\r') line.pop_back();
    if (first == 1 && line.starts_with("\xEF\xBB\xBF")) line.erase(0, 3);
    return true;
  }
  /// Throws an Error that names the line read last.
  [[noreturn]] void fail(const std::string& fact, const std::string& remedy = {}) const {
    throw Error(ExitCode::data, detail::str("reading ", file_.shown(), ", line ", number_), fact, remedy);
  }

 private:
  void fill() {
    rest_ = {buffer_.data(), file_.read_some(std::as_writable_bytes(std::span(buffer_)))};
    if (rest_.find('\0') != std::string_view::npos)  // UTF-16 has one in each digit and comma
      file_.reject("it holds zero bytes, as UTF-16 text does", "Save it as UTF-8: `iconv -f UTF-16 -t UTF-8 IN > OUT`");
  }

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
  return end == field.data() + field.size() ? error : std::errc::invalid_argument;
}

/// True if a number that double does not hold is too small, and not too large.
bool is_too_small(std::string_view field) {
  const auto e = std::min(field.find_first_of("eE"), field.size());
  const auto point = std::min(field.substr(0, e).find('.'), e);
  std::int64_t exponent = 0;
  if (e < field.size() && parse(field.substr(e + 1), exponent) == std::errc::result_out_of_range)
    return field[e + 1] == '-';
  constexpr std::int64_t most = std::int64_t{1} << 40;  // far more than a line has digits
  return std::clamp(exponent, -most, most) + static_cast<std::int64_t>(point) <
         static_cast<std::int64_t>(field.find_first_of("123456789"));
}

/// The number in the field; zero if it is too small for double, none if it is no number that double holds.
std::optional<double> number(std::string_view field) {
  double value = 0;
  const auto error = parse(field, value);
  if (error == std::errc{}) return value;
  if (error == std::errc::result_out_of_range && is_too_small(field)) return 0;
  return {};
}

bool is_missing(std::string_view field) {
  return field.empty() || field == "?" || field == "NA" || field == "N/A" || field == "null" || field == "NULL";
}

constexpr double largest_float_whole = 1 << 24;  ///< float32 holds all whole numbers up to it
constexpr double no_fractions = 0x1p52;          ///< doubles from here on are whole numbers

/// The whole number that the digits of a field make, with its point and its exponent; none if it has a fraction, or if
/// int64 does not hold it.
std::optional<std::int64_t> exact_whole(std::string_view field) {
  const auto e = std::min(field.find_first_of("eE"), field.size());
  std::int64_t zeros = 0;  // how many to append to the digits; if negative, how many digits are behind the point
  if (e < field.size() && parse(field.substr(e + 1), zeros) != std::errc{}) return {};
  std::string digits(field.substr(0, e));
  if (const auto point = digits.find('.'); point != std::string::npos) {
    digits.erase(point, 1);
    zeros -= static_cast<std::int64_t>(digits.size() - point);
  }
  if (zeros > 18 || std::cmp_less(digits.size(), -zeros)) return {};
  const auto length = static_cast<std::size_t>(static_cast<std::int64_t>(digits.size()) + zeros);
  if (length < digits.size() && digits.find_first_not_of('0', length) != std::string::npos) return {};
  digits.resize(length, '0');
  std::int64_t whole = 0;
  if (parse(digits, whole) != std::errc{}) return {};
  return whole;
}

/// The numbers of a column, of 8 bytes each: int64 as long as all are whole, then double.
class Values {
 public:
  /// `type`: that of ConvertOptions::types; empty: chosen by the numbers. `is_target`: whole numbers are then classes,
  /// which become int64.
  Values(std::string type, bool is_target) : type_(std::move(type)), is_target_(is_target) {}

  /// Returns why the field cannot be in the column; null if it can.
  const char* add(std::string_view field) {
    std::int64_t whole = 0;
    const auto integer = parse(field, whole);
    const bool is_digits = integer == std::errc{};
    const auto value = is_digits ? static_cast<double>(whole) : number(field);
    if (!value || std::isnan(*value)) return "is not a number";
    if (type_ == "float32" && std::isfinite(*value) && std::isinf(static_cast<float>(*value)))
      return "is not a number that float32 holds";
    bool is_whole = std::trunc(*value) == *value && std::abs(*value) <= 0x1p63;
    if (is_whole && !is_digits) {
      const auto exact = std::abs(*value) < no_fractions ? static_cast<std::int64_t>(*value) : exact_whole(field);
      is_whole = exact.has_value();
      whole = exact.value_or(0);
    }
    if (type_ == "int64" && !is_whole) return "is not a whole number that int64 holds";
    are_digits_ = are_digits_ && is_digits;
    has_large_ =
        has_large_ || (std::isfinite(*value) && std::trunc(*value) == *value && std::abs(*value) > largest_float_whole);
    is_rounded_ = is_rounded_ || integer == std::errc::result_out_of_range ||
                  (!is_whole && std::abs(*value) >= 0x1p53 && std::abs(*value) <= 0x1p63) ||
                  (is_whole && std::abs(*value) >= 0x1p53 &&
                   (std::abs(*value) >= 0x1p63 || static_cast<std::int64_t>(*value) != whole));
    if (are_whole_ && !is_whole) become_double();
    are_whole_ ? append(whole) : append(*value);
    return nullptr;
  }

  InputColumn column(const std::vector<std::uint64_t>& shape, const std::string& shown) && {
    if (type_.empty() && has_large_ && !are_whole_ && is_rounded_)
      detail::log::warn("reading " + shown +
                        ": not all numbers of a column are whole ones that int64 holds, so it is float64, which "
                        "rounds some of those above 2^53");
    if (type_.empty())
      type_ = !has_large_ ? is_target_ && are_digits_ ? "int64" : "float32" : are_whole_ ? "int64" : "float64";
    constexpr bool big = std::endian::native == std::endian::big;
    if (type_ == "int64") return {{'i', 8, big}, shape, shown, std::move(values_)};
    if (are_whole_) become_double();
    if (type_ == "float64") return {{'f', 8, big}, shape, shown, std::move(values_)};
    const auto count = values_.size() / 8;
    for (std::size_t i = 0; i < count; ++i) {
      const auto narrow = static_cast<float>(get<double>(i));
      std::memcpy(values_.data() + i * sizeof narrow, &narrow, sizeof narrow);
    }
    values_.resize(count * sizeof(float));
    return {{'f', 4, big}, shape, shown, std::move(values_)};
  }

 private:
  template <class Number>
  void append(Number value) {
    const auto bytes = std::as_bytes(std::span(&value, 1));
    values_.insert(values_.end(), bytes.begin(), bytes.end());
  }
  template <class Number>
  Number get(std::size_t i) const {
    Number value;
    std::memcpy(&value, values_.data() + i * sizeof value, sizeof value);
    return value;
  }
  void become_double() {
    are_whole_ = false;
    for (std::size_t i = 0; i < values_.size() / 8; ++i) {
      const auto value = static_cast<double>(get<std::int64_t>(i));
      std::memcpy(values_.data() + i * sizeof value, &value, sizeof value);
    }
  }

  std::string type_;
  bool is_target_;
  bool are_whole_ = true, are_digits_ = true;  ///< digits: written without a point and an exponent
  bool has_large_ = false;                     ///< a number is whole, and float32 may not hold it
  bool is_rounded_ = false;                    ///< a number is large, and double does not hold it exactly
  std::vector<std::byte> values_;
};

/// Reads the lines of all files into two columns, features and target.
class Table {
 public:
  Table(std::optional<bool> header, std::string feature_type, std::string target_type)
      : header_(header), features_(std::move(feature_type), false), targets_(std::move(target_type), true) {}

  void read(const std::filesystem::path& path, const detail::convert::Progress& progress) {
    InputFile file(path, progress);
    if (shown_.empty()) shown_ = file.shown();
    Lines lines(file);
    std::string line;
    std::vector<std::string_view> fields;
    std::int64_t rows = 0;
    bool has_unnamed = false, counts_rows = true;
    for (bool first = true; lines.next(line);) {
      if (trimmed(line).empty()) continue;
      split(line, fields);
      if (fields.size() < 2) lines.fail("it has one field", "Separate features and target by commas");
      if (width_ == 0) width_ = fields.size();
      if (fields.size() != width_)
        lines.fail(detail::str("it has ", fields.size(), " fields, the lines before it have ", width_),
                   "Give every line the same number of fields");
      const bool may_be_header = std::exchange(first, false);
      if (may_be_header && !header_ && fields.back().empty())
        lines.fail("it ends in a comma, so the last column, the target, is empty",
                   "Remove the commas at the ends of the lines, or name and fill in that column");
      if (may_be_header && is_header(fields, file)) {
        compare_header(fields, lines);
        has_unnamed = fields.front().empty() || fields.front() == "Unnamed: 0";
        continue;
      }
      add(fields, lines);
      std::int64_t count = -1;
      counts_rows = counts_rows && parse(fields.front(), count) == std::errc{} && count == rows++;
    }
    if (has_unnamed && counts_rows && rows > 0)
      file.reject("its first column has no name and counts the lines, as the index of pandas does",
                  "Leave it out: DataFrame.to_csv(…, index=False), or `cut -d, -f2-`; or give it a name");
    if (has_unnamed)
      detail::log::warn("reading " + file.shown() +
                        ": the first column has no name, as the index that pandas writes, and is taken as a feature");
  }

  std::vector<InputColumn> columns() && {
    if (samples_ == 0)
      throw Error(ExitCode::data, "reading " + shown_, "it holds no sample",
                  "Give a file that has some, a line for each");
    std::vector<InputColumn> both;
    both.push_back(std::move(features_).column({samples_, width_ - 1}, shown_));
    both.push_back(std::move(targets_).column({samples_}, shown_));
    return both;
  }

 private:
  /// True if the first line of a file is a header. Logs a warning if that is doubtful.
  bool is_header(const std::vector<std::string_view>& fields, const InputFile& file) const {
    if (header_) return *header_;
    const bool header = !is_missing(fields.back()) && !number(fields.back());
    const auto is_number = [](std::string_view field) { return number(field).has_value(); };
    const auto say = [&](const std::string& why, const char* taken) {
      detail::log::warn("reading " + file.shown() + ": the first line " + why + " and is taken as a " + taken +
                        "; set --header yes or no (ConvertOptions::header) to decide it");
    };
    if (header && std::all_of(fields.begin(), fields.end() - 1, is_number))
      say(detail::str("has numbers and ends in \"", fields.back().substr(0, 40), "\","), "header");
    else if (!header && counts_columns(fields))
      say("counts the columns", "sample");
    else if (!header && are_years(fields))
      say("looks like years that ascend", "sample");
    return header;
  }

  /// Throws an Error if the header differs from the one of the first file: the rows of all files become one dataset.
  void compare_header(const std::vector<std::string_view>& fields, const Lines& lines) {
    if (names_.empty()) names_.assign(fields.begin(), fields.end());
    for (std::size_t i = 0; i < fields.size(); ++i)
      if (fields[i] != names_[i])
        lines.fail(detail::str("its header names column ", i + 1, " \"", fields[i].substr(0, 40),
                               "\", but an earlier file names it \"", names_[i].substr(0, 40), '"'),
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

  /// True if the fields are years that ascend, such as 2018, 2019. Such a line may be a header or a sample.
  static bool are_years(const std::vector<std::string_view>& fields) {
    int last = 1799;
    return std::ranges::all_of(fields, [&](std::string_view field) {
      int year = 0;
      return parse(field, year) == std::errc{} && year > std::exchange(last, year) && year < 2200;
    });
  }

  void add(const std::vector<std::string_view>& fields, const Lines& lines) {
    for (std::size_t i = 0; i < fields.size(); ++i)
      if (const auto* const problem = (i + 1 < fields.size() ? features_ : targets_).add(fields[i]))
        refuse(fields[i], i + 1, problem, lines);
    ++samples_;
  }

  [[noreturn]] static void refuse(std::string_view field, std::size_t column, const std::string& problem,
                                  const Lines& lines) {
    const std::string where = detail::str("field ", column);
    const auto value = number(field);
    if (is_missing(field) || (value && std::isnan(*value)))
      lines.fail(where + " is missing", "Fill it in, or leave the line out");
    lines.fail(detail::str(where, ", \"", field.substr(0, 40), "\", ", problem),
               value ? "Choose another type for the column, as in --type x=float64" : "Turn names into numbers first");
  }

  std::vector<std::string> names_;  ///< fields of the first header
  std::optional<bool> header_;
  std::string shown_;
  std::uint64_t samples_ = 0;
  std::uint64_t width_ = 0;  ///< fields per line; 0 before the first line
  Values features_, targets_;
};

std::string type_of(const std::string& column, const ConvertOptions& options) {
  const auto found = options.types.find(column);
  return found == options.types.end() ? std::string() : found->second;
}

void check_types(const std::vector<std::string>& names, const ConvertOptions& options) {
  for (const auto& [column, type] : options.types) {
    const std::string doing = "choosing the type of the column " + column;
    if (std::ranges::find(names, column) == names.end())
      throw Error(ExitCode::usage, doing, "there is no such column",
                  "The columns are " + names[0] + " and " + names[1]);
    if (type != "float32" && type != "float64" && type != "int64")
      throw Error(ExitCode::usage, doing, "\"" + type + "\" is none", "Give float32, float64 or int64");
  }
}

}  // namespace

std::vector<std::filesystem::path> convert_csv(const std::vector<std::filesystem::path>& inputs,
                                               const std::filesystem::path& output, const ConvertOptions& options) {
  const auto names = detail::convert::names_of(2, options);
  detail::convert::check_conversion(inputs, 2, names, output, options);
  check_types(names, options);
  Table table(options.header, type_of(names[0], options), type_of(names[1], options));
  for (const auto& input : inputs) table.read(input, options.progress);
  return detail::convert::convert_columns(std::move(table).columns(), names, output, options);
}

}  // namespace muster
