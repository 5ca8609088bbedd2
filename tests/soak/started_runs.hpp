// Runs that are started for real, and what befalls them there.
#pragma once

namespace muster::soak {

/// One start of a run, with the words of the command line; gives the exit code.
int play_started_run(int argc, char** argv);

}  // namespace muster::soak
