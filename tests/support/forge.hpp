// Manifests with some of their JSON changed and a right checksum: what an attacker would write.
#pragma once

#include "base/file.hpp"
#include "checkpoint/files/manifest.hpp"
#include "checkpoint/files/pieces.hpp"

#include <cstdio>
#include <filesystem>
#include <functional>
#include <string>

namespace muster::test {

/// `text` is a JSON object without the key "checksum".
inline std::string with_checksum(std::string text) {
  text.back() = ',';
  text += '\n';
  char line[64];
  std::snprintf(line, sizeof line, "\"checksum\": \"%08x\"\n}\n",
                detail::checkpoint::crc32(std::as_bytes(std::span(text))));
  return text + line;
}

inline std::string forge(const std::filesystem::path& checkpoint, const std::function<void(Json&)>& change) {
  auto json = Json::parse(detail::read_file(checkpoint / detail::checkpoint::manifest_name));
  json.erase("checksum");
  change(json);
  return with_checksum(json.dump());
}

}  // namespace muster::test
