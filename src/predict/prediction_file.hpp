// An HDF5 file that all ranks write: rank 0 lays it out, and each rank writes its own rows into it.
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
  /// Makes a file of `rows` rows under a temporary name beside `output`. The destructor removes it unless it has been
  /// put in place. `columns` is used on rank 0 only. Collective; an Error is the same on all ranks.
  PredictionFile(const Communicator& ranks, std::filesystem::path output, const Schema& columns, std::int64_t rows);
  /// Writes rows to the file, from row `first` on.
  void write(const Batch& rows, std::int64_t first);
  /// Makes this rank's writes durable.
  void finish();
  /// Gives the file the name `output`, replacing a file of that name. Call it after all ranks have finished.
  /// Collective; an Error is the same on all ranks.
  void put_in_place();

 private:
  /// Removes its file on destruction, also if the constructor of PredictionFile fails after it has made the file.
  struct TemporaryFile {
    TemporaryFile() = default;
    TemporaryFile(const TemporaryFile&) = delete;
    TemporaryFile& operator=(const TemporaryFile&) = delete;
    ~TemporaryFile();
    std::filesystem::path path = {};  ///< empty on all ranks but 0, and once the file is in place
  };

  const Communicator ranks_;
  const std::filesystem::path output_;
  TemporaryFile temporary_;
  std::map<std::string, std::uint64_t> offsets_;  ///< file offset of each column in bytes
  std::optional<File> file_;
};

}  // namespace muster::detail::predict
