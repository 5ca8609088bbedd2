// Making datasets: files as downloaded become one HDF5 file that training reads fast.
#pragma once

#include <muster/json.hpp>

#include <cstdint>
#include <filesystem>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace muster {

struct ConvertOptions {
  /// Names of the columns, one per input (idx, npy), or one for features and one for the target (csv).
  std::vector<std::string> columns = {"x", "y"};
  /// Samples per chunk; contiguous, the layout that reads fastest, unless given (compression needs chunks and chooses
  /// some 256 KiB).
  std::optional<std::int64_t> chunk = {};
  /// Level of deflate, 1 … 9; none unless given.
  std::optional<int> compress = {};
  /// Splits by name, each with its share of the samples, which it gets in their order as OUT.NAME.h5; shares sum to 1
  /// at the most. One file, OUT.h5, unless given.
  std::vector<std::pair<std::string, double>> split = {};
  /// Puts the samples into a random order first, the same for the same seed on every machine.
  std::optional<std::uint64_t> shuffle = {};
  /// Keeps the first so many samples of each value of the last column, after the shuffle.
  std::optional<std::int64_t> per_class = {};
  /// Of CSV: whether the first line of each file is a header. Unless given, it is one where its last field is no
  /// number; a warning says so where the line could be either.
  std::optional<bool> header = {};
  /// Called now and then with the bytes written and those to write in all; what it throws ends the conversion.
  std::function<void(std::uint64_t done, std::uint64_t total)> progress = {};
};
void to_json(Json& json, const ConvertOptions& options);
void from_json(const Json& json, ConvertOptions& options);

// Each writes under a temporary name beside `output`, which ends in .h5 or .hdf5, and renames at the end: a failure
// leaves no half file, and a file that was there before is replaced only then. The files written come back. Bad input
// is an Error with ExitCode::data, an option that does not fit one with ExitCode::usage, a full disk one with
// ExitCode::retry. Inputs are read as a stream; shuffling holds one column at a time in memory.

/// IDX files (the format of MNIST: magic 0 0 TYPE NDIM, sizes and data big-endian), gzipped or not; one column each.
std::vector<std::filesystem::path> convert_idx(const std::vector<std::filesystem::path>& inputs,
                                               const std::filesystem::path& output, const ConvertOptions& options = {});
/// NumPy .npy files, version 1 to 3, C order, numbers and booleans, gzipped or not; one column each.
std::vector<std::filesystem::path> convert_npy(const std::vector<std::filesystem::path>& inputs,
                                               const std::filesystem::path& output, const ConvertOptions& options = {});
/// Comma-separated numbers: the last field of a line is the target (int64 where all are
/// integers, else float32), those before it the features (float32). ConvertOptions::header says whether the first line
/// is a header. Several files are one after the other; the numbers of all are held in memory.
std::vector<std::filesystem::path> convert_csv(const std::vector<std::filesystem::path>& inputs,
                                               const std::filesystem::path& output, const ConvertOptions& options = {});

/// What a dataset "FILE.h5[:/group]" is: {"path", "samples" (null where columns differ), "bytes" (of the file),
/// "columns": [{"name", "dtype", "shape", "layout", "chunk", "compression", "bytes"}], "groups": [those inside the
/// group], "advice": [what keeps it from being read, or will make it slow, and the remedy]}.
Json describe_dataset(const std::string& path);

}  // namespace muster
