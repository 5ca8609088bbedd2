#include "supervise/signals.hpp"

#include "launch/stop_signal.hpp"
#include "muster/error.hpp"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

namespace muster::detail::supervise {
namespace {

// The pipe by which the signal handler passes signals to take(). Global, since a signal handler has no object.
std::array<int, 2> ends{-1, -1};

void note(int signal) {
  const int before = errno;
  const auto number = static_cast<char>(signal);
  [[maybe_unused]] const auto written = ::write(ends[1], &number, 1);
  errno = before;
}

}  // namespace

Signals::Signals() {
  if (::pipe2(ends.data(), O_CLOEXEC | O_NONBLOCK) != 0)
    throw Error(ExitCode::retry, "starting the ranks", std::string("making a pipe: ") + std::strerror(errno),
                "Look at the limits of this machine (ulimit -a)");
  const bool ignores_hangup = launch::stop_signal::ignores_hangup();
  struct sigaction action {};
  action.sa_handler = note;
  action.sa_flags = SA_RESTART;
  struct sigaction ignore {};
  ignore.sa_handler = SIG_IGN;
  for (std::size_t i = 0; i < handled.size(); ++i) {
    ::sigaction(handled[i], nullptr, &before_[i]);
    const bool is_ignored =
        (handled[i] == SIGHUP && ignores_hangup) || (handled[i] == SIGTSTP && before_[i].sa_handler == SIG_IGN);
    ::sigaction(handled[i], is_ignored ? &ignore : &action, nullptr);
  }
  ::sigaction(SIGPIPE, &ignore, &pipe_before_);
  sigset_t all;
  ::sigemptyset(&all);
  for (const int signal : handled) ::sigaddset(&all, signal);
  ::pthread_sigmask(SIG_UNBLOCK, &all, &blocked_before_);
}

Signals::~Signals() {
  ::pthread_sigmask(SIG_SETMASK, &blocked_before_, nullptr);
  for (std::size_t i = 0; i < handled.size(); ++i) ::sigaction(handled[i], &before_[i], nullptr);
  ::sigaction(SIGPIPE, &pipe_before_, nullptr);
  for (auto& end : ends) ::close(end);
}

int Signals::descriptor() const noexcept { return ends[0]; }

void Signals::take() {
  std::array<char, 64> came{};
  for (ssize_t count = 0; (count = ::read(ends[0], came.data(), came.size())) > 0;)
    for (ssize_t i = 0; i < count; ++i) {
      const int signal = came[static_cast<std::size_t>(i)];
      suspension_requested_ = suspension_requested_ || signal == SIGTSTP;
      if (signal == SIGCHLD || signal == SIGTSTP) continue;
      interrupts_ += signal == SIGINT;
      if (first_request_ == 0) first_request_ = signal;
      stop_requested_ = true;
    }
}

void Signals::suspend() noexcept {
  struct sigaction ours {
  }, standard{};
  standard.sa_handler = SIG_DFL;
  ::sigaction(SIGTSTP, &standard, &ours);
  ::raise(SIGTSTP);  // SIGSTOP would stop orphaned processes, too
  ::sigaction(SIGTSTP, &ours, nullptr);
}

}  // namespace muster::detail::supervise
