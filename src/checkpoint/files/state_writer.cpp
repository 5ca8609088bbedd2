#include "checkpoint/files/state_writer.hpp"

#include "base/direct.hpp"
#include "base/page_size.hpp"
#include "comm/collectives.hpp"
#include "state/fingerprint.hpp"

#include <sys/mman.h>

#include <chrono>
#include <cstring>
#include <future>
#include <new>

namespace muster::detail::checkpoint {
namespace {

/// Greatest number of bytes per write.
constexpr std::size_t max_write_bytes = 8 << 20;
/// Bytes per copy: few enough to be in the processor's cache still when their checksum is computed.
constexpr std::size_t copy_block_bytes = 128 << 10;

/// Provides the bytes of the file: from HDF5's own bytes, from rows of per-rank tensors, and from tensors.
class Source {
 public:
  Source(const Layout& layout, const Tensors& tensors, const std::vector<FileBytes>& rows)
      : layout_(layout), tensors_(tensors), rows_(rows), tensor_index_(layout.tensors) {}

  /// Calls use(bytes, zero_count) for consecutive parts of this range: either with their bytes, or with an empty span
  /// and the number of zero bytes.
  void each(Range range, auto&& use) {
    tensor_index_.for_each_segment(range, [&](Range segment, const TensorEntry* tensor) {
      if (tensor == nullptr) return stored(layout_.structure, segment, use);
      if (tensor->per_rank && tensor->shape[0] > 1) return stored(rows_, segment, use);
      if (current_ != tensor) bytes_ = std::make_unique<const state::Bytes>(tensors_.at(tensor->name));
      current_ = tensor;
      use(bytes_->part(segment.begin - tensor->offset, segment.end - tensor->offset), 0);
    });
  }

 private:
  static void stored(const std::vector<FileBytes>& parts, Range range, auto& use) {
    auto at = std::ranges::upper_bound(parts, range.begin, {}, &FileBytes::end);
    while (range.begin < range.end) {
      const bool none = at == parts.end() || at->offset >= range.end;
      const auto next = none ? range.end : std::max(at->offset, range.begin);
      if (range.begin < next) use(std::span<const std::byte>(), next - range.begin);
      if (none) return;
      const Range there{next, std::min(at->end(), range.end)};
      use(std::as_bytes(std::span(at->bytes)).subspan(there.begin - at->offset, there.end - there.begin), 0);
      range.begin = there.end;
      ++at;
    }
  }

  const Layout& layout_;
  const Tensors& tensors_;
  const std::vector<FileBytes>& rows_;
  const TensorIndex tensor_index_;
  const TensorEntry* current_ = nullptr;
  std::unique_ptr<const state::Bytes> bytes_;  // of current_
};

/// Copies this range of the file to `to` and returns its checksum.
std::uint32_t copy_out(Source& source, Range range, std::byte* to) {
  std::uint32_t checksum = 0;
  const auto take = [&](std::size_t size, auto&& copy) {
    for (std::size_t done = 0; done < size;) {
      const auto block = std::min(size - done, copy_block_bytes);
      copy(done, block);
      checksum = piece_checksum({to, block}, checksum);
      to += block;
      done += block;
    }
  };
  source.each(range, [&](std::span<const std::byte> bytes, std::size_t zeroes) {
    take(bytes.size(), [&](auto at, auto size) { std::memcpy(to, bytes.data() + at, size); });
    take(zeroes, [&](auto, auto size) { std::memset(to, 0, size); });
  });
  return checksum;
}

/// Calls use(tensor, rank, range) for each rank's row of each per-rank tensor, in the order of tensors, then ranks.
void each_row(const Layout& layout, int ranks, auto&& use) {
  for (const auto& tensor : layout.tensors) {
    if (!tensor.per_rank) continue;
    const auto row = tensor.bytes / static_cast<std::uint64_t>(ranks);
    for (int rank = 0; rank < ranks; ++rank) {
      const auto begin = tensor.offset + static_cast<std::uint64_t>(rank) * row;
      use(tensor, rank, Range{begin, begin + row});
    }
  }
}

/// Splits `range` where the writing rank changes, and calls use(writer, range) for each part.
void each_writer(Range range, std::uint64_t piece_bytes, const std::vector<int>& writers, auto&& use) {
  for (auto begin = range.begin; begin < range.end;) {
    const int writer = writers[begin / piece_bytes];
    auto end = begin;
    while (end < range.end && writers[end / piece_bytes] == writer)
      end = std::min(range.end, (end / piece_bytes + 1) * piece_bytes);
    use(writer, Range{begin, end});
    begin = end;
  }
}

}  // namespace

std::vector<int> piece_owners(const Layout& layout, int ranks) {
  const auto piece_bytes = piece_bytes_for(layout.bytes);
  std::vector<int> owners(piece_count(layout.bytes, piece_bytes), -1);
  each_row(layout, ranks, [&](const TensorEntry&, int rank, Range row) {
    for (auto piece = row.begin / piece_bytes; piece * piece_bytes < row.end; ++piece)
      if (owners[piece] < 0) owners[piece] = rank;
  });
  return owners;
}

std::vector<std::uint64_t> pieces_of(const std::vector<int>& writers, int rank) {
  std::vector<std::uint64_t> pieces;
  for (std::uint64_t piece = 0; piece < writers.size(); ++piece)
    if (writers[piece] == rank) pieces.push_back(piece);
  return pieces;
}

std::vector<FileBytes> gather_rows(const Communicator& communicator, const Layout& layout, const Tensors& tensors,
                                   const std::vector<int>& writers) {
  if (communicator.size() == 1) return {};
  const auto piece_bytes = piece_bytes_for(layout.bytes);
  struct Memory {
    std::vector<state::Bytes> mine;
    std::vector<FileBytes> gathered;
  };
  auto memory = std::make_shared<Memory>();
  std::vector<comm::Message> sends, receives;
  each_row(layout, communicator.size(), [&](const TensorEntry& tensor, int rank, Range row) {
    if (rank == communicator.rank()) memory->mine.emplace_back(tensors.at(tensor.name));
    each_writer(row, piece_bytes, writers, [&](int writer, Range range) {
      const auto size = range.end - range.begin;
      if (rank == communicator.rank()) {
        auto* const bytes = memory->mine.back().part(range.begin - row.begin, range.end - row.begin).data();
        sends.push_back({const_cast<std::byte*>(bytes), size, writer});
      }
      if (writer != communicator.rank()) return;
      auto& gathered = memory->gathered.emplace_back(range.begin, std::vector<std::uint8_t>(size));
      receives.push_back({gathered.bytes.data(), size, rank});
    });
  });
  auto request = comm::Collectives(communicator).all_to_all(sends, receives, comm::Dtype::u8);
  request.keep(memory);
  request.wait();
  std::ranges::sort(memory->gathered, {}, &FileBytes::offset);
  return std::move(memory->gathered);
}

std::span<std::byte> StateWriter::Buffer::take(std::size_t bytes) {
  if (size < bytes) {
    memory.reset(static_cast<std::byte*>(std::aligned_alloc(std::max(direct_alignment, page_size()), bytes)));
    size = memory ? bytes : 0;
    if (!memory) throw std::bad_alloc();
    ::madvise(memory.get(), bytes, MADV_HUGEPAGE);  // a hint
  }
  return {memory.get(), bytes};
}

std::vector<std::uint32_t> StateWriter::write(const OpenFile& open, const Layout& layout, const Tensors& tensors,
                                              const std::vector<std::uint64_t>& pieces,
                                              const std::vector<FileBytes>& rows,
                                              const std::function<bool()>& meanwhile) {
  if (pieces.empty()) return {};
  const auto file = open(storage::Alignment::direct);
  const auto piece_bytes = piece_bytes_for(layout.bytes);
  Source source(layout, tensors, rows);
  std::vector<std::uint32_t> checksums;
  // Declared after `file`: if an exception is thrown, these are destroyed first, which waits for the writes.
  std::array<std::shared_future<void>, buffer_count> pending_writes;
  const auto wait = [&](std::shared_future<void>& slot) {
    if (!slot.valid()) return;
    while (meanwhile && slot.wait_for(std::chrono::seconds(0)) != std::future_status::ready && meanwhile()) continue;
    slot.get();
  };
  for (std::size_t done = 0, chunk = 0; done < pieces.size(); ++chunk) {
    auto last = done + 1;  // end of the adjacent pieces that one write takes
    while (last < pieces.size() && pieces[last] == pieces[last - 1] + 1 &&
           (last - done) * piece_bytes < max_write_bytes)
      ++last;
    const Range range{pieces[done] * piece_bytes, std::min((pieces[last - 1] + 1) * piece_bytes, layout.bytes)};
    auto& slot = pending_writes[chunk % buffer_count];
    wait(slot);
    const auto buffer = buffers_[chunk % buffer_count].take(range.end - range.begin);
    for (; done < last; ++done) {
      const auto piece = piece_range(layout.bytes, piece_bytes, pieces[done]);
      checksums.push_back(copy_out(source, piece, buffer.data() + (piece.begin - range.begin)));
    }
    // Writes one buffer after the other. Parallel writes would end at the same time and leave the disk idle until
    // buffers are filled again.
    const auto& before = pending_writes[(chunk + buffer_count - 1) % buffer_count];
    slot = std::async(std::launch::async, [&file, before, buffer, range] {
      if (before.valid()) before.get();
      file->write_at(buffer, range.begin);
    });
  }
  for (auto& slot : pending_writes) wait(slot);
  file->finish();
  return checksums;
}

}  // namespace muster::detail::checkpoint
