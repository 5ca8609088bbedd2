// What all generators of random programs share: their options, and the report about a program that fails.
//
//   --first SEED --count COUNT    plays these programs, one after the other
//   --seed SEED                   plays one program and prints what it does
#pragma once

#include "muster/communicator.hpp"

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <string>

namespace muster::soak {

/// How long a rank waits for another one. A longer wait counts as a hang. The value is large because a loaded machine
/// is slow.
constexpr std::chrono::seconds patience{60};

struct Round {
  std::uint64_t seed;
  std::filesystem::path folder;  ///< for this program alone; empty and the same on all ranks; removed afterwards
  bool aloud;                    ///< print what the program does
};
/// Plays the program of a round on all ranks. Returns this rank's description of what is wrong; empty if nothing is.
using Play = std::function<std::string(const Round& round)>;

/// Returns a communicator whose ranks are told that they are on the nodes `node_of` names. Collective.
Communicator on_nodes(const Communicator& world, const std::function<int(int rank)>& node_of);

/// The main function of the generator `name`. `begin` is called once on all ranks; objects that it makes for all
/// programs live as long as the Play that it returns. For each program that fails, prints the command that plays it
/// again. Returns 1 if any program failed. An exception from a program ends all ranks.
int drive(int argc, char** argv, const std::string& name, const std::function<Play(const Communicator& world)>& begin);

}  // namespace muster::soak
