// A variable of which windows are read.
#pragma once

#include "base/file.hpp"
#include "data/sources/box_reader.hpp"
#include "data/sources/source.hpp"
#include "data/sources/window_shape.hpp"
#include "hdf5/handle.hpp"

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <deque>
#include <memory>
#include <span>
#include <string>
#include <vector>

namespace muster::detail::data {

struct OpenFile {
  std::string path;
  hdf5::Handle handle;
  File bytes;
};
/// A deque, since the addresses of files must stay valid when one is added.
using OpenFiles = std::deque<OpenFile>;

/// The coordinates of windows: the number of each of them along each dimension of the grid.
using WindowCoordinates = std::span<const std::vector<std::int64_t>>;

/// The windows from `least` to `most` along each dimension of the grid.
struct WindowRange {
  std::vector<std::int64_t> least, most;
};

/// Each dimension of a variable is one of the dimensions of the first variable.
class WindowVariable {
 public:
  /// `path`: "FILE:/NAME". The file is added to `files` if it is not there. `first`: the first variable; null if this
  /// is it. Throws an Error if their dimensions do not match.
  WindowVariable(const std::string& path, OpenFiles& files, ChunkDecoding& decoding, const WindowVariable* first);

  const std::string& name() const noexcept { return name_; }
  const std::string& shown() const noexcept { return array().shown; }
  const StoredArray& array() const noexcept { return reader_->array(); }
  const std::vector<std::string>& dimension_names() const noexcept { return names_; }
  /// For each of its dimensions: the number of that dimension among those of the first variable.
  const std::vector<std::size_t>& dimensions() const noexcept { return dimensions_; }
  /// The column that the windows make: its name, its type and the shape of a window.
  Column column(const WindowShape& shape) const;

  /// True if windows are read without decoding or converting other values.
  bool reads_directly(const WindowShape& shape) const;
  /// The memory for all values as stored, in whole chunks, in bytes.
  double all_bytes() const;
  /// The memory for all chunks that neighbouring windows touch: `tile` of them along each dimension of the grid.
  double bytes_of_tile(const WindowShape& shape, const std::vector<std::int64_t>& tile) const;
  /// The array through which HDF5 reads the values; null if HDF5 does not read them.
  LibraryArray* library() noexcept { return reader_->library(); }
  hid_t file() const noexcept { return file_->handle.get(); }

  /// The windows in a tensor [windows, …]. Values beyond the ends of the variable are NaN, or 0 in a column without
  /// NaN.
  at::Tensor read(WindowCoordinates windows, const WindowShape& shape, TensorPool& pool) const;
  /// Prepares to read all windows of these ranges.
  void expect(std::span<const WindowRange> ranges, const WindowShape& shape, Ahead how) const;

 private:
  void match(const WindowVariable& first);
  /// The part of a window that is inside of the variable; Box::into is null.
  Box box_of(const std::vector<std::int64_t>& window, const WindowShape& shape) const;
  /// Moves what was read of a window that is partly outside to its place, and fills the rest.
  void pad(at::Tensor window, const Box& box, const std::vector<std::int64_t>& coordinates,
           const WindowShape& shape) const;

  std::string name_;
  std::string dataset_;  ///< the name of the dataset with its file, without a field
  const OpenFile* file_ = nullptr;
  std::vector<std::string> names_;
  std::vector<std::size_t> dimensions_;
  std::unique_ptr<BoxReader> reader_;
};

}  // namespace muster::detail::data
