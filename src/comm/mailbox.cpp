#include "comm/mailbox.hpp"

#include "comm/channel.hpp"
#include "comm/handshake.hpp"
#include "comm/mpi_call.hpp"

#include <list>
#include <utility>

namespace muster::detail::comm {

struct Mailbox::Memory {
  struct Letter {
    std::string text;
    MPI_Request request = MPI_REQUEST_NULL;
  };

  /// Forgets what MPI is done with.
  void tidy() {
    std::erase_if(sent, [](Letter& letter) {
      int done = 0;
      check(MPI_Test(&letter.request, &done, MPI_STATUS_IGNORE), "MPI_Test");
      return done != 0;
    });
  }

  MPI_Comm comm = MPI_COMM_NULL;
  std::list<Letter> sent = {};
};

Mailbox::Mailbox(const Communicator& ranks) : memory_(std::make_unique<Memory>()) {
  rendezvous(ranks, "opening a mailbox");
  memory_->comm = duplicate(Channel::of(ranks)->collective);
}

Mailbox::~Mailbox() {
  try {
    memory_->tidy();
  } catch (...) {
    // Of MPI, which may still read what is left.
  }
  if (!memory_->sent.empty()) static_cast<void>(memory_.release());
}

void Mailbox::send(int rank, std::string text) {
  memory_->tidy();
  auto& letter = memory_->sent.emplace_back(std::move(text));
  check(MPI_Isend(letter.text.data(), static_cast<int>(letter.text.size()), MPI_BYTE, rank, 0, memory_->comm,
                  &letter.request),
        "MPI_Isend");
}

std::optional<std::string> Mailbox::receive() {
  memory_->tidy();
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
