// early_signal [before SIGNAL|after SIGNAL|wait]: a request to stop before this program has made its Launch, which no
// handler of muster notes, or after that. `wait` waits for one, before.
#include "muster/launch.hpp"

#include <signal.h>
#include <unistd.h>

#include <cstdio>
#include <string>

int main(int argc, char** argv) {
  const std::string when = argc > 1 ? argv[1] : "", name = argc > 2 ? argv[2] : "";
  const int signal = name == "USR2" ? SIGUSR2 : name == "HUP" ? SIGHUP : SIGUSR1;
  if (when == "before") ::raise(signal);
  if (when == "wait") {
    std::puts("waits");
    std::fflush(stdout);
    for (;;) ::pause();
  }
  muster::Launch launch(1, argv);
  return launch.run([&] {
    if (when == "after") ::raise(signal);
    const bool is_right = launch.stop_requested() == (when == "after");
    if (!is_right) std::fprintf(stderr, "the signal was not noted, or one that has not come\n");
    return is_right ? 0 : 1;
  });
}
