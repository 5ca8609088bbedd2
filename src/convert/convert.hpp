// Shared by all conversions: reads input files and their columns, and writes the columns to datasets.
#pragma once

#include "hdf5/handle.hpp"
#include "muster/convert.hpp"
#include "muster/error.hpp"

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

namespace muster::detail::convert {

class Hdf5Rows;
class InputFile;
using Progress = decltype(ConvertOptions::progress);

/// Where the bytes of an InputFile come from. The functions do what InputFile's of the same names do, and throw errors
/// with file.reject().
class InputStream {
 public:
  virtual ~InputStream() = default;
  virtual std::size_t read_some(std::span<std::byte> into, const InputFile& file) = 0;
  virtual void expect_remaining(std::uint64_t bytes, const InputFile& file) const = 0;
};

/// A file that is read once, in order. Errors are ExitCode::data and name it.
class InputFile {
 public:
  /// A file on the disk, gzipped or not. `progress`: ConvertOptions::progress, called with 0, 0 before each piece that
  /// is read.
  explicit InputFile(const std::filesystem::path& path, Progress progress = {});
  /// Other bytes. `shown`: their name in errors.
  InputFile(std::string shown, std::unique_ptr<InputStream> stream, Progress progress = {});

  /// Reads up to `into.size()` bytes and returns their number. It is smaller only at the end of the file; a gzipped
  /// file has then been verified.
  std::size_t read_some(std::span<std::byte> into);
  /// Reads exactly `into.size()` bytes. Throws an Error if the file ends before.
  void read(std::span<std::byte> into);
  void skip(std::uint64_t bytes);
  /// Throws an Error if more bytes follow.
  void expect_end();
  /// Throws an Error if the file's size shows that not exactly `bytes` bytes can follow. The size of a gzipped file can
  /// only show that too few bytes follow (most_deflated). Call this before allocating the memory.
  void expect_remaining(std::uint64_t bytes) const;
  /// Throws an Error unless `bytes`, the number that the file announces, equals `left`, the number that follows.
  void expect_exactly(std::uint64_t bytes, std::uint64_t left) const;

  const std::string& shown() const noexcept { return shown_; }
  [[noreturn]] void reject(const std::string& fact, const std::string& remedy = {}) const {
    throw Error(ExitCode::data, "reading " + shown_, fact, remedy);
  }

 private:
  std::string shown_;
  Progress progress_;
  std::unique_ptr<InputStream> stream_;
};

/// A number type in an input file. Kinds are NumPy's: b boolean, i and u integers, f floating point, c complex.
struct NumberType {
  char kind = 'u';
  std::size_t size = 1;
  bool big_endian = false;

  /// The HDF5 type, in the byte order of the input file.
  hdf5::Handle file_type() const;
  /// The HDF5 type, in this machine's byte order.
  hdf5::Handle memory_type() const;
};

/// The largest factor by which deflate makes bytes smaller.
inline constexpr std::uint64_t most_deflated = 1032;

/// How many indices at the beginning are consecutive.
std::size_t consecutive(std::span<const std::int64_t> indices) noexcept;

/// A column of samples: still in its file, or held in memory.
class InputColumn {
 public:
  /// A column whose values follow in `file`. `shape` begins with the number of samples. Throws an Error for a shape
  /// that no column can have.
  InputColumn(const NumberType& type, const std::vector<std::uint64_t>& shape, InputFile file);
  /// A column whose values are in memory.
  InputColumn(const NumberType& type, const std::vector<std::uint64_t>& shape, std::string shown,
              std::vector<std::byte> values);
  /// A column of an HDF5 file.
  explicit InputColumn(std::unique_ptr<Hdf5Rows> rows);
  InputColumn(InputColumn&&) noexcept;
  ~InputColumn();

  /// The type of the values that take() gives, and the same type in this machine's byte order.
  hid_t file_type() const noexcept { return file_type_.get(); }
  hid_t memory_type() const noexcept { return memory_type_.get(); }
  /// The dataset with the column's attributes; H5I_INVALID_HID if the column is not from an HDF5 file.
  hid_t dataset() const noexcept;
  bool holds_whole_numbers() const noexcept { return holds_whole_numbers_; }
  std::size_t value_bytes() const noexcept { return value_bytes_; }
  const std::vector<std::int64_t>& shape() const noexcept { return shape_; }
  std::int64_t samples() const noexcept { return shape_.front(); }
  std::size_t sample_bytes() const noexcept { return sample_bytes_; }
  const std::string& shown() const noexcept { return shown_; }

  /// True if take() may be called with samples in any order, which is slower than in ascending order.
  bool takes_any_order() const noexcept { return !file_; }
  /// Reads all values into memory. After that take() may be called with samples in any order.
  void load();
  /// Copies the samples with the indices `samples` to `into`, one after the other. Unless takes_any_order(), the
  /// indices must ascend, over all calls. Calls `between` from time to time.
  void take(std::span<const std::int64_t> samples, std::span<std::byte> into, const std::function<void()>& between);
  /// The bytes of one sample. Call it only after load().
  std::string sample(std::int64_t index) const;
  /// Skips the samples that are left and checks that the file ends there.
  void finish();

 private:
  void take_from_memory(std::span<const std::int64_t> samples, std::span<std::byte> into) const;

  hdf5::Handle file_type_, memory_type_;
  bool holds_whole_numbers_ = false;
  std::size_t value_bytes_ = 0;
  std::vector<std::int64_t> shape_;
  std::size_t sample_bytes_ = 0;
  std::string shown_;
  std::optional<InputFile> file_;
  std::int64_t next_ = 0;  ///< index of the next sample in the file
  std::unique_ptr<Hdf5Rows> rows_;
  std::vector<std::byte> values_;
};

/// The names of the columns that the options give. If they give none: x for a single column, otherwise x and y.
std::vector<std::string> names_of(std::size_t columns, const ConvertOptions& options);
/// Throws an Error if the files, the names or the options are wrong, before anything is read. `columns`: number of
/// columns that the inputs will give.
void check_conversion(const std::vector<std::filesystem::path>& inputs, std::size_t columns,
                      const std::vector<std::string>& names, const std::filesystem::path& output,
                      const ConvertOptions& options);
/// Writes the columns under these names. Returns the files written. `samples`: writes only so many samples from the
/// beginning, in the order of the input; only for columns of an HDF5 file.
std::vector<std::filesystem::path> convert_columns(std::vector<InputColumn> columns,
                                                   const std::vector<std::string>& names,
                                                   const std::filesystem::path& output, const ConvertOptions& options,
                                                   std::optional<std::int64_t> samples = {});
/// Copies the columns of an HDF5 file or a Zarr store, "PATH" or "PATH:/group".
std::vector<std::filesystem::path> copy_columns(const std::filesystem::path& input, const std::filesystem::path& output,
                                                const ConvertOptions& options,
                                                std::optional<std::int64_t> samples = {});

}  // namespace muster::detail::convert
