#include "comm/presence.hpp"

#include "comm/mpi_call.hpp"

#include <cstring>
#include <iterator>
#include <string>

namespace muster::detail::comm {
namespace {

/// The tag of questions and answers. Agreements send outcomes with tag 0.
constexpr int note_tag = 1;

}  // namespace

void Presence::send(int rank, Note note) {
  comm_->post(std::string(reinterpret_cast<const char*>(&note), sizeof note), rank, note_tag);
}

void Presence::ask(const std::vector<int>& ranks, std::int64_t agreement) {
  const std::lock_guard lock(mutex_);
  for (const int rank : ranks)
    if (std::exchange(asked_[rank], agreement) != agreement) send(rank, {.agreement = agreement, .is_answer = false});
}

void Presence::poll(std::int64_t agreement) {
  const std::lock_guard lock(mutex_);
  while (const auto letter = receive_letter(comm_, MPI_ANY_SOURCE, note_tag)) {
    Note note;
    std::memcpy(&note, letter->bytes.data(), sizeof note);
    (note.is_answer != 0 ? answers_ : questions_)[letter->from] = note.agreement;
  }
  if (agreement == 0) return;
  for (auto question = questions_.begin(); question != questions_.end();) {
    const auto [rank, number] = *question;
    if (number == agreement) send(rank, {.agreement = agreement, .is_answer = true});
    // A rank that asks about a later agreement is ahead, and gets its answer there.
    question = number <= agreement ? questions_.erase(question) : std::next(question);
  }
}

bool Presence::has_answered(int rank, std::int64_t agreement) const {
  const std::lock_guard lock(mutex_);
  const auto found = answers_.find(rank);
  return found != answers_.end() && found->second == agreement;
}

}  // namespace muster::detail::comm
