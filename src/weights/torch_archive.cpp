// Files of torch.save(): ARCHIVE/data.pkl is a pickle, and ARCHIVE/data/KEY holds the values of a storage. libtorch
// writes them.
#include "base/text.hpp"
#include "muster/error.hpp"
#include "muster/weights.hpp"
#include "state/tensor_bytes.hpp"
#include "weights/archive.hpp"
#include "weights/pickle.hpp"
#include "weights/weights_file.hpp"

#include <ATen/core/Dict.h>
#include <caffe2/serialize/inline_container.h>
#include <torch/csrc/jit/serialization/pickler.h>

#include <array>
#include <exception>
#include <map>

namespace muster {
namespace {

using namespace detail::weights;

constexpr std::uint64_t max_pickle_bytes = 64 << 20;  // a tensor takes about 200 bytes of it

/// Writes `dict` as an archive, by libtorch.
void write_dict(const c10::IValue& dict, const ArchiveSink& sink) {
  caffe2::serialize::PyTorchStreamWriter writer(sink);
  std::string pickle;
  torch::jit::Pickler pickler([&](const char* data, std::size_t bytes) { pickle.append(data, bytes); }, nullptr,
                              nullptr, nullptr, nullptr, /*tag_aggregates=*/false);  // only TorchScript needs tags
  pickler.protocol();
  pickler.pushIValue(dict);
  pickler.stop();
  writer.writeRecord("data.pkl", pickle.data(), pickle.size());
  writer.writeRecord("byteorder", "little", 6);
  std::size_t key = 0;
  for (const auto& tensor : pickler.tensorData()) {
    const auto& storage = tensor.storage();
    writer.writeRecord(detail::str("data/", key++), storage.data(), storage.nbytes());
  }
  writer.writeEndOfFile();
}

constexpr const char* constants_record = "constants.pkl";  // only TorchScript archives have this record
constexpr const char* cpp_root = "c__torch__\nModule\n";   // the root's class in files of torch::save() in C++
constexpr std::size_t root_class_bytes = 16;               // the root's class begins within so many bytes of the pickle

/// Returns the folder of data.pkl. Refuses programs of torch.export, and archives without a data.pkl.
std::string folder_in(const Archive& archive) {
  auto folder = archive.folder_of("data.pkl");
  if (!archive.folder_of("archive_format").empty())
    archive.refuse("it is a program of torch.export", "Load it with load_exported()");
  if (folder.empty())
    archive.refuse("it is an archive without a data.pkl", "Use a file that torch.save() or torch.jit.save() wrote");
  return folder;
}

}  // namespace

void detail::weights::write_archive(const ByteSink& sink, const std::function<void(const ArchiveSink&)>& write) {
  std::exception_ptr failed;
  write([&](const void* data, std::size_t bytes) {
    if (!failed) try {
        sink({static_cast<const char*>(data), bytes});
      } catch (...) {
        failed = std::current_exception();
      }
    return bytes;
  });
  if (failed) std::rethrow_exception(failed);
}

void detail::weights::check_script(const std::filesystem::path& path) {
  const Archive archive(path);
  if (!archive.contains(folder_in(archive) + constants_record))
    archive.refuse("it holds values and no program of TorchScript",
                   "In Python: torch.jit.script(model).save(FILE); for a state dict, load_torch()");
  archive.check_sums();
}

void save_torch(const StateDict& state, const std::filesystem::path& path, const ExportOptions& options) {
  check_exportable(state);
  for (const auto& [name, tensor] : state.tensors)
    if (!has_storage_class(tensor.scalar_type()))
      throw Error(ExitCode::usage, "writing " + name,
                  detail::str("Python cannot load a pickle from here with ", c10::toString(tensor.scalar_type())),
                  is_safetensors_type(tensor.scalar_type())
                      ? "Write it as safetensors, or convert it to another type"
                      : "Convert it to another type: safetensors has none for it");
  c10::Dict<std::string, at::Tensor> dict;
  std::map<const void*, std::uint64_t> storages;
  std::map<const void*, at::ScalarType> types;
  for (const auto& [name, tensor] : state.tensors) {
    auto plain = tensor.detach().resolve_conj().resolve_neg().cpu();
    // An expanded tensor is written in full, because load_torch() refuses tensors larger than their storage.
    if (plain.nbytes() > plain.storage().nbytes()) plain = plain.contiguous();
    // A storage in the file has one type, that of its first tensor. Views of other types get a storage of their own.
    const auto [first, is_first] = types.try_emplace(plain.storage().data(), plain.scalar_type());
    if (first->second != plain.scalar_type()) plain = plain.clone();
    storages[plain.storage().data()] = plain.storage().nbytes();
    dict.insert(name, plain);
  }
  std::uint64_t total = 0;
  for (const auto& [data, bytes] : storages) total += bytes;
  write_weights(path, options, total, [&](const ByteSink& sink) {
    write_archive(sink, [&](const ArchiveSink& archive) { write_dict(dict, archive); });
  });
}

StateDict load_torch(const std::filesystem::path& path) {
  const Archive archive(path);
  const auto folder = folder_in(archive);
  if (archive.contains(folder + constants_record)) {
    const auto pickle =
        archive.is_stored(folder + "data.pkl") ? archive.text(folder + "data.pkl", max_pickle_bytes) : "";
    if (pickle.find(cpp_root) < root_class_bytes)
      archive.refuse(
          "it was written by torch::save() in C++, not by torch.save() in Python",
          "In C++: torch::load(model, FILE), then muster::save_torch(muster::Checkpoint::from_dict({{\"model\", "
          "model}}).to_dict(), OTHER)");
    archive.refuse("it is a TorchScript module",
                   "Load it with load_script(), or save its state dict with torch.save()");
  }
  archive.check_stored();
  if (const auto order = folder + "byteorder"; archive.contains(order) && archive.text(order, 16) != "little")
    archive.refuse("its values are not little-endian");
  std::map<std::string, at::Tensor> read;
  const auto storage = [&](const std::string& key, at::ScalarType type, std::int64_t count) {
    const auto name = folder + "data/" + key;
    if (detail::state::tensor_bytes(type, std::array{count}) != archive.bytes_in(name))
      throw BadPickle("the storage " + key + " in it is not as long as it says");
    const auto [at, is_new] = read.try_emplace(key);
    if (is_new) at->second = archive.values(name, type, count);
    if (at->second.scalar_type() != type) throw BadPickle("the storage " + key + " in it has two types");
    return at->second;
  };
  try {
    return unpickle_state_dict(archive.text(folder + "data.pkl", max_pickle_bytes), storage);
  } catch (const BadPickle& bad) {
    archive.refuse(bad.what(), bad.remedy);
  }
}

}  // namespace muster
