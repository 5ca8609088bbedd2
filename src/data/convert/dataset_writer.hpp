// Writes one dataset file so that it is there whole or not at all.
#pragma once

#include "hdf5/handle.hpp"

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <optional>
#include <span>
#include <string>
#include <vector>

namespace muster::detail::data {

/// Columns one after the other, each sample by sample; then finish() and publish(). Destroyed before that, it removes
/// what it wrote. Several files that belong together are all finished before the first is published. Errors are
/// ExitCode::retry: HDF5 may close a file without complaint after a write has failed, so each write counts.
class DatasetWriter {
 public:
  /// Begins under a temporary name beside `output`. `aligned`: columns start at pages, for reading without HDF5.
  DatasetWriter(std::filesystem::path output, bool aligned);
  DatasetWriter(const DatasetWriter&) = delete;
  DatasetWriter& operator=(const DatasetWriter&) = delete;
  ~DatasetWriter();

  /// A new column of that shape, samples first, and HDF5 type: contiguous, or in chunks of so many samples, deflated.
  void begin_column(const std::string& name, hid_t stored, const std::vector<std::int64_t>& shape,
                    std::optional<std::int64_t> chunk, std::optional<int> compress);
  /// The next `count` samples, their values of type `spelled`; in a chunked column whole chunks, but for the last call.
  void write(std::span<const std::byte> values, std::int64_t count, hid_t spelled);
  void end_column();

  /// Everything is on the disk, under the temporary name.
  void finish();
  /// It takes its name, replacing what has it.
  void publish();

  const std::filesystem::path& output() const noexcept { return output_; }

 private:
  std::string doing() const { return "writing " + output_.string(); }
  std::int64_t check(std::int64_t status) const { return hdf5::check(status, doing(), ExitCode::retry); }

  std::filesystem::path output_;
  std::filesystem::path temporary_;  ///< empty once it has its name
  hdf5::Handle file_;
  hdf5::Handle column_;
  std::int64_t next_ = 0;  ///< the sample of the column that comes next
};

}  // namespace muster::detail::data
