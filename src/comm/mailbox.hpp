// Words from rank to rank that nobody waits for: who sends goes on at once, who is sent something looks when it likes.
#pragma once

#include "muster/communicator.hpp"

#include <memory>
#include <optional>
#include <string>

namespace muster::detail::comm {

/// Over a communicator of its own, on which no collective is ever half done: it outlives failed attempts. One thread of
/// a rank uses it.
class Mailbox {
 public:
  /// Collective.
  explicit Mailbox(const Communicator& ranks);
  /// What has not arrived is left to MPI. Local.
  ~Mailbox();
  Mailbox(const Mailbox&) = delete;
  Mailbox& operator=(const Mailbox&) = delete;

  /// To another rank. Those to one rank arrive in their order.
  void send(int rank, std::string text);
  /// The next one that has come, if any.
  std::optional<std::string> receive();

 private:
  struct Memory;
  std::unique_ptr<Memory> memory_;
};

}  // namespace muster::detail::comm
