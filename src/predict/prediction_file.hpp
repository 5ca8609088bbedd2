// An HDF5 file that all ranks write: one lays it out, and each writes its rows where they belong.
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
  /// A file of that many rows under a temporary name beside `output`, removed unless it is published. `columns` matters
  /// on rank 0. Collective; an Error is the same on all ranks, as in publish().
  PredictionFile(const Communicator& ranks, std::filesystem::path output, const Schema& columns, std::int64_t rows);
  /// The rows from `first` on.
  void write(const Batch& rows, std::int64_t first);
  /// What this rank has written is on the disk.
  void finish();
  /// All ranks have finished: it takes its name, replacing what has it. Collective.
  void publish();

 private:
  /// Removes a file, also where the constructor fails after it was made.
  struct Temporary {
    Temporary() = default;
    Temporary(const Temporary&) = delete;
    Temporary& operator=(const Temporary&) = delete;
    ~Temporary();
    std::filesystem::path path = {};  ///< empty on other ranks than 0, and once it has its name
  };

  const Communicator ranks_;
  const std::filesystem::path output_;
  Temporary temporary_;
  std::map<std::string, std::uint64_t> offsets_;
  std::optional<File> file_;
};

}  // namespace muster::detail::predict
