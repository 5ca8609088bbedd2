#include "weights/archive.hpp"

#include "checkpoint/files/pieces.hpp"
#include "weights/weights_file.hpp"

#include <algorithm>
#include <array>
#include <utility>

namespace muster::detail::weights {

Archive::Archive(const std::filesystem::path& path) : file_(path, File::Mode::read) {
  auto records = read_zip_directory(file_);
  if (file_.size() == 0) refuse("it has no bytes");
  if (!records)
    refuse("it is not a torch archive, or it is truncated",
           "If torch before 1.6 wrote it, load and save it with a newer version");
  records_ = std::move(*records);
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
    if (!record.stored)
      refuse("its " + name + " is compressed or encrypted, which torch does to TorchScript's code alone");
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
