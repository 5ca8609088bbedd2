#include "weights/archive.hpp"

#include "checkpoint/files/pieces.hpp"
#include "weights/weights_file.hpp"

#include <algorithm>
#include <array>
#include <cstring>
#include <vector>

namespace muster::detail::weights {
namespace {

constexpr std::uint64_t max_directory_bytes = 64 << 20;

template <class Number>
Number number(std::string_view bytes, std::size_t at) {
  Number value;
  std::memcpy(&value, bytes.substr(at, sizeof value).data(), sizeof value);
  return value;
}

}  // namespace

Archive::Archive(const std::filesystem::path& path) : file_(path, File::Mode::read) {
  const auto directory = find_directory();
  std::uint64_t at = 0;
  for (std::uint64_t i = 0; i < directory.count; ++i) at = take_record(directory, at);
  check_no_overlap(directory.offset);
  has_sums_ = std::ranges::any_of(records_, [](const auto& record) { return record.second.crc32 != 0; });
}

std::string Archive::folder_of(const std::string& name) const {
  for (const auto& [path, record] : records_)
    if (path.size() > name.size() && path.ends_with("/" + name) && path.find('/') == path.size() - name.size() - 1)
      return path.substr(0, path.size() - name.size());
  return {};
}

void Archive::check_stored() const {
  for (const auto& [name, record] : records_)
    if (!record.stored) refuse("its " + name + " is packed or encrypted, which torch never does");
}

void Archive::check_sums() const {
  for (const auto& [name, record] : records_)
    if (record.stored) values(name, at::kByte, static_cast<std::int64_t>(record.bytes));
}

std::string Archive::text(const std::string& name, std::uint64_t most) const {
  const auto& record = find(name);
  if (record.bytes > most) refuse("its " + name + " is absurdly large");
  std::string content(record.bytes, '\0');
  file_.read_at(std::as_writable_bytes(std::span(content)), record.offset);
  check(name, std::as_bytes(std::span(content)));
  return content;
}

at::Tensor Archive::values(const std::string& name, at::ScalarType type, std::int64_t count) const {
  const auto stored =
      read_values(file_, find(name).offset, at::kByte, std::array{static_cast<std::int64_t>(bytes_in(name))});
  check(name, {static_cast<const std::byte*>(stored.const_data_ptr()), stored.nbytes()});
  if (type == at::kBool) return stored.ne(0);
  return count == 0 ? stored.to(type) : stored.view(type);
}

void Archive::refuse(const std::string& fact, const std::string& remedy) const {
  throw_unreadable(file_.path(), fact, remedy);
}

std::string Archive::read(std::uint64_t offset, std::uint64_t bytes) const {
  if (offset > file_.size() || bytes > file_.size() - offset) refuse("its directory points outside the file");
  std::string content(bytes, '\0');
  file_.read_at(std::as_writable_bytes(std::span(content)), offset);
  return content;
}

/// Finds the directory by the end record, which must have no comment, and by the 64-bit end record if there is one.
Archive::Directory Archive::find_directory() const {
  constexpr std::uint64_t end_bytes = 22, locator_bytes = 20, end64_bytes = 56;
  const auto size = file_.size();
  const auto end = size < end_bytes ? std::string() : read(size - end_bytes, end_bytes);
  if (size == 0) refuse("it has no bytes");
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
std::uint64_t Archive::take_record(const Directory& directory, std::uint64_t at) {
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
void Archive::take_large(std::string_view extra, std::span<std::uint64_t> sizes) const {
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

void Archive::check_no_overlap(std::uint64_t end) const {
  std::vector<Record> sorted;
  for (const auto& [name, record] : records_) sorted.push_back(record);
  std::ranges::sort(sorted, {}, &Record::offset);
  for (std::size_t i = 0; i < sorted.size(); ++i) {
    const auto stop = i + 1 < sorted.size() ? sorted[i + 1].offset : end;
    if (sorted[i].offset > stop || sorted[i].bytes > stop - sorted[i].offset)
      refuse("its records overlap, or lie outside the file");
  }
}

const Archive::Record& Archive::find(const std::string& name) const {
  const auto at = records_.find(name);
  if (at == records_.end()) refuse("there is no " + name + " in it");
  return at->second;
}

void Archive::check(const std::string& name, std::span<const std::byte> bytes) const {
  if (has_sums_ && detail::checkpoint::crc32(bytes) != find(name).crc32)
    refuse("its " + name + " is damaged: its checksum is wrong");
}

}  // namespace muster::detail::weights
