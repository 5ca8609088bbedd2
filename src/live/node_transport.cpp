#include "base/log.hpp"
#include "base/text.hpp"
#include "live/connection.hpp"
#include "live/receiver.hpp"
#include "muster/error.hpp"

#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstring>

namespace muster::detail::live {
namespace {

using Clock = std::chrono::steady_clock;

class NodeConnection final : public Connection {
 public:
  explicit NodeConnection(Descriptor socket) : socket_(std::move(socket)) {}

  bool is_open() const noexcept override { return socket_ >= 0; }
  bool is_closing() const noexcept override { return is_closed_; }
  bool has_died() const noexcept override { return has_died_; }
  void tell() override { wake(); }
  void wake() override {
    if (ring && is_open() && __atomic_exchange_n(&ring->solver_waits, 0, __ATOMIC_SEQ_CST) != 0)
      static_cast<void>(!::send(socket_, "", 1, MSG_NOSIGNAL | MSG_DONTWAIT));
  }
  void send_weights(const Weights& weights) override {
    static_cast<void>(!live_send_file(socket_, &weights.head, sizeof weights.head, weights.file));
  }
  void leave() override {
    if (ring) __atomic_store_n(&ring->told.gone, 1, __ATOMIC_SEQ_CST);
    tell();
    socket_ = Descriptor();
  }

  int socket() const noexcept { return socket_; }
  /// Reads the ring, bytes that have only woken this thread, or the end of the connection.
  void read(Receiver& receiver) {
    while (is_open()) {
      char byte = 0;
      int file = LIVE_NO_FILE;
      const auto got = live_receive_file(socket_, &byte, 1, &file);
      if (got == LIVE_NOTHING) return;
      if (got < 0 && errno == ECONNRESET) continue;  // it has not read all, and its last byte is still to be read here
      if (got <= 0) {
        socket_ = Descriptor();
        has_died_ = !is_closed_;
        return;
      }
      if (byte == LIVE_CLOSED) is_closed_ = true;
      if (byte == LIVE_WANTED) receiver.send_weights(*this);
      if (file >= 0) {
        const Descriptor owned(file);
        struct stat status {};
        const bool is_file = ::fstat(file, &status) == 0 && status.st_size >= static_cast<off_t>(sizeof(live_ring));
        receiver.take_ring(*this, is_file ? map_file<live_ring>(status.st_size, file) : nullptr, status.st_size);
      } else if (file == LIVE_LOST_FILE) {
        receiver.take_ring(*this, nullptr, 0);
      }
    }
  }

 private:
  Descriptor socket_;
  bool is_closed_ = false, has_died_ = false;
};

class NodeTransport final : public Transport {
 public:
  explicit NodeTransport(Receiver& receiver)
      : receiver_(receiver), listener_(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0)) {
    const auto& stream = receiver.stream;
    sockaddr_un address{};
    const auto bytes = live_address(&address, stream.token.c_str(), stream.name.c_str(), stream.rank);
    if (listener_ < 0 || ::bind(listener_, reinterpret_cast<const sockaddr*>(&address), bytes) != 0)
      throw Error(ExitCode::usage, "opening the live stream \"" + stream.name + "\"",
                  errno == EADDRINUSE ? "the job has another muster::Live of this name"
                                      : str("its socket cannot be made: ", std::strerror(errno)),
                  "Give each stream a name of its own, and raise the limit on open files if it is low");
  }

  void start() override {
    constexpr int waiting = 4096;
    ::listen(listener_, waiting);
  }

  void watch(std::vector<pollfd>& events) override {
    std::erase_if(connections_, [](const auto& connection) { return !connection->is_open(); });
    const bool accepts = Clock::now() >= accepts_from_;
    events.push_back({accepts ? int{listener_} : -1, POLLIN, 0});
    for (const auto& connection : connections_) events.push_back({connection->socket(), POLLIN, 0});
    for (const auto& stranger : strangers_) events.push_back({stranger, POLLIN, 0});
  }

  bool serve(std::span<const pollfd> events) override {
    // The connections first, in the order above: greeting and accepting change the lists.
    auto event = events.begin() + 1;
    bool has_served = events.front().revents != 0;
    for (const auto& connection : connections_)
      if ((event++)->revents != 0) connection->read(receiver_), has_served = true;
    std::vector<Descriptor> strangers;
    for (auto& stranger : strangers_)
      if ((event++)->revents != 0)
        greet(std::move(stranger)), has_served = true;
      else
        strangers.push_back(std::move(stranger));
    strangers_ = std::move(strangers);
    if (events.front().revents != 0) accept_one();
    return has_served;
  }

 private:
  void accept_one() {
    Descriptor socket(::accept4(listener_, nullptr, nullptr, SOCK_CLOEXEC));
    if (socket >= 0 && live_is_own_user(socket) != 0) strangers_.push_back(std::move(socket));
    if (socket >= 0 || (errno != EMFILE && errno != ENFILE)) return;
    if (accepts_from_ == Clock::time_point())
      log::warn(str("live stream \"", receiver_.stream.name, "\": a solver cannot be accepted: ", std::strerror(errno),
                    ". Raise the limit on open files (ulimit -n)"));
    accepts_from_ = Clock::now() + std::chrono::milliseconds(100);
  }

  /// Reads who has connected, and answers.
  void greet(Descriptor socket) {
    live_hello hello{};
    if (::recv(socket, &hello, sizeof hello, MSG_DONTWAIT) != static_cast<ssize_t>(sizeof hello)) return;
    live_welcome welcome{.protocol = LIVE_PROTOCOL, .ranks = receiver_.stream.ranks, .refusal = {}};
    const auto text = receiver_.reason_to_refuse(hello);
    text.copy(welcome.refusal, sizeof welcome.refusal - 1);
    if (::send(socket, &welcome, sizeof welcome, MSG_NOSIGNAL) < 0 || !text.empty()) return;
    connections_.push_back(std::make_shared<NodeConnection>(std::move(socket)));
    receiver_.add(hello, connections_.back());
  }

  Receiver& receiver_;
  Descriptor listener_;
  std::vector<Descriptor> strangers_;  ///< connections that have not said who they are
  std::vector<std::shared_ptr<NodeConnection>> connections_;
  Clock::time_point accepts_from_{};  ///< later, after it was out of file descriptors
};

}  // namespace

Descriptor::~Descriptor() {
  if (number_ >= 0) ::close(number_);
}

std::unique_ptr<Transport> node_transport(Receiver& receiver) { return std::make_unique<NodeTransport>(receiver); }

}  // namespace muster::detail::live
