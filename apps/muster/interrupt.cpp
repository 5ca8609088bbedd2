#include "interrupt.hpp"

namespace muster::tool {
namespace {

volatile std::sig_atomic_t last_signal = 0;

void record_signal(int signal) { last_signal = signal; }

}  // namespace

InterruptGuard::InterruptGuard(bool restarts_calls) {
  struct sigaction action {};
  action.sa_handler = record_signal;
  action.sa_flags = static_cast<int>(SA_RESETHAND) | (restarts_calls ? SA_RESTART : 0);
  ::sigaction(SIGINT, &action, &before_int_);
  ::sigaction(SIGTERM, &action, &before_term_);
}

InterruptGuard::~InterruptGuard() {
  ::sigaction(SIGINT, &before_int_, nullptr);
  ::sigaction(SIGTERM, &before_term_, nullptr);
}

bool InterruptGuard::has_come() { return last_signal != 0; }

void InterruptGuard::check(const char* remains) const {
  if (last_signal != 0) throw Interrupted{128 + last_signal, remains};
}

}  // namespace muster::tool
