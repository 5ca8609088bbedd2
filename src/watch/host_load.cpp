#include "watch/host_load.hpp"

#include "base/control_groups.hpp"
#include "base/page_size.hpp"
#include "base/text.hpp"

#include <fcntl.h>
#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <fstream>
#include <string>
#include <string_view>
#include <utility>

namespace muster::detail::watch {
namespace {

int open_file(const std::filesystem::path& path) { return ::open(path.c_str(), O_RDONLY | O_CLOEXEC); }

/// The beginning of a file, up to 4 KiB; empty if it cannot be read.
std::string_view content(int descriptor, std::array<char, 4096>& buffer) {
  if (descriptor < 0) return {};
  const auto got = ::pread(descriptor, buffer.data(), buffer.size(), 0);
  return {buffer.data(), got > 0 ? static_cast<std::size_t>(got) : 0};
}

/// The number in the field of that index, counted from 0; 0 if there is none.
std::int64_t number_at(std::string_view text, int index) {
  for (; index > 0; --index) {
    const auto space = text.find(' ');
    if (space == std::string_view::npos) return 0;
    text.remove_prefix(space + 1);
  }
  std::int64_t number = 0;
  std::from_chars(text.data(), text.data() + text.size(), number);
  return number;
}

/// The number after `key` at the beginning of a line; 0 if there is none.
std::int64_t number_of(std::string_view text, std::string_view key) {
  for (std::size_t at = text.find(key); at != std::string_view::npos; at = text.find(key, at + 1)) {
    if (at != 0 && text[at - 1] != '\n') continue;
    return number_at(text.substr(at + key.size()), 0);
  }
  return 0;
}

/// Opens cpu.stat of this process's control group or, if it cannot be read, of the nearest parent.
int open_group(const std::filesystem::path& root) {
  int file = -1;
  for_each_control_group("cpu", root, [&](const std::filesystem::path& folder) {
    if (file < 0) file = open_file(folder / "cpu.stat");
  });
  return file;
}

}  // namespace

HostLoadReader::HostLoadReader(const std::filesystem::path& root)
    : root_(root),
      threads_{{.file = open_file(root / "proc/thread-self/schedstat")}},
      group_stat_(open_group(root)),
      process_stat_(open_file(root / "proc/self/stat")) {}

HostLoadReader::~HostLoadReader() {
  for (const auto& thread : threads_)
    if (thread.file >= 0) ::close(thread.file);
  for (const int file : {group_stat_, process_stat_, throttle_count_})
    if (file >= 0) ::close(file);
}

void HostLoadReader::watch_threads(const std::vector<int>& threads) {
  std::array<char, 4096> buffer;
  for (const int thread : threads) {
    const int file = open_file(root_ / "proc/self/task" / std::to_string(thread) / "schedstat");
    threads_.push_back({.file = file, .run_queue_ns = number_at(content(file, buffer), 1)});
  }
}

HostLoad HostLoadReader::read() {
  std::array<char, 4096> buffer;
  HostLoad load;
  std::int64_t longest = 0, watched_ns = 0;
  for (auto& thread : threads_) {
    const auto schedstat = content(thread.file, buffer);
    const auto now = number_at(schedstat, 1);
    longest = std::max(longest, now - std::exchange(thread.run_queue_ns, now));
    watched_ns += number_at(schedstat, 0);
  }
  run_queue_ns_ += longest;
  load.run_queue_ns = run_queue_ns_;
  const auto group = content(group_stat_, buffer);
  load.throttled_ns = number_of(group, "throttled_time ");  // control groups version 1
  if (load.throttled_ns == 0) load.throttled_ns = 1000 * number_of(group, "throttled_usec ");
  auto stat = content(process_stat_, buffer);
  stat.remove_prefix(std::min(stat.size(), stat.rfind(')') + 2));  // the name may hold spaces
  load.major_faults = number_at(stat, 9);
  static const std::int64_t ns_per_tick = 1'000'000'000 / ::sysconf(_SC_CLK_TCK);
  load.other_threads_ns = (number_at(stat, 11) + number_at(stat, 12)) * ns_per_tick - watched_ns;
  if (const int cpu = ::sched_getcpu(); cpu != throttle_cpu_) {
    throttles_before_ += number_at(content(throttle_count_, buffer), 0) - throttles_on_arrival_;
    if (throttle_count_ >= 0) ::close(throttle_count_);
    throttle_count_ =
        open_file(root_ / "sys/devices/system/cpu" / str("cpu", cpu) / "thermal_throttle/core_throttle_count");
    throttle_cpu_ = cpu;
    throttles_on_arrival_ = number_at(content(throttle_count_, buffer), 0);
  }
  load.clock_throttles = throttles_before_ + number_at(content(throttle_count_, buffer), 0) - throttles_on_arrival_;
  return load;
}

std::int64_t memory_bytes(const std::filesystem::path& root) {
  std::int64_t size = 0, resident = 0;
  std::ifstream(root / "proc/self/statm") >> size >> resident;
  return resident * static_cast<std::int64_t>(kernel_page_size());
}

}  // namespace muster::detail::watch
