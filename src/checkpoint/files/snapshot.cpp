#include "checkpoint/files/snapshot.hpp"

#include "checkpoint/files/checked_files.hpp"
#include "checkpoint/state/checksum.hpp"
#include "node/stream.hpp"

#include <ATen/ops/from_blob.h>
#include <sys/mman.h>

#include <map>
#include <new>
#include <optional>
#include <string_view>

namespace muster::detail::checkpoint {
namespace {

/// What is copied before its checksum is taken: it is still in the processor's cache.
constexpr std::size_t looked_at_once = 128 << 10;

/// Address space, of which what is touched takes memory.
std::shared_ptr<std::byte> reserve(std::uint64_t bytes) {
  void* const address =
      ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (address == MAP_FAILED) throw std::bad_alloc();
  ::madvise(address, bytes, MADV_HUGEPAGE);  // a hint
  return {static_cast<std::byte*>(address), [bytes](std::byte* memory) { ::munmap(memory, bytes); }};
}

/// The memory that keeps the tensor's bytes.
std::shared_ptr<const std::byte> kept(const at::Tensor& tensor, std::span<const optim::FrozenMemory> frozen) {
  if (!tensor.is_cpu() || !tensor.is_contiguous()) return nullptr;
  const auto* const data = static_cast<const std::byte*>(tensor.const_data_ptr());
  for (const auto& memory : frozen)
    if (data >= memory.seen && data + tensor.nbytes() <= memory.seen + memory.bytes)
      return {memory.kept, memory.kept.get() + (data - memory.seen)};
  return nullptr;
}

at::Tensor tensor_at(std::shared_ptr<const std::byte> data, const at::Tensor& like) {
  auto* const bytes = const_cast<std::byte*>(data.get());
  return at::from_blob(
      bytes, like.sizes(), [data = std::move(data)](void*) {}, at::TensorOptions(like.scalar_type()));
}

/// A part of a tensor that lies in one piece of the file.
struct Part {
  std::span<const std::byte> from;
  std::byte* to = nullptr;  ///< null where it is only looked at
  bool compared = false;
  std::uint64_t sum = 0;
};

void pass_over(Part& part) {
  for (std::size_t done = 0; done < part.from.size(); done += looked_at_once) {
    const auto block = part.from.subspan(done, std::min(looked_at_once, part.from.size() - done));
    if (part.to != nullptr) node::stream_copy(part.to + done, block.data(), block.size());
    if (part.compared) part.sum = checksum({reinterpret_cast<const char*>(block.data()), block.size()}, part.sum);
  }
}

}  // namespace

Snapshot::Taken Snapshot::take(const Layout& layout, const Tensors& tensors, const std::vector<std::uint64_t>& pieces,
                               std::span<const optim::FrozenMemory> frozen, bool compare) {
  if (layout.bytes != bytes_ || pieces != pieces_) {
    memory_.reset();
    memory_ = reserve(layout.bytes);
    bytes_ = layout.bytes;
    pieces_ = pieces;
  }
  const auto piece_bytes = piece_bytes_for(layout.bytes);
  const auto is_mine = [&](std::uint64_t offset) { return std::ranges::binary_search(pieces, offset / piece_bytes); };

  Taken taken;
  std::vector<Part> parts;
  std::vector<Bytes> whole;            // which the parts are of
  std::vector<at::Tensor> on_devices;  // whose sums are taken there
  for (const auto& entry : layout.tensors) {
    const auto& tensor = tensors.at(entry.name);
    if (!entry.same_as.empty()) {
      taken.tensors.emplace(entry.name, taken.tensors.at(entry.same_as));
      continue;
    }
    if (auto data = kept(tensor, frozen)) {
      taken.tensors.emplace(entry.name, tensor_at(std::move(data), tensor));
      continue;
    }
    taken.tensors.emplace(entry.name, tensor_at({memory_, memory_.get() + entry.offset}, tensor));
    if (entry.per_rank && entry.shape[0] > 1) continue;  // gather_rows() has copied it
    const bool compares = compare && !entry.per_rank, on_device = !tensor.is_cpu();
    if (compares && on_device) on_devices.push_back(tensor);
    std::optional<Bytes> bytes;
    for (auto begin = entry.offset; begin < entry.offset + entry.bytes;) {
      const auto end = std::min(entry.offset + entry.bytes, (begin / piece_bytes + 1) * piece_bytes);
      Part part{.from = {}, .to = is_mine(begin) ? memory_.get() + begin : nullptr, .compared = compares && !on_device};
      if (part.to != nullptr || part.compared) {
        if (!bytes) bytes.emplace(tensor);
        part.from = bytes->part(begin - entry.offset, end - entry.offset);
        parts.push_back(part);
      }
      begin = end;
    }
    if (bytes) whole.push_back(std::move(*bytes));
  }
  on_threads(parts.size(), [&](Range mine) {
    for (auto i = mine.begin; i < mine.end; ++i) pass_over(parts[i]);
    node::stream_fence();
  });
  auto sums = checksums_on_devices(on_devices);
  for (const auto& part : parts)
    if (part.compared) sums.push_back(part.sum);
  taken.fingerprint = checksum({reinterpret_cast<const char*>(sums.data()), sums.size() * sizeof sums[0]});
  return taken;
}

}  // namespace muster::detail::checkpoint
