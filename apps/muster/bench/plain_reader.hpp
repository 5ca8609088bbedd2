// The least work that reading a dataset can be: a plain loop.
#pragma once

#include <muster/dataset.hpp>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace muster::bench {

/// A dataset, and which part of it a pass reads.
struct DatasetPlan {
  std::string path;  ///< "FILE.h5[:/group]"
  Schema columns;
  std::vector<std::int64_t> offsets = {};  ///< where each column begins, in bytes; empty unless all are contiguous
  std::int64_t count = 0;                  ///< number of samples in the dataset
  std::int64_t samples = 0;                ///< number of samples that a pass reads
  std::int64_t batch = 0;
  std::int64_t sample_bytes = 0;

  std::vector<std::string> names() const;
};

/// `most_bytes`: a pass ends after about this many bytes.
DatasetPlan plan_of(const std::string& path, std::int64_t batch, std::int64_t most_bytes);

/// Returns the bytes that one sample takes in this column.
std::int64_t bytes_of(const Column& column);

/// Reads the part of a dataset that a plan names. If all columns are contiguous, reads them by pread() into tensors of
/// batches; otherwise in the order of the file, so that each chunk is decoded once.
class PlainReader {
 public:
  /// Opens the file. `shuffle`: reads in a random order, which works for contiguous columns only.
  PlainReader(const DatasetPlan& plan, bool shuffle);
  /// Makes one pass.
  void read() const { read_(); }

  /// Return the candidate's name, and a text that says how it reads.
  static std::string name(const DatasetPlan& plan);
  static std::string description(const DatasetPlan& plan);

 private:
  std::function<void()> read_;
};

}  // namespace muster::bench
