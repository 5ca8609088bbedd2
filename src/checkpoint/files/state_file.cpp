#include "checkpoint/files/state_file.hpp"

#include "base/file.hpp"
#include "checkpoint/files/checked_files.hpp"
#include "checkpoint/state/checksum.hpp"
#include "hdf5/file.hpp"
#include "hdf5/types.hpp"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <memory>
#include <tuple>

namespace muster::detail::checkpoint {
namespace {

const std::string making = "making state.h5";

/// Two tensors with the same key are the same numbers in the same memory.
using MemoryKey = std::tuple<const void*, at::ScalarType, std::vector<std::int64_t>, std::vector<std::int64_t>>;

MemoryKey memory_key(const at::Tensor& tensor) {
  return {tensor.const_data_ptr(), tensor.scalar_type(), tensor.sizes().vec(), tensor.strides().vec()};
}

std::int64_t check(std::int64_t status) { return hdf5::check(status, making, ExitCode::retry); }

/// Gives the place of its values in the file.
std::uint64_t make_dataset(hid_t file, const std::string& name, const at::Tensor& tensor, hid_t links) {
  const auto type = hdf5::type_of(tensor.scalar_type());
  const auto space = hdf5::make_space(tensor.sizes().vec(), making, ExitCode::retry);
  const auto creation = hdf5::make_properties(H5P_DATASET_CREATE, making, ExitCode::retry);
  check(H5Pset_layout(creation.get(), H5D_CONTIGUOUS));
  check(H5Pset_alloc_time(creation.get(), H5D_ALLOC_TIME_EARLY));
  check(H5Pset_fill_time(creation.get(), H5D_FILL_TIME_NEVER));
  hdf5::Handle dataset(
      check(H5Dcreate2(file, name.c_str(), type.get(), space.get(), links, creation.get(), H5P_DEFAULT)), H5Dclose);
  const auto offset = tensor.numel() == 0 ? 0 : H5Dget_offset(dataset.get());
  if (offset == HADDR_UNDEF) throw Error(ExitCode::retry, making, "HDF5 gave " + name + " no place");
  dataset.close(making);
  return offset;
}

/// The whole file but for the values.
Layout make_structure(const std::shared_ptr<hdf5::Medium>& memory, const Tensors& tensors) {
  const hdf5::Lock lock;
  auto file = hdf5::create_file(memory);
  const auto links = hdf5::make_properties(H5P_LINK_CREATE, making, ExitCode::retry);
  check(H5Pset_create_intermediate_group(links.get(), 1));
  check(H5Pset_char_encoding(links.get(), H5T_CSET_UTF8));
  Layout layout;
  std::map<MemoryKey, std::string> first_name;
  for (const auto& [name, tensor] : tensors) {
    TensorEntry entry{.name = name, .type = tensor.scalar_type(), .shape = tensor.sizes().vec()};
    const auto [first, is_new] = first_name.try_emplace(memory_key(tensor), name);
    if (is_new || tensor.numel() == 0) {
      entry.bytes = tensor.nbytes();
      entry.offset = make_dataset(file.get(), name, tensor, links.get());
    } else {
      entry.same_as = first->second;
      check(H5Lcreate_hard(file.get(), entry.same_as.c_str(), file.get(), name.c_str(), links.get(), H5P_DEFAULT));
    }
    layout.tensors.push_back(std::move(entry));
  }
  file.close(making);
  layout.bytes = memory->size();
  return layout;
}

/// The tensors with bytes, in the order of the file.
std::vector<const TensorEntry*> by_offset(const std::vector<TensorEntry>& tensors) {
  std::vector<const TensorEntry*> sorted;
  for (const auto& tensor : tensors)
    if (tensor.bytes > 0) sorted.push_back(&tensor);
  std::ranges::sort(sorted, {}, &TensorEntry::offset);
  return sorted;
}

/// Calls segment(range, tensor) for each stretch of `range` in order: the tensor that lies there, or none.
void each_segment(const std::vector<const TensorEntry*>& sorted, Range range, auto&& segment) {
  auto at = std::ranges::upper_bound(sorted, range.begin, {},
                                     [](const TensorEntry* tensor) { return tensor->offset + tensor->bytes; });
  const TensorEntry* const none = nullptr;
  for (auto position = range.begin; position < range.end; ++at) {
    const auto begin = at == sorted.end() ? range.end : std::min((*at)->offset, range.end);
    if (position < begin) segment(Range{position, begin}, none);
    position = std::max(position, begin);
    if (position == range.end) return;
    const auto end = std::min(range.end, (*at)->offset + (*at)->bytes);
    segment(Range{position, end}, *at);
    position = end;
  }
}

void check_layout(const Layout& layout, const Tensors& tensors) {
  const auto fail = [](const std::string& name, const std::string& fact) {
    throw Error(ExitCode::usage, "saving " + name, fact, "All ranks must save the same names, shapes and types");
  };
  auto here = tensors.begin();
  for (const auto& entry : layout.tensors) {
    if (here == tensors.end() || here->first != entry.name) fail(entry.name, "this rank does not have it, rank 0 does");
    const auto& tensor = here->second;
    if (tensor.scalar_type() != entry.type || tensor.sizes().vec() != entry.shape)
      fail(entry.name, "its shape or type is not that of rank 0");
    ++here;
  }
  if (here != tensors.end()) fail(here->first, "this rank has it, rank 0 does not");
}

}  // namespace

Json to_json(const Layout& layout) { return {{"tensors", layout.tensors}, {"bytes", layout.bytes}}; }

Layout layout_from_json(const Json& json) { return {.tensors = json.at("tensors"), .bytes = json.at("bytes")}; }

void check_storable(const Tensors& tensors) {
  for (const auto& [name, tensor] : tensors) {
    const auto fail = [&](const std::string& fact) {
      throw Error(ExitCode::usage, "saving " + name, fact, "Save it in another form");
    };
    if (tensor.layout() != at::kStrided || tensor.is_meta() || tensor.is_quantized())
      fail("it is not a tensor of plain values in memory");
    if (tensor.dim() > H5S_MAX_RANK) fail("it has more than 32 dimensions");
    if (!is_plain(name) || name.find('\0') != std::string::npos)
      fail("its name has an empty part, or one that means a folder");
    for (auto end = name.find('/'); end != std::string::npos; end = name.find('/', end + 1))
      if (tensors.contains(name.substr(0, end)))
        fail("\"" + name.substr(0, end) + "\" is a tensor, so it cannot be a group too");
  }
}

Layout lay_out(const std::filesystem::path& path, const Tensors& tensors) {
  File file(path, File::Mode::create);
  std::uint64_t values = 0;
  for (const auto& [name, tensor] : tensors) values += tensor.nbytes();
  file.truncate(values);  // where files may not grow as large, this says so
  const auto memory = std::make_shared<hdf5::Medium>();
  const auto layout = make_structure(memory, tensors);
  std::vector<std::byte> bytes;
  each_segment(by_offset(layout.tensors), Range{0, layout.bytes}, [&](Range range, const TensorEntry* tensor) {
    if (tensor != nullptr) return;
    bytes.resize(range.end - range.begin);
    memory->read_at(bytes, range.begin);
    file.write_at(bytes, range.begin);
  });
  file.truncate(layout.bytes);
  file.sync();
  file.close();
  return layout;
}

std::vector<int> piece_writers(const Layout& layout, int ranks, const std::set<std::string>& of_rank_0) {
  const auto piece_bytes = piece_bytes_for(layout.bytes);
  std::vector<int> writers(piece_count(layout.bytes, piece_bytes), -1);
  std::map<std::string, const TensorEntry*> stored;
  for (const auto& entry : layout.tensors) {
    const auto* place = entry.same_as.empty() ? &entry : stored.at(entry.same_as);
    stored.emplace(entry.name, place);
    if (!of_rank_0.contains(entry.name) || place->bytes == 0) continue;
    const auto last = (place->offset + place->bytes - 1) / piece_bytes;
    for (auto piece = place->offset / piece_bytes; piece <= last; ++piece) writers[piece] = 0;
  }
  std::vector<std::uint64_t> shared;
  for (std::uint64_t piece = 0; piece < writers.size(); ++piece)
    if (writers[piece] < 0) shared.push_back(piece);
  for (int rank = 0; rank < ranks; ++rank) {
    const auto mine = share(shared.size(), {rank, ranks});
    for (auto i = mine.begin; i < mine.end; ++i) writers[shared[i]] = rank;
  }
  return writers;
}

std::vector<std::uint32_t> write_pieces(const std::filesystem::path& path, const Layout& layout, const Tensors& tensors,
                                        const std::vector<int>& writers, int rank) {
  check_layout(layout, tensors);
  const auto sorted = by_offset(layout.tensors);
  const auto piece_bytes = piece_bytes_for(layout.bytes);
  File file(path, File::Mode::write);
  std::vector<std::uint32_t> checksums;
  std::vector<std::byte> gap;
  const TensorEntry* current = nullptr;
  std::unique_ptr<const Bytes> bytes;
  for (std::uint64_t piece = 0; piece < writers.size(); ++piece) {
    if (writers[piece] != rank) continue;
    std::uint32_t checksum = 0;
    each_segment(sorted, piece_range(layout.bytes, piece_bytes, piece), [&](Range range, const TensorEntry* tensor) {
      if (tensor == nullptr) {
        gap.resize(range.end - range.begin);
        file.read_at(gap, range.begin);
        checksum = crc32(gap, checksum);
        return;
      }
      if (current != tensor) bytes = std::make_unique<const Bytes>(tensors.at(tensor->name));
      current = tensor;
      const auto values = bytes->part(range.begin - tensor->offset, range.end - tensor->offset);
      checksum = crc32(values, checksum);
      file.write_at(values, range.begin);
    });
    checksums.push_back(checksum);
  }
  file.sync();
  file.close();
  return checksums;
}

Tensors read_tensors(const std::filesystem::path& directory, const Manifest& manifest, Rank here) {
  Tensors tensors;
  for (const auto& tensor : manifest.tensors)
    tensors.emplace(tensor.name, tensor.same_as.empty() ? at::empty(tensor.shape, at::TensorOptions(tensor.type))
                                                        : tensors.at(tensor.same_as));
  const auto& entry = manifest.state_file();
  const auto sorted = by_offset(manifest.tensors);
  const auto count = piece_count(entry.bytes, entry.piece_bytes);
  read_pieces(directory, entry, {0, count}, share(count, here), [&](Range range, std::span<const std::byte> bytes) {
    each_segment(sorted, range, [&](Range segment, const TensorEntry* tensor) {
      if (tensor == nullptr) return;
      auto* const to = static_cast<std::byte*>(tensors.at(tensor->name).mutable_data_ptr());
      std::ranges::copy(bytes.subspan(segment.begin - range.begin, segment.end - segment.begin),
                        to + (segment.begin - tensor->offset));
    });
  });
  return tensors;
}

}  // namespace muster::detail::checkpoint
