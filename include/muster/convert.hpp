// Making datasets: converts downloaded files into one HDF5 file that training reads fast.
#pragma once

#include <muster/detail/export.hpp>
#include <muster/json.hpp>

#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace muster {

struct ConvertOptions {
  /// Names of the columns: one per input (idx, npy), or one for features and one for the target (csv); empty: x and y,
  /// and x for a single input. For h5, zarr and npz they choose and order the columns to copy, for h5 also fields of
  /// compound values ("particles.mass"); empty: all, in the order of names (npz: of the archive).
  std::vector<std::string> columns = {};
  /// Samples per chunk. Empty: contiguous, the layout that reads fastest; with `compress`, which needs chunks, chunks
  /// of about 256 KiB.
  std::optional<std::int64_t> chunk = {};
  /// Level of deflate, 1 … 9; empty: no compression.
  std::optional<int> compress = {};
  /// Names of splits with their shares of the samples. They get the samples in order, and are written as OUT.NAME.h5.
  /// The shares must sum to at most 1. Empty: one file, OUT.h5.
  std::vector<std::pair<std::string, double>> split = {};
  /// Shuffles the samples first with this seed; the order is the same on every machine.
  std::optional<std::uint64_t> shuffle = {};
  /// Keeps only this many samples of each value of the last column: the first ones, in the shuffled order if `shuffle`
  /// is set.
  std::optional<std::int64_t> per_class = {};
  /// For CSV: true if the first line of each file is a header. Empty: it is a header if its last field is not a number;
  /// a warning says so if the line could be either.
  std::optional<bool> header = {};
  /// For CSV: "float32", "float64" or "int64" for some of the columns, by name; the others get the type that
  /// convert_csv() chooses.
  std::map<std::string, std::string> types = {};
  /// Called from time to time with the bytes written so far and in total, and with 0 and 0 while a part of the input is
  /// read; what it throws ends the conversion.
  std::function<void(std::uint64_t done, std::uint64_t total)> progress = {};
};

// Each function writes under a temporary name beside `output`, which must end in .h5 or .hdf5, and renames the file at
// the end: a failure leaves no partial file, and an existing file is replaced only by a complete one. It returns the
// files written. Bad input is an Error with ExitCode::data, unsuitable options are one with ExitCode::usage, and a full
// disk is one with ExitCode::retry. Inputs are read as a stream; shuffling holds one column at a time in memory, unless
// the function says otherwise.

/// IDX files (the format of MNIST: magic 0 0 TYPE NDIM, sizes and data big-endian), gzipped or not; one column each.
MUSTER_API std::vector<std::filesystem::path> convert_idx(const std::vector<std::filesystem::path>& inputs,
                                                          const std::filesystem::path& output,
                                                          const ConvertOptions& options = {});
/// NumPy .npy files, version 1 to 3, C order, numbers and booleans, gzipped or not; one column each.
MUSTER_API std::vector<std::filesystem::path> convert_npy(const std::vector<std::filesystem::path>& inputs,
                                                          const std::filesystem::path& output,
                                                          const ConvertOptions& options = {});
/// One .npz archive, as numpy.savez and numpy.savez_compressed write it: each array makes a column with its name, by
/// the rules of convert_npy(). Single values are left out unless ConvertOptions::columns names them. The checksum of
/// each array is verified. An Error (ExitCode::missing_package) if muster was built without libzip.
MUSTER_API std::vector<std::filesystem::path> convert_npz(const std::vector<std::filesystem::path>& inputs,
                                                          const std::filesystem::path& output,
                                                          const ConvertOptions& options = {});
/// Comma-separated numbers: the last field of a line is the target, the fields before it are the features. Features are
/// float32, and so is the target, unless all of it is written as integers: then it is int64. A column with a whole
/// number above 2^24, which float32 may not hold, is int64 if all its values are whole (1e2 is), and float64 if they
/// are not. Numbers above 2^24 with a fraction do not change the type. ConvertOptions::types decides otherwise, and
/// ConvertOptions::header says whether the first line is a header. Several files are concatenated; the numbers of all
/// of them are held in memory, 8 bytes each.
MUSTER_API std::vector<std::filesystem::path> convert_csv(const std::vector<std::filesystem::path>& inputs,
                                                          const std::filesystem::path& output,
                                                          const ConvertOptions& options = {});

/// One HDF5 file, "FILE.h5[:/group]", whose columns may have any layout and any filters that can be decoded here. They
/// keep their types, in this machine's byte order, their attributes that hold numbers, booleans or strings (each up to
/// 1 MB and 1024 strings), and the names of their dimensions (dimension scales, as NetCDF has them); enumerations
/// become their integers. A copy in order holds about 80 MB in memory, or as much as the largest chunk, and decodes
/// each chunk once, unless the chunks of the same rows are larger than 64 MB together. A shuffled copy holds 256 MB
/// more. It reads the input again for every 256 MB that it writes, or for a field of compound values, for every 64 MB
/// of these values.
MUSTER_API std::vector<std::filesystem::path> convert_h5(const std::vector<std::filesystem::path>& inputs,
                                                         const std::filesystem::path& output,
                                                         const ConvertOptions& options = {});

/// One Zarr store, "STORE.zarr[:/group]": a folder or a zip archive of version 2 or 3. Its arrays are copied as
/// convert_h5() copies columns, with the names of their dimensions. Missing chunks become the fill value.
MUSTER_API std::vector<std::filesystem::path> convert_zarr(const std::vector<std::filesystem::path>& inputs,
                                                           const std::filesystem::path& output,
                                                           const ConvertOptions& options = {});

/// Describes a dataset "FILE.h5[:/group]", or a Zarr store, whose "bytes" are those of the columns: {"path", "samples"
/// (null if columns differ), "bytes" (of the file), "columns": [{"name", "dtype", "shape", "layout", "chunk",
/// "compression", "bytes", "reader", "offset" (of the values in the file; null unless they are contiguous and read
/// directly)}], "groups": [those inside the group], "advice": [problems that prevent reading it or make it slow, with
/// remedies], "convert": {"chunk", "compress", "command"} (the conversion that makes reading faster; null if there is
/// none, or no command for it), "ragged": {"values": [names], "offsets", "columns": [names], "samples"} (what
/// Dataset::ragged needs to read it; null unless it looks like samples of different length)}. A reader is "direct"
/// (rows are read where they lie), "decoded" (muster decodes chunks, without HDF5's lock; all of Zarr) or "hdf5" (HDF5
/// reads, under its lock).
MUSTER_API Json describe_dataset(const std::string& path);

/// Measures how fast training reads a dataset "FILE.h5[:/group]", and how fast it would be after the conversion that
/// describe_dataset() advises, which is tried on the same samples in a folder in TMPDIR that is removed afterwards.
/// Each measurement takes about a second, or as long as one pass. The samples are the first ones, in whole chunks:
/// about 64 MB of values, or fewer, down to 8 MB, if these take longer than a second; or all samples where HDF5 reads a
/// column whole. They are read in a random order, `batch` at once, and come from the system's cache, not from the disk.
///
/// Returns {"samples", "batch", "cache" ("memory"), "now": {"first_pass", "later_passes"}, "converted": the same, or
/// null if no conversion is advised}. A pass is {"samples_per_s", "bytes_per_s"}, of decoded values. The first pass
/// decodes chunks; later ones take the values from memory. later_passes is null if they are like the first: because
/// all rows are read where they lie, or because the dataset does not fit into DatasetOptions::cache_bytes.
///
/// Calls `between` from time to time; what it throws ends the measurement. Errors are those of Dataset, and
/// ExitCode::retry if TMPDIR cannot be written, ExitCode::usage if it is no folder.
MUSTER_API Json measure_dataset(const std::string& path, const std::function<void()>& between = {});

/// Reads samples once, and drops them.
using PlainPass = std::function<void()>;

/// Opens a dataset "FILE.h5[:/group]" for one plain pass over its first `samples` samples, whose speed is a reference
/// for other ways of reading. The pass, which may be called once, reads on the calling thread, column by column in the
/// order of the file, and decodes each chunk as often as convert_h5() in order does. Of a Zarr store it reads and
/// decodes each chunk once, on as many threads as a dataset decodes on.
MUSTER_API PlainPass plain_pass(const std::string& path, const std::vector<std::string>& columns, std::int64_t samples);

}  // namespace muster
