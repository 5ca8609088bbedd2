#include "comm/mailbox.hpp"

#include "comm/channel.hpp"
#include "comm/mpi_call.hpp"
#include "comm/rendezvous.hpp"

#include <utility>

namespace muster::detail::comm {
namespace {

constexpr int letter_tag = 0;

}  // namespace

Mailbox::Mailbox(const Communicator& ranks) {
  constexpr auto doing = "opening a mailbox";
  wait_for_all_ranks(ranks, doing);
  const auto& channel = *Channel::of(ranks);
  comm_ =
      std::make_unique<PooledCommunicator>(std::move(channel.take_from_pool(1, channel.all_ranks(), doing).front()));
}

Mailbox::~Mailbox() = default;

void Mailbox::send(int rank, std::string text) { (*comm_)->post(std::move(text), rank, letter_tag); }

std::optional<std::string> Mailbox::receive() {
  auto letter = receive_letter(*comm_, MPI_ANY_SOURCE, letter_tag);
  return letter ? std::optional(std::move(letter->bytes)) : std::nullopt;
}

}  // namespace muster::detail::comm
