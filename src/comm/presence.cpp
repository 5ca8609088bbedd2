#include "comm/presence.hpp"

#include "comm/mpi_call.hpp"

#include <iterator>
#include <memory>

namespace muster::detail::comm {
namespace {

/// The tag of questions and answers. Agreements send outcomes with tag 0.
constexpr int note_tag = 1;

}  // namespace

Presence::~Presence() {
  const auto kept = std::make_shared<Sends>(std::move(sends_));
  comm_->abandon({}, kept->requests, kept);  // MPI may still read the notes
}

void Presence::send(int rank, Note note) {
  sends_.requests.push_back(comm_->send(&sends_.notes.emplace_back(note), sizeof note, MPI_BYTE, rank, note_tag));
}

void Presence::ask(const std::vector<int>& ranks, std::int64_t agreement) {
  const std::lock_guard lock(mutex_);
  for (const int rank : ranks)
    if (std::exchange(asked_[rank], agreement) != agreement) send(rank, {.agreement = agreement, .is_answer = false});
}

void Presence::poll(std::int64_t agreement) {
  const std::lock_guard lock(mutex_);
  for (;;) {
    int flag = 0;
    MPI_Status status;
    check(MPI_Iprobe(MPI_ANY_SOURCE, note_tag, comm_, &flag, &status), "MPI_Iprobe");
    if (!flag) break;
    Note note;
    check(MPI_Recv(&note, sizeof note, MPI_BYTE, status.MPI_SOURCE, note_tag, comm_, MPI_STATUS_IGNORE), "MPI_Recv");
    (note.is_answer != 0 ? answers_ : questions_)[status.MPI_SOURCE] = note.agreement;
  }
  if (agreement == 0) return;
  for (auto question = questions_.begin(); question != questions_.end();) {
    const auto [rank, number] = *question;
    if (number == agreement) send(rank, {.agreement = agreement, .is_answer = true});
    // A rank that asks about a later agreement is ahead, and gets its answer there.
    question = number <= agreement ? questions_.erase(question) : std::next(question);
  }
  if (test_all(sends_.requests)) sends_ = {};
}

bool Presence::has_answered(int rank, std::int64_t agreement) const {
  const std::lock_guard lock(mutex_);
  const auto found = answers_.find(rank);
  return found != answers_.end() && found->second == agreement;
}

}  // namespace muster::detail::comm
