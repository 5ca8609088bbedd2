#include "zarr/metadata.hpp"

#include "base/json.hpp"
#include "base/number.hpp"
#include "base/text.hpp"
#include "hdf5/dimensions.hpp"

#include <algorithm>
#include <bit>
#include <limits>
#include <string_view>
#include <utility>

namespace muster::detail::zarr {
namespace {

constexpr const char* remedy = "Correct its metadata, or write it again";

[[noreturn]] void refuse(const std::string& doing, const std::string& fact, const std::string& what = remedy) {
  throw Error(ExitCode::data, doing, fact, what);
}

[[noreturn]] void refuse_form(const std::string& doing, const Json::exception& error) {
  refuse(doing, str("its metadata are not as Zarr's specification says (", error.what(), ")"));
}

/// Python writes NaN and Infinity into JSON, which has no such numbers. Puts them in quotes.
std::string with_quoted_numbers(std::string_view text) {
  constexpr std::string_view words[] = {"NaN", "Infinity", "-Infinity"};
  std::string quoted;
  bool is_in_text = false;
  for (std::size_t i = 0; i < text.size(); ++i) {
    const auto word = std::ranges::find_if(words, [&](auto each) { return text.substr(i).starts_with(each); });
    if (!is_in_text && word != std::end(words)) {
      quoted.append("\"").append(*word).append("\"");
      i += word->size() - 1;
      continue;
    }
    if (text[i] == '"') is_in_text = !is_in_text;
    quoted += text[i];
    if (is_in_text && text[i] == '\\' && i + 1 < text.size()) quoted += text[++i];
  }
  return quoted;
}

std::optional<Json> read_document(const StoreFiles& files, const std::string& name, const std::string& doing,
                                  std::string& all) {
  constexpr std::uint64_t most = 16 << 20;
  const auto file = files.open(name);
  if (!file) return {};
  if (file->size() > most) refuse(doing, name + " has more than 16 MiB, and metadata are short", damaged);
  std::string text(file->size(), '\0');
  file->read(std::as_writable_bytes(std::span(text)), 0);
  all += text;
  auto json = parse_json(with_quoted_numbers(text), doing);
  if (!json.is_object()) refuse(doing, name + " is no JSON object");
  return json;
}

std::vector<std::int64_t> sizes_of(const Json& list, std::int64_t least, const std::string& doing, const char* what) {
  std::vector<std::int64_t> sizes;
  for (const auto& size : list) {
    if (!list.is_array() || !size.is_number_integer() || size < least ||
        (size.is_number_unsigned() && size.get<std::uint64_t>() > std::numeric_limits<std::int64_t>::max()))
      refuse(doing, str(what, " is ", json_text_lossy(list)));
    sizes.push_back(size.get<std::int64_t>());
  }
  return sizes;
}

const std::string& name_of(const Json& extension) {
  return (extension.is_string() ? extension : extension.at("name")).get_ref<const std::string&>();
}

/// Decodes a number that xarray has written as a text: the 8 bytes of a double, the lowest first, in base 64. Returns
/// other values as they are.
Json decoded_number(const Json& value) {
  constexpr std::string_view digits = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
  const std::string_view text = value.is_string() ? value.get_ref<const std::string&>() : std::string_view();
  if (text.size() != 12 || !text.ends_with('=')) return value;
  std::uint64_t bits = 0;
  for (std::size_t i = 0; i < 11; ++i) {
    const auto digit = digits.find(text[i]);
    if (digit == digits.npos) return value;
    bits = i < 10 ? bits << 6 | digit : bits << 4 | digit >> 2;  // 64 bits are 10 digits and 4 bits
  }
  return std::bit_cast<double>(__builtin_bswap64(bits));
}

/// Puts the metadata of an array of version 2, and its attributes, into the form of version 3.
void make_version_3(Json& array, Json& attributes) {
  Json codecs = Json::array();
  const auto add = [&](const Json& codec) { codecs.push_back({{"name", codec.at("id")}, {"configuration", codec}}); };
  if (array.value("order", "C") == "F" && array.at("shape").size() > 1)
    codecs.push_back({{"name", "transpose"}, {"configuration", {{"order", "F"}}}});
  for (const auto& filter : array.value("filters", Json())) add(filter);
  if (const auto compressor = array.value("compressor", Json()); !compressor.is_null()) add(compressor);
  const auto fill = array.value("fill_value", Json()), names = attributes.value(hdf5::array_dimensions, Json());
  // In stores of xarray, fill_value is the value that marks missing values. In those of other programs, it is only the
  // value of missing chunks, mostly 0.
  if (!fill.is_null() && names.is_array() && !attributes.contains("_FillValue")) attributes["_FillValue"] = fill;
  array = {{"shape", array.at("shape")},
           {"data_type", array.at("dtype")},
           {"chunk_grid", {{"name", "regular"}, {"configuration", {{"chunk_shape", array.at("chunks")}}}}},
           {"chunk_key_encoding",
            {{"name", "v2"}, {"configuration", {{"separator", array.value("dimension_separator", ".")}}}}},
           {"fill_value", fill},
           {"codecs", codecs},
           {"dimension_names", names}};
}

}  // namespace

std::optional<Node> read_node(const StoreFiles& files, const std::string& folder, const std::string& doing) try {
  Node node;
  if (auto document = read_document(files, folder + "zarr.json", doing, node.text)) {
    node.document = std::move(*document);
    const auto kind = node.document.value("node_type", Json());
    node.is_array = kind == "array";
    if (node.document.value("zarr_format", Json()) != 3 || (!node.is_array && kind != "group"))
      refuse(doing, folder + "zarr.json describes no array or group of version 3");
    node.attributes = node.document.value("attributes", Json::object());
  } else {
    auto array = read_document(files, folder + ".zarray", doing, node.text);
    node.is_array = array.has_value();
    if (!array) array = read_document(files, folder + ".zgroup", doing, node.text);
    if (!array) return {};
    node.document = std::move(*array);
    if (node.document.value("zarr_format", Json()) != 2) refuse(doing, "its zarr_format is not 2");
    node.attributes = read_document(files, folder + ".zattrs", doing, node.text).value_or(Json::object());
    if (node.is_array) make_version_3(node.document, node.attributes);
  }
  if (!node.attributes.is_object()) node.attributes = Json::object();
  return node;
} catch (const Json::exception& error) {
  refuse_form(doing, error);
}

ArrayMetadata::ArrayMetadata(const Node& node, const std::string& doing) try : attributes(node.attributes) {
  read(node.document, doing);
  if (const auto missing = attributes.find("_FillValue"); missing != attributes.end())
    *missing = decoded_number(*missing);
} catch (const Json::exception& error) {
  refuse_form(doing, error);
}

void ArrayMetadata::read(const Json& document, const std::string& doing) {
  const auto require = [&](bool is_known, const std::string& what) {
    if (!is_known) refuse(doing, "it needs " + what + ", which muster does not know", "Write it without");
  };
  constexpr std::string_view known[] = {
      "zarr_format", "node_type", "shape",      "data_type",       "chunk_grid",           "chunk_key_encoding",
      "fill_value",  "codecs",    "attributes", "dimension_names", "storage_transformers", "consolidated_metadata"};
  for (const auto& [name, value] : document.items())
    require(std::ranges::find(known, name) != std::end(known) ||
                (value.is_object() && value.value("must_understand", true) == false),
            "the extension " + name);
  require(document.value("storage_transformers", Json()).empty(), "storage transformers");
  shape = sizes_of(document.at("shape"), 0, doing, "its shape");
  type = number_type(document.at("data_type"), doing);
  fill_value = value_bytes(type, document.at("fill_value"), doing);
  const auto& grid = document.at("chunk_grid");
  require(name_of(grid) == "regular", "a grid of chunks " + name_of(grid));
  chunk = sizes_of(grid.at("configuration").at("chunk_shape"), 1, doing, "the shape of its chunks");
  const auto& keys = document.at("chunk_key_encoding");
  const bool is_default = name_of(keys) == "default";
  require(is_default || name_of(keys) == "v2", "chunk keys " + name_of(keys));
  const auto options = keys.is_object() ? keys.value("configuration", Json::object()) : Json::object();
  separator_ = options.value("separator", is_default ? "/" : ".");
  if (is_default) key_prefix_ = "c";
  check_shapes(doing);
  for (const auto& name : document.value("dimension_names", Json()))
    dimensions.push_back(name.is_string() ? name.get<std::string>() : "");
  if (dimensions.size() != shape.size()) dimensions.clear();
  if (!shape.empty()) read_codecs(document.at("codecs"), doing);
}

/// Reads the codecs. A shard holds chunks, which have codecs of their own, and an index of the chunks.
void ArrayMetadata::read_codecs(const Json& list, const std::string& doing) {
  const auto is_shards = [](const Json& codec) { return name_of(codec) == "sharding_indexed"; };
  if (std::ranges::none_of(list, is_shards)) {
    codecs.emplace(list, type, chunk, doing);
    return;
  }
  const auto refuse_shards = [&](const std::string& fact) {
    refuse(doing, "it has shards " + fact, "Write it with shards whose chunks have the other codecs");
  };
  if (list.size() != 1) refuse_shards("that have codecs themselves");
  const auto& options = list.front().at("configuration");
  shard = std::exchange(chunk, sizes_of(options.at("chunk_shape"), 1, doing, "the shape of its chunks"));
  check_shapes(doing);
  for (std::size_t d = 0; d < chunk.size(); ++d)
    if (shard[d] % chunk[d] != 0) refuse_shards("that are no multiple of its chunks");
  const auto location = options.value("index_location", "end");
  if (location != "end" && location != "start") refuse_shards("whose index lies at \"" + location + "\"");
  index_is_at_end = location == "end";
  std::vector<std::int64_t> index_shape;
  for (std::size_t d = 0; d < chunk.size(); ++d) index_shape.push_back(shard[d] / chunk[d]);
  index_shape.push_back(2);
  index_codecs.emplace(options.at("index_codecs"), NumberType{at::kUInt64}, std::move(index_shape), doing);
  if (!index_codecs->encoded_bytes()) refuse_shards("whose index is compressed");
  if (std::ranges::any_of(options.at("codecs"), is_shards)) refuse_shards("inside of shards");
  codecs.emplace(options.at("codecs"), type, chunk, doing);
}

void ArrayMetadata::check_shapes(const std::string& doing) const {
  constexpr std::size_t most_dimensions = 32;
  if (chunk.size() != shape.size())
    refuse(doing, str("its chunks have ", chunk.size(), " dimensions, its values ", shape.size()));
  if (shape.size() > most_dimensions) refuse(doing, str("it has ", shape.size(), " dimensions; the most are 32"));
  if (separator_ != "/" && separator_ != ".") refuse(doing, "its chunk keys have the separator \"" + separator_ + "\"");
  auto bytes = static_cast<std::int64_t>(type.bytes());
  for (const auto size : chunk) bytes = checked_product(bytes, size, doing, "the shape of its chunks");
}

std::string ArrayMetadata::key(const std::vector<std::int64_t>& coordinates) const {
  auto key = key_prefix_;
  for (const auto at : coordinates) {
    if (!key.empty()) key += separator_;
    key += std::to_string(at);
  }
  return key;
}

}  // namespace muster::detail::zarr
