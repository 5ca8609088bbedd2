// What all conversions share: files as they are read, columns of numbers in them, the way from columns to datasets.
#pragma once

#include "hdf5/handle.hpp"
#include "muster/convert.hpp"

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

struct gzFile_s;

namespace muster::detail::data {

/// A file that is read once, in order, gzipped or not. Errors are ExitCode::data and name it.
class InputFile {
 public:
  explicit InputFile(const std::filesystem::path& path);

  /// As many bytes as there are, `into.size()` at the most; fewer only at the end, which has then been verified.
  std::size_t read_some(std::span<std::byte> into);
  /// Exactly that many; an Error if the file ends before.
  void read(std::span<std::byte> into);
  void skip(std::uint64_t bytes);
  /// An Error if anything follows.
  void expect_end();
  /// An Error if so many bytes (and no more) cannot follow, as far as the file's size tells: exactly for a plain file,
  /// by the limit of deflate for a gzipped one. Allocate after asking this.
  void expect_remaining(std::uint64_t bytes) const;

  std::string shown() const { return path_.string(); }
  [[noreturn]] void fail(const std::string& fact, const std::string& remedy = {}) const;

 private:
  std::filesystem::path path_;
  std::optional<std::uint64_t> size_;  ///< on the disk; none for what is not a regular file
  std::unique_ptr<gzFile_s, int (*)(gzFile_s*)> file_;
};

/// How a file spells a number. Kinds are NumPy's: b boolean, i and u integers, f floating point, c complex.
struct NumberType {
  char kind = 'u';
  std::size_t size = 1;
  bool big_endian = false;

  /// That type in HDF5, with that byte order.
  hdf5::Handle spelled() const;
  /// The same in this machine's byte order.
  hdf5::Handle native() const;
};

/// A column of samples: still in its file, or held in memory.
class InputColumn {
 public:
  /// `shape` as the file gives it, samples first; the values follow in `file`. Refuses what cannot be a column.
  InputColumn(NumberType type, const std::vector<std::uint64_t>& shape, InputFile file);
  InputColumn(NumberType type, const std::vector<std::uint64_t>& shape, std::string shown,
              std::vector<std::byte> values);

  const NumberType& type() const noexcept { return type_; }
  const std::vector<std::int64_t>& shape() const noexcept { return shape_; }
  std::int64_t samples() const noexcept { return shape_.front(); }
  std::size_t sample_bytes() const noexcept { return sample_bytes_; }
  const std::string& shown() const noexcept { return shown_; }

  /// Reads everything into memory; then `take` may be called with samples in any order.
  void load();
  /// Copies those samples one after the other. From a file their numbers must ascend, over all calls.
  void take(std::span<const std::int64_t> samples, std::span<std::byte> into);
  /// The bytes of one sample. After load().
  std::string sample(std::int64_t index) const;
  /// Reads what is left and checks that the file ends there.
  void finish();

 private:
  NumberType type_;
  std::vector<std::int64_t> shape_;
  std::size_t sample_bytes_ = 0;
  std::string shown_;
  std::optional<InputFile> file_;
  std::int64_t next_ = 0;  ///< the sample that the file gives next
  std::vector<std::byte> values_;
};

/// Refuses what is wrong with the files or the options before anything is read. `columns`: how many there will be.
void check_conversion(const std::vector<std::filesystem::path>& inputs, std::size_t columns,
                      const std::filesystem::path& output, const ConvertOptions& options);
/// Writes the columns under the names in the options.
std::vector<std::filesystem::path> convert_columns(std::vector<InputColumn> columns,
                                                   const std::filesystem::path& output, const ConvertOptions& options);

}  // namespace muster::detail::data
