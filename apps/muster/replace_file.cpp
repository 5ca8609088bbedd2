#include "replace_file.hpp"

#include "base/file.hpp"

#include <sys/stat.h>

#include <system_error>

namespace muster::tool {

namespace fs = std::filesystem;

void replace_file(const fs::path& output, const std::string& text) {
  std::error_code ignored;
  const auto target = fs::is_symlink(output, ignored) ? fs::canonical(output, ignored) : output;
  const auto before = fs::status(target, ignored);
  detail::write_file(target, [&](detail::File& file) {
    if (fs::exists(before)) ::fchmod(file.descriptor(), static_cast<mode_t>(before.permissions()));
    file.append(text);
  });
}

}  // namespace muster::tool
