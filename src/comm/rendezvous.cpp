#include "comm/rendezvous.hpp"

#include "comm/channel.hpp"
#include "comm/mpi_call.hpp"
#include "comm/wait.hpp"
#include "muster/error.hpp"

#include <cstdint>
#include <cstring>
#include <optional>
#include <string>

namespace muster::detail::comm {
namespace {

using namespace std::chrono_literals;

/// This tag is above the tags of Collectives::all_to_all() and SliceExchange.
constexpr int rendezvous_tag = 32'701;
/// A rank that waits in the rendezvous answers at once, so a rank that has not answered after this time does not wait
/// in it.
constexpr auto grace = 5s;
/// How often rank 0 looks for messages before it answers: Open MPI does not poll its sockets in every call.
constexpr int calls_per_turn = 32;

/// Other ranks tell rank 0 that they are here, or have left again (gone). Rank 0 answers go if all are here, or no.
enum class Word : std::int64_t { here, gone, go, no };

/// A message of a rendezvous.
struct Note {
  std::int64_t attempt = 0;  ///< number of agreements before this attempt
  std::int64_t number = 0;   ///< number of the rendezvous, on this channel in this attempt
  Word word = Word::here;
};

/// One call of wait_for_all_ranks(): rank 0 leads, the other ranks follow.
class Rendezvous {
 public:
  Rendezvous(Channel& channel, const char* doing)
      : channel_(channel), doing_(doing), attempt_(channel_.world->agreements) {
    call_ = channel_.begin({.kind = node::Call::Kind::set_up}, doing);  // may throw, so count afterwards
    // A failed attempt may have left the ranks at different numbers, so each attempt counts from the beginning.
    if (channel_.rendezvous.attempt != attempt_) channel_.rendezvous = {attempt_, 0};
    number_ = ++channel_.rendezvous.count;
  }
  Rendezvous(const Rendezvous&) = delete;
  Rendezvous& operator=(const Rendezvous&) = delete;
  ~Rendezvous() { channel_.end(call_); }

  /// What rank 0 does.
  void lead() {
    int here = 1;
    bool gone = false;
    const auto listen = [&] {
      while (const auto word = receive(MPI_ANY_SOURCE)) {
        here += *word == Word::here;
        gone = gone || *word == Word::gone;
      }
      return gone || here == channel_.size;
    };
    try {
      wait(listen);
    } catch (...) {
      tell_all(Word::no);
      throw;
    }
    // A rank that left some time ago has sent `gone` after its `here`: receive that first.
    for (int call = 0; call < calls_per_turn && !gone; ++call) listen();
    tell_all(gone ? Word::no : Word::go);
    if (gone) throw_refused();
  }

  void follow() {
    std::optional<Word> answer;
    const auto answered = [&] { return answer || (answer = receive(0)); };
    const auto let_go = [&](std::chrono::milliseconds within) {
      tell(0, Word::gone);
      // Rank 0 answers, or it is in agree() already, or it is busy elsewhere: then it will read that this rank is gone
      // before it lets any rank go.
      channel_.world->presence.ask({channel_.world_ranks.front()}, attempt_ + 1);
      wait_until([&] { return answered() || rank_0_is_in_agree(); }, within);
      return answered() && answer == Word::go;
    };
    tell(0, Word::here);
    try {
      wait(answered);
    } catch (const WaitTimeout&) {
      if (!let_go(stall_grace)) throw;
    } catch (...) {
      if (!let_go(grace)) throw;
    }
    if (answer == Word::no) throw_refused();
  }

 private:
  void wait(const std::function<bool()>& ready) {
    channel_.wait(
        ready, [&] { return std::string(doing_); }, call_);
  }

  void tell(int rank, Word word) {
    const Note note{attempt_, number_, word};
    channel_.transport->collective->post(std::string(reinterpret_cast<const char*>(&note), sizeof note), rank,
                                         rendezvous_tag);
  }
  void tell_all(Word word) {
    for (int r = 1; r < channel_.size; ++r) tell(r, word);
  }

  /// Returns the next word that has come for this rendezvous, if any; drops words of earlier rendezvous.
  std::optional<Word> receive(int from) {
    for (;;) {
      require_in_use(*channel_.world);
      const auto letter = receive_letter(channel_.transport->collective, from, rendezvous_tag);
      if (!letter) return std::nullopt;
      Note note;
      std::memcpy(&note, letter->bytes.data(), sizeof note);
      if (note.attempt == attempt_ && note.number == number_) return note.word;
    }
  }

  /// True if rank 0 waits in agree(): then it has not let any rank go.
  bool rank_0_is_in_agree() {
    channel_.world->presence.poll(0);
    return channel_.world->presence.has_answered(channel_.world_ranks.front(), attempt_ + 1);
  }

  /// Called when another rank has left: throws that rank's alarm or, if none comes, an Error.
  [[noreturn]] void throw_refused() {
    wait_until(
        [&] {
          require_in_use(*channel_.world);
          channel_.world->alarm.throw_if_raised();
          return false;
        },
        grace);
    throw Error(ExitCode::retry, doing_, "another rank gave up waiting for all to come",
                "A rank is stuck, lost or in another collective; --timeout sets the limit");
  }

  Channel& channel_;
  const char* doing_;
  std::int64_t attempt_;
  std::int64_t number_ = 0;
  Channel::RecordedCall call_;
};

}  // namespace

void wait_for_all_ranks(const Communicator& communicator, const char* doing) {
  if (communicator.size() == 1) return;
  auto& channel = *Channel::of(communicator);
  require_in_use(*channel.world);
  channel.world->alarm.throw_if_raised();
  Rendezvous here(channel, doing);
  if (channel.rank == 0)
    here.lead();
  else
    here.follow();
}

}  // namespace muster::detail::comm
