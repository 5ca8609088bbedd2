#include "launch/stop_signal.hpp"

#include <signal.h>
#include <time.h>

#include <csignal>
#include <initializer_list>

namespace muster::detail::launch::stop_signal {
namespace {

volatile std::sig_atomic_t requested = 0;
volatile std::sig_atomic_t launched = 0;
time_t loaded = 0;

time_t seconds() noexcept {
  timespec now{};
  ::clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec;
}

void handle(int signal) {
  requested = 1;
  if (launched || seconds() - loaded < first_seconds) return;
  ::signal(signal, SIG_DFL);
  ::raise(signal);
}

void install(int signal) noexcept {
  struct sigaction action {};
  action.sa_handler = handle;
  action.sa_flags = SA_RESTART;
  ::sigaction(signal, &action, nullptr);
}

[[gnu::constructor]] void stand_by() noexcept {
  loaded = seconds();
  for (const int signal : {SIGUSR1, SIGUSR2}) {
    struct sigaction now {};
    if (::sigaction(signal, nullptr, &now) == 0 && now.sa_handler == SIG_DFL) install(signal);
  }
}

}  // namespace

bool came() noexcept { return requested != 0; }

void take_over(bool terminate) noexcept {
  launched = 1;
  for (const int signal : {SIGUSR1, SIGUSR2}) install(signal);
  if (terminate) install(SIGTERM);
}

}  // namespace muster::detail::launch::stop_signal
