// early_signal USR1|USR2: a wish to stop that comes before anything of the program has begun, and before libtorch is
// initialised, is heeded by the Launch that is made later.
#include "muster/launch.hpp"

#include <signal.h>

#include <cstdio>
#include <string_view>

namespace {

/// The loader calls it before the initialisers of this program's libraries.
void before_everything(int argc, char** argv, char**) {
  if (argc == 2) ::raise(std::string_view(argv[1]) == "USR2" ? SIGUSR2 : SIGUSR1);
}

[[gnu::section(".preinit_array"), gnu::used]] void (*const first)(int, char**, char**) = before_everything;

}  // namespace

int main(int, char** argv) {
  muster::Launch launch(1, argv);
  return launch.run([&] {
    if (!launch.stop_requested()) std::fprintf(stderr, "nobody remembers the signal\n");
    return launch.stop_requested() ? 0 : 1;
  });
}
