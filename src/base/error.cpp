#include "muster/error.hpp"

#include "base/printable.hpp"

namespace muster {

Error::Error(ExitCode code, std::string_view doing, std::string_view fact, std::string_view remedy)
    // `doing` names files and flags, which are one line; a fact may be the text of another library, of several lines.
    : std::runtime_error(
          detail::printable_in_line(doing) +
          detail::printable(std::string(": ").append(fact).append(remedy.empty() ? "" : ". ").append(remedy))),
      code_(code) {}

}  // namespace muster
