// Writes a program of torch.export with other weights: a copy of its archive, with new records for the tensors.
#include "base/text.hpp"
#include "muster/error.hpp"
#include "muster/exported.hpp"
#include "weights/exported/program.hpp"
#include "weights/weights_file.hpp"

#include <caffe2/serialize/inline_container.h>

#include <nlohmann/json.hpp>

#include <algorithm>
#include <cstring>
#include <iterator>
#include <map>
#include <set>
#include <utility>
#include <vector>

namespace muster {
namespace {

using namespace detail::weights;
using exported::ProgramFile;
using OrderedJson = nlohmann::ordered_json;

bool same_bytes(const at::Tensor& a, const at::Tensor& b) {
  return a.nbytes() == b.nbytes() &&
         (a.nbytes() == 0 || std::memcmp(a.const_data_ptr(), b.const_data_ptr(), a.nbytes()) == 0);
}

OrderedJson numbers(at::IntArrayRef values) {
  auto list = OrderedJson::array();
  for (const auto value : values) list.push_back({{"as_int", value}});
  return list;
}

/// How the state and the program differ.
struct Differences {
  std::vector<std::string> missing = {}, different = {}, not_tied = {};
};

/// A folder of the archive whose tensors are described by a record, `config`.
struct Folder {
  std::string path, config, prefix;  ///< `prefix`: how the names of new records begin, before a number
  OrderedJson content;
  std::map<std::string, at::Tensor> written = {};  ///< new records by path
  std::set<std::string> unused = {};               ///< paths of old records that nothing refers to any more
};

/// Replaces the folder's tensors by those of `left`, the tensors that no folder has used yet, and removes from `left`
/// the ones that it uses. Tensors of one view of one record are tied, and share a record again.
void replace(const ProgramFile& program, Folder& folder, bool needs_all, std::map<std::string, at::Tensor>& left,
             Differences& differences) {
  std::map<std::string, std::vector<std::string>> views;  // by view: the names of its tensors, which are tied
  std::set<std::string> replaced, kept;                   // paths of old records
  auto& entries = folder.content.at("config");
  for (const auto& [name, entry] : entries.items()) {
    const auto& meta = entry.at("tensor_meta");
    const auto view =
        entry.at("path_name").get<std::string>() +
        (meta.is_null() ? "" : OrderedJson{meta.at("sizes"), meta.at("strides"), meta.at("storage_offset")}.dump());
    views[view].push_back(name);
  }
  std::size_t number = 0;
  for (const auto& [view, names] : views) {
    const auto old = folder.path + entries.at(names.front()).at("path_name").get<std::string>();
    at::Tensor value;
    bool is_given = false;
    for (const auto& name : names) {
      const auto given = left.extract(name);
      if (!given) continue;
      is_given = true;
      const auto& entry = entries.at(name);
      const auto& meta = entry.at("tensor_meta");
      if (entry.at("use_pickle") == true || meta.is_null())
        program.refuse("its " + name + " is pickled", "Export the model with plain tensors");
      auto plain = given.mapped().detach().resolve_conj().resolve_neg().cpu().contiguous();
      if (meta.at("sizes") != numbers(plain.sizes()) || exported::scalar_type(meta.at("dtype")) != plain.scalar_type())
        differences.different.push_back(name);
      else if (value.defined() && !same_bytes(value, plain))
        differences.not_tied.push_back(name);
      else
        value = std::move(plain);
    }
    if (!is_given && needs_all) differences.missing.push_back(names.front());
    (value.defined() ? replaced : kept).insert(old);
    if (!value.defined()) continue;
    while (program.contains(detail::str(folder.path, folder.prefix, number))) ++number;
    const auto record = detail::str(folder.prefix, number++);
    folder.written.emplace(folder.path + record, value);
    for (const auto& name : names) {
      entries[name]["path_name"] = record;
      auto& meta = entries[name]["tensor_meta"];
      meta["strides"] = numbers(value.strides());
      meta["storage_offset"] = {{"as_int", 0}};
    }
  }
  std::ranges::set_difference(replaced, kept, std::inserter(folder.unused, folder.unused.end()));
}

Folder read_folder(const ProgramFile& program, const std::string& name, const std::string& prefix) {
  const auto config = program.config_of(name);
  program.json(config);  // throws if the JSON is nested too deep to be written
  return {.path = program.root() + "data/" + name + "/",
          .config = config,
          .prefix = prefix,
          .content = OrderedJson::parse(program.text(config, detail::max_json_bytes))};
}

void require_fit(const std::filesystem::path& program, const std::filesystem::path& file,
                 const std::map<std::string, at::Tensor>& left, const Differences& differences) {
  std::vector<std::string> unknown;
  for (const auto& [name, tensor] : left) unknown.push_back(name);
  std::string fact;
  const auto add = [&](const std::string& what, const std::vector<std::string>& names) {
    if (!names.empty())
      fact +=
          (fact.empty() ? "" : "; ") + what + detail::listed(names, 5, [](auto& name) { return "\"" + name + "\""; });
  };
  add("the program needs ", differences.missing);
  add("the program has no ", unknown);
  add("of other shape or type in the program: ", differences.different);
  add("tied in the program, and not equal: ", differences.not_tied);
  if (!fact.empty())
    throw Error(ExitCode::data, "writing " + file.string(), "the weights do not fit " + program.string() + ": " + fact,
                "Give the weights of the model that was exported");
}

void write_program(const ProgramFile& program, const std::vector<Folder>& folders, const ArchiveSink& sink) {
  const auto& root = program.root();
  caffe2::serialize::PyTorchStreamWriter writer(sink);
  const auto write = [&](const std::string& path, const void* data, std::size_t bytes) {
    writer.writeRecord(path.substr(root.size()), data, bytes);
  };
  std::set<std::string> done;  // paths of records that are written, or left out
  for (const auto& folder : folders) {
    for (const auto& [path, tensor] : folder.written) write(path, tensor.const_data_ptr(), tensor.nbytes());
    done.insert(folder.unused.begin(), folder.unused.end());
    const auto config = folder.content.dump();
    write(folder.config, config.data(), config.size());
    done.insert(folder.config);
  }
  for (const auto& [path, record] : program.records()) {
    // The writer makes the records of .data/ itself, and takes no folders.
    if (!path.starts_with(root) || path.starts_with(root + ".data/") || path.ends_with('/') || done.contains(path))
      continue;
    const auto content = program.values(path, at::kByte, static_cast<std::int64_t>(record.bytes));
    write(path, content.const_data_ptr(), content.nbytes());
  }
  writer.writeEndOfFile();
}

}  // namespace

void save_exported(const std::filesystem::path& program, const StateDict& state, const std::filesystem::path& file,
                   const ExportOptions& options) {
  check_exportable(state);
  const ProgramFile from(program);
  from.check_sums();
  std::vector<Folder> folders;
  std::uint64_t total = 0;
  try {
    folders.push_back(read_folder(from, "weights", "weight_"));
    folders.push_back(read_folder(from, "constants", "tensor_"));
    auto left = state.tensors;
    Differences differences;
    for (auto& folder : folders) replace(from, folder, &folder == folders.data(), left, differences);
    require_fit(program, file, left, differences);
  } catch (const nlohmann::json::exception& error) {
    from.refuse_damaged(error.what());
  }
  for (const auto& folder : folders)
    for (const auto& [path, tensor] : folder.written) total += tensor.nbytes();
  write_weights(file, options, total, [&](const ByteSink& sink) {
    write_archive(sink, [&](const ArchiveSink& out) { write_program(from, folders, out); });
  });
}

}  // namespace muster
