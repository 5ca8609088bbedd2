// Small files in the formats that are converted, and what came out of them.
#pragma once

#include "hdf5/file.hpp"
#include "hdf5/types.hpp"
#include "support/folder.hpp"

#include <gtest/gtest.h>
#include <zlib.h>

#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <string>
#include <vector>

namespace muster::test {

/// An empty folder for each test, and files in it.
class FolderTest : public testing::Test {
 protected:
  std::filesystem::path write(const std::string& name, const std::string& bytes) const {
    std::ofstream(folder / name, std::ios::binary) << bytes;
    return folder / name;
  }
  std::filesystem::path write_gz(const std::string& name, const std::string& bytes) const {
    const gzFile file = gzopen((folder / name).c_str(), "wb");
    EXPECT_EQ(gzwrite(file, bytes.data(), static_cast<unsigned>(bytes.size())), static_cast<int>(bytes.size()));
    EXPECT_EQ(gzclose(file), Z_OK);
    return folder / name;
  }
  /// Names in the folder, sorted.
  std::vector<std::string> names() const {
    std::vector<std::string> found;
    for (const auto& entry : std::filesystem::directory_iterator(folder)) found.push_back(entry.path().filename());
    std::sort(found.begin(), found.end());
    return found;
  }

  const Folder folder;
};

/// The text of the Error; the test fails if there is none or its code differs.
inline std::string message(ExitCode expected, const std::function<void()>& action) {
  try {
    action();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), expected) << error.what();
    return error.what();
  }
  ADD_FAILURE() << "no Error was thrown";
  return {};
}

/// The bytes of a value, most significant first or last.
template <class Number>
std::string bytes(Number value, bool big_endian) {
  std::string text(sizeof value, '\0');
  std::memcpy(text.data(), &value, sizeof value);
  if (big_endian != (std::endian::native == std::endian::big)) std::reverse(text.begin(), text.end());
  return text;
}

template <class Number>
std::string idx(int type, const std::vector<std::uint32_t>& shape, const std::vector<Number>& values) {
  std::string text{'\0', '\0', static_cast<char>(type), static_cast<char>(shape.size())};
  for (const auto size : shape) text += bytes(size, true);
  for (const auto value : values) text += bytes(value, true);
  return text;
}

inline std::string npy(const std::string& header, const std::string& values, int version = 1) {
  std::string text = "\x93NUMPY";
  text.push_back(static_cast<char>(version));
  text.push_back('\0');
  text.append(version == 1 ? bytes(static_cast<std::uint16_t>(header.size()), false)
                           : bytes(static_cast<std::uint32_t>(header.size()), false));
  return text.append(header).append(values);
}

/// All values of a dataset, converted to Number.
template <class Number>
std::vector<Number> values(const std::filesystem::path& path, const std::string& name) {
  const detail::hdf5::Lock lock;
  const auto file = detail::hdf5::open_file(path);
  const auto dataset = detail::hdf5::open_dataset(file.get(), name, name);
  std::int64_t count = 1;
  for (const auto size : detail::hdf5::shape(dataset.get())) count *= size;
  std::vector<Number> all(static_cast<std::size_t>(count));
  const auto type = detail::hdf5::memory_type_of(c10::CppTypeToScalarType<Number>::value);
  detail::hdf5::check(H5Dread(dataset.get(), type.get(), H5S_ALL, H5S_ALL, H5P_DEFAULT, all.data()), "reading back");
  return all;
}

}  // namespace muster::test
