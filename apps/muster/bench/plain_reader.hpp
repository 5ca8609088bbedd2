// The least work of reading a dataset: what a plain loop does.
#pragma once

#include <muster/dataset.hpp>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace muster::bench {

/// A dataset and the part of it that a pass reads.
struct DatasetPlan {
  std::string path;  ///< "FILE.h5[:/group]"
  Schema columns;
  std::vector<std::int64_t> offsets = {};  ///< of the columns in the file; empty unless all are contiguous
  std::int64_t count = 0;                  ///< of all samples
  std::int64_t samples = 0;                ///< of those that a pass reads
  std::int64_t batch = 0;
  std::int64_t sample_bytes = 0;

  std::vector<std::string> names() const;
};

/// `most_bytes`: a pass ends after about so many.
DatasetPlan plan_of(const std::string& path, std::int64_t batch, std::int64_t most_bytes);

/// Bytes of one value of a sample of the column, all dimensions together.
std::int64_t bytes_of(const Column& column);

/// One pass: of contiguous columns a loop of pread into tensors of the batches; of others in the order of the file,
/// with each chunk decoded once.
class PlainReader {
 public:
  /// Opens the file. `shuffle`: in a random order, which only contiguous columns have.
  PlainReader(const DatasetPlan& plan, bool shuffle);
  /// Reads once.
  void read() const { read_(); }

  /// The candidate's name and what it does.
  static std::string name(const DatasetPlan& plan);
  static std::string description(const DatasetPlan& plan);

 private:
  std::function<void()> read_;
};

}  // namespace muster::bench
