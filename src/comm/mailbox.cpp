#include "comm/mailbox.hpp"

#include "comm/channel.hpp"
#include "comm/mpi_call.hpp"
#include "comm/rendezvous.hpp"

#include <list>
#include <memory>
#include <utility>
#include <vector>

namespace muster::detail::comm {

/// The mailbox's communicator, and the messages that MPI is still sending.
struct Mailbox::Memory {
  struct Letter {
    std::string text;
    MPI_Request request = MPI_REQUEST_NULL;
  };

  /// Frees the messages that MPI has sent.
  void free_sent() {
    std::erase_if(sent, [](Letter& letter) {
      bool is_sent = false;
      check(test(letter.request, is_sent), "MPI_Test");
      return is_sent;
    });
  }

  PooledCommunicator comm;
  std::list<Letter> sent = {};
};

Mailbox::Mailbox(const Communicator& ranks) {
  constexpr auto doing = "opening a mailbox";
  wait_for_all_ranks(ranks, doing);
  const auto& channel = *Channel::of(ranks);
  memory_.reset(new Memory{std::move(channel.take_from_pool(1, channel.all_ranks(), doing).front())});
}

Mailbox::~Mailbox() {
  // MPI may still read what has not arrived.
  const auto sent = std::make_shared<std::list<Memory::Letter>>(std::move(memory_->sent));
  std::vector<MPI_Request> requests;
  for (const auto& letter : *sent) requests.push_back(letter.request);
  memory_->comm->abandon({}, requests, sent);
}

void Mailbox::send(int rank, std::string text) {
  memory_->free_sent();
  auto& letter = memory_->sent.emplace_back(std::move(text));
  letter.request = memory_->comm->send(letter.text.data(), static_cast<int>(letter.text.size()), MPI_BYTE, rank, 0);
}

std::optional<std::string> Mailbox::receive() {
  memory_->free_sent();
  int there = 0, length = 0;
  MPI_Status status;
  check(MPI_Iprobe(MPI_ANY_SOURCE, 0, memory_->comm, &there, &status), "MPI_Iprobe");
  if (!there) return {};
  check(MPI_Get_count(&status, MPI_BYTE, &length), "MPI_Get_count");
  std::string text(static_cast<std::size_t>(length), '\0');
  check(MPI_Recv(text.data(), length, MPI_BYTE, status.MPI_SOURCE, 0, memory_->comm, MPI_STATUS_IGNORE), "MPI_Recv");
  return text;
}

}  // namespace muster::detail::comm
