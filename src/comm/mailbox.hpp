// Messages from rank to rank for which no rank waits: the sender goes on at once, and the receiver polls when it likes.
#pragma once

#include "muster/communicator.hpp"

#include <memory>
#include <optional>
#include <string>

namespace muster::detail::comm {

class PooledCommunicator;

/// Sends and receives small messages that no rank has to wait for. Uses a separate communicator without collectives, so
/// failed attempts leave nothing half done and the mailbox stays usable. Only one thread of a rank uses it.
class Mailbox {
 public:
  /// Collective.
  explicit Mailbox(const Communicator& ranks);
  /// MPI still delivers the messages that have not arrived. Local.
  ~Mailbox();
  Mailbox(const Mailbox&) = delete;
  Mailbox& operator=(const Mailbox&) = delete;

  /// Sends to another rank. Messages to the same rank arrive in order.
  void send(int rank, std::string text);
  /// Returns the next message that has come, if any. Never waits.
  std::optional<std::string> receive();

 private:
  std::unique_ptr<PooledCommunicator> comm_;
};

}  // namespace muster::detail::comm
