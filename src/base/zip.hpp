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

/// A record of an archive: one file in it.
struct ZipRecord {
  std::uint64_t offset = 0, bytes = 0;  ///< where its bytes lie in the file, as stored
  std::uint64_t unpacked_bytes = 0;
  std::uint32_t crc32 = 0;
  bool stored = true;     ///< the bytes are neither compressed nor encrypted
  bool deflated = false;  ///< they are compressed by deflate, and not encrypted
};

/// The records of the archive by name; nothing if the file does not end with an archive's end record, as when it is
/// truncated or ends with a comment. The stored bytes of the records lie inside the file and do not overlap, so they
/// are no larger than the file. `may_repeat`: of several records with one name the last one counts; without it, they
/// are an error. Throws an Error (ExitCode::data) that names the file if its directory is damaged.
MUSTER_INTERNAL_API std::optional<std::map<std::string, ZipRecord>> read_zip_directory(const File& file,
                                                                                       bool may_repeat = false);

}  // namespace muster::detail
