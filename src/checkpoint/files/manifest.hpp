// manifest.json describes the content of a checkpoint. It is written last, so a directory without it is not a
// checkpoint.
//
//   {
//   "format": "muster checkpoint",
//   "version": 1,
//   "index": 3,                       the number in the directory's name
//   "time": "2026-01-31T12:00:00Z",
//   "world_size": 2,                  number of ranks that wrote it
//   "progress": {"training_iteration": 4, "epoch": 3, …},
//   "metrics": {"loss": 0.1, …},      metrics of the report
//   "metadata": {…},                  the user's metadata
//   "values": {"model": {}, "best": 0.5, …},   JSON values of the state, by entry
//   "per_rank": {"model": false, "best": false, …},   true for entries of which each rank had its own: their values are
//                                     lists with one element for each rank
//   "tensors": [{"name": "model/fc.weight", "type": "float32", "shape": [3, 4], "offset": 4096, "bytes": 48},
//               {"name": "model/tied", "type": "float32", "shape": [3, 4], "same_as": "model/fc.weight"}, …],
//                                     where the tensors lie in state.h5; with "per_rank": true if each rank had its
//                                     own tensor
//   "files": [{"name": "state.h5", "bytes": 8192, "piece_bytes": 65536, "crc32": [123456789]},
//             {"name": "notes/a.txt", …}, …],
//   "checksum": "0a1b2c3d"
//   }
//
// The tensor "random" [world_size, bytes] holds the random state of each rank. A tensor "gradients/model/fc.weight" is
// a gradient that waited for an optimizer's step, and "gradient_weights/…" is its weight; neither has an entry in
// "values". "checksum" is the CRC-32 of all bytes before its line, in hexadecimal. In every version, the first lines
// are "{", "format" and "version", and the last lines are "checksum" and "}", in the same form.
#pragma once

#include "base/export.hpp"
#include "muster/error.hpp"
#include "muster/json.hpp"

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <filesystem>
#include <map>
#include <string>
#include <string_view>
#include <vector>

namespace muster::detail::storage {
class Tier;
}

namespace muster::detail::checkpoint {

inline constexpr const char* manifest_name = "manifest.json";
inline constexpr const char* state_name = "state.h5";
inline constexpr const char* random_name = "random";

/// A tensor in state.h5.
struct TensorEntry {
  std::string name;
  at::ScalarType type{};
  std::vector<std::int64_t> shape;
  std::uint64_t offset = 0;  ///< in state.h5, in bytes; 0 for a tensor without bytes
  std::uint64_t bytes = 0;
  std::string same_as = {};  ///< name of an earlier tensor with the same memory; empty if there is none
  bool per_rank = false;     ///< true if each rank has its own tensor; the first dimension is then the rank
};

/// A file of the checkpoint and the checksums of its pieces.
struct FileEntry {
  std::string name;  ///< relative path, with "/" between its parts
  std::uint64_t bytes = 0;
  std::uint64_t piece_bytes = 0;
  std::vector<std::uint32_t> piece_checksums = {};  ///< one for each piece
};

/// The content of manifest.json.
struct Manifest {
  int index = 0;
  std::string time = {};
  int world_size = 1;
  Json position_json = Json::object();  ///< a state::TrainingPosition; "progress" in the file
  Json metrics = Json::object();
  Json metadata = Json::object();
  Json values = Json::object();
  /// For each entry of the state, whether each rank had its own value. Checkpoints by early versions of muster do not
  /// have this; then it is unknown.
  std::map<std::string, bool> per_rank = {};
  std::vector<TensorEntry> tensors = {};
  std::vector<FileEntry> files = {};

  /// The entry of state.h5.
  const FileEntry& state_file() const;
};

/// Thrown for a checkpoint in a newer format, which this version of muster cannot read. The checkpoint does not count
/// as damaged and must not be changed.
class NewerFormat : public Error {
 public:
  using Error::Error;
};

std::string to_text(const Manifest& manifest);
/// Parses a manifest that need not be trusted. Checks that the checksum and types are right, names stay inside the
/// directory, sizes add up, and tensors do not overlap. Throws an Error (ExitCode::data); its message calls the
/// manifest `shown`.
Manifest from_text(std::string_view text, const std::string& shown);

/// True if the directory holds a manifest that begins like muster's; the rest of it may be damaged.
MUSTER_INTERNAL_API bool is_checkpoint(const std::filesystem::path& directory);
/// Reads and checks the manifest in `directory`.
MUSTER_INTERNAL_API Manifest read_manifest(const std::filesystem::path& directory);
/// Both create manifest.json and sync it: the first in `directory`, the second in the hidden folder of the checkpoint
/// manifest.index, which is being saved to `tier`.
void write_manifest(const std::filesystem::path& directory, const Manifest& manifest);
void write_manifest(const storage::Tier& tier, const Manifest& manifest);

/// Returns the current time in UTC, as ISO 8601.
std::string time_now();

void to_json(Json& json, const TensorEntry& tensor);
void to_json(Json& json, const FileEntry& file);
/// Throw nlohmann's exceptions or Error if the JSON does not have the expected form.
void from_json(const Json& json, TensorEntry& tensor);
void from_json(const Json& json, FileEntry& file);

/// True if `path` is relative, without empty, "." or ".." parts.
bool is_plain(const std::string& path);

}  // namespace muster::detail::checkpoint
