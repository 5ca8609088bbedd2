#include "launch/stop_signal.hpp"

#include "base/host.hpp"
#include "base/supervisor_message.hpp"
#include "base/text.hpp"

#include <dlfcn.h>
#include <signal.h>
#include <unistd.h>

#include <csignal>
#include <cstddef>
#include <cstdlib>
#include <iterator>

namespace muster::detail::launch::stop_signal {
namespace {

constexpr int stop_signals[] = {SIGUSR1, SIGUSR2, SIGHUP};

volatile std::sig_atomic_t requested = 0;  // number of the first signal; 0 if none has come
bool hangup_ignored_at_start = false;

void handle(int signal) {
  if (!requested) requested = signal;
}

void install(int signal) noexcept {
  struct sigaction action {};
  action.sa_handler = handle;
  action.sa_flags = SA_RESTART;
  ::sigaction(signal, &action, nullptr);
}

bool ignored(int signal) noexcept {
  struct sigaction now {};
  return ::sigaction(signal, nullptr, &now) == 0 && now.sa_handler == SIG_IGN;
}

bool is_of(const std::string& library, void (*handler)(int)) noexcept {
  Dl_info found{};
  return ::dladdr(reinterpret_cast<const void*>(handler), &found) != 0 && found.dli_fname == library;
}

#ifdef __GLIBC__
/// Called when the process exits. On a rank, tells `muster run` an exit code other than 0.
void tell_exit(int code, void*) noexcept {
  if (code == 0) return;
  const char* const own = std::getenv(rank_process_variable);
  if (own == nullptr || std::atoi(own) != ::getpid()) return;  // this process is a child of the rank
  const char* rank = std::getenv("OMPI_COMM_WORLD_RANK");
  // Under srun, no message is needed: srun itself reports the exit codes of its tasks.
  if (rank == nullptr && std::getenv("SLURM_PROCID") == nullptr) rank = std::getenv("PMI_RANK");
  if (const auto host = host_name(); rank != nullptr && !host.empty())
    tell(message_exit, str(rank, " ", code, " ", host));
}
#endif

bool supervised_in_batch_job() noexcept { return std::getenv(supervised_variable) != nullptr && in_batch_job(); }

[[gnu::constructor]] void prepare_before_main([[maybe_unused]] int argc, char**,
                                              [[maybe_unused]] char** variables) noexcept {
#ifdef __GLIBC__
  // glibc sets environ only after the constructors of a library that is initialised first.
  if (::environ == nullptr) ::environ = variables;
#endif
  hangup_ignored_at_start = ignored(SIGHUP);
#ifdef __GLIBC__
  if (std::getenv(supervised_variable) != nullptr) ::on_exit(tell_exit, nullptr);
#endif
  tell(message_loaded, "");
}

}  // namespace

bool is_requested() noexcept { return requested != 0; }

int requested_by() noexcept { return requested; }

bool ignores_hangup() noexcept { return hangup_ignored_at_start || ignored(SIGHUP); }

void install_handlers(bool terminate) noexcept {
  for (const int signal : {SIGUSR1, SIGUSR2}) install(signal);
  if (ignores_hangup())
    ::signal(SIGHUP, SIG_IGN);
  else
    install(SIGHUP);
  if (terminate || supervised_in_batch_job()) install(SIGTERM);
}

ScopedHandlers::ScopedHandlers(const std::string& mpi) noexcept {
  for (std::size_t i = 0; i < std::size(stop_signals); ++i) {
    ::sigaction(stop_signals[i], nullptr, &before_[i]);
    const auto now = before_[i].sa_handler;
    if (now == SIG_DFL || now == handle || is_of(mpi, now)) install(stop_signals[i]);
  }
}

ScopedHandlers::~ScopedHandlers() {
  for (std::size_t i = 0; i < std::size(stop_signals); ++i) {
    struct sigaction now {};
    if (::sigaction(stop_signals[i], nullptr, &now) == 0 && now.sa_handler == handle)
      ::sigaction(stop_signals[i], &before_[i], nullptr);
  }
}

}  // namespace muster::detail::launch::stop_signal
