// What the generators of random programs have in common: their options, and what is said of a program that is wrong.
//
//   --first SEED --count COUNT    these programs, one after the other
//   --seed SEED                   one program, which tells what it does
#pragma once

#include "muster/communicator.hpp"

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <string>

namespace muster::soak {

/// How long a rank waits for another one: a longer wait is a hang. A loaded machine needs more than it seems.
constexpr std::chrono::seconds patience{60};

struct Round {
  std::uint64_t seed;
  std::filesystem::path folder;  ///< of this program alone, empty and the same on all ranks; removed after it
  bool aloud;                    ///< tells what it does
};
/// Plays the program of a round on all ranks. Gives what is wrong, as this rank sees it; empty where nothing is.
using Play = std::function<std::string(const Round& round)>;

/// The main function of the generator `name`. `begin` is called once on all ranks; what it makes for all programs lives
/// as long as the Play that it gives. For each program that is wrong, the command that plays it again is printed, and
/// the result is 1. An exception out of a program ends all ranks.
int drive(int argc, char** argv, const std::string& name, const std::function<Play(const Communicator& world)>& begin);

}  // namespace muster::soak
