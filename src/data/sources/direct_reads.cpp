#include "data/sources/direct_reads.hpp"

#include "base/direct.hpp"
#include "base/text.hpp"
#include "muster/error.hpp"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <new>

namespace muster::detail::data {
namespace {

std::uint64_t rounded_down(std::uint64_t number) { return number / direct_alignment * direct_alignment; }

std::uint64_t rounded_up(std::uint64_t number) { return rounded_down(number + direct_alignment - 1); }

/// Reads bytes [begin, end) of the file, of which `begin` is aligned. False if they are not all there.
bool read_all(int descriptor, std::byte* into, std::uint64_t begin, std::uint64_t end) {
  while (begin < end) {
    const auto length = rounded_up(end - begin);
    const auto got = ::pread(descriptor, into, length, static_cast<off_t>(begin));
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) return false;
    const auto bytes = static_cast<std::uint64_t>(got);
    if (begin + bytes >= end) return true;
    // The next read must be aligned, too. After the end of the file it would not be, and the bytes are not all there.
    if (bytes % direct_alignment != 0) return false;
    into += bytes;
    begin += bytes;
  }
  return true;
}

}  // namespace

DirectReads::Part::Part(DirectReads& of, Pages memory, std::size_t skipped, std::size_t bytes)
    : of_(&of), memory_(std::move(memory)), skipped_(skipped), bytes_(bytes) {}

DirectReads::Part::~Part() {
  if (memory_.data() == nullptr) return;
  const std::lock_guard lock(of_->mutex_);
  of_->unused_.push_back(std::move(memory_));
}

/// Memory for `bytes`. Throws std::bad_alloc.
Pages DirectReads::memory_of(std::size_t bytes) {
  const auto fits = std::ranges::find_if(unused_, [&](const Pages& memory) { return memory.size() >= bytes; });
  if (fits != unused_.end()) {
    std::swap(*fits, unused_.back());
    Pages memory = std::move(unused_.back());
    unused_.pop_back();
    return memory;
  }
  unused_.clear();  // all pieces of memory in it are too small
  return Pages(bytes + bytes / 8);
}

DirectReads::Direct& DirectReads::direct_of(const File& file) {
  const auto [known, is_new] = direct_.try_emplace(file.descriptor());
  auto& direct = known->second;
  if (!is_new) return direct;
  try {
    // The same file, also if another has its name by now.
    direct.file.emplace(str("/proc/self/fd/", file.descriptor()), File::Mode::read);
    direct.works = read_directly(*direct.file);
  } catch (const Error&) {  // without /proc
  }
  return direct;
}

/// Drops requests that no thread is reading until `bytes` more may be held.
void DirectReads::make_room(std::size_t bytes) {
  std::vector<Key> kept;
  while (!order_.empty()) {
    const auto first = requests_.find(order_.front());
    if (first != requests_.end()) {
      if (held_ + bytes <= most_) break;
      if (first->second.state == State::is_read) {
        kept.push_back(order_.front());
      } else {
        held_ -= first->second.memory_bytes;
        if (first->second.memory.data() != nullptr) unused_.push_back(std::move(first->second.memory));
        requests_.erase(first);
      }
    }
    order_.pop_front();
  }
  order_.insert(order_.begin(), kept.begin(), kept.end());
}

bool DirectReads::request(const File& file, std::uint64_t offset, std::size_t bytes) {
  const Lock lock(mutex_);
  const auto memory_bytes = rounded_up(offset + bytes) - rounded_down(offset);
  if (!direct_of(file).works || memory_bytes > most_) return false;
  if (threads_.start() == 0) return false;
  const Key key{file.descriptor(), offset};
  if (requests_.contains(key)) return true;
  make_room(memory_bytes);
  held_ += memory_bytes;
  requests_.emplace(key, Request{.bytes = bytes, .memory_bytes = memory_bytes});
  order_.push_back(key);
  threads_.add([this, key] { read(key); });
  return true;
}

bool DirectReads::has(const File& file, std::uint64_t offset) {
  const Lock lock(mutex_);
  return requests_.contains({file.descriptor(), offset});
}

std::optional<DirectReads::Part> DirectReads::take(const File& file, std::uint64_t offset) {
  Lock lock(mutex_);
  const Key key{file.descriptor(), offset};
  auto found = requests_.find(key);
  while (found != requests_.end() && (found->second.state == State::waits || found->second.state == State::is_read)) {
    changed_.wait(lock);
    found = requests_.find(key);  // it may be taken or dropped by now
  }
  if (found == requests_.end()) return {};
  std::optional<Part> part;
  if (found->second.state == State::is_there)
    part.emplace(Part(*this, std::move(found->second.memory), offset - rounded_down(offset), found->second.bytes));
  held_ -= found->second.memory_bytes;
  requests_.erase(found);
  return part;
}

void DirectReads::rest() {
  threads_.rest();
  const Lock lock(mutex_);
  std::erase_if(requests_, [this](const auto& request) {
    const bool is_dropped = request.second.state == State::waits;
    if (is_dropped) held_ -= request.second.memory_bytes;
    return is_dropped;
  });
  changed_.notify_all();
}

void DirectReads::read(const Key& key) {
  Lock lock(mutex_);
  const auto found = requests_.find(key);
  if (found == requests_.end() || found->second.state != State::waits) return;
  auto& request = found->second;  // nobody drops it while it is read
  request.state = State::is_read;
  auto& direct = direct_.at(key.first);
  bool is_there = false;
  if (direct.works) {
    const auto begin = rounded_down(key.second), end = key.second + request.bytes;
    std::byte* into = nullptr;
    try {
      request.memory = memory_of(request.memory_bytes);
      into = request.memory.data();
    } catch (const std::bad_alloc&) {
    }
    lock.unlock();
    errno = 0;
    is_there = into != nullptr && read_all(direct.file->descriptor(), into, begin, end);
    const bool is_refused = !is_there && errno == EINVAL;
    lock.lock();
    if (is_refused) direct.works = false;  // some file systems say so only now
  }
  request.state = is_there ? State::is_there : State::failed;
  changed_.notify_all();
}

}  // namespace muster::detail::data
