#include "checkpoint/files/state_file.hpp"

#include "base/direct.hpp"
#include "base/json.hpp"
#include "hdf5/file.hpp"
#include "hdf5/types.hpp"

#include <memory>
#include <tuple>

namespace muster::detail::checkpoint {
namespace {

const std::string making = "making state.h5";

/// Two tensors with equal keys have the same values in the same memory, and are both per-rank or both replicated.
using MemoryKey =
    std::tuple<bool, const void*, at::ScalarType, std::vector<std::int64_t>, std::vector<std::int64_t>, bool, bool>;

MemoryKey memory_key(const TensorEntry& entry, const at::Tensor& tensor) {
  return {entry.per_rank,         tensor.const_data_ptr(), entry.type,     entry.shape,
          tensor.strides().vec(), tensor.is_conj(),        tensor.is_neg()};
}

std::int64_t check(std::int64_t status) { return hdf5::check(status, making, ExitCode::retry); }

/// Creates the HDF5 groups in `name` that are not in `made`, and adds them to it. HDF5 would create them by itself, but
/// with a time stamp.
void make_groups(hid_t file, const std::string& name, hid_t links, std::set<std::string>& made) {
  const auto creation = hdf5::make_properties(H5P_GROUP_CREATE, making, ExitCode::retry);
  check(H5Pset_obj_track_times(creation.get(), false));
  for (auto end = name.find('/'); end != std::string::npos; end = name.find('/', end + 1)) {
    const auto group = name.substr(0, end);
    if (!made.insert(group).second) continue;
    hdf5::Handle(check(H5Gcreate2(file, group.c_str(), links, creation.get(), H5P_DEFAULT)), H5Gclose).close(making);
  }
}

/// Creates the tensor's dataset and returns the offset of its values in the file.
std::uint64_t make_dataset(hid_t file, const TensorEntry& tensor, hid_t links) {
  const auto type = hdf5::memory_type_of(tensor.type);
  const auto space = hdf5::make_space(tensor.shape, making, ExitCode::retry);
  const auto creation = hdf5::make_properties(H5P_DATASET_CREATE, making, ExitCode::retry);
  check(H5Pset_layout(creation.get(), H5D_CONTIGUOUS));
  check(H5Pset_alloc_time(creation.get(), H5D_ALLOC_TIME_EARLY));
  check(H5Pset_fill_time(creation.get(), H5D_FILL_TIME_NEVER));
  check(H5Pset_obj_track_times(creation.get(), false));  // so that the same tensors always give the same file
  hdf5::Handle dataset(
      check(H5Dcreate2(file, tensor.name.c_str(), type.get(), space.get(), links, creation.get(), H5P_DEFAULT)),
      H5Dclose);
  const auto offset = tensor.bytes == 0 ? 0 : H5Dget_offset(dataset.get());
  if (offset == HADDR_UNDEF)
    throw Error(ExitCode::retry, making, "HDF5 gave " + tensor.name + " no offset",
                "Check the space and the permissions there");
  dataset.close(making);
  return offset;
}

/// Returns the entry of a tensor, without its offset in the file.
TensorEntry entry_for(const std::string& name, const at::Tensor& tensor, bool per_rank, int ranks) {
  TensorEntry entry{.name = name, .type = tensor.scalar_type(), .shape = tensor.sizes().vec()};
  if (per_rank) entry.shape.insert(entry.shape.begin(), ranks);
  entry.bytes = tensor.nbytes() * static_cast<std::uint64_t>(per_rank ? ranks : 1);
  entry.per_rank = per_rank;
  return entry;
}

/// Returns the entries of all tensors, without their offsets in the file.
std::vector<TensorEntry> entries_for(const Tensors& tensors, const std::set<std::string>& per_rank, int ranks) {
  std::vector<TensorEntry> entries;
  std::map<MemoryKey, std::string> first_name;
  for (const auto& [name, tensor] : tensors) {
    auto entry = entry_for(name, tensor, per_rank.contains(name), ranks);
    // Per-rank tensors that share memory on this rank may have separate memory on other ranks.
    if (!entry.per_rank) {
      const auto [first, is_new] = first_name.try_emplace(memory_key(entry, tensor), name);
      if (!is_new && entry.bytes > 0) {
        entry.bytes = 0;
        entry.same_as = first->second;
      }
    }
    entries.push_back(std::move(entry));
  }
  return entries;
}

}  // namespace

std::string pack(const Layout& layout) {
  auto structure = Json::array();
  for (const auto& part : layout.structure) structure.push_back({part.offset, Json::binary(part.bytes)});
  return json_to_cbor({{"tensors", layout.tensors}, {"bytes", layout.bytes}, {"structure", std::move(structure)}});
}

Layout unpack_layout(std::string_view packed) {
  const auto json = json_from_cbor(packed);
  Layout layout{.tensors = json.at("tensors"), .bytes = json.at("bytes")};
  for (const auto& part : json.at("structure")) layout.structure.push_back({part[0], part[1].get_binary()});
  return layout;
}

void check_storable(const Tensors& tensors) {
  for (const auto& [name, tensor] : tensors) {
    const auto fail = [&](const std::string& fact, const std::string& remedy = "Save it in another form") {
      throw Error(ExitCode::usage, "saving " + name, fact, remedy);
    };
    if (tensor.is_sparse())
      fail("it is a sparse tensor",
           "Save it as to_dense(); a momentum buffer is sparse if the gradient is: train with SGD without momentum, or "
           "the embedding with sparse(false)");
    if (tensor.layout() != at::kStrided || tensor.is_meta() || tensor.is_quantized())
      fail("it is not a tensor of plain values in memory");
    if (!hdf5::has_type(tensor.scalar_type()))
      fail(std::string("HDF5 has no type for ") + c10::toString(tensor.scalar_type()),
           "Save it in another type, or its bytes: .view(torch::kUInt8)");
    if (tensor.dim() > H5S_MAX_RANK) fail("it has more than 32 dimensions");
    if (!is_plain(name) || name.find('\0') != std::string::npos)
      fail("its name has an empty part, a zero byte, or a part \".\" or \"..\"");
    for (auto end = name.find('/'); end != std::string::npos; end = name.find('/', end + 1))
      if (tensors.contains(name.substr(0, end)))
        fail("\"" + name.substr(0, end) + "\" is a tensor, so it cannot be a group too");
  }
}

Layout make_layout(const Tensors& tensors, const std::set<std::string>& per_rank, int ranks) {
  const auto memory = std::make_shared<hdf5::FileStorage>();
  Layout layout;
  {
    const hdf5::Lock lock;
    auto file = hdf5::create_file(memory, direct_alignment);
    const auto links = hdf5::make_properties(H5P_LINK_CREATE, making, ExitCode::retry);
    check(H5Pset_char_encoding(links.get(), H5T_CSET_UTF8));
    layout.tensors = entries_for(tensors, per_rank, ranks);
    std::set<std::string> groups;
    for (auto& entry : layout.tensors) {
      make_groups(file.get(), entry.name, links.get(), groups);
      if (entry.same_as.empty())
        entry.offset = make_dataset(file.get(), entry, links.get());
      else
        check(H5Lcreate_hard(file.get(), entry.same_as.c_str(), file.get(), entry.name.c_str(), links.get(),
                             H5P_DEFAULT));
    }
    file.close(making);
  }
  // Pads the file. HDF5 knows the size of its own data and ignores bytes behind it.
  layout.bytes = (memory->size() + direct_alignment - 1) / direct_alignment * direct_alignment;
  TensorIndex(layout.tensors).for_each_segment({0, memory->size()}, [&](Range range, const TensorEntry* tensor) {
    if (tensor != nullptr) return;
    FileBytes part{range.begin, std::vector<std::uint8_t>(range.end - range.begin)};
    memory->read_at(std::as_writable_bytes(std::span(part.bytes)), range.begin);
    if (std::ranges::any_of(part.bytes, [](auto byte) { return byte != 0; }))
      layout.structure.push_back(std::move(part));
  });
  return layout;
}

bool layout_fits(const Layout& layout, const Tensors& tensors, const std::set<std::string>& per_rank, int ranks) {
  const auto form = [](const TensorEntry& entry) {
    return std::tie(entry.name, entry.type, entry.shape, entry.bytes, entry.same_as, entry.per_rank);
  };
  return std::ranges::equal(layout.tensors, entries_for(tensors, per_rank, ranks), {}, form, form);
}

std::vector<std::uint64_t> pieces_of_tensors(const std::vector<TensorEntry>& tensors, std::uint64_t file_bytes,
                                             const std::function<bool(const std::string&)>& wanted) {
  const auto piece_bytes = piece_bytes_for(file_bytes);
  std::set<std::uint64_t> pieces;
  std::map<std::string, const TensorEntry*> stored;
  for (const auto& entry : tensors) {
    const auto* owner = entry.same_as.empty() ? &entry : stored.at(entry.same_as);
    stored.emplace(entry.name, owner);
    if (!wanted(entry.name)) continue;
    for (auto piece = owner->offset / piece_bytes; piece * piece_bytes < owner->offset + owner->bytes; ++piece)
      pieces.insert(piece);
  }
  return {pieces.begin(), pieces.end()};
}

void check_layout(const Layout& layout, const Tensors& tensors) {
  const auto fail = [](const std::string& name, const std::string& fact) {
    throw Error(ExitCode::usage, "saving " + name, fact, "All ranks must save the same names, shapes and types");
  };
  auto here = tensors.begin();
  for (const auto& entry : layout.tensors) {
    if (here == tensors.end() || here->first != entry.name)
      fail(entry.name, "this rank does not have it, but rank 0 does");
    const auto& tensor = here->second;
    auto shape = entry.shape;
    if (entry.per_rank) shape.erase(shape.begin());
    if (tensor.scalar_type() != entry.type || tensor.sizes().vec() != shape)
      fail(entry.name, "its shape or type is not that of rank 0");
    ++here;
  }
  if (here != tensors.end()) fail(here->first, "this rank has it, but rank 0 does not");
}

}  // namespace muster::detail::checkpoint
