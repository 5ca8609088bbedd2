#include "checkpoint/together.hpp"

#include "muster/error.hpp"

#include <exception>

namespace muster::checkpoint {
namespace {

/// One byte for how it ended, then the result or the error's text.
std::string attempt(const std::function<std::string()>& work) {
  const auto packed = [](ExitCode code, const std::string& text) { return static_cast<char>(code) + text; };
  try {
    return packed(ExitCode::done, work());
  } catch (const Error& error) {
    return packed(error.code(), error.what());
  } catch (const std::exception& error) {
    return packed(ExitCode::user_error, error.what());
  }
}

std::string unpack(const Communicator& communicator, const std::string& packed, int rank) {
  const auto code = static_cast<ExitCode>(static_cast<unsigned char>(packed.at(0)));
  if (code == ExitCode::done) return packed.substr(1);
  throw Error(
      code, "rank " + std::to_string(rank) + " on " + communicator.topology().hosts.at(static_cast<std::size_t>(rank)),
      packed.substr(1));
}

}  // namespace

std::vector<std::string> on_all(const Communicator& communicator, const std::function<std::string()>& work) {
  auto results = communicator.all_gather(attempt(work));
  int rank = 0;
  for (auto& result : results) result = unpack(communicator, result, rank++);
  return results;
}

std::string on_root(const Communicator& communicator, const std::function<std::string()>& work) {
  return unpack(communicator, communicator.broadcast(communicator.rank() == 0 ? attempt(work) : ""), 0);
}

}  // namespace muster::checkpoint
