#include "muster/error.hpp"

namespace muster {
namespace {

std::string sentence(std::string_view doing, std::string_view fact, std::string_view remedy) {
  std::string text(doing);
  text.append(": ").append(fact);
  if (!remedy.empty()) text.append(". ").append(remedy);
  return text;
}

}  // namespace

Error::Error(ExitCode code, std::string_view doing, std::string_view fact, std::string_view remedy)
    : std::runtime_error(sentence(doing, fact, remedy)), code_(code) {}

}  // namespace muster
