#include "data/sources/scattered_read.hpp"

#include "hdf5/handle.hpp"
#include "muster/error.hpp"

#include <fcntl.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

namespace muster::detail::data {
namespace {

constexpr std::size_t max_pieces = 1024;                      ///< IOV_MAX of Linux
constexpr std::size_t max_read_bytes = std::size_t{1} << 30;  ///< one preadv reads at most just under 2 GiB

}  // namespace

File open_for_pieces(const std::string& path) {
  File file(path, File::Mode::read);
  ::posix_fadvise(file.descriptor(), 0, 0, POSIX_FADV_RANDOM);
  return file;
}

void ScatteredRead::add(std::uint64_t offset, std::byte* into, std::size_t bytes) {
  while (bytes > max_read_bytes) {
    add(offset, into, max_read_bytes);
    offset += max_read_bytes;
    into += max_read_bytes;
    bytes -= max_read_bytes;
  }
  const bool is_near = offset >= end_ && offset - end_ <= most_skipped && offset + bytes - begin_ <= max_read_bytes;
  if (!is_near || pieces_.size() - first_ + 2 > max_pieces) end_run();
  if (pieces_.size() == first_)
    begin_ = offset;
  else if (offset > end_)
    pieces_.push_back({skipped_.data(), offset - end_});
  if (pieces_.size() > first_ && static_cast<std::byte*>(pieces_.back().iov_base) + pieces_.back().iov_len == into)
    pieces_.back().iov_len += bytes;
  else
    pieces_.push_back({into, bytes});
  end_ = offset + bytes;
}

void ScatteredRead::finish() {
  end_run();
  for (const auto& run : waiting_) read(run);
  waiting_.clear();
  pieces_.clear();
  first_ = 0;
}

/// Reads the last run if the system has it in memory; otherwise requests it.
void ScatteredRead::end_run() {
  Run run{begin_, first_, pieces_.size()};
  if (run.first == run.end) return;
  if (read_cached(run)) {
    pieces_.resize(first_);
  } else {
    file_.will_read(run.offset, end_ - run.offset);
    waiting_.push_back(run);
    first_ = run.end;
  }
}

/// Reads as much as is possible without waiting for the disk. True if that was the whole run.
bool ScatteredRead::read_cached(Run& run) {
  if (!tells_cached_) return false;
  const auto got = ::preadv2(file_.descriptor(), pieces_.data() + run.first, static_cast<int>(run.end - run.first),
                             static_cast<off_t>(run.offset), RWF_NOWAIT);
  if (got < 0) tells_cached_ = errno == EAGAIN;
  if (got <= 0) return false;  // read() meets an error or the end of the file again
  advance(run, static_cast<std::size_t>(got));
  return run.first == run.end;
}

void ScatteredRead::read(Run run) {
  while (run.first < run.end) {
    const auto got = ::preadv(file_.descriptor(), pieces_.data() + run.first, static_cast<int>(run.end - run.first),
                              static_cast<off_t>(run.offset));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) throw Error(read_error_code(errno), "reading " + shown_, std::strerror(errno), hdf5::retry_reading);
    if (got == 0)
      throw Error(ExitCode::data, "reading " + shown_, "the file became shorter while it was in use",
                  "Do not change a dataset while it is read");
    advance(run, static_cast<std::size_t>(got));
  }
}

/// Leaves out the first bytes of a run, which have been read.
void ScatteredRead::advance(Run& run, std::size_t bytes) {
  run.offset += bytes;
  while (bytes > 0) {
    auto& piece = pieces_[run.first];
    const auto step = std::min(bytes, piece.iov_len);
    piece.iov_base = static_cast<std::byte*>(piece.iov_base) + step;
    piece.iov_len -= step;
    bytes -= step;
    if (piece.iov_len == 0) ++run.first;
  }
}

}  // namespace muster::detail::data
