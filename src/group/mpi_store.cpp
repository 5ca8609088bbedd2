#include "group/mpi_store.hpp"

#include "base/duration.hpp"
#include "base/text.hpp"
#include "comm/collectives.hpp"
#include "comm/mpi_threads.hpp"
#include "comm/wait.hpp"

#include <algorithm>
#include <array>
#include <mutex>
#include <stop_token>
#include <string_view>
#include <thread>
#include <utility>

namespace muster::detail::group {
namespace {

using comm::Dtype;
using comm::Request;
using namespace std::chrono_literals;

Bytes bytes_of(std::string_view text) { return {text.begin(), text.end()}; }
std::int64_t number_of(const Bytes& bytes) { return std::stoll(std::string(bytes.begin(), bytes.end())); }

/// Calls ready() until it is true; false if gives_up() is true before. Sleeps between the calls: first 20 µs, then
/// longer each time, up to 10 ms.
template <class Ready, class GivesUp>
bool poll_until(Ready&& ready, GivesUp&& gives_up) {
  for (auto nap = 20us; !ready(); nap = std::min<std::chrono::microseconds>(nap * 2, 10ms)) {
    if (gives_up()) return false;
    std::this_thread::sleep_for(nap);
  }
  return true;
}

template <class Field>
void append_field(Bytes& message, const Field& field) {
  const std::uint64_t length = field.size();
  const auto* first = reinterpret_cast<const std::uint8_t*>(&length);
  message.insert(message.end(), first, first + sizeof length);
  message.insert(message.end(), field.begin(), field.end());
}

Bytes take_field(const Bytes& message, std::size_t& at) {
  std::uint64_t length = 0;
  std::copy_n(message.begin() + static_cast<std::ptrdiff_t>(at), sizeof length,
              reinterpret_cast<std::uint8_t*>(&length));
  at += sizeof length;
  const auto first = message.begin() + static_cast<std::ptrdiff_t>(at);
  at += length;
  return {first, first + static_cast<std::ptrdiff_t>(length)};
}

Bytes pack(const StoreRequest& store_request) {
  Bytes message{static_cast<std::uint8_t>(store_request.kind)};
  append_field(message, store_request.key);
  append_field(message, store_request.value);
  append_field(message, store_request.expected);
  return message;
}

StoreRequest unpack(const Bytes& message) {
  std::size_t at = 1;
  const auto key = take_field(message, at);
  auto value = take_field(message, at);
  return {static_cast<StoreRequest::Kind>(message[0]), std::string(key.begin(), key.end()), std::move(value),
          take_field(message, at)};
}

}  // namespace

std::optional<Bytes> handle(std::map<std::string, Bytes>& table, const StoreRequest& store_request) {
  const auto found = table.find(store_request.key);
  const bool known = found != table.end();
  switch (store_request.kind) {
    case StoreRequest::Kind::get:
      return known ? std::optional(found->second) : std::nullopt;
    case StoreRequest::Kind::set:
      return table[store_request.key] = store_request.value;
    case StoreRequest::Kind::add:
      return table[store_request.key] =
                 bytes_of(std::to_string((known ? number_of(found->second) : 0) + number_of(store_request.value)));
    case StoreRequest::Kind::compare_set:
      // As in c10d, a missing key is set if the expected value is empty.
      if (known ? found->second == store_request.expected : store_request.expected.empty())
        return table[store_request.key] = store_request.value;
      return known ? found->second : store_request.expected;
    case StoreRequest::Kind::erase:
      return table.erase(store_request.key) > 0 ? std::optional(Bytes()) : std::nullopt;
    case StoreRequest::Kind::count:
      return bytes_of(std::to_string(table.size()));
  }
  return std::nullopt;
}

/// Sends requests to rank 0, also from rank 0 itself. Each request and its answer have tags of their own (used again
/// after 16383 requests), so that the answer to an abandoned request is not taken for the answer to another one.
class MpiStore::Connection {
 public:
  explicit Connection(Communicator communicator) : collectives_(std::move(communicator)) {
    if (collectives_.communicator().rank() == 0)
      server_ = std::jthread([collectives = collectives_](const std::stop_token& stop) {
        try {
          serve(collectives, stop);
        } catch (const Error&) {
          // MPI has failed. Ranks that ask get an error from MPI too, or wait until their timeout.
        }
      });
  }

  std::optional<Bytes> ask(const StoreRequest& store_request) {
    struct Memory {
      Announcement announcement;
      Bytes store_request;
      std::int64_t length = absent;
      Bytes answer;
    };
    const std::lock_guard lock(mutex_);
    auto memory = std::make_shared<Memory>();
    tag_ = tag_ % last_tag + 1;
    memory->store_request = pack(store_request);
    memory->announcement = {static_cast<std::int64_t>(memory->store_request.size()), tag_};
    const auto finish = [&](Request request) {
      request.keep(memory);
      request.wait();
    };
    finish(
        collectives_.send(memory->announcement.data(), memory->announcement.size(), Dtype::i64, 0, announcement_tag));
    finish(collectives_.send(memory->store_request.data(), memory->store_request.size(), Dtype::u8, 0, tag_));
    finish(collectives_.receive(&memory->length, 1, Dtype::i64, 0, last_tag + tag_));
    if (memory->length == absent) return std::nullopt;
    memory->answer.resize(static_cast<std::size_t>(memory->length));
    finish(collectives_.receive(memory->answer.data(), memory->answer.size(), Dtype::u8, 0, last_tag + tag_));
    return std::move(memory->answer);
  }

  void close() { server_ = {}; }

 private:
  using Announcement = std::array<std::int64_t, 2>;  // length of the request in bytes, and its tag
  static constexpr int announcement_tag = 0;
  static constexpr int last_tag = 16383;      // for requests; answers use as many tags, and MPI guarantees 32767
  static constexpr std::int64_t absent = -1;  // in place of an answer's length: no such key

  static bool is_done(Request& request) {
    try {
      return request.done();
    } catch (const RemoteError&) {
      return false;  // another rank has failed; ranks that ask report that
    }
  }

  static void serve(comm::Collectives collectives, const std::stop_token& stop) {
    const auto finished = [&](Request& request) {
      return poll_until([&] { return is_done(request); }, [&] { return stop.stop_requested(); });
    };
    std::map<std::string, Bytes> table;
    std::vector<Request> answers;
    for (;;) {
      const auto announcement = std::make_shared<Announcement>();
      auto request = collectives.receive_any(announcement->data(), announcement->size(), Dtype::i64, announcement_tag);
      request.keep(announcement);
      if (!finished(request)) return;
      const int from = request.source();
      const auto [length, tag] = *announcement;

      const auto store_request = std::make_shared<Bytes>(static_cast<std::size_t>(length));
      request =
          collectives.receive(store_request->data(), store_request->size(), Dtype::u8, from, static_cast<int>(tag));
      request.keep(store_request);
      if (!finished(request)) return;

      struct Answer {
        std::int64_t length = absent;
        Bytes bytes;
      };
      const auto reply = std::make_shared<Answer>();
      if (auto bytes = handle(table, unpack(*store_request)))
        *reply = {static_cast<std::int64_t>(bytes->size()), std::move(*bytes)};
      const int tagged = last_tag + static_cast<int>(tag);
      answers.push_back(collectives.send(&reply->length, 1, Dtype::i64, from, tagged));
      answers.back().keep(reply);
      if (reply->length != absent) {
        answers.push_back(collectives.send(reply->bytes.data(), reply->bytes.size(), Dtype::u8, from, tagged));
        answers.back().keep(reply);
      }
      // Do not wait: a large answer is sent only when it is received, and a rank that has given up never receives it.
      std::erase_if(answers, [](Request& one) { return is_done(one); });
    }
  }

  comm::Collectives collectives_;
  std::mutex mutex_;
  int tag_ = 0;
  std::jthread server_;  // on rank 0 only
};

MpiStore::MpiStore(Communicator communicator, std::chrono::milliseconds timeout) : c10d::Store(timeout) {
  if (!comm::threads_may_call_mpi())
    throw Error(ExitCode::usage, "starting the process group", "MPI was initialised without MPI_THREAD_MULTIPLE",
                "Leave that to muster::Launch, or ask for it in MPI_Init_thread; or use --backend mpi");
  connection_ = std::make_shared<Connection>(std::move(communicator));
}

MpiStore::MpiStore(std::shared_ptr<Connection> connection, std::chrono::milliseconds timeout)
    : c10d::Store(timeout), connection_(std::move(connection)) {}

c10::intrusive_ptr<c10d::Store> MpiStore::clone() {
  return c10::intrusive_ptr<c10d::Store>::unsafe_steal_from_new(new MpiStore(connection_, timeout_));
}

void MpiStore::set(const std::string& key, const Bytes& value) {
  connection_->ask({StoreRequest::Kind::set, key, value});
}

Bytes MpiStore::compareSet(const std::string& key, const Bytes& expected, const Bytes& desired) {
  return *connection_->ask({StoreRequest::Kind::compare_set, key, desired, expected});
}

Bytes MpiStore::get(const std::string& key) { return wait_for(key, timeout_); }

Bytes MpiStore::wait_for(const std::string& key, std::chrono::milliseconds timeout) {
  std::optional<Bytes> value;
  comm::WaitTime time;
  if (!poll_until(
          [&] {
            return (value = connection_->ask({StoreRequest::Kind::get, key})).has_value();
          },
          [&] { return time.until() > usable_timeout(timeout); }))
    throw Error(ExitCode::retry, "waiting for the other ranks' backend",
                str("no rank has set \"", key, "\" within ", timeout.count() / 1000, " s"),
                "A rank is stuck or lost; --timeout sets the limit");
  return std::move(*value);
}

std::int64_t MpiStore::add(const std::string& key, std::int64_t value) {
  return number_of(*connection_->ask({StoreRequest::Kind::add, key, bytes_of(std::to_string(value))}));
}

bool MpiStore::deleteKey(const std::string& key) {
  return connection_->ask({StoreRequest::Kind::erase, key}).has_value();
}

bool MpiStore::check(const std::vector<std::string>& keys) {
  return std::all_of(keys.begin(), keys.end(), [&](const std::string& key) {
    return connection_->ask({StoreRequest::Kind::get, key}).has_value();
  });
}

std::int64_t MpiStore::getNumKeys() { return number_of(*connection_->ask({StoreRequest::Kind::count})); }

void MpiStore::close() { connection_->close(); }

void MpiStore::wait(const std::vector<std::string>& keys, const std::chrono::milliseconds& timeout) {
  for (const auto& key : keys) wait_for(key, timeout);
}

}  // namespace muster::detail::group
