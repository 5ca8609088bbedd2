// Replaces muster report if a package was missing when muster was built.
#include "write.hpp"

#include <muster/error.hpp>

namespace muster::tool::report {

void write_report(const std::vector<std::filesystem::path>& /*folders*/, const std::filesystem::path& /*output*/) {
  throw Error(ExitCode::missing_package, "writing a report", "muster was built without " MUSTER_REPORT_LACKS,
              "Install it (" MUSTER_REPORT_PACKAGES " on Debian) and build muster again");
}

}  // namespace muster::tool::report
