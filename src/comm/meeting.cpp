#include "comm/meeting.hpp"

#include "comm/channel.hpp"
#include "comm/mpi_call.hpp"
#include "comm/wait.hpp"
#include "muster/error.hpp"

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace muster::detail::comm {
namespace {

using namespace std::chrono_literals;

/// After those of Collectives::exchange() and of SliceExchange.
constexpr int meeting_tag = 16'385;
/// A rank that is in the meeting answers at once; one that does not is not in it.
constexpr auto grace = 5s;
/// Open MPI does not look at its sockets in every call.
constexpr int calls_per_turn = 32;

enum class Word : std::int64_t { here, gone, go, no };

struct Message {
  std::int64_t attempt = 0;  ///< the agreements that there were before it
  std::int64_t meeting = 0;  ///< of this channel in that attempt
  Word word = Word::here;
};

class Meeting {
 public:
  Meeting(Communicator communicator, const char* doing)
      : communicator_(std::move(communicator)),
        channel_(*communicator_.channel()),
        doing_(doing),
        attempt_(channel_.world->agreements) {
    // After a failed attempt ranks may have been in different meetings of a channel, so they are counted anew.
    if (channel_.meetings.attempt != attempt_) channel_.meetings = {attempt_, 0};
    number_ = ++channel_.meetings.count;
  }
  Meeting(const Meeting&) = delete;
  Meeting& operator=(const Meeting&) = delete;
  ~Meeting() {
    int sent = 0;
    MPI_Testall(static_cast<int>(sends_->requests.size()), sends_->requests.data(), &sent, MPI_STATUSES_IGNORE);
    if (!sent) static_cast<void>(sends_.release());  // MPI may still read it
  }

  /// Rank 0.
  void lead() {
    int here = 1;
    bool gone = false;
    const auto listen = [&] {
      while (const auto word = hear(MPI_ANY_SOURCE)) {
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
    // Who has left long ago said so after it had said that it is here.
    for (int call = 0; call < calls_per_turn && !gone; ++call) listen();
    tell_all(gone ? Word::no : Word::go);
    if (gone) refused();
  }

  void follow() {
    std::optional<Word> answer;
    const auto answered = [&] { return answer || (answer = hear(0)); };
    tell(0, Word::here);
    try {
      wait(answered);
    } catch (...) {
      tell(0, Word::gone);
      // The first rank answers, or it has left its work and says so, or it is busy elsewhere: then it will read that
      // this rank is gone before it lets anybody go.
      wait_until([&] { return answered() || first_is_done(); }, grace);
      if (answer != Word::go) throw;
    }
    if (answer == Word::no) refused();
  }

 private:
  struct Sends {
    std::vector<std::unique_ptr<Message>> messages;
    std::vector<MPI_Request> requests;
  };

  void wait(const std::function<bool()>& ready) {
    wait_for(communicator_, ready, [&] { return std::string(doing_); });
  }

  void tell(int rank, Word word) {
    sends_->messages.push_back(std::make_unique<Message>(Message{attempt_, number_, word}));
    sends_->requests.push_back(MPI_REQUEST_NULL);
    check(MPI_Isend(sends_->messages.back().get(), sizeof(Message), MPI_BYTE, rank, meeting_tag, channel_.collective,
                    &sends_->requests.back()),
          "MPI_Isend");
  }
  void tell_all(Word word) {
    for (int r = 1; r < channel_.size; ++r) tell(r, word);
  }

  /// What has come for this meeting; what is left of earlier ones is dropped.
  std::optional<Word> hear(int from) {
    for (;;) {
      int flag = 0;
      MPI_Status status;
      check(MPI_Iprobe(from, meeting_tag, channel_.collective, &flag, &status), "MPI_Iprobe");
      if (!flag) return std::nullopt;
      Message message;
      check(MPI_Recv(&message, sizeof message, MPI_BYTE, status.MPI_SOURCE, meeting_tag, channel_.collective,
                     MPI_STATUS_IGNORE),
            "MPI_Recv");
      if (message.attempt == attempt_ && message.meeting == number_) return message.word;
    }
  }

  /// Whether the first rank waits in agree(), where it would not be if it had let anybody go.
  bool first_is_done() {
    int flag = 0;
    MPI_Status status;
    check(MPI_Iprobe(channel_.world_ranks.front(), MPI_ANY_TAG, channel_.world->agreement, &flag, &status),
          "MPI_Iprobe");
    return flag != 0;
  }

  /// Another rank has left: for a reason that comes as an alarm, unless its caller kept that to itself.
  [[noreturn]] void refused() {
    wait_until(
        [&] {
          channel_.world->alarm.check();
          return false;
        },
        grace);
    throw Error(ExitCode::retry, doing_, "another rank gave up waiting for all to come",
                "A rank is stuck, lost or in another collective; --timeout sets the limit");
  }

  Communicator communicator_;
  Channel& channel_;
  const char* doing_;
  std::int64_t attempt_;
  std::int64_t number_ = 0;
  std::unique_ptr<Sends> sends_ = std::make_unique<Sends>();
};

}  // namespace

void meet(const Communicator& communicator, const char* doing) {
  if (communicator.size() == 1) return;
  communicator.channel()->world->alarm.check();
  Meeting meeting(communicator, doing);
  if (communicator.rank() == 0)
    meeting.lead();
  else
    meeting.follow();
}

}  // namespace muster::detail::comm
