#include "live/memory.hpp"

#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <utility>

namespace muster::detail::live {
namespace {

/// True if the fields lie inside of their arrays, and their blocks inside of the slots.
bool is_sound(const live_layout& layout, std::int64_t slot_bytes) {
  const auto is_name = [](const auto& name) { return ::memchr(name, 0, sizeof name) != nullptr; };
  const auto is_inside = [&](const live_field& field) {
    if (!is_name(field.name) || field.type < 0 || field.type > MUSTER_LIVE_UINT8 || field.dims < 1 ||
        field.dims > MUSTER_LIVE_MAX_DIMS || field.at < 0)
      return false;
    std::int64_t bytes = live_type_bytes(field.type), all = bytes;
    for (int d = 0; d < field.dims; ++d)
      if (field.local[d] < 0 || field.offset[d] < 0 || field.offset[d] > field.global[d] - field.local[d] ||
          __builtin_mul_overflow(all, field.global[d], &all) || __builtin_mul_overflow(bytes, field.local[d], &bytes))
        return false;
    return field.at <= slot_bytes && bytes <= slot_bytes - static_cast<std::int64_t>(sizeof(live_sample)) - field.at;
  };
  constexpr int most = MUSTER_LIVE_MAX_FIELDS;
  return layout.field_count > 0 && layout.field_count <= most && layout.parameter_count >= 0 &&
         layout.parameter_count <= most && std::all_of(layout.fields, layout.fields + layout.field_count, is_inside) &&
         std::all_of(layout.parameters, layout.parameters + layout.parameter_count,
                     [&](const live_parameter& parameter) { return is_name(parameter.name); });
}

}  // namespace

bool is_sound(const live_ring& ring, std::int64_t bytes, int trainers) {
  constexpr std::int64_t line = sizeof(live_sample);
  if (ring.slots < 1 || ring.slots > bytes / 8 || ring.slot_bytes < line || ring.slot_bytes > bytes / ring.slots)
    return false;
  live_ring placed{};
  live_place(&placed, ring.slots, ring.slot_bytes, trainers);
  return placed.file_bytes == bytes && ring.words_at == placed.words_at && ring.trainers_at == placed.trainers_at &&
         ring.data_at == placed.data_at && is_sound(ring.layout, ring.slot_bytes);
}

std::vector<LiveColumn> columns_of(const live_layout& layout) {
  std::vector<LiveColumn> columns;
  for (int f = 0; f < layout.field_count; ++f) {
    const auto& field = layout.fields[f];
    columns.push_back({.name = field.name,
                       .type = field.type,
                       .shape = {field.global, field.global + field.dims},
                       .bytes = live_volume(field.dims, field.global) * live_type_bytes(field.type)});
  }
  for (int p = 0; p < layout.parameter_count; ++p) columns.push_back({.name = layout.parameters[p].name});
  return columns;
}

std::int64_t sample_bytes(const std::vector<LiveColumn>& columns) {
  std::int64_t bytes = 0;
  for (const auto& column : columns) bytes += column.bytes;
  return bytes;
}

template <class T>
std::shared_ptr<T> map_file(std::int64_t size, int file) {
  const auto bytes = static_cast<std::size_t>(size);
  const int flags = file < 0 ? MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE : MAP_SHARED;
  void* const memory = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, flags, file, 0);
  if (memory == MAP_FAILED) return nullptr;
  return {static_cast<T*>(memory), [bytes](T* at) { ::munmap(at, bytes); }};
}
template std::shared_ptr<std::byte> map_file(std::int64_t, int);
template std::shared_ptr<live_ring> map_file(std::int64_t, int);

std::shared_ptr<std::byte> make_memory(std::vector<LiveColumn>& columns, std::int64_t capacity) {
  auto memory = map_file<std::byte>(capacity * sample_bytes(columns), -1);
  auto* at = memory.get();
  // Values of 8 bytes first, so that all are aligned.
  for (const std::int64_t size : {8, 4, 1})
    for (auto& column : columns)
      if (at != nullptr && live_type_bytes(column.type) == size)
        column.data = std::exchange(at, at + capacity * column.bytes);
  return memory;
}

void copy_block(const live_layout& layout, const char* block, const std::vector<LiveColumn>& columns,
                std::int64_t slot) {
  const auto place = [&](int column) {
    const auto& to = columns[static_cast<std::size_t>(column)];
    return reinterpret_cast<char*>(to.data + slot * to.bytes);
  };
  for (int f = 0; f < layout.field_count; ++f) {
    const auto& field = layout.fields[f];
    const auto bytes = live_type_bytes(field.type);
    std::int64_t first = 0;
    for (int d = 0; d < field.dims; ++d) first = first * field.global[d] + field.offset[d];
    live_copy_box(field.dims, bytes, field.local, block + field.at, field.local, place(f) + first * bytes,
                  field.global);
  }
  for (int p = 0; p < layout.parameter_count; ++p)
    std::memcpy(place(layout.field_count + p), &layout.parameters[p].value, sizeof(double));
}

}  // namespace muster::detail::live
