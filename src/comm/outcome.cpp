#include "comm/outcome.hpp"

#include "base/text.hpp"
#include "muster/communicator.hpp"

#include <cxxabi.h>

#include <algorithm>
#include <cstdlib>
#include <exception>
#include <memory>
#include <typeinfo>

namespace muster::detail::comm {
namespace {

/// Cuts `text` to at most `longest` bytes and marks the cut.
std::string shortened(const std::string& text, std::size_t longest) {
  constexpr std::string_view mark = " […]";
  if (text.size() <= longest) return text;
  const auto room = text.substr(0, longest - std::min(longest, mark.size()));
  auto end = room.rfind(". ");
  end = end == std::string::npos ? room.rfind(' ') : end + 1;
  return room.substr(0, end).append(mark);
}

/// The lowest failed rank; if no rank has failed, the lowest interrupted one.
std::vector<Outcome>::const_iterator find_cause(const std::vector<Outcome>& outcomes) {
  const auto failed = std::ranges::find(outcomes, Outcome::Kind::failed, &Outcome::kind);
  return failed != outcomes.end() ? failed : std::ranges::find(outcomes, Outcome::Kind::interrupted, &Outcome::kind);
}

std::string name_of(const std::type_info& type) {
  const std::unique_ptr<char, void (*)(void*)> plain(abi::__cxa_demangle(type.name(), nullptr, nullptr, nullptr),
                                                     std::free);
  return plain ? plain.get() : type.name();
}

/// Text about the exception that is being handled, and about the exceptions nested in it.
std::string current_text() {
  try {
    throw;
  } catch (const std::exception& error) {
    std::string text = error.what();
    text = text.substr(0, text.find("\nException raised from "));
    if (text.empty()) text = "an exception of the type " + name_of(typeid(error)) + " without a text";
    try {
      std::rethrow_if_nested(error);
    } catch (...) {
      text += ": " + current_text();
    }
    return text;
  } catch (const std::string& text) {
    return text;
  } catch (const char* text) {
    return text;
  } catch (...) {
    const auto* const type = abi::__cxa_current_exception_type();
    return "an exception that is not a std::exception" + (type == nullptr ? "" : ": " + name_of(*type));
  }
}

}  // namespace

Outcome current_outcome() {
  try {
    throw;
  } catch (const RemoteError& error) {
    return {Outcome::Kind::interrupted, error.code(), false, error.what()};
  } catch (const WaitTimeout& error) {
    return {Outcome::Kind::failed, error.code(), false, error.what(), true};
  } catch (const Error& error) {
    return {Outcome::Kind::failed, error.code(), error.agreed(), error.what()};
  } catch (...) {
    return {Outcome::Kind::failed, ExitCode::user_error, false, current_text()};
  }
}

std::string pack(const Outcome& outcome, std::size_t longest) {
  std::string bytes{static_cast<char>(outcome.kind), static_cast<char>(outcome.code),
                    static_cast<char>(outcome.agreed | outcome.stalled << 1)};
  return bytes.append(shortened(outcome.text, longest));
}

Outcome unpack(std::string_view bytes) {
  return {static_cast<Outcome::Kind>(bytes[0]), static_cast<ExitCode>(static_cast<unsigned char>(bytes[1])),
          (bytes[2] & 1) != 0, std::string(bytes.substr(packed_fields)), (bytes[2] & 2) != 0};
}

std::optional<Error> root_cause(const std::vector<Outcome>& outcomes, const std::vector<std::string>& hosts) {
  const auto first = find_cause(outcomes);
  if (first == outcomes.end()) return std::nullopt;
  const bool alike = std::ranges::all_of(
      outcomes, [&](const Outcome& o) { return o.kind == Outcome::Kind::failed && o.text == first->text; });
  if (first->agreed || alike) return Error(first->code, first->text);
  const auto rank = first - outcomes.begin();
  return Error(first->code, str("rank ", rank, " (", hosts[static_cast<std::size_t>(rank)], "): ", first->text));
}

RemoteError remote_cause(const std::vector<Outcome>& outcomes, const std::vector<std::string>& hosts) {
  const auto cause = root_cause(outcomes, hosts);
  return {cause->code(), static_cast<int>(find_cause(outcomes) - outcomes.begin()), cause->what()};
}

}  // namespace muster::detail::comm
