#include "checkpoint/files/snapshot.hpp"

#include "checkpoint/files/checked_files.hpp"
#include "node/stream.hpp"
#include "state/fingerprint.hpp"

#include <ATen/ops/from_blob.h>
#include <sys/mman.h>

#include <new>
#include <optional>

namespace muster::detail::checkpoint {
namespace {

/// Bytes per copy: few enough to be in the processor's cache still when their fingerprint is computed.
constexpr std::size_t snapshot_block_bytes = 128 << 10;

/// Reserves address space. A page takes memory only when it is written to for the first time.
std::shared_ptr<std::byte> reserve(std::uint64_t bytes) {
  void* const address =
      ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (address == MAP_FAILED) throw std::bad_alloc();
  ::madvise(address, bytes, MADV_HUGEPAGE);  // a hint
  return {static_cast<std::byte*>(address), [bytes](std::byte* memory) { ::munmap(memory, bytes); }};
}

/// Returns the tensor's bytes in one of the memory snapshots; null if no snapshot has them.
std::shared_ptr<const std::byte> find_in_snapshots(const at::Tensor& tensor,
                                                   std::span<const optim::MemorySnapshot> memory_snapshots) {
  if (!tensor.is_cpu() || !tensor.is_contiguous()) return nullptr;
  const auto* const data = static_cast<const std::byte*>(tensor.const_data_ptr());
  for (const auto& memory : memory_snapshots)
    if (data >= memory.live_data && data + tensor.nbytes() <= memory.live_data + memory.bytes)
      return {memory.snapshot_data, memory.snapshot_data.get() + (data - memory.live_data)};
  return nullptr;
}

at::Tensor tensor_at(std::shared_ptr<const std::byte> data, const at::Tensor& like) {
  auto* const bytes = const_cast<std::byte*>(data.get());
  return at::from_blob(
      bytes, like.sizes(), [data = std::move(data)](void*) {}, at::TensorOptions(like.scalar_type()));
}

/// The bytes of one tensor that lie in one piece of the file.
struct TensorSlice {
  std::span<const std::byte> from;
  std::byte* to = nullptr;  ///< where to copy the bytes; null if they need not be copied
  bool compared = false;
  std::uint64_t fingerprint = 0;
};

/// Copies the slice if needed, and computes its fingerprint if it is compared between ranks.
void copy_and_fingerprint(TensorSlice& slice) {
  for (std::size_t done = 0; done < slice.from.size(); done += snapshot_block_bytes) {
    const auto block = slice.from.subspan(done, std::min(snapshot_block_bytes, slice.from.size() - done));
    if (slice.to != nullptr) node::stream_copy(slice.to + done, block.data(), block.size());
    if (slice.compared)
      slice.fingerprint =
          state::fingerprint({reinterpret_cast<const char*>(block.data()), block.size()}, slice.fingerprint);
  }
}

}  // namespace

Snapshot::Result Snapshot::take(const Layout& layout, const Tensors& tensors, const std::vector<std::uint64_t>& pieces,
                                std::span<const optim::MemorySnapshot> memory_snapshots, bool compare) {
  if (layout.bytes != bytes_ || pieces != pieces_) {
    memory_.reset();
    memory_ = reserve(layout.bytes);
    bytes_ = layout.bytes;
    pieces_ = pieces;
  }
  const auto piece_bytes = piece_bytes_for(layout.bytes);
  const auto is_mine = [&](std::uint64_t offset) { return std::ranges::binary_search(pieces, offset / piece_bytes); };

  Result taken;
  std::vector<TensorSlice> slices;
  std::vector<state::Bytes> whole;     // owns the memory that slices point to
  std::vector<at::Tensor> on_devices;  // tensors on accelerators, which compute the fingerprints there
  for (const auto& entry : layout.tensors) {
    const auto& tensor = tensors.at(entry.name);
    if (!entry.same_as.empty()) {
      taken.tensors.emplace(entry.name, taken.tensors.at(entry.same_as));
      continue;
    }
    if (auto data = find_in_snapshots(tensor, memory_snapshots)) {
      taken.tensors.emplace(entry.name, tensor_at(std::move(data), tensor));
      continue;
    }
    taken.tensors.emplace(entry.name, tensor_at({memory_, memory_.get() + entry.offset}, tensor));
    if (entry.per_rank && entry.shape[0] > 1) continue;  // gather_rows() has copied them
    const bool compares = compare && !entry.per_rank, on_device = !tensor.is_cpu();
    if (compares && on_device) on_devices.push_back(tensor);
    std::optional<state::Bytes> bytes;
    for (auto begin = entry.offset; begin < entry.offset + entry.bytes;) {
      const auto end = std::min(entry.offset + entry.bytes, (begin / piece_bytes + 1) * piece_bytes);
      TensorSlice slice{
          .from = {}, .to = is_mine(begin) ? memory_.get() + begin : nullptr, .compared = compares && !on_device};
      if (slice.to != nullptr || slice.compared) {
        if (!bytes) bytes.emplace(tensor);
        slice.from = bytes->part(begin - entry.offset, end - entry.offset);
        slices.push_back(slice);
      }
      begin = end;
    }
    if (bytes) whole.push_back(std::move(*bytes));
  }
  for_each_share(slices.size(), [&](Range mine) {
    for (auto i = mine.begin; i < mine.end; ++i) copy_and_fingerprint(slices[i]);
    node::stream_fence();
  });
  auto fingerprints = state::fingerprints_on_devices(on_devices);
  for (const auto& slice : slices)
    if (slice.compared) fingerprints.push_back(slice.fingerprint);
  taken.fingerprint = state::fingerprint(
      {reinterpret_cast<const char*>(fingerprints.data()), fingerprints.size() * sizeof fingerprints[0]});
  return taken;
}

}  // namespace muster::detail::checkpoint
