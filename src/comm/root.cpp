#include "comm/root.hpp"

#include "muster/error.hpp"

namespace muster::comm {

std::string root_decides(const Communicator& communicator, const std::function<std::string()>& decide) {
  // One byte of code before the value or the text of the error.
  std::string heard;
  if (communicator.rank() == 0) {
    const auto failed = [](ExitCode code, const char* text) { return std::string(1, static_cast<char>(code)) + text; };
    try {
      heard = '\0' + decide();
    } catch (const Error& error) {
      heard = failed(error.code(), error.what());
    } catch (const std::exception& error) {
      heard = failed(ExitCode::user_error, error.what());
    }
  }
  heard = communicator.broadcast(std::move(heard), 0);
  const auto code = static_cast<ExitCode>(static_cast<unsigned char>(heard[0]));
  heard.erase(0, 1);
  if (code != ExitCode::done) throw Error(code, heard);
  return heard;
}

}  // namespace muster::comm
