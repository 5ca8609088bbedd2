// .safetensors files, as described at https://github.com/huggingface/safetensors. The first eight bytes, little-endian,
// give the length of the header. The header is a JSON object {NAME: {"dtype", "shape", "data_offsets": [BEGIN, END]},
// "__metadata__": {strings}}, padded with spaces. Then come the values, one tensor after the other without gaps. Files
// written here have wider types first and a header that ends at a multiple of eight, so every tensor is aligned.
#include "base/file.hpp"
#include "base/json.hpp"
#include "base/text.hpp"
#include "muster/weights.hpp"
#include "state/fingerprint.hpp"
#include "state/tensor_bytes.hpp"
#include "weights/pickle.hpp"
#include "weights/weights_file.hpp"

#include <algorithm>
#include <array>
#include <bit>

namespace muster {
namespace {

using namespace detail::weights;
using detail::File;

static_assert(std::endian::native == std::endian::little, "the values in these files are little-endian");

constexpr const char* metadata_key = "__metadata__";
constexpr std::uint64_t max_header_bytes = 100'000'000;  // the limit of the format's own library

struct FormatType {
  at::ScalarType type;
  const char* name;
};
constexpr std::array format_types{
    FormatType{at::kBool, "BOOL"},
    FormatType{at::kByte, "U8"},
    FormatType{at::kChar, "I8"},
    FormatType{at::kShort, "I16"},
    FormatType{at::kUInt16, "U16"},
    FormatType{at::kInt, "I32"},
    FormatType{at::kUInt32, "U32"},
    FormatType{at::kLong, "I64"},
    FormatType{at::kUInt64, "U64"},
    FormatType{at::kHalf, "F16"},
    FormatType{at::kBFloat16, "BF16"},
    FormatType{at::kFloat, "F32"},
    FormatType{at::kDouble, "F64"},
    FormatType{at::kComplexFloat, "C64"},
    FormatType{at::kFloat8_e5m2, "F8_E5M2"},
    FormatType{at::kFloat8_e4m3fn, "F8_E4M3"},
    FormatType{at::kFloat8_e5m2fnuz, "F8_E5M2FNUZ"},
    FormatType{at::kFloat8_e4m3fnuz, "F8_E4M3FNUZ"},
    FormatType{at::kFloat8_e8m0fnu, "F8_E8M0"},
};

/// A tensor in the header.
struct Listed {
  std::string name;
  at::ScalarType type{};
  std::vector<std::int64_t> shape = {};
  std::uint64_t begin = 0, end = 0;  // in bytes after the header
};

Listed listed_from_json(const std::string& name, const Json& json, const std::filesystem::path& path) {
  const auto fail = [&](const std::string& fact) { throw_unreadable(path, "the tensor " + name + " " + fact); };
  const auto numbers = [&](const char* key) {
    std::vector<std::int64_t> values;
    const auto at = json.find(key);
    if (at == json.end() || !at->is_array()) fail(detail::str("has no proper \"", key, "\""));
    for (const auto& value : *at) {
      if (!value.is_number_unsigned() || value.get<std::uint64_t>() > std::numeric_limits<std::int64_t>::max())
        fail(detail::str("has an absurd \"", key, "\""));
      values.push_back(value.get<std::int64_t>());
    }
    return values;
  };
  if (!json.is_object() || !json.contains("dtype") || !json.at("dtype").is_string()) fail("has no type");
  const auto& type = json.at("dtype").get_ref<const std::string&>();
  const auto known = std::ranges::find(format_types, type, &FormatType::name);
  if (known == format_types.end()) fail("has the type " + type + ", which is not known here");
  const auto offsets = numbers("data_offsets");
  if (offsets.size() != 2 || offsets[0] > offsets[1]) fail("has no proper \"data_offsets\"");
  Listed listed{.name = name,
                .type = known->type,
                .shape = numbers("shape"),
                .begin = static_cast<std::uint64_t>(offsets[0]),
                .end = static_cast<std::uint64_t>(offsets[1])};
  if (detail::state::tensor_bytes(listed.type, listed.shape) != listed.end - listed.begin)
    fail("has a shape that does not take the bytes between its \"data_offsets\"");
  return listed;
}

/// Checks that each byte after the header belongs to exactly one tensor. So all tensors together are as large as the
/// file.
void check_offsets(std::vector<Listed>& tensors, std::uint64_t bytes, const std::filesystem::path& path) {
  std::ranges::sort(tensors, {}, [](const Listed& tensor) { return std::pair(tensor.begin, tensor.end); });
  std::uint64_t end = 0;
  for (const auto& tensor : tensors) {
    if (tensor.begin != end)
      throw_unreadable(path,
                       "the tensor " + tensor.name + (tensor.begin < end ? " overlaps another" : " comes after a gap"));
    end = tensor.end;
  }
  if (end != bytes)
    throw_unreadable(path, detail::str("its tensors take ", end, " bytes, and there are ", bytes,
                                       end > bytes ? ": it is truncated" : ""));
}

std::string header_text(const std::vector<Listed>& tensors) {
  Json header{{metadata_key, {{"format", "pt"}}}};
  for (const auto& tensor : tensors) {
    const auto type = std::ranges::find(format_types, tensor.type, &FormatType::type);
    const auto fail = [&](const std::string& fact, const char* remedy) {
      throw Error(ExitCode::usage, "writing " + tensor.name + " as safetensors", fact, remedy);
    };
    if (type == format_types.end())
      fail(detail::str("the format has no type for ", c10::toString(tensor.type)),
           has_storage_class(tensor.type) ? "Convert it to another type, or write torch's format"
                                          : "Convert it to another type: torch's format has none for it");
    if (tensor.name == metadata_key) fail("the format itself uses that name", "Give it another name");
    header[tensor.name] = {
        {"dtype", type->name}, {"shape", tensor.shape}, {"data_offsets", {tensor.begin, tensor.end}}};
  }
  try {
    auto text = header.dump();
    return text.append((8 - text.size() % 8) % 8, ' ');
  } catch (const Json::exception& error) {
    throw Error(ExitCode::usage, "writing safetensors", error.what(), "Names must be UTF-8");
  }
}

}  // namespace

bool detail::weights::is_safetensors_type(at::ScalarType type) noexcept {
  return std::ranges::find(format_types, type, &FormatType::type) != format_types.end();
}

namespace {

/// Calls `write` with the number of bytes of the file and a function that passes them to a sink.
void with_bytes(const StateDict& state,
                const std::function<void(std::uint64_t bytes, const std::function<void(const ByteSink&)>&)>& write) {
  check_exportable(state);
  std::vector<Listed> tensors;
  for (const auto& [name, tensor] : state.tensors)
    tensors.push_back({.name = name, .type = tensor.scalar_type(), .shape = tensor.sizes().vec()});
  std::ranges::stable_sort(tensors, std::greater(), [](const Listed& tensor) { return c10::elementSize(tensor.type); });
  std::uint64_t end = 0;
  for (auto& tensor : tensors) {
    tensor.begin = end;
    tensor.end = end += state.tensors.at(tensor.name).nbytes();
  }
  const auto header = header_text(tensors);
  write(sizeof(std::uint64_t) + header.size() + end, [&](const ByteSink& sink) {
    const std::uint64_t length = header.size();
    sink({reinterpret_cast<const char*>(&length), sizeof length});
    sink(header);
    for (const auto& tensor : tensors) sink(detail::state::Bytes(state.tensors.at(tensor.name)).all());
  });
}

}  // namespace

void save_safetensors(const StateDict& state, const std::filesystem::path& path, const ExportOptions& options) {
  with_bytes(state, [&](std::uint64_t bytes, const auto& to) { write_weights(path, options, bytes, to); });
}

std::string safetensors(const StateDict& state) {
  std::string all;
  with_bytes(state, [&](std::uint64_t bytes, const auto& to) {
    all.reserve(bytes);
    to([&](std::string_view piece) { all.append(piece); });
  });
  return all;
}

StateDict load_safetensors(const std::filesystem::path& path) {
  const File file(path, File::Mode::read);
  std::uint64_t length = 0;
  const auto size = file.size();
  if (size < sizeof length) throw_unreadable(path, "it is too short for a .safetensors file");
  file.read_at(std::as_writable_bytes(std::span(&length, 1)), 0);
  if (length > max_header_bytes || length > size - sizeof length)
    throw_unreadable(path, detail::str("it claims a header of ", length, " bytes, in a file of ", size),
                     "It is not a .safetensors file, or it is truncated");
  std::string text(length, '\0');
  file.read_at(std::as_writable_bytes(std::span(text)), sizeof length);
  const auto header = detail::parse_json(text, "reading the header of " + path.string());
  if (!header.is_object()) throw_unreadable(path, "its header is not a JSON object");

  StateDict state;
  std::vector<Listed> tensors;
  for (const auto& [name, json] : header.items()) {
    if (name != metadata_key) {
      tensors.push_back(listed_from_json(name, json, path));
      continue;
    }
    if (!json.is_object() || !std::ranges::all_of(json, [](const Json& value) { return value.is_string(); }))
      throw_unreadable(path, "its metadata is not an object of strings");
    state.values = json;
  }
  check_offsets(tensors, size - sizeof length - length, path);
  for (const auto& tensor : tensors)
    state.tensors.emplace(tensor.name,
                          read_values(file, sizeof length + length + tensor.begin, tensor.type, tensor.shape));
  return state;
}

}  // namespace muster
