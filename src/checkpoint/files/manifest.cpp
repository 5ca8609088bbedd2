#include "checkpoint/files/manifest.hpp"

#include "base/file.hpp"
#include "base/json.hpp"
#include "base/text.hpp"
#include "checkpoint/files/pieces.hpp"
#include "state/tensor_bytes.hpp"
#include "state/training_position.hpp"
#include "storage/tier.hpp"

#include <algorithm>
#include <array>
#include <bit>
#include <concepts>
#include <ctime>
#include <map>
#include <set>
#include <span>
#include <utility>

namespace muster::detail::checkpoint {
namespace {

constexpr const char* format_name = "muster checkpoint";
constexpr int newest_version = 1;
constexpr std::size_t max_dimensions = 32;

struct TypeName {
  at::ScalarType type;
  const char* name;
};
constexpr TypeName type_names[] = {
    {at::kByte, "uint8"},
    {at::kChar, "int8"},
    {at::kShort, "int16"},
    {at::kInt, "int32"},
    {at::kLong, "int64"},
    {at::kUInt16, "uint16"},
    {at::kUInt32, "uint32"},
    {at::kUInt64, "uint64"},
    {at::kHalf, "float16"},
    {at::kBFloat16, "bfloat16"},
    {at::kFloat, "float32"},
    {at::kDouble, "float64"},
    {at::kBool, "bool"},
    {at::kComplexFloat, "complex64"},
    {at::kComplexDouble, "complex128"},
};

/// A fault in a manifest. from_text() turns it into an Error that also names the file.
struct Invalid : Error {
  explicit Invalid(std::string what_is_wrong)
      : Error(ExitCode::data, "reading a manifest", what_is_wrong), fact(std::move(what_is_wrong)) {}
  std::string fact;
};

template <std::integral T>
bool fits(const Json& value) {
  return value.is_number_unsigned() && std::in_range<T>(value.get<std::uint64_t>());
}

/// Reads json[key] into `number`. Throws Invalid if it is not an unsigned number in the range of T.
template <std::integral T>
void take(const Json& json, const char* key, T& number) {
  const auto& value = json.at(key);
  if (!value.is_number_unsigned()) throw Invalid{str("\"", key, "\" is not a whole number")};
  if (!fits<T>(value)) throw Invalid{str("\"", key, "\" is out of range")};
  number = value.get<T>();
}

const Json& member_at(const Json& json, const char* key, bool (Json::*is_kind)() const noexcept, const char* kind) {
  const auto& value = json.at(key);
  if (!(value.*is_kind)()) throw Invalid{str("\"", key, "\" is not ", kind)};
  return value;
}
const Json& object_at(const Json& json, const char* key) { return member_at(json, key, &Json::is_object, "an object"); }
const Json& array_at(const Json& json, const char* key) { return member_at(json, key, &Json::is_array, "a list"); }

std::string checksum_line(std::string_view before) {
  return formatted("\"checksum\": \"%08x\"\n}\n", crc32(std::as_bytes(std::span(before))));
}

void check_name(const std::string& name) {
  if (name.find('\0') != std::string::npos) throw Invalid{"a name holds a zero byte"};
  if (!is_plain(name)) throw Invalid{"the name \"" + name + "\" leads out of the directory"};
}

std::uint64_t bytes_of(at::ScalarType type, const std::vector<std::int64_t>& shape) {
  const auto bytes = state::tensor_bytes(type, shape);
  if (!bytes) throw Invalid{"a shape is absurd"};
  return *bytes;
}

/// Checks that tensors lie inside the file, have the sizes of their shapes, and do not overlap. It follows that
/// together they are no larger than the file.
void check_tensors(const Manifest& manifest) {
  std::map<std::string, const TensorEntry*> stored;
  std::vector<const TensorEntry*> by_offset;
  for (const auto& tensor : manifest.tensors) {
    check_name(tensor.name);
    if (!tensor.same_as.empty()) {
      const auto at = stored.find(tensor.same_as);
      if (at == stored.end())
        throw Invalid{tensor.name + " shares the memory of " + tensor.same_as + ", which is not there"};
      if (tensor.type != at->second->type || tensor.shape != at->second->shape)
        throw Invalid{tensor.name + " and " + tensor.same_as + " share memory but differ in shape or type"};
    } else if (tensor.bytes != bytes_of(tensor.type, tensor.shape)) {
      throw Invalid{"the size of " + tensor.name + " is not that of its shape"};
    }
    if (!stored.emplace(tensor.name, &tensor).second) throw Invalid{tensor.name + " is there twice"};
    if (tensor.bytes > 0) by_offset.push_back(&tensor);
  }
  std::ranges::sort(by_offset, {}, &TensorEntry::offset);
  std::uint64_t end = 0;
  for (const auto* tensor : by_offset) {
    if (tensor->offset < end) throw Invalid{tensor->name + " overlaps another tensor"};
    if (__builtin_add_overflow(tensor->offset, tensor->bytes, &end)) throw Invalid{"an offset is absurd"};
  }
  if (end > manifest.state_file().bytes) throw Invalid{"a tensor lies past the end of state.h5"};
}

void check_files(const Manifest& manifest) {
  std::set<std::string> names;
  for (const auto& file : manifest.files) {
    check_name(file.name);
    if (file.name == manifest_name) throw Invalid{"it lists itself"};
    if (!names.insert(file.name).second) throw Invalid{file.name + " is there twice"};
    if (!std::has_single_bit(file.piece_bytes) || file.piece_bytes != piece_bytes_for(file.bytes))
      throw Invalid{"the pieces of " + file.name + " have an odd size"};
    if (file.piece_checksums.size() != piece_count(file.bytes, file.piece_bytes))
      throw Invalid{file.name + " has more or fewer checksums than pieces"};
  }
  if (!names.contains(state_name)) throw Invalid{"it does not list state.h5"};
}

/// Checks the training position, and that it agrees with the rest of the manifest.
void check_position(const Manifest& manifest) {
  if (manifest.world_size < 1) throw Invalid{"\"world_size\" is 0"};
  state::TrainingPosition position;
  try {
    position = state::training_position_from_json(manifest.position_json);
  } catch (const Error& error) {
    throw Invalid{error.what()};
  }
  if (const auto at = manifest.metrics.find("training_iteration");
      at != manifest.metrics.end() && *at != position.training_iteration)
    throw Invalid{"\"training_iteration\" is not that of its metrics"};
  for (const auto& tensor : manifest.tensors)
    if (tensor.per_rank && (tensor.shape.empty() || tensor.shape[0] != manifest.world_size))
      throw Invalid{tensor.name + " does not have one row for each rank that wrote the checkpoint"};
  for (const auto& [name, is_per_rank] : manifest.per_rank) {
    const auto value = manifest.values.find(name);
    if (value == manifest.values.end()) throw Invalid{"\"per_rank\" names " + name + ", which has no value"};
    if (is_per_rank && !(value->is_array() && std::cmp_equal(value->size(), manifest.world_size)))
      throw Invalid{"the value of " + name + " is not a list with one element for each rank"};
  }
  const auto random = std::ranges::find(manifest.tensors, std::string_view(random_name), &TensorEntry::name);
  if (random != manifest.tensors.end() &&
      (random->type != at::kByte || random->shape.size() != 2 || random->shape[0] != manifest.world_size))
    throw Invalid{"the random state does not have one row of bytes for each rank that wrote the checkpoint"};
}

Manifest manifest_from(const Json& json) {
  Manifest manifest;
  take(json, "index", manifest.index);
  manifest.time = json.at("time").get<std::string>();
  take(json, "world_size", manifest.world_size);
  manifest.position_json = object_at(json, "progress");
  manifest.metrics = object_at(json, "metrics");
  manifest.metadata = json.at("metadata");
  manifest.values = object_at(json, "values");
  if (json.contains("per_rank")) {
    for (const auto& [name, flag] : object_at(json, "per_rank").items()) {
      if (!flag.is_boolean()) throw Invalid{"\"per_rank\" of " + name + " is neither true nor false"};
      manifest.per_rank.emplace(name, flag.get<bool>());
    }
  }
  array_at(json, "files").get_to(manifest.files);
  array_at(json, "tensors").get_to(manifest.tensors);
  check_files(manifest);
  check_tensors(manifest);
  check_position(manifest);
  return manifest;
}

}  // namespace

const FileEntry& Manifest::state_file() const {
  return *std::ranges::find(files, std::string_view(state_name), &FileEntry::name);
}

bool is_plain(const std::string& path) {
  for (std::size_t begin = 0, end = 0; begin <= path.size(); begin = end + 1) {
    end = std::min(path.find('/', begin), path.size());
    const auto part = path.substr(begin, end - begin);
    if (part.empty() || part == "." || part == "..") return false;
  }
  return true;
}

void to_json(Json& json, const TensorEntry& tensor) {
  const auto type = std::ranges::find(type_names, tensor.type, &TypeName::type);
  if (type == std::end(type_names))
    throw Error(ExitCode::usage, "saving " + tensor.name,
                str("checkpoints have no type for ", c10::toString(tensor.type)), "Convert it to another type first");
  json = {{"name", tensor.name}, {"type", type->name}, {"shape", tensor.shape}};
  if (tensor.per_rank) json["per_rank"] = true;
  json.update(tensor.same_as.empty() ? Json{{"offset", tensor.offset}, {"bytes", tensor.bytes}}
                                     : Json{{"same_as", tensor.same_as}});
}

void from_json(const Json& json, TensorEntry& tensor) {
  tensor.name = json.at("name").get<std::string>();
  const auto type = std::ranges::find(type_names, json.at("type").get<std::string>(), &TypeName::name);
  if (type == std::end(type_names)) throw Invalid{"the type of " + tensor.name + " is unknown"};
  tensor.type = type->type;
  const auto& shape = array_at(json, "shape");
  if (!std::ranges::all_of(shape, fits<std::int64_t>) || shape.size() > max_dimensions)
    throw Invalid{"the shape of " + tensor.name + " is absurd"};
  shape.get_to(tensor.shape);
  if (json.contains("same_as")) {
    tensor.same_as = json.at("same_as").get<std::string>();
    if (tensor.same_as.empty()) throw Invalid{"\"same_as\" is empty"};
  } else {
    take(json, "offset", tensor.offset);
    take(json, "bytes", tensor.bytes);
  }
  tensor.per_rank = json.value("per_rank", false);
}

void to_json(Json& json, const FileEntry& file) {
  json = {
      {"name", file.name}, {"bytes", file.bytes}, {"piece_bytes", file.piece_bytes}, {"crc32", file.piece_checksums}};
}

void from_json(const Json& json, FileEntry& file) {
  file.name = json.at("name").get<std::string>();
  take(json, "bytes", file.bytes);
  take(json, "piece_bytes", file.piece_bytes);
  const auto& checksums = array_at(json, "crc32");
  if (!std::ranges::all_of(checksums, fits<std::uint32_t>))
    throw Invalid{"a checksum of " + file.name + " is not a number of 32 bits"};
  checksums.get_to(file.piece_checksums);
}

std::string to_text(const Manifest& manifest) {
  const std::pair<const char*, Json> members[] = {
      {"format", format_name},         {"version", newest_version},         {"index", manifest.index},
      {"time", manifest.time},         {"world_size", manifest.world_size}, {"progress", manifest.position_json},
      {"metrics", manifest.metrics},   {"metadata", manifest.metadata},     {"values", manifest.values},
      {"per_rank", manifest.per_rank}, {"tensors", manifest.tensors},       {"files", manifest.files},
  };
  std::string text = "{\n";
  try {
    for (const auto& [key, value] : members) text += str("\"", key, "\": ", json_text(value), ",\n");
  } catch (const Json::exception& error) {
    throw Error(ExitCode::usage, "writing the manifest of a checkpoint", error.what(),
                "Names, metrics and metadata must be UTF-8");
  }
  return text + checksum_line(text);
}

Manifest from_text(std::string_view text, const std::string& shown) {
  const auto fail = [&](const std::string& fact) -> Error {
    return {ExitCode::data, "reading " + shown, fact, "Use another checkpoint"};
  };
  const auto length = checksum_line({}).size();
  if (text.size() < length) throw fail("it is truncated");
  const auto before = text.substr(0, text.size() - length);
  if (text.substr(before.size()) != checksum_line(before)) throw fail("it is damaged: its checksum is wrong");
  try {
    const auto json = parse_json(text, "reading " + shown);
    if (json.at("format") != format_name) throw Invalid{"it is not a checkpoint's manifest"};
    std::uint64_t version = 0;
    take(json, "version", version);
    if (version > newest_version)
      throw NewerFormat(ExitCode::data, "reading " + shown,
                        str("it was written by a newer muster: version ", version,
                            " of the format, and this one reads up to ", newest_version),
                        "Update muster");
    return manifest_from(json);
  } catch (const Invalid& invalid) {
    throw fail(invalid.fact);
  } catch (const Json::exception& error) {
    throw fail(error.what());
  }
}

bool is_checkpoint(const std::filesystem::path& directory) {
  const auto path = directory / manifest_name;
  if (!std::filesystem::is_regular_file(status_of(path))) return false;
  const std::string_view begin = "{\n\"format\": \"muster checkpoint\",\n";
  const File file(path, File::Mode::read);
  std::string have(std::min<std::uint64_t>(file.size(), begin.size()), '\0');
  file.read_at(std::as_writable_bytes(std::span(have)), 0);
  return have == begin;
}

Manifest read_manifest(const std::filesystem::path& directory) {
  const auto path = directory / manifest_name;
  const auto status = status_of(path);
  if (!std::filesystem::is_regular_file(status))
    throw Error(ExitCode::data, "reading " + path.string(),
                std::filesystem::exists(status) ? "it is not a regular file" : "there is no such file",
                "A directory without this file is not a checkpoint that muster wrote");
  return from_text(read_file(path, max_json_bytes), path.string());
}

/// Returns the manifest's text. Throws an Error if from_text() would refuse it.
static std::string readable_text(const Manifest& manifest, const std::filesystem::path& directory) {
  auto text = to_text(manifest);
  from_text(text, (directory / manifest_name).string());
  return text;
}

void write_manifest(const std::filesystem::path& directory, const Manifest& manifest) {
  File file(directory / manifest_name, File::Mode::create);
  file.append(readable_text(manifest, directory));
  file.sync();
  file.close();
}

void write_manifest(const storage::Tier& tier, const Manifest& manifest) {
  tier.put(manifest.index, manifest_name, readable_text(manifest, tier.published(manifest.index)));
}

std::string time_now() {
  const std::time_t now = std::time(nullptr);
  std::tm utc{};
  ::gmtime_r(&now, &utc);
  std::array<char, 32> text{};
  std::strftime(text.data(), text.size(), "%Y-%m-%dT%H:%M:%SZ", &utc);
  return text.data();
}

}  // namespace muster::detail::checkpoint
