// Preloaded into a program, makes its wall clock jump: every quarter of a second it is right, or wrong by up to a day.
//   MUSTER_TEST_CLOCK=SEED LD_PRELOAD=libmuster_jumping_clock.so PROGRAM
// Programs with the same even seed have the same clock, as on one host; with an odd one, each rank has its own. The
// times of files are right.
#include <dlfcn.h>
#include <sys/time.h>
#include <time.h>

#include <cstdint>
#include <cstdlib>
#include <iterator>

namespace {

using GetTime = int (*)(clockid_t, timespec*);

constexpr std::int64_t quarter_ns = 250'000'000;
constexpr std::int64_t day = 24 * 3600;

int get_time(clockid_t clock, timespec* time) noexcept {
  static const auto get = reinterpret_cast<GetTime>(::dlsym(RTLD_NEXT, "clock_gettime"));
  return get(clock, time);
}

/// The seed, and for an odd one the rank; 0: the clock is right.
std::uint64_t draw_seed() noexcept {
  const char* const seed = std::getenv("MUSTER_TEST_CLOCK");
  if (seed == nullptr) return 0;
  const auto number = std::strtoull(seed, nullptr, 10) + 2;
  const char* const rank = std::getenv("OMPI_COMM_WORLD_RANK");
  return number % 2 == 0 || rank == nullptr ? number : number + 1'000'003 * std::strtoull(rank, nullptr, 10);
}

/// By how many seconds the clock is wrong now.
std::int64_t error_now() noexcept {
  static const auto seed = draw_seed();
  if (seed == 0) return 0;
  timespec steady{};
  get_time(CLOCK_MONOTONIC, &steady);
  const auto quarter = (steady.tv_sec * 1'000'000'000 + steady.tv_nsec) / quarter_ns;
  auto word = (seed * 0x9e3779b97f4a7c15 + static_cast<std::uint64_t>(quarter)) * 0xbf58476d1ce4e5b9;
  word = (word ^ (word >> 31)) * 0x94d049bb133111eb;
  constexpr std::int64_t errors[] = {0, 2, -2, 90, -90, 3600, -3600, day, -day};
  return errors[(word >> 33) % std::size(errors)];
}

}  // namespace

extern "C" {

__attribute__((visibility("default"))) int clock_gettime(clockid_t clock, timespec* time) noexcept {
  const int result = get_time(clock, time);
  if (result == 0 && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) time->tv_sec += error_now();
  return result;
}

__attribute__((visibility("default"))) int gettimeofday(timeval* time, void* /*zone*/) noexcept {
  timespec now{};
  ::clock_gettime(CLOCK_REALTIME, &now);
  time->tv_sec = now.tv_sec;
  time->tv_usec = now.tv_nsec / 1000;
  return 0;
}

__attribute__((visibility("default"))) time_t time(time_t* where) noexcept {
  timespec now{};
  ::clock_gettime(CLOCK_REALTIME, &now);
  if (where != nullptr) *where = now.tv_sec;
  return now.tv_sec;
}

}  // extern "C"
