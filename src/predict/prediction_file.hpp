// An HDF5 file that all ranks write together: rank 0 lays it out, and each rank writes its own rows.
#pragma once

#include "base/file.hpp"
#include "muster/communicator.hpp"
#include "muster/dataset.hpp"

#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <string>

namespace muster::detail::predict {

class PredictionFile {
 public:
  /// Makes a file of `rows` rows under a temporary name beside `output`. Rank 0's destructor removes it unless
  /// put_in_place() has succeeded. `columns` is only used on rank 0. Collective; if rank 0 cannot make the file, the
  /// Error is the same on all ranks.
  PredictionFile(const Communicator& ranks, std::filesystem::path output, const Schema& columns, std::int64_t rows);
  /// Writes these rows to the file, as rows `first` and following.
  void write(const Batch& rows, std::int64_t first);
  /// Makes this rank's writes durable and closes the file.
  void finish();
  /// Renames the file to `output`, replacing a file of that name. Call it when finish() has returned on all ranks.
  /// Collective; an Error is the same on all ranks.
  void put_in_place();

 private:
  /// Removes the file when it is destroyed, even if the constructor of PredictionFile fails after making the file.
  struct TemporaryFile {
    TemporaryFile() = default;
    TemporaryFile(const TemporaryFile&) = delete;
    TemporaryFile& operator=(const TemporaryFile&) = delete;
    ~TemporaryFile();
    std::filesystem::path path = {};  ///< empty on all ranks but 0, and when the file is in place
  };

  const Communicator ranks_;
  const std::filesystem::path output_;
  TemporaryFile temporary_;
  std::map<std::string, std::uint64_t> offsets_;  ///< offset of each column in the file, in bytes
  std::optional<File> file_;
};

}  // namespace muster::detail::predict
