// The wish to stop, by SIGUSR1 or SIGUSR2.
//
// A library of its own, which the loader initialises before all others: libtorch and MPI take seconds to come up, and
// mpirun passes signals on all the while. A signal whose disposition is not the default is left alone until heed().
#pragma once

namespace muster::detail::launch::stop_signal {

/// A program that makes no Launch by then has the signals' default back.
inline constexpr int first_seconds = 300;

/// Whether one has come since this program was loaded.
bool came() noexcept;

/// There is a Launch: from here on they are its own.
void heed() noexcept;

}  // namespace muster::detail::launch::stop_signal
