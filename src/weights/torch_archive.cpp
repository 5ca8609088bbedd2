// Files of torch.save(): a zip archive of uncompressed records. ARCHIVE/data.pkl is a pickle, and ARCHIVE/data/KEY
// holds the values of a storage. libtorch writes such archives. They are read here, because libtorch's own reader
// trusts them.
// The layout of a zip archive: https://pkware.cachefly.net/webdocs/casestudies/APPNOTE.TXT
#include "base/file.hpp"
#include "checkpoint/files/pieces.hpp"
#include "muster/error.hpp"
#include "muster/weights.hpp"
#include "state/tensor_bytes.hpp"
#include "weights/pickle.hpp"
#include "weights/weights_file.hpp"

#include <ATen/core/Dict.h>
#include <caffe2/serialize/inline_container.h>
#include <torch/csrc/jit/serialization/pickler.h>

#include <algorithm>
#include <cstring>
#include <exception>
#include <map>
#include <string_view>
#include <vector>

namespace muster {
namespace {

using namespace detail::weights;
using detail::File;

constexpr std::uint64_t max_pickle_bytes = 64 << 20;  // a tensor takes about 200 bytes of it
constexpr std::uint64_t max_directory_bytes = 64 << 20;

/// A record of an archive. `stored`: its bytes are neither compressed nor encrypted.
struct Record {
  std::uint64_t offset = 0, bytes = 0;
  std::uint32_t crc32 = 0;
  bool stored = true;
};

/// An archive with a checked directory: its records lie inside the file and do not overlap. So together they are no
/// larger than the file.
class TorchArchive {
 public:
  explicit TorchArchive(const std::filesystem::path& path) : file_(path, File::Mode::read) {
    const auto directory = find_directory();
    std::uint64_t at = 0;
    for (std::uint64_t i = 0; i < directory.count; ++i) at = take_record(directory, at);
    check_no_overlap(directory.offset);
    has_sums_ = std::ranges::any_of(records_, [](const auto& record) { return record.second.crc32 != 0; });
  }

  bool contains(const std::string& name) const { return records_.contains(name); }
  /// True if the record is neither compressed nor encrypted.
  bool stored(const std::string& name) const { return find(name).stored; }

  /// Returns the archive's own name, with a slash: the folder in which `name` lies.
  std::string folder_of(const std::string& name) const {
    for (const auto& [path, record] : records_)
      if (path.size() > name.size() && path.ends_with("/" + name) && path.find('/') == path.size() - name.size() - 1)
        return path.substr(0, path.size() - name.size());
    refuse("it is an archive without a " + name, "Use a file that torch.save() or torch.jit.save() wrote");
  }

  /// Refuses an archive with compressed or encrypted records, which torch.save() never writes.
  void check_stored() const {
    for (const auto& [name, record] : records_)
      if (!record.stored) refuse("its " + name + " is packed or encrypted, which torch.save() never does");
  }

  /// Verifies the checksums of the records that are neither compressed nor encrypted; all values are among them.
  void check_sums() const {
    for (const auto& [name, record] : records_)
      if (record.stored) values(name, at::kByte, static_cast<std::int64_t>(record.bytes));
  }

  std::uint64_t bytes_in(const std::string& name) const { return find(name).bytes; }

  std::string text(const std::string& name, std::uint64_t most) const {
    const auto& record = find(name);
    if (record.bytes > most) refuse("its " + name + " is absurdly large");
    std::string content(record.bytes, '\0');
    file_.read_at(std::as_writable_bytes(std::span(content)), record.offset);
    check(name, std::as_bytes(std::span(content)));
    return content;
  }

  /// Returns the record as a tensor. The caller has checked that it holds `count` values.
  at::Tensor values(const std::string& name, at::ScalarType type, std::int64_t count) const {
    const auto stored =
        read_values(file_, find(name).offset, at::kByte, std::array{static_cast<std::int64_t>(bytes_in(name))});
    check(name, {static_cast<const std::byte*>(stored.const_data_ptr()), stored.nbytes()});
    if (type == at::kBool) return stored.ne(0);
    return count == 0 ? stored.to(type) : stored.view(type);
  }

  [[noreturn]] void refuse(const std::string& fact,
                           const std::string& remedy = "Use another file, or make it anew") const {
    throw_unreadable(file_.path(), fact, remedy);
  }

 private:
  struct Directory {
    std::uint64_t offset = 0, count = 0;
    std::string bytes = {};
  };

  template <class Number>
  static Number number(std::string_view bytes, std::size_t at) {
    Number value;
    std::memcpy(&value, bytes.substr(at, sizeof value).data(), sizeof value);
    return value;
  }

  std::string read(std::uint64_t offset, std::uint64_t bytes) const {
    if (offset > file_.size() || bytes > file_.size() - offset) refuse("its directory points outside the file");
    std::string content(bytes, '\0');
    file_.read_at(std::as_writable_bytes(std::span(content)), offset);
    return content;
  }

  /// Finds the directory by the end record, which must have no comment, and by the 64-bit end record if there is one.
  Directory find_directory() const {
    constexpr std::uint64_t end_bytes = 22, locator_bytes = 20, end64_bytes = 56;
    const auto size = file_.size();
    const auto end = size < end_bytes ? std::string() : read(size - end_bytes, end_bytes);
    if (!end.starts_with("PK\5\6"))
      refuse("it is not a torch archive, or it is truncated",
             "If torch before 1.6 wrote it, load and save it with a newer version");
    Directory directory{.offset = number<std::uint32_t>(end, 16), .count = number<std::uint16_t>(end, 10)};
    std::uint64_t bytes = number<std::uint32_t>(end, 12), stop = size - end_bytes;
    if (size >= end_bytes + locator_bytes)
      if (const auto locator = read(size - end_bytes - locator_bytes, locator_bytes); locator.starts_with("PK\6\7")) {
        stop = number<std::uint64_t>(locator, 8);
        const auto end64 = read(stop, end64_bytes);
        if (!end64.starts_with("PK\6\6")) refuse("its directory is damaged");
        directory.count = number<std::uint64_t>(end64, 32);
        directory.offset = number<std::uint64_t>(end64, 48);
        bytes = number<std::uint64_t>(end64, 40);
      }
    if (directory.offset > stop || bytes != stop - directory.offset || bytes > max_directory_bytes)
      refuse("its directory is damaged");
    directory.bytes = read(directory.offset, bytes);
    return directory;
  }

  /// Adds the record whose entry lies at `at` in the directory. Returns the position of the next entry.
  std::uint64_t take_record(const Directory& directory, std::uint64_t at) {
    constexpr std::uint64_t entry_bytes = 46, local_bytes = 30;
    const auto rest = std::string_view(directory.bytes).substr(at);
    if (rest.size() < entry_bytes || !rest.starts_with("PK\1\2")) refuse("its directory is damaged");
    const std::uint64_t name_bytes = number<std::uint16_t>(rest, 28), extra_bytes = number<std::uint16_t>(rest, 30),
                        all_bytes = entry_bytes + name_bytes + extra_bytes + number<std::uint16_t>(rest, 32);
    if (rest.size() < all_bytes) refuse("its directory is damaged");
    const std::string name(rest.substr(entry_bytes, name_bytes));
    std::uint64_t sizes[] = {number<std::uint32_t>(rest, 24), number<std::uint32_t>(rest, 20),
                             number<std::uint32_t>(rest, 42)};  // uncompressed size, compressed size, offset
    take_large(rest.substr(entry_bytes + name_bytes, extra_bytes), sizes);
    const bool encrypted = (number<std::uint16_t>(rest, 8) & 1) != 0,
               stored = !encrypted && number<std::uint16_t>(rest, 10) == 0 && sizes[0] == sizes[1];
    const auto local = read(sizes[2], local_bytes);
    if (!local.starts_with("PK\3\4")) refuse("there is no " + name + " where its directory says");
    const auto begin = sizes[2] + local_bytes + number<std::uint16_t>(local, 26) + number<std::uint16_t>(local, 28);
    if (!records_.try_emplace(name, Record{begin, sizes[1], number<std::uint32_t>(rest, 16), stored}).second)
      refuse("it has two records called " + name);
    return at + all_bytes;
  }

  /// Replaces numbers that do not fit 32 bits by those in the extra field, which has them in the same order.
  void take_large(std::string_view extra, std::span<std::uint64_t> sizes) const {
    std::string_view large;
    while (extra.size() >= 4) {
      const auto length = number<std::uint16_t>(extra, 2);
      if (number<std::uint16_t>(extra, 0) == 1) large = extra.substr(4, length);
      extra.remove_prefix(std::min<std::size_t>(extra.size(), 4 + length));
    }
    for (auto& size : sizes) {
      if (size != 0xffffffff) continue;
      if (large.size() < sizeof size) refuse("its directory is damaged");
      size = number<std::uint64_t>(large, 0);
      large.remove_prefix(sizeof size);
    }
  }

  void check_no_overlap(std::uint64_t end) const {
    std::vector<Record> sorted;
    for (const auto& [name, record] : records_) sorted.push_back(record);
    std::ranges::sort(sorted, {}, &Record::offset);
    for (std::size_t i = 0; i < sorted.size(); ++i) {
      const auto stop = i + 1 < sorted.size() ? sorted[i + 1].offset : end;
      if (sorted[i].offset > stop || sorted[i].bytes > stop - sorted[i].offset)
        refuse("its records overlap, or lie outside the file");
    }
  }

  const Record& find(const std::string& name) const {
    const auto at = records_.find(name);
    if (at == records_.end()) refuse("there is no " + name + " in it");
    return at->second;
  }

  void check(const std::string& name, std::span<const std::byte> bytes) const {
    if (has_sums_ && detail::checkpoint::crc32(bytes) != find(name).crc32)
      refuse("its " + name + " is damaged: its checksum is wrong");
  }

  File file_;
  std::map<std::string, Record> records_;
  bool has_sums_ = true;  ///< false after torch.serialization.set_crc32_options(False), which leaves 0 for each record
};

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
    writer.writeRecord("data/" + std::to_string(key++), storage.data(), storage.nbytes());
  }
  writer.writeEndOfFile();
}

constexpr const char* constants_record = "constants.pkl";  // only TorchScript archives have this record
constexpr const char* cpp_root = "c__torch__\nModule\n";   // the root's class in files of torch::save() in C++
constexpr std::size_t root_class_bytes = 16;               // the root's class begins within so many bytes of the pickle

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
  const TorchArchive archive(path);
  if (!archive.contains(archive.folder_of("data.pkl") + constants_record))
    archive.refuse("it holds values and no program of TorchScript",
                   "In Python: torch.jit.script(model).save(FILE); for a state dict, load_torch()");
  archive.check_sums();
}

void save_torch(const StateDict& state, const std::filesystem::path& path, const ExportOptions& options) {
  check_exportable(state);
  for (const auto& [name, tensor] : state.tensors)
    if (!has_storage_class(tensor.scalar_type()))
      throw Error(ExitCode::usage, "writing " + name,
                  std::string("Python cannot load a pickle from here with ") + c10::toString(tensor.scalar_type()),
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
    // A storage in the file has one type, that of its first tensor. Views of other types are written apart.
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
  const TorchArchive archive(path);
  const auto folder = archive.folder_of("data.pkl");
  if (archive.contains(folder + constants_record)) {
    const auto pickle = archive.stored(folder + "data.pkl") ? archive.text(folder + "data.pkl", max_pickle_bytes) : "";
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
