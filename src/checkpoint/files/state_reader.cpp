#include "checkpoint/files/state_reader.hpp"

#include "base/page_size.hpp"
#include "checkpoint/files/checked_files.hpp"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <sys/mman.h>

#include <cerrno>
#include <cstring>

namespace muster::detail::checkpoint {
namespace {

#ifndef MADV_POPULATE_READ
constexpr int MADV_POPULATE_READ = 22;  // since Linux 5.14; older C libraries do not define it
#endif

/// Smaller tensors are copied instead of mapped: a mapped page for each would cost more, and they may be unaligned in
/// the file.
constexpr std::uint64_t min_mapped_bytes = 64 << 10;

std::byte* memory_of(const at::Tensor& tensor) { return static_cast<std::byte*>(tensor.mutable_data_ptr()); }

/// Calls `make` for each entry that does not share the memory of an earlier one, and returns the tensors by name.
/// Entries that share memory get the same tensor. Leaves out undefined tensors.
Tensors make_tensors(const Manifest& manifest, auto&& make) {
  Tensors tensors;
  std::map<std::string, at::Tensor> stored;
  for (const auto& entry : manifest.tensors) {
    auto tensor = entry.same_as.empty() ? make(entry) : stored.at(entry.same_as);
    stored.emplace(entry.name, tensor);
    if (tensor.defined()) tensors.emplace(entry.name, std::move(tensor));
  }
  return tensors;
}

at::Tensor empty_for(const TensorEntry& entry) { return at::empty(entry.shape, at::TensorOptions(entry.type)); }

}  // namespace

Tensors read_tensors(const std::filesystem::path& directory, const Manifest& manifest,
                     const std::function<bool(const std::string&)>& wanted) {
  // A wanted tensor may share its bytes with a tensor that is not wanted; then the latter must be read.
  std::set<std::string> needed;
  for (const auto& entry : manifest.tensors)
    if (!wanted || wanted(entry.name)) needed.insert(entry.same_as.empty() ? entry.name : entry.same_as);
  std::map<const TensorEntry*, std::byte*> memory;
  auto tensors = make_tensors(manifest, [&](const TensorEntry& entry) {
    if (!needed.contains(entry.name)) return at::Tensor();
    auto tensor = empty_for(entry);
    memory.emplace(&entry, memory_of(tensor));
    return tensor;
  });
  const auto& file = manifest.state_file();
  const auto pieces =
      pieces_of_tensors(manifest.tensors, file.bytes, [&](const auto& name) { return needed.contains(name); });

  const TensorIndex tensor_index(manifest.tensors);
  read_pieces(
      directory, file, pieces,
      [&](Range range) {  // a piece that lies within one tensor is read directly into the tensor's memory
        std::byte* address = nullptr;
        tensor_index.for_each_segment(range, [&](Range segment, const TensorEntry* tensor) {
          const auto at = memory.find(tensor);
          if (segment.end - segment.begin == range.end - range.begin && at != memory.end())
            address = at->second + (range.begin - tensor->offset);
        });
        return address;
      },
      [&](Range range, std::span<const std::byte> bytes) {
        tensor_index.for_each_segment(range, [&](Range segment, const TensorEntry* tensor) {
          const auto at = memory.find(tensor);
          if (at == memory.end()) return;
          auto* const to = at->second + (segment.begin - tensor->offset);
          const auto from = bytes.subspan(segment.begin - range.begin, segment.end - segment.begin);
          if (to != from.data()) std::ranges::copy(from, to);
        });
      });
  if (wanted) std::erase_if(tensors, [&](const auto& item) { return !wanted(item.first); });
  return tensors;
}

std::shared_ptr<const MappedState> MappedState::open(const std::filesystem::path& directory, const FileEntry& entry) {
  const auto file = open_with_size(directory, entry);
  void* const address =
      ::mmap(nullptr, entry.bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_NORESERVE, file.descriptor(), 0);
  if (address == MAP_FAILED) return nullptr;
  std::shared_ptr<const MappedState> mapped(new MappedState(file.path(), entry, static_cast<std::byte*>(address)));
  return mapped->load({0, 1}) ? mapped : nullptr;
}

MappedState::~MappedState() { ::munmap(data_, entry_.bytes); }

/// Makes the kernel read this range now: then a failure is an Error here, not a signal at a later access. Returns false
/// if the kernel does not support this.
bool MappedState::load(Range range) const {
  const auto begin = range.begin / page_size() * page_size();
  int status;
  do status = ::madvise(data_ + begin, range.end - begin, MADV_POPULATE_READ);
  while (status != 0 && errno == EINTR);
  if (status == 0) return true;
  if (errno == EINVAL) return false;
  throw Error(ExitCode::retry, "reading " + path_.string(), std::strerror(errno == EFAULT ? EIO : errno),
              "Check the disk or the file server, then try again");
}

void MappedState::verify(std::span<const std::uint64_t> pieces) const {
  for_each_share(pieces.size(), [&](Range mine) {
    for (const auto piece : pieces.subspan(mine.begin, mine.end - mine.begin)) {
      const auto range = piece_range(entry_.bytes, entry_.piece_bytes, piece);
      load(range);
      if (piece_checksum({data_ + range.begin, range.end - range.begin}) != entry_.piece_checksums[piece])
        refuse_piece(path_, range);
    }
  });
}

Tensors MappedState::tensors(const Manifest& manifest) const {
  return make_tensors(manifest, [&](const TensorEntry& entry) {
    // Another rank may have verified these bytes, and the kernel may have dropped their pages since. If it could not
    // read them again, an access would kill this process, so they are loaded now.
    if (entry.bytes > 0) load({entry.offset, entry.offset + entry.bytes});
    auto* const begin = data_ + entry.offset;
    if (entry.bytes >= min_mapped_bytes && entry.offset % c10::elementSize(entry.type) == 0)
      return at::from_blob(
          begin, entry.shape, [mapped = shared_from_this()](void*) {}, at::TensorOptions(entry.type));
    auto tensor = empty_for(entry);
    std::copy_n(begin, entry.bytes, memory_of(tensor));
    return tensor;
  });
}

}  // namespace muster::detail::checkpoint
