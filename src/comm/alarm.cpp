#include "comm/alarm.hpp"

#include "base/text.hpp"
#include "comm/mpi_call.hpp"

#include <algorithm>
#include <utility>

namespace muster::detail::comm {
namespace {

constexpr int notice_tags = 2;
/// Short enough that MPI sends a notice eagerly, without the receiver's help.
constexpr std::size_t longest_notice = 3000;

}  // namespace

Alarm::Alarm(PooledCommunicator comm)
    : comm_(std::move(comm)),
      rank_(rank_in(comm_)),
      size_(size_in(comm_)),
      received_from_(static_cast<std::size_t>(size_)) {}

Alarm::~Alarm() { comm_->abandon({}, sends_, sent_); }

void Alarm::raise(const Outcome& mine) {
  const std::lock_guard lock(mutex_);
  if (raised_) return;
  raised_ = mine;
  if (mine.stalled) note_stalled(rank_);
  if (size_ == 1) return;
  sent_ = std::make_shared<std::string>(pack(mine, longest_notice));
  for (int r = 0; r < size_; ++r) {
    if (r == rank_) continue;
    try {
      sends_.push_back(comm_->send(sent_->data(), static_cast<int>(sent_->size()), MPI_BYTE, r, tag_));
    } catch (const Error&) {  // even if a rank is lost, the others must get the notice
    }
  }
}

void Alarm::note(const Letter& notice) {
  const int rank = notice.from;
  received_from_[static_cast<std::size_t>(rank)] = true;
  const auto theirs = unpack(notice.bytes);
  if (theirs.stalled) note_stalled(rank);
  if (is_raised_) return;
  cause_.emplace(theirs.code, rank, str("rank ", rank, " failed: ", theirs.text));
  is_raised_ = true;
}

void Alarm::note_stalled(int rank) { stalled_ = std::min<int>(stalled_, rank); }

void Alarm::poll() {
  if (size_ == 1) return;
  const std::unique_lock lock(mutex_, std::try_to_lock);
  if (!lock) return;
  if (const auto notice = receive_letter(comm_, MPI_ANY_SOURCE, tag_)) note(*notice);
}

void Alarm::throw_if_raised() {
  if (!is_raised_) poll();
  if (is_raised_) throw *cause_;
}

void Alarm::clear(const std::vector<bool>& raised) {
  const std::lock_guard lock(mutex_);
  for (int r = 0; r < size_; ++r) {
    if (r == rank_ || !raised[static_cast<std::size_t>(r)] || received_from_[static_cast<std::size_t>(r)]) continue;
    check(MPI_Probe(r, tag_, comm_, MPI_STATUS_IGNORE), "MPI_Probe");
    note(receive_letter(comm_, r, tag_).value());
  }
  // The sends complete, since every other rank receives this notice, in its own clear() at the latest.
  if (!sends_.empty())
    check(MPI_Waitall(static_cast<int>(sends_.size()), sends_.data(), MPI_STATUSES_IGNORE), "MPI_Waitall");
  sends_.clear();
  raised_.reset();
  stalled_ = nobody;
  tag_ = (tag_ + 1) % notice_tags;
  received_from_.assign(received_from_.size(), false);
  is_raised_ = false;
}

}  // namespace muster::detail::comm
