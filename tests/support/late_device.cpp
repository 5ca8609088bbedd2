#include "support/late_device.hpp"

#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/view_native.h>
#include <c10/core/Allocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

namespace muster::test::late_device {
namespace {

using c10::Device, c10::DeviceIndex, c10::Stream, c10::StreamId;

constexpr auto type = c10::DeviceType::PrivateUse1;
constexpr int garbage = 0x5a;

struct EventState {
  StreamId stream = 0;
  bool done = false;
};
using EventPtr = std::shared_ptr<EventState>;

thread_local StreamId current_stream = 0;
thread_local std::int64_t waits_of_this_thread = 0;

/// The streams' queues. Whoever waits does the work.
class Streams {
 public:
  void push(StreamId stream, std::function<void()> work) {
    const std::lock_guard lock(mutex);
    queues_[stream].push_back(std::move(work));
    if (stream != 0 && pool == Pool::early) drain(stream);
  }
  void drain(StreamId stream) {
    const std::lock_guard lock(mutex);
    while (!queues_[stream].empty()) do_first(stream);
  }
  void drain_to(const EventPtr& event) {
    const std::lock_guard lock(mutex);
    while (!event->done) do_first(event->stream);
  }
  void drain_all() {
    const std::lock_guard lock(mutex);
    for (auto& [stream, queue] : queues_)
      while (!queue.empty()) do_first(stream);
  }
  EventPtr record(StreamId stream) {
    const auto event = std::make_shared<EventState>(EventState{.stream = stream});
    push(stream, [event] { event->done = true; });
    return event;
  }

  std::recursive_mutex mutex;  ///< of all state of the device
  Pool pool = Pool::late;
  StreamId next = 0;
  Counts counts;

 private:
  void do_first(StreamId stream) {
    auto work = std::move(queues_[stream].front());
    queues_[stream].pop_front();
    work();
  }

  std::map<StreamId, std::deque<std::function<void()>>> queues_;
};

Streams& streams() {
  static auto* const all = new Streams;  // outlives all tensors
  return *all;
}

void thread_waits() {
  ++waits_of_this_thread;
  ++streams().counts.thread_waits;
}

/// Reuses memory as a caching allocator does: at once for the stream that it was allocated on, and after the work of
/// the other streams that were recorded on it.
class DeviceMemory final : public c10::Allocator {
 public:
  c10::DataPtr allocate(std::size_t bytes) override {
    const std::lock_guard lock(streams().mutex);
    const auto is_free = [&](const std::unique_ptr<Block>& block) {
      return block->is_free && block->bytes == bytes && block->stream == current_stream &&
             std::ranges::all_of(block->used, [](const EventPtr& event) { return event->done; });
    };
    auto found = std::ranges::find_if(blocks_, is_free);
    if (found == blocks_.end()) {
      blocks_.push_back(std::make_unique<Block>(Block{.memory = std::malloc(bytes + 1), .bytes = bytes}));
      found = blocks_.end() - 1;
      std::memset((*found)->memory, garbage, bytes);
    }
    auto& block = **found;
    block.is_free = false;
    block.stream = current_stream;
    block.others.clear();
    block.used.clear();
    return {block.memory, &block, &free_block, device()};
  }
  void copy_data(void* to, const void* from, std::size_t bytes) const override { std::memcpy(to, from, bytes); }

  static void record(const c10::DataPtr& pointer, StreamId stream) {
    const std::lock_guard lock(streams().mutex);
    ++streams().counts.records;
    static_cast<Block*>(pointer.get_context())->others.push_back(stream);
  }

 private:
  struct Block {
    void* memory = nullptr;
    std::size_t bytes = 0;
    StreamId stream = 0;
    bool is_free = false;
    std::vector<StreamId> others = {};  ///< recorded
    std::vector<EventPtr> used = {};    ///< the end of their work
  };

  static void free_block(void* context) {
    const std::lock_guard lock(streams().mutex);
    auto& block = *static_cast<Block*>(context);
    for (const auto stream : block.others) block.used.push_back(streams().record(stream));
    block.is_free = true;
  }

  std::vector<std::unique_ptr<Block>> blocks_;
};

/// Freed memory is overwritten and never given back, so that late copies from it are seen.
class PinnedMemory final : public c10::Allocator {
 public:
  c10::DataPtr allocate(std::size_t bytes) override {
    const std::lock_guard lock(streams().mutex);
    ++streams().counts.pinned_pieces;
    ++streams().counts.pinned_in_use;
    auto* const piece = new Piece{static_cast<char*>(std::malloc(bytes)), bytes};
    pieces_.push_back(piece);
    return {piece->memory, piece, &free_piece, c10::DeviceType::CPU};
  }
  void copy_data(void* to, const void* from, std::size_t bytes) const override { std::memcpy(to, from, bytes); }

  bool contains(const void* address) const { return find(address) != nullptr; }
  bool is_freed(const void* address) const {
    const auto* const piece = find(address);
    return piece != nullptr && piece->is_freed;
  }

 private:
  struct Piece {
    char* memory;
    std::size_t bytes;
    bool is_freed = false;
  };

  const Piece* find(const void* address) const {
    const std::lock_guard lock(streams().mutex);
    const auto* const byte = static_cast<const char*>(address);
    const auto found = std::ranges::find_if(
        pieces_, [&](const Piece* piece) { return byte >= piece->memory && byte < piece->memory + piece->bytes; });
    return found == pieces_.end() ? nullptr : *found;
  }
  static void free_piece(void* context) {
    const std::lock_guard lock(streams().mutex);
    auto& piece = *static_cast<Piece*>(context);
    std::memset(piece.memory, garbage, piece.bytes);
    piece.is_freed = true;
    --streams().counts.pinned_in_use;
  }

  std::vector<const Piece*> pieces_;
};

DeviceMemory& device_memory() {
  static auto* const memory = new DeviceMemory;
  return *memory;
}
PinnedMemory& pinned_memory() {
  static auto* const memory = new PinnedMemory;
  return *memory;
}

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return 1; }
  bool isPinnedPtr(const void* address) const override { return pinned_memory().contains(address); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory(); }
};

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return late_device::type; }
  Device exchangeDevice(Device) const override { return device(); }
  Device getDevice() const override { return device(); }
  void setDevice(Device) const override {}
  void uncheckedSetDevice(Device) const noexcept override {}
  DeviceIndex deviceCount() const noexcept override { return 1; }
  Stream getStream(Device) const override { return Stream(Stream::UNSAFE, device(), current_stream); }
  Stream getDefaultStream(Device) const override { return Stream(Stream::UNSAFE, device(), 0); }
  Stream getStreamFromGlobalPool(Device, bool) const override {
    const std::lock_guard lock(streams().mutex);
    return Stream(Stream::UNSAFE, device(), ++streams().next);
  }
  Stream exchangeStream(Stream stream) const override {
    return Stream(Stream::UNSAFE, device(), std::exchange(current_stream, stream.id()));
  }
  void record(void** event, const Stream& stream, DeviceIndex, c10::EventFlag) const override {
    if (*event == nullptr) *event = new EventPtr;
    *static_cast<EventPtr*>(*event) = streams().record(stream.id());
  }
  void block(void* event, const Stream& stream) const override {
    const std::lock_guard lock(streams().mutex);
    ++streams().counts.stream_waits;
    streams().push(stream.id(), [state = *static_cast<EventPtr*>(event)] { streams().drain_to(state); });
  }
  bool queryEvent(void* event) const override {
    const std::lock_guard lock(streams().mutex);
    return (*static_cast<EventPtr*>(event))->done;
  }
  void destroyEvent(void* event, DeviceIndex) const noexcept override { delete static_cast<EventPtr*>(event); }
  void synchronizeEvent(void* event) const override {
    const std::lock_guard lock(streams().mutex);
    thread_waits();
    streams().drain_to(*static_cast<EventPtr*>(event));
  }
  void synchronizeStream(const Stream& stream) const override {
    const std::lock_guard lock(streams().mutex);
    thread_waits();
    streams().drain(stream.id());
  }
  void recordDataPtrOnStream(const c10::DataPtr& pointer, const Stream& stream) const override {
    DeviceMemory::record(pointer, stream.id());
  }
};

at::Tensor empty(c10::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                 std::optional<Device>, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(size, &device_memory(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   dtype.value_or(at::kFloat), format);
}

at::Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>, std::optional<Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(
      size, stride, &device_memory(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), dtype.value_or(at::kFloat));
}

/// A view of the memory that the device's work uses: the CPU's.
at::Tensor on_cpu(const at::Tensor& tensor) {
  return at::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.strides(), at::dtype(tensor.scalar_type()));
}

/// The memory of device tensors is not kept alive, as on a real device.
at::Tensor& copy(at::Tensor& to, const at::Tensor& from, bool non_blocking) {
  if (from.numel() == 0) return to;
  const std::lock_guard lock(streams().mutex);
  const bool from_host = from.is_cpu(), to_host = to.is_cpu();
  const bool is_pinned = from_host && pinned_memory().contains(from.data_ptr());
  streams().push(current_stream, [to = on_cpu(to), from = on_cpu(from), is_pinned] {
    if (is_pinned && pinned_memory().is_freed(from.data_ptr())) ++streams().counts.lost_copies;
    to.copy_(from);
  });
  if (from_host) ++(is_pinned ? streams().counts.copies_from_pinned : streams().counts.copies_from_pageable);
  if (to_host || (from_host && !(is_pinned && non_blocking))) {
    thread_waits();
    streams().drain(current_stream);
  }
  return to;
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", &empty);
  library.impl("empty_strided", &empty_strided);
  library.impl("copy_", &copy);
  library.impl("as_strided", &at::native::as_strided_tensorimpl);
  library.impl("view", &at::native::view);
}

}  // namespace

void install() {
  static const bool installed = [] {
    c10::register_privateuse1_backend("late");
    at::RegisterPrivateUse1HooksInterface(new Hooks);
    static const c10::impl::DeviceGuardImplRegistrar registrar(type, new Guard);
    c10::SetAllocator(type, &device_memory());
    return true;
  }();
  static_cast<void>(installed);
}

c10::Device device() { return {type, 0}; }

void set_pool(Pool pool) {
  const std::lock_guard lock(streams().mutex);
  streams().pool = pool;
}

void finish() { streams().drain_all(); }

Counts counts() {
  const std::lock_guard lock(streams().mutex);
  auto all = streams().counts;
  all.waits_of_this_thread = waits_of_this_thread;
  return all;
}

}  // namespace muster::test::late_device
