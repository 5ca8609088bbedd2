// HDF5 as muster calls it: handles that close themselves and calls that are checked. HDF5 is not thread-safe here: take
// hdf5::Lock around any use of this room, and never hold it while waiting for anything else. Errors are muster::Error
// with ExitCode::data when reading what cannot be, ExitCode::retry when writing or where the disk could not be read.
#pragma once

#include "muster/error.hpp"

#include <hdf5.h>

#include <cstdint>
#include <mutex>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace muster::detail::hdf5 {

/// Holds HDF5's lock; may be taken again by the thread that has it. The first one prepares the library: no messages of
/// its own, no external links, no filter plugins from the environment.
class Lock {
 public:
  Lock();

 private:
  std::unique_lock<std::recursive_mutex> lock_;
};

/// An HDF5 identifier with the function that closes it. Move-only. Destroyed under the lock.
class Handle {
 public:
  using Close = herr_t (*)(hid_t);
  Handle() noexcept = default;
  Handle(hid_t id, Close close) noexcept : id_(id), close_(close) {}
  Handle(Handle&& other) noexcept : id_(std::exchange(other.id_, H5I_INVALID_HID)), close_(other.close_) {}
  Handle& operator=(Handle other) noexcept {
    std::swap(id_, other.id_);
    std::swap(close_, other.close_);
    return *this;
  }
  Handle(const Handle&) = delete;
  ~Handle();

  hid_t get() const noexcept { return id_; }
  explicit operator bool() const noexcept { return id_ >= 0; }
  /// Closes now and says whether that worked: what a writer must know.
  void close(std::string_view doing);

 private:
  hid_t id_ = H5I_INVALID_HID;
  Close close_ = nullptr;
};

/// The remedy where the disk could not be read.
inline constexpr const char* retry_reading = "Look after the disk or the file server, then try again";

/// Why a call of HDF5 has failed.
struct Reason {
  std::string text;  ///< HDF5's innermost message (the system's word where a system call failed)
  ExitCode code;     ///< if it was a reading call: code_of_reading() where a system call failed, else data
};

/// What HDF5's error stack says, or "HDF5 gives no reason"; clears the stack.
Reason last_reason();
/// The text of last_reason().
std::string last_error();

/// Throws an Error with last_error() if `status` (an herr_t, hid_t, htri_t, …) is negative; returns it otherwise. The
/// code is `code`, but ExitCode::retry where the disk could not be read.
std::int64_t check(std::int64_t status, std::string_view doing, ExitCode code = ExitCode::data);

/// What `get` (H5Dget_type, H5Dget_space or H5Dget_create_plist) gives of a dataset.
Handle part_of(hid_t dataset, hid_t (*get)(hid_t), std::string_view doing, ExitCode code = ExitCode::data);
/// A new list of properties of that kind, H5P_DATASET_CREATE and so on.
Handle make_properties(hid_t kind, std::string_view doing, ExitCode code = ExitCode::data);
/// The space of values in that shape; a single value's where it is empty.
Handle make_space(const std::vector<std::int64_t>& shape, std::string_view doing, ExitCode code = ExitCode::data);

}  // namespace muster::detail::hdf5
