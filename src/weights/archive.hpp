// A zip archive of torch, for reading: torch.save(), torch.jit.save() and torch.export.save() write such archives. Only
// torch.jit.save() compresses records, and only records of code. libtorch's own reader trusts the archives; this one
// does not.
#pragma once

#include "base/file.hpp"
#include "base/zip.hpp"

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <filesystem>
#include <map>
#include <span>
#include <string>
#include <string_view>

namespace muster::detail::weights {

/// An archive with a checked directory: its records lie inside the file and do not overlap. So together they are no
/// larger than the file. All functions throw an Error (ExitCode::data) that names the file if it is damaged.
class Archive {
 public:
  using Record = ZipRecord;

  explicit Archive(const std::filesystem::path& path);

  /// The records by name.
  const std::map<std::string, Record>& records() const noexcept { return records_; }
  bool contains(const std::string& name) const { return records_.contains(name); }
  /// True if the record is neither compressed nor encrypted.
  bool is_stored(const std::string& name) const { return find(name).stored; }

  const std::filesystem::path& path() const noexcept { return file_.path(); }
  /// Returns the archive's own name, with a slash: the topmost folder, in which `name` lies; empty if no such record is
  /// there.
  std::string folder_of(const std::string& name) const;

  /// Refuses an archive with compressed or encrypted records, which torch.save() and torch.export.save() never write.
  void check_stored() const;
  /// Verifies the checksums of the records that are neither compressed nor encrypted; the tensors are among them. If
  /// the archive has no checksums, it only reads the records.
  void check_sums() const;

  std::uint64_t bytes_in(const std::string& name) const { return find(name).bytes; }

  /// Returns the record, verified. Refuses one of more than `most` bytes.
  std::string text(const std::string& name, std::uint64_t most) const;
  /// Returns the record, verified, as a one-dimensional tensor. The caller has checked that it holds `count` values.
  at::Tensor values(const std::string& name, at::ScalarType type, std::int64_t count) const;

  [[noreturn]] void refuse(const std::string& fact,
                           const std::string& remedy = "Use another file, or make it anew") const;

 private:
  const Record& find(const std::string& name) const;
  void check(const std::string& name, std::span<const std::byte> bytes) const;

  File file_;
  std::map<std::string, Record> records_;
  bool has_sums_ = true;  ///< false if all checksums are 0: torch.serialization.set_crc32_options(False)
};

}  // namespace muster::detail::weights
