// Real starts of a run that are interrupted in drawn ways.
#pragma once

namespace muster::soak {

/// Plays one start of a run with this command line. Returns the exit code.
int play_started_run(int argc, char** argv);

}  // namespace muster::soak
