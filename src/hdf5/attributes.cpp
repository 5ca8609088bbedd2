#include "hdf5/attributes.hpp"

#include "base/text.hpp"

#include <charconv>
#include <optional>
#include <string_view>

namespace muster::detail::hdf5 {
namespace {

/// An attribute with its type and the number of its values; no handles if there is no such attribute.
struct Attribute {
  Attribute(hid_t dataset, const char* name, const std::string& doing) {
    if (check(H5Aexists(dataset, name), doing) == 0) return;
    attribute = {check(H5Aopen(dataset, name, H5P_DEFAULT), doing), H5Aclose};
    type = {check(H5Aget_type(attribute.get()), doing), H5Tclose};
    const Handle space(check(H5Aget_space(attribute.get()), doing), H5Sclose);
    count = H5Sget_simple_extent_npoints(space.get());
  }

  Handle attribute, type;
  hssize_t count = 0;
};

/// The strings of an attribute of strings; none if they have a fixed length above 256 bytes.
std::vector<std::string> texts_of(const Attribute& found, const std::string& doing) {
  const auto count = static_cast<std::size_t>(found.count);
  std::vector<std::string> texts(count);
  if (H5Tis_variable_str(found.type.get()) > 0) {
    std::vector<char*> pointers(count);
    check(H5Aread(found.attribute.get(), found.type.get(), static_cast<void*>(pointers.data())), doing);
    for (std::size_t i = 0; i < count; ++i) {
      if (pointers[i] != nullptr) texts[i] = pointers[i];
      H5free_memory(pointers[i]);
    }
    return texts;
  }
  constexpr std::size_t most = 256;
  const auto size = H5Tget_size(found.type.get());
  if (size == 0 || size > most) return {};
  std::string all(count * size, '\0');
  check(H5Aread(found.attribute.get(), found.type.get(), all.data()), doing);
  for (std::size_t i = 0; i < count; ++i) texts[i] = all.substr(i * size, size).c_str();  // without the padding
  return texts;
}

/// The numbers of a text, separated by spaces or by a comma and a space; none if there is anything else in it, such as
/// a comma within a number.
std::optional<std::vector<double>> numbers_in(std::string_view text) {
  std::vector<double> numbers;
  constexpr const char* spaces = " \t\n";
  for (auto begin = text.find_first_not_of(spaces); begin != text.npos; begin = text.find_first_not_of(spaces)) {
    auto word = text.substr(begin, text.find_first_of(spaces, begin) - begin);
    text.remove_prefix(begin + word.size());
    if (word.ends_with(',')) word.remove_suffix(1);
    if (word.empty()) continue;
    if (word.starts_with('+') && !word.starts_with("+-")) word.remove_prefix(1);
    const auto [end, error] = std::from_chars(word.data(), word.data() + word.size(), numbers.emplace_back());
    if (error != std::errc{} || end != word.data() + word.size()) return {};
  }
  return numbers;
}

}  // namespace

std::vector<double> numbers_of_attribute(hid_t dataset, const char* name, const std::string& doing) {
  const Lock lock;
  const Attribute found(dataset, name, doing);
  if (found.count < 1) return {};
  const auto kind = H5Tget_class(found.type.get());
  if (kind != H5T_INTEGER && kind != H5T_FLOAT && kind != H5T_STRING) return {};
  const hssize_t most = kind == H5T_STRING ? 64 : 1024;  // a hostile file may repeat a long string
  if (found.count > most)
    throw Error(ExitCode::data, doing, str(name, " has ", found.count, " numbers; the most are ", most),
                "Shorten it, or choose other columns");
  if (kind != H5T_STRING) {
    std::vector<double> values(static_cast<std::size_t>(found.count));
    check(H5Aread(found.attribute.get(), H5T_NATIVE_DOUBLE, values.data()), doing);
    return values;
  }
  const auto texts = texts_of(found, doing);
  std::string all;
  for (const auto& text : texts) all += text + " ";
  const auto numbers = numbers_in(all);
  if (!numbers || texts.empty())
    throw Error(ExitCode::data, doing, str(name, " is not a number"), "Correct it, or choose other columns");
  return *numbers;
}

std::vector<std::string> texts_of_attribute(hid_t dataset, const char* name, const std::string& doing) {
  const Lock lock;
  const Attribute found(dataset, name, doing);
  constexpr hssize_t most = 32;
  if (found.count < 1 || found.count > most || H5Tget_class(found.type.get()) != H5T_STRING) return {};
  return texts_of(found, doing);
}

std::string text_of_attribute(hid_t dataset, const char* name, const std::string& doing) {
  const auto texts = texts_of_attribute(dataset, name, doing);
  return texts.size() == 1 ? texts.front() : std::string();
}

}  // namespace muster::detail::hdf5
