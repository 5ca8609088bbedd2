// The exported programs that tests/unit/exported/make_files.py has made.
#pragma once

#include <zlib.h>

#include <filesystem>
#include <fstream>
#include <stdexcept>
#include <string>

namespace muster::test {

/// Returns the bytes of a program of torch.export.save().
inline std::string exported_program(const std::string& name) {
  const auto folder = std::filesystem::path(__FILE__).parent_path().parent_path() / "unit" / "exported";
  const auto path = folder / (name + ".pt2.gz");
  auto* const file = ::gzopen(path.c_str(), "rb");
  if (file == nullptr) throw std::runtime_error("cannot open " + path.string());
  std::string bytes, part(1 << 16, '\0');
  for (int count = 0; (count = ::gzread(file, part.data(), static_cast<unsigned>(part.size()))) > 0;)
    bytes.append(part, 0, static_cast<std::size_t>(count));
  ::gzclose(file);
  return bytes;
}

inline void write_bytes(const std::filesystem::path& path, const std::string& bytes) {
  std::ofstream(path, std::ios::binary) << bytes;
}

}  // namespace muster::test
