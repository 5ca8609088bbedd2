// What the sources of files have in common: they open their files at the first call that needs them, compare them, and
// divide the memory of the dataset.
#pragma once

#include "base/file.hpp"
#include "data/sources/chunk_reader.hpp"
#include "data/sources/library_array.hpp"
#include "data/sources/source.hpp"
#include "hdf5/file.hpp"

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

namespace muster::detail::data {

/// A file with some of a dataset's samples.
struct DataFile : hdf5::GroupPath {
  using GroupPath::GroupPath;

  std::int64_t first = 0;  ///< its first sample in the dataset
  std::optional<File> bytes;
  hdf5::Handle handle;  ///< none if no column needs HDF5
};

/// An array that is read block by block.
struct ArrayInBlocks {
  LibraryArray* library;  ///< null if HDF5 does not read it
  hid_t file;
  double block_bytes;  ///< of its part of a block
  std::size_t slots;   ///< see LibraryArray::keep_chunks()
};

class FileSource : public Source {
 public:
  std::int64_t count() final;
  const Schema& schema() final;
  Blocks blocks() final;
  NodeChunks* node_chunks() final;
  void end_threads() final;
  DatasetFingerprint fingerprint() final;
  /// "a.h5 and 2 more".
  std::string shown() const override;
  std::vector<std::string> files() const final;

 protected:
  /// `paths`: "FILE" or "FILE:/NAME".
  FileSource(std::vector<std::string> paths, std::int64_t cache_bytes);

  /// Throws an Error if there is no file. Raises this process's limit of open files if there are many.
  void prepare_to_open() const;
  void ensure_open();
  /// Adds an opened file, whose address must not change. Throws an Error (ExitCode::data) that names the first
  /// difference if its columns are not those of the first file, or if there are too many samples to be counted.
  void add_file(DataFile& file, const Schema& schema, std::int64_t samples);

  /// Sets memory aside to keep an array whole; false if it does not fit. `library`: null if HDF5 does not read it.
  bool keep_whole(LibraryArray* library, double bytes);
  /// Chooses how many lanes of blocks of `block_bytes` the memory that is left has room for, and whether chunks are
  /// read past the page cache.
  void choose_lanes(double block_bytes);
  /// Gives the arrays that HDF5 reads their part of `bytes`, by the sizes of their blocks.
  void keep_chunks(std::span<const ArrayInBlocks> arrays, double bytes);

  const std::vector<std::string> paths_;
  std::unique_ptr<ChunkDecoding> decoding_;
  std::vector<const File*> open_files_;  ///< without folders of Zarr, which are many files each
  std::int64_t count_ = 0;
  Schema schema_;
  Blocks blocks_;
  double memory_left_ = 0;  ///< bytes that no array has got
  TensorPool pool_;

 private:
  /// Opens and checks the files, which sets the members above, and drops what a failed attempt has opened.
  virtual void open_all() = 0;
  /// "chunks of 27 samples".
  virtual std::string block_text() const;

  const std::int64_t cache_bytes_;
  std::once_flag opened_;
};

}  // namespace muster::detail::data
