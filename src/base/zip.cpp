#include "base/zip.hpp"

#include <algorithm>
#include <cstring>
#include <span>
#include <string_view>
#include <vector>

namespace muster::detail {
namespace {

constexpr std::uint64_t max_directory_bytes = 256 << 20;

template <class Number>
Number number(std::string_view bytes, std::size_t at) {
  Number value;
  std::memcpy(&value, bytes.substr(at, sizeof value).data(), sizeof value);
  return value;
}

class Reader {
 public:
  Reader(const File& file, bool may_repeat) : file_(file), may_repeat_(may_repeat) {}

  std::optional<std::map<std::string, ZipRecord>> records() {
    const auto directory = find_directory();
    if (!directory) return {};
    std::uint64_t at = 0;
    for (std::uint64_t i = 0; i < directory->count; ++i) at = take_record(*directory, at);
    check_no_overlap(directory->offset);
    return std::move(records_);
  }

 private:
  struct Directory {
    std::uint64_t offset = 0, count = 0;
    std::string bytes = {};
  };

  [[noreturn]] void refuse(const std::string& fact) const {
    throw Error(ExitCode::data, "reading " + file_.path().string(), fact, "Use another file, or make it anew");
  }

  std::string read(std::uint64_t offset, std::uint64_t bytes) const {
    if (offset > file_.size() || bytes > file_.size() - offset) refuse("its directory points outside the file");
    std::string content(bytes, '\0');
    file_.read_at(std::as_writable_bytes(std::span(content)), offset);
    return content;
  }

  /// Finds the directory by the end record, which must have no comment, and by the 64-bit end record if there is one.
  std::optional<Directory> find_directory() const {
    constexpr std::uint64_t end_bytes = 22, locator_bytes = 20, end64_bytes = 56;
    const auto size = file_.size();
    const auto end = size < end_bytes ? std::string() : read(size - end_bytes, end_bytes);
    if (!end.starts_with("PK\5\6")) return {};
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
    constexpr std::uint64_t entry_bytes = 46, local_bytes = 30, deflate = 8;
    const auto rest = std::string_view(directory.bytes).substr(at);
    if (rest.size() < entry_bytes || !rest.starts_with("PK\1\2")) refuse("its directory is damaged");
    const std::uint64_t name_bytes = number<std::uint16_t>(rest, 28), extra_bytes = number<std::uint16_t>(rest, 30),
                        all_bytes = entry_bytes + name_bytes + extra_bytes + number<std::uint16_t>(rest, 32);
    if (rest.size() < all_bytes) refuse("its directory is damaged");
    const std::string name(rest.substr(entry_bytes, name_bytes));
    std::uint64_t sizes[] = {number<std::uint32_t>(rest, 24), number<std::uint32_t>(rest, 20),
                             number<std::uint32_t>(rest, 42)};  // uncompressed size, compressed size, offset
    take_large(rest.substr(entry_bytes + name_bytes, extra_bytes), sizes);
    const bool encrypted = (number<std::uint16_t>(rest, 8) & 1) != 0;
    const auto method = number<std::uint16_t>(rest, 10);
    const auto local = read(sizes[2], local_bytes);
    if (!local.starts_with("PK\3\4")) refuse("there is no " + name + " where its directory says");
    const ZipRecord record{
        .offset = sizes[2] + local_bytes + number<std::uint16_t>(local, 26) + number<std::uint16_t>(local, 28),
        .bytes = sizes[1],
        .unpacked_bytes = sizes[0],
        .crc32 = number<std::uint32_t>(rest, 16),
        .stored = !encrypted && method == 0 && sizes[0] == sizes[1],
        .deflated = !encrypted && method == deflate};
    all_.push_back(record);
    if (!records_.insert_or_assign(name, record).second && !may_repeat_) refuse("it has two records called " + name);
    return at + all_bytes;
  }

  /// Replaces each number that is 0xffffffff, since it needs 64 bits, by the next number of the extra field.
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

  void check_no_overlap(std::uint64_t end) {
    std::ranges::sort(all_, {}, &ZipRecord::offset);
    for (std::size_t i = 0; i < all_.size(); ++i) {
      const auto stop = i + 1 < all_.size() ? all_[i + 1].offset : end;
      if (all_[i].offset > stop || all_[i].bytes > stop - all_[i].offset)
        refuse("its records overlap, or lie outside the file");
    }
  }

  const File& file_;
  const bool may_repeat_;
  std::map<std::string, ZipRecord> records_;
  std::vector<ZipRecord> all_;
};

}  // namespace

std::optional<std::map<std::string, ZipRecord>> read_zip_directory(const File& file, bool may_repeat) {
  return Reader(file, may_repeat).records();
}

}  // namespace muster::detail
