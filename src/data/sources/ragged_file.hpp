// One file of samples of different length.
#pragma once

#include "data/sources/chunk_reader.hpp"
#include "data/sources/file_source.hpp"
#include "data/sources/hdf5_column.hpp"
#include "muster/dataset.hpp"

#include <cstdint>
#include <vector>

namespace muster::detail::data {

/// The values of its samples lie one after the other; sample i has the values offsets[i] … offsets[i + 1] − 1.
struct RaggedFile : DataFile {
  using DataFile::DataFile;

  /// Opens and checks the file. `decoding` outlives it. Throws an Error (ExitCode::data) if the columns do not go
  /// together, ExitCode::usage if they cannot hold RaggedOptions::padding.
  void open(const RaggedOptions& options, ChunkDecoding& decoding);

  std::int64_t samples() const noexcept { return static_cast<std::int64_t>(offsets.size()) - 1; }
  /// The first value of a sample, and the number of its values. Samples are counted from 0 in each file.
  std::int64_t first_value(std::int64_t sample) const { return offsets[static_cast<std::size_t>(sample)]; }
  std::int64_t length(std::int64_t sample) const { return first_value(sample + 1) - first_value(sample); }

  std::vector<Hdf5Column> values, columns;  ///< closed before the file
  std::vector<std::int64_t> offsets;        ///< [samples + 1]

 private:
  void check_values(const Hdf5Column& column, const at::Scalar& padding) const;
  void check_rows(const Hdf5Column& column) const;
};

}  // namespace muster::detail::data
