// The directory of a zip archive that is not trusted. The layout:
// https://pkware.cachefly.net/webdocs/casestudies/APPNOTE.TXT
#pragma once

#include "base/export.hpp"
#include "base/file.hpp"

#include <cstdint>
#include <map>
#include <optional>
#include <string>

namespace muster::detail {

/// A record of an archive.
struct ZipRecord {
  std::uint64_t offset = 0, bytes = 0;  ///< where its bytes lie in the file, as stored
  std::uint64_t unpacked_bytes = 0;
  std::uint32_t crc32 = 0;
  bool stored = true;     ///< the bytes are neither compressed nor encrypted
  bool deflated = false;  ///< they are compressed by deflate, and not encrypted
};

/// The records of the archive by name; none if the file is no archive, is truncated, or ends with a comment. They lie
/// inside the file and do not overlap, so together they are no larger than the file. `may_repeat`: of several records
/// with one name the last one counts; otherwise they are an error. Throws an Error (ExitCode::data) that names the file
/// if its directory is damaged.
MUSTER_INTERNAL_API std::optional<std::map<std::string, ZipRecord>> read_zip_directory(const File& file,
                                                                                       bool may_repeat = false);

}  // namespace muster::detail
