#include "muster/error.hpp"

#include "base/printable.hpp"

namespace muster {

Error::Error(ExitCode code, std::string_view doing, std::string_view fact, std::string_view remedy)
    : std::runtime_error(detail::printable(
          std::string(doing).append(": ").append(fact).append(remedy.empty() ? "" : ". ").append(remedy))),
      code_(code) {}

}  // namespace muster
