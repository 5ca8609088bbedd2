// manifest.json: what a checkpoint is made of. Written last, so that a directory without one is no checkpoint.
//
//   {
//   "format": "muster checkpoint",
//   "version": 1,
//   "index": 3,                       the number in the directory's name
//   "time": "2026-01-31T12:00:00Z",
//   "world_size": 2,                  ranks that wrote it
//   "progress": {"training_iteration": 4, "epoch": 3, …},
//   "metrics": {"loss": 0.1, …},      of the report
//   "metadata": {…},                  the user's
//   "values": {"model": {}, "best": 0.5, …},   JSON of the state, by entry
//   "tensors": [{"name": "model/fc.weight", "type": "float32", "shape": [3, 4], "offset": 4096, "bytes": 48},
//               {"name": "model/tied", "type": "float32", "shape": [3, 4], "same_as": "model/fc.weight"}, …],
//                                     where the values lie in state.h5; and "per_rank": true where each rank had its
//                                     own
//   "files": [{"name": "state.h5", "bytes": 8192, "piece_bytes": 65536, "crc32": [123456789]},
//             {"name": "notes/a.txt", …}, …],
//   "checksum": "0a1b2c3d"
//   }
//
// The tensor "random" [world_size, bytes] is the random state of each rank. "checksum" is the CRC-32 of every byte
// before that line, in hexadecimal. The first three lines and the last two have this form in every version.
#pragma once

#include "muster/error.hpp"
#include "muster/json.hpp"

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

namespace muster::detail::checkpoint {

inline constexpr const char* manifest_name = "manifest.json";
inline constexpr const char* state_name = "state.h5";
inline constexpr const char* random_name = "random";

struct TensorEntry {
  std::string name;
  at::ScalarType type{};
  std::vector<std::int64_t> shape;
  std::uint64_t offset = 0;  ///< in state.h5; 0 where there are no bytes
  std::uint64_t bytes = 0;
  std::string same_as = {};  ///< the tensor stored before that this one shares its memory with; usually empty
  bool per_rank = false;     ///< each rank has its own: the first dimension is the rank
};

struct FileEntry {
  std::string name;  ///< relative, its parts separated by "/"
  std::uint64_t bytes = 0;
  std::uint64_t piece_bytes = 0;
  std::vector<std::uint32_t> crc32 = {};
};

struct Manifest {
  int index = 0;
  std::string time = {};
  int world_size = 1;
  Json progress = Json::object();
  Json metrics = Json::object();
  Json metadata = Json::object();
  Json values = Json::object();
  std::vector<TensorEntry> tensors = {};
  std::vector<FileEntry> files = {};

  /// The entry of state.h5.
  const FileEntry& state_file() const;
};

/// A checkpoint of a format that this muster does not know: not damaged, not to be touched.
class NewerFormat : public Error {
 public:
  using Error::Error;
};

std::string to_text(const Manifest& manifest);
/// Trusts nothing: checksum, types, names that stay inside the directory, sizes that add up, tensors that do not
/// overlap. An Error (ExitCode::data) says what is wrong in the manifest of `shown`.
Manifest from_text(std::string_view text, const std::string& shown);

/// Whether the directory holds a manifest of muster's, damaged or not; else it is any folder of files.
bool is_checkpoint(const std::filesystem::path& directory);
/// Reads and checks the manifest in `directory`.
Manifest read_manifest(const std::filesystem::path& directory);
/// A new file, durable.
void write_manifest(const std::filesystem::path& directory, const Manifest& manifest);

/// Now, UTC, ISO 8601.
std::string time_now();

void to_json(Json& json, const TensorEntry& tensor);
void to_json(Json& json, const FileEntry& file);
/// Throw nlohmann's exceptions, or Error, where the JSON is of another kind.
void from_json(const Json& json, TensorEntry& tensor);
void from_json(const Json& json, FileEntry& file);

/// Whether it is a relative path of plain names, separated by "/".
bool is_plain(const std::string& path);

}  // namespace muster::detail::checkpoint
