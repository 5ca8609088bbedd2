#include "data/sources/scattered_read.hpp"

#include "hdf5/handle.hpp"
#include "muster/error.hpp"

#include <algorithm>
#include <cerrno>
#include <cstring>

namespace muster::detail::data {
namespace {

constexpr std::size_t max_pieces = 1024;                      ///< IOV_MAX of Linux
constexpr std::size_t max_read_bytes = std::size_t{1} << 30;  ///< one preadv reads at most just under 2 GiB

}  // namespace

void ScatteredRead::add(std::uint64_t offset, std::byte* into, std::size_t bytes) {
  while (bytes > max_read_bytes) {
    add(offset, into, max_read_bytes);
    offset += max_read_bytes;
    into += max_read_bytes;
    bytes -= max_read_bytes;
  }
  const bool is_near = offset >= end_ && offset - end_ <= most_skipped && offset + bytes - begin_ <= max_read_bytes;
  if (!is_near || pieces_.size() + 2 > max_pieces) finish();
  if (pieces_.empty())
    begin_ = offset;
  else if (offset > end_)
    pieces_.push_back({skipped_.data(), offset - end_});
  if (!pieces_.empty() && static_cast<std::byte*>(pieces_.back().iov_base) + pieces_.back().iov_len == into)
    pieces_.back().iov_len += bytes;
  else
    pieces_.push_back({into, bytes});
  end_ = offset + bytes;
}

void ScatteredRead::finish() {
  auto offset = static_cast<off_t>(begin_);
  for (std::size_t next = 0; next < pieces_.size();) {
    const auto got =
        ::preadv(file_.descriptor(), pieces_.data() + next, static_cast<int>(pieces_.size() - next), offset);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) throw Error(read_error_code(errno), "reading " + shown_, std::strerror(errno), hdf5::retry_reading);
    if (got == 0)
      throw Error(ExitCode::data, "reading " + shown_, "the file became shorter while it was in use",
                  "Do not change a dataset while it is read");
    offset += got;
    for (auto left = static_cast<std::size_t>(got); left > 0;) {
      auto& piece = pieces_[next];
      const auto step = std::min(left, piece.iov_len);
      piece.iov_base = static_cast<std::byte*>(piece.iov_base) + step;
      piece.iov_len -= step;
      left -= step;
      if (piece.iov_len == 0) ++next;
    }
  }
  pieces_.clear();
}

}  // namespace muster::detail::data
