// Reads NumPy's .npy files. Layout: magic, version, length of the header, the header as a Python dictionary, the
// values. https://numpy.org/doc/stable/reference/generated/numpy.lib.format.html
#include "convert/npy.hpp"

#include "base/text.hpp"

#include <array>
#include <charconv>
#include <cstdlib>
#include <cstring>
#include <optional>
#include <set>
#include <string_view>
#include <utility>

namespace muster {
namespace {

using detail::convert::InputColumn, detail::convert::InputFile, detail::convert::NpyHeader, detail::convert::NumberType;

constexpr std::size_t longest_header = 1 << 20;

/// Parses the header, a dictionary of a few kinds of Python literals. Every mistake throws the same Error.
class HeaderParser {
 public:
  HeaderParser(std::string_view text, const InputFile& file) : text_(text), file_(file) {}

  NpyHeader parse() {
    NpyHeader header;
    std::set<std::string> keys;
    expect("{");
    while (!accept("}")) {
      const auto key = string();
      if (!keys.insert(key).second) fail();
      expect(":");
      if (key == "descr")
        header.descr = descr();
      else if (key == "fortran_order")
        header.fortran_order = boolean();
      else if (key == "shape")
        header.shape = tuple();
      else
        fail();
      if (!accept(",")) {
        expect("}");
        break;
      }
    }
    skip_space();
    if (!text_.empty() || keys.size() != 3) fail();
    return header;
  }

 private:
  [[noreturn]] void fail() const { file_.reject("its .npy header is malformed", "Save it again with numpy.save"); }

  void skip_space() {
    while (!text_.empty() && (text_.front() == ' ' || text_.front() == '\n')) text_.remove_prefix(1);
  }
  void expect(std::string_view word) {
    if (!accept(word)) fail();
  }
  bool accept(std::string_view word) {
    skip_space();
    if (!text_.starts_with(word)) return false;
    text_.remove_prefix(word.size());
    return true;
  }
  std::string string() {
    const char quote = accept("\"") ? '"' : '\'';
    if (quote == '\'') expect("'");
    const auto end = text_.find(quote);
    if (end == std::string_view::npos) fail();
    const std::string value(text_.substr(0, end));
    text_.remove_prefix(end + 1);
    return value;
  }
  std::string descr() {
    if (accept("[")) file_.reject("it holds records with named fields", "Save each field as a file of its own");
    return string();
  }
  bool boolean() {
    if (accept("True")) return true;
    expect("False");
    return false;
  }
  std::vector<std::uint64_t> tuple() {
    std::vector<std::uint64_t> values;
    expect("(");
    while (!accept(")")) {
      skip_space();
      std::uint64_t value = 0;
      const auto [end, error] = std::from_chars(text_.data(), text_.data() + text_.size(), value);
      if (error != std::errc{}) fail();
      text_.remove_prefix(static_cast<std::size_t>(end - text_.data()));
      values.push_back(value);
      if (text_.starts_with('L')) text_.remove_prefix(1);  // NumPy of Python 2
      if (!accept(",")) {
        // One number in parentheses is a tuple only with its comma.
        if (values.size() == 1) fail();
        expect(")");
        break;
      }
    }
    return values;
  }

  std::string_view text_;
  const InputFile& file_;
};

/// The type of a descr such as "<f4"; none if HDF5 or torch does not have it.
std::optional<NumberType> number_type(std::string_view descr) {
  if (descr.size() < 3 || std::string_view("<>|=").find(descr.front()) == std::string_view::npos) return {};
  const std::string_view spelled = descr.substr(1);
  for (const std::string_view known :
       {"b1", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8", "c8", "c16"}) {
    if (spelled != known) continue;
    const auto size = static_cast<std::size_t>(std::atoi(known.data() + 1));
    // "|", no byte order, is for single bytes only.
    if (descr.front() == '|' && size > 1) return {};
    return NumberType{known.front(), size, descr.front() == '>'};
  }
  return {};
}

std::size_t header_length(InputFile& file) {
  std::array<std::byte, 8> start{};
  file.read(start);
  if (std::memcmp(start.data(), "\x93NUMPY", 6) != 0)
    file.reject("it is not a .npy file", "numpy.save makes one; `muster convert npz` reads .npz archives");
  const int major = std::to_integer<int>(start[6]), minor = std::to_integer<int>(start[7]);
  if (major < 1 || major > 3 || minor != 0)
    file.reject(detail::str("its version, ", major, ".", minor, ", is not 1.0, 2.0 or 3.0"));
  std::array<std::byte, 4> bytes{};
  file.read(std::span(bytes).first(major == 1 ? 2 : 4));
  std::size_t length = 0;
  for (std::size_t i = 0; i < bytes.size(); ++i) length |= std::to_integer<std::size_t>(bytes[i]) << (8 * i);
  if (length > longest_header) file.reject("its .npy header is absurdly long");
  return length;
}

}  // namespace

namespace detail::convert {

NpyHeader read_npy_header(InputFile& file) {
  std::string text(header_length(file), '\0');
  file.read(std::as_writable_bytes(std::span(text)));
  return HeaderParser(text, file).parse();
}

InputColumn npy_column(const NpyHeader& header, InputFile file) {
  if (header.descr.ends_with('O'))
    file.reject("it holds Python objects, such as arrays of different lengths",
                "Make an array of numbers of them, or leave it out");
  const auto type = number_type(header.descr);
  if (!type)
    file.reject("it holds values of type '" + header.descr + "', but tensors only hold numbers of up to 8 bytes",
                "Convert them first, as in numpy.save(file, values.astype('float32')), or leave it out");
  if (header.fortran_order && header.shape.size() > 1)
    file.reject("its values lie in Fortran order", "Save it with numpy.save(file, numpy.ascontiguousarray(values))");
  return InputColumn(*type, header.shape, std::move(file));
}

}  // namespace detail::convert

std::vector<std::filesystem::path> convert_npy(const std::vector<std::filesystem::path>& inputs,
                                               const std::filesystem::path& output, const ConvertOptions& options) {
  const auto names = detail::convert::names_of(inputs.size(), options);
  detail::convert::check_conversion(inputs, inputs.size(), names, output, options);
  std::vector<InputColumn> columns;
  for (const auto& input : inputs) {
    InputFile file(input, options.progress);
    const auto header = detail::convert::read_npy_header(file);
    columns.push_back(detail::convert::npy_column(header, std::move(file)));
  }
  return detail::convert::convert_columns(std::move(columns), names, output, options);
}

}  // namespace muster
