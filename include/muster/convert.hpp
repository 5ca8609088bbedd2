// Making datasets: files as downloaded become one HDF5 file that training reads fast.
#pragma once

#include <muster/config.hpp>

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace muster {

struct ConvertOptions {
  /// Names of the columns, one per input (idx, npy), or one for features and one for the target (csv).
  std::vector<std::string> columns = {"x", "y"};
  /// Samples per chunk; contiguous, the layout that reads fastest, unless given (compression needs chunks and chooses).
  std::optional<std::int64_t> chunk = {};
  /// Level of deflate, 1 … 9; none unless given.
  std::optional<int> compress = {};
  /// Parts that divide the samples among OUT.NAME.h5; shares sum to 1 at the most. One file, OUT.h5, unless given.
  std::vector<std::pair<std::string, double>> split = {};
  /// Puts the samples into a random order first, the same for the same seed.
  std::optional<std::uint64_t> shuffle = {};
  /// Keeps the first so many samples of each value of the last column, after the shuffle.
  std::optional<std::int64_t> per_class = {};
};

// Each writes under a temporary name beside `output` and renames at the end, so a failure leaves no half file; the
// files written come back. Bad input is an Error with ExitCode::data, a full disk one with ExitCode::retry.

/// IDX files (the format of MNIST: magic 0 0 TYPE NDIM, sizes and data big-endian), gzipped or not; one column each.
std::vector<std::filesystem::path> convert_idx(const std::vector<std::filesystem::path>& inputs,
                                               const std::filesystem::path& output, const ConvertOptions& options = {});
/// NumPy .npy files, version 1 to 3, C order, numbers and booleans; one column each.
std::vector<std::filesystem::path> convert_npy(const std::vector<std::filesystem::path>& inputs,
                                               const std::filesystem::path& output, const ConvertOptions& options = {});
/// Comma-separated numbers, a header line allowed; the last field of a line is the target (int64 where all are
/// integers, else float32), those before it the features (float32). Several files are one after the other.
std::vector<std::filesystem::path> convert_csv(const std::vector<std::filesystem::path>& inputs,
                                               const std::filesystem::path& output, const ConvertOptions& options = {});

/// What a dataset "FILE.h5[:/group]" is: {"path", "samples", "bytes", "columns": [{"name", "dtype", "shape", "layout",
/// "chunk", "compression", "bytes"}], "advice": [what will make it slow, and the remedy]}.
Config describe_dataset(const std::string& path);

}  // namespace muster
