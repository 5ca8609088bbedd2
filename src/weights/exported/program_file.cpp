#include "base/text.hpp"
#include "weights/exported/program.hpp"

#include "weights/weights_file.hpp"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <vector>

namespace muster::detail::weights::exported {

constexpr std::int64_t known_major = 8, known_minor = 20;
constexpr const char* remedy = "In Python: torch.export.save(torch.export.export(model, (x,)), FILE)";

std::optional<at::ScalarType> scalar_type(std::int64_t number) {
  static const std::map<std::int64_t, at::ScalarType> others{
      {13, at::kBFloat16},       {28, at::kUInt16},          {29, at::kFloat8_e4m3fn},
      {30, at::kFloat8_e5m2},    {31, at::kFloat8_e4m3fnuz}, {32, at::kFloat8_e5m2fnuz},
      {33, at::kFloat8_e8m0fnu}, {34, at::kUInt32},          {35, at::kUInt64}};
  if (number >= 1 && number <= 12) return static_cast<at::ScalarType>(number - 1);  // the same order as in torch
  const auto at = others.find(number);
  return at == others.end() ? std::nullopt : std::optional(at->second);
}

ProgramFile::ProgramFile(const std::filesystem::path& path) : Archive(path) {
  find_program();
  check_stored();
  if (text(root_ + "archive_format", 64) != "pt2") refuse("it is not of torch.export.save()");
  if (const auto order = root_ + "byteorder"; contains(order) && text(order, 64) != "little")
    refuse("its byte order is not little-endian", "Make it again on the type of machine used here");
  program_ = json(root_ + "models/" + model_ + ".json");
  try {
    const auto& version = program_.at("schema_version");
    const auto major = integer_at(version.at("major"));
    version_ = str(major, ".", integer_at(version.at("minor")));
    if (major != known_major) refuse_version("its format is another");
  } catch (const Json::exception& error) {
    refuse_damaged(error.what());
  }
}

void ProgramFile::find_program() {
  root_ = folder_of("archive_format");
  if (root_.empty() && !folder_of("constants.pkl").empty())
    refuse("it is no program of torch.export, but a module of TorchScript or C++", remedy);
  if (root_.empty() && !folder_of("data.pkl").empty())
    refuse("it is no program of torch.export, but weights or other objects of torch.save()", remedy);
  if (root_.empty()) refuse("it is no program of torch.export, but another archive", remedy);
  std::size_t count = 0;
  const auto prefix = root_ + "models/";
  for (const auto& [name, record] : records())
    if (name.starts_with(prefix) && name.ends_with(".json")) {
      model_ = name.substr(prefix.size(), name.size() - prefix.size() - 5);
      ++count;
    }
  if (count != 1) refuse(str("it has ", count, " exported programs"), remedy);
}

std::string ProgramFile::config_of(const std::string& folder) const {
  return root_ + "data/" + folder + "/" + model_ + "_" + folder + "_config.json";
}

Json ProgramFile::parse(std::string_view text, const std::string& what) const {
  return parse_json(text, "reading " + what + " in " + path().string());
}

void ProgramFile::check_fields(const Json& object, std::initializer_list<std::string_view> known) const {
  for (const auto& [name, value] : object.items())
    if (std::ranges::find(known, name) == known.end() && !value.is_null() && !(value.is_structured() && value.empty()))
      refuse_version("it has a field " + name);
}

std::int64_t ProgramFile::integer_at(const Json& number) const {
  if (number.is_number_float()) refuse_damaged("a number is not an integer");
  return number.get<std::int64_t>();
}

at::ScalarType ProgramFile::type_at(const Json& number) const {
  const auto type = scalar_type(integer_at(number));
  if (!type) refuse("it has a type with the unknown number " + json_text(number));
  return *type;
}

at::ScalarType ProgramFile::tensor_type(const Json& meta) const {
  check_fields(meta, {"dtype", "sizes", "requires_grad", "device", "strides", "storage_offset", "layout"});
  return type_at(meta.at("dtype"));
}

void ProgramFile::refuse_damaged(const std::string& fact) const { refuse("its program is damaged: " + fact); }

void ProgramFile::refuse_object(const std::string& what) const {
  refuse("the program needs " + what + ", which muster does not run", "Export a model that does without it");
}

void ProgramFile::refuse_version(const std::string& fact) const {
  refuse(str(fact, ": the file has version ", version_, " of the format, and muster knows ", known_major, ".",
             known_minor),
         "Export the model again with a version of torch that muster knows");
}

std::map<std::string, StoredTensor> ProgramFile::read_tensors(const std::string& folder) const {
  std::map<std::string, StoredTensor> tensors;
  std::map<std::string, at::Tensor> storages, views;
  const auto config = json(config_of(folder));
  for (const auto& [name, entry] : config.at("config").items()) {
    check_fields(entry, {"path_name", "is_param", "use_pickle", "tensor_meta"});
    const auto& meta = entry.at("tensor_meta");
    if (entry.at("use_pickle").get<bool>() || meta.is_null()) refuse_object("the pickled object " + name);
    const auto record = root_ + "data/" + folder + "/" + entry.at("path_name").get<std::string>();
    // Each part of the name becomes a module inside the previous one, and modules are visited by recursion.
    if (std::ranges::count(name, '.') > max_json_depth) refuse_damaged("a name in it has too many parts");
    const auto is_parameter = entry.at("is_param").get<bool>();
    auto& view = views[record + json_text(meta)];
    if (!view.defined()) view = read_view(record, name, meta, storages[record]);
    if (is_parameter) view.set_requires_grad(meta.at("requires_grad").get<bool>());
    tensors[name] = {view, is_parameter};
  }
  return tensors;
}

at::Tensor ProgramFile::read_view(const std::string& record, const std::string& name, const Json& meta,
                                  at::Tensor& storage) const {
  const auto type = tensor_type(meta);
  if (meta.at("layout") != 7) refuse_object("the tensor " + name + " of a layout that is not strided");
  if (!storage.defined()) storage = values(record, at::kByte, static_cast<std::int64_t>(bytes_in(record)));
  std::vector<std::int64_t> sizes, strides;
  for (const auto& size : meta.at("sizes")) sizes.push_back(integer_at(size.at("as_int")));
  for (const auto& stride : meta.at("strides")) strides.push_back(integer_at(stride.at("as_int")));
  const auto offset = integer_at(meta.at("storage_offset").at("as_int")),
             capacity = storage.numel() / static_cast<std::int64_t>(c10::elementSize(type));
  const auto count = values_of_view(type, sizes, strides, offset, capacity);
  if (!count || *count > capacity || sizes.size() > 64)  // torch has at most 64 dimensions
    refuse("its " + name + " is larger than its bytes, or lies outside of them");
  if (type == at::kBool && storage.gt(1).any().item<bool>()) refuse("its " + name + " has values that are no bool");
  const at::NoGradGuard no_grad;
  auto view = at::empty({0}, at::TensorOptions(type));
  view.set_(storage.storage(), *count > 0 ? offset : 0, sizes, strides);
  return view;
}

}  // namespace muster::detail::weights::exported
