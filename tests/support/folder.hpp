// A temporary folder that goes with its owner.
#pragma once

#include <stdlib.h>
#include <unistd.h>

#include <filesystem>
#include <stdexcept>
#include <string>

namespace muster::test {

class Folder {
 public:
  Folder() {
    auto name = (std::filesystem::temp_directory_path() / "muster-test-XXXXXX").string();
    if (::mkdtemp(name.data()) == nullptr) throw std::runtime_error("no folder for the test at " + name);
    path_ = name;
  }
  Folder(const Folder&) = delete;
  Folder& operator=(const Folder&) = delete;
  ~Folder() {
    std::error_code ignored;
    if (::getpid() == maker_) std::filesystem::remove_all(path_, ignored);  // a child that ends by exit() leaves it
  }
  const std::filesystem::path& path() const noexcept { return path_; }
  operator const std::filesystem::path&() const noexcept { return path_; }
  std::filesystem::path operator/(const std::string& name) const { return path_ / name; }
  std::string file(const std::string& name) const { return path_ / name; }

 private:
  std::filesystem::path path_;
  pid_t maker_ = ::getpid();
};

}  // namespace muster::test
