// The request to stop, by SIGUSR1, SIGUSR2 or SIGHUP (a lost terminal), and by SIGTERM where it is one.
//
// A library of its own, which the loader initialises before all others: libtorch and MPI take seconds to come up, and
// mpirun passes signals on all the while. A signal whose disposition is not the default is left alone until
// take_over().
#pragma once

#include <signal.h>

namespace muster::detail::launch::stop_signal {

/// A program that has made no Launch after so long gets the default dispositions back.
inline constexpr int first_seconds = 300;

/// Whether one has come since this program was loaded.
bool came() noexcept;

/// There is a Launch, which has the signals from now on, whatever their disposition was; but a SIGHUP that is ignored
/// (nohup) stays ignored. `terminate`: SIGTERM too.
void take_over(bool terminate) noexcept;

/// There is a Launch in a program with signals of its own: while this lives it has those that the program has not, and
/// then they are as they were.
class Loan {
 public:
  Loan() noexcept;
  Loan(const Loan&) = delete;
  Loan& operator=(const Loan&) = delete;
  ~Loan();

 private:
  struct sigaction before_[3];
  bool launched_;
};

}  // namespace muster::detail::launch::stop_signal
