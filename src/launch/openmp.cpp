#include "launch/openmp.hpp"

#include "base/cpus.hpp"

#include <dlfcn.h>
#include <strings.h>

#include <charconv>
#include <cstddef>
#include <cstring>
#include <vector>

namespace muster::detail::launch {
namespace {

/// A function of the OpenMP library that this process has loaded; null if it has none.
template <class Function>
Function* openmp_function(const char* name) {
  return reinterpret_cast<Function*>(::dlsym(RTLD_DEFAULT, name));
}

}  // namespace

std::string openmp_binding(const Environment& environment) {
  const char* const binds = environment("OMP_PROC_BIND");
  if (binds != nullptr && ::strcasecmp(binds, "false") == 0) return {};  // whatever the other variables are
  for (const char* name : {"GOMP_CPU_AFFINITY", "OMP_PLACES", "OMP_PROC_BIND"})
    if (const char* const value = environment(name); value != nullptr && *value != '\0') return name;
  return {};
}

std::optional<int> openmp_threads(const Environment& environment) {
  const char* const value = environment("OMP_NUM_THREADS");
  if (value == nullptr) return {};
  const char* const first = value + std::strspn(value, " \t");
  int threads = 0;
  const auto [end, error] = std::from_chars(first, first + std::strlen(first), threads);
  const bool is_number = error == std::errc() && std::strchr(", \t", *end) != nullptr;  // finds '\0', too
  return is_number && threads >= 1 && threads <= most_threads ? std::optional(threads) : std::nullopt;
}

std::string process_mask() {
  auto* const binds = openmp_function<int()>("omp_get_proc_bind");
  auto* const place_count = openmp_function<int()>("omp_get_num_places");
  auto* const cpu_count = openmp_function<int(int)>("omp_get_place_num_procs");
  auto* const cpus_of = openmp_function<void(int, int*)>("omp_get_place_proc_ids");
  std::vector<int> cpus;
  if (binds != nullptr && place_count != nullptr && cpu_count != nullptr && cpus_of != nullptr && binds() != 0)
    for (int place = 0; place < place_count(); ++place) {
      std::vector<int> of_place(static_cast<std::size_t>(cpu_count(place)));
      cpus_of(place, of_place.data());
      cpus.insert(cpus.end(), of_place.begin(), of_place.end());
    }
  return cpus.empty() ? cpu_mask() : mask_of(cpus);
}

void undo_openmp_binding() {
  if (const auto mask = process_mask(); mask != cpu_mask()) bind_threads(mask);
}

}  // namespace muster::detail::launch
