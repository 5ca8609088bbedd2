// Wrappers for HDF5: handles that close themselves and calls that are checked. HDF5 may be built without thread safety:
// hold an hdf5::Lock around all that calls HDF5, and never wait for anything else while holding it. Functions throw an
// Error with ExitCode::data for bad content, and ExitCode::retry if writing has failed or the disk could not be read.
#pragma once

#include "base/export.hpp"
#include "muster/error.hpp"

#include <hdf5.h>

#include <cstdint>
#include <mutex>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace muster::detail::hdf5 {

/// Holds muster's lock for HDF5, which is recursive. The first Lock prepares the library: HDF5 prints no errors itself,
/// follows no external links, and loads no filter plugins.
class MUSTER_INTERNAL_API Lock {
 public:
  Lock();

 private:
  std::unique_lock<std::recursive_mutex> lock_;
};

/// An HDF5 identifier with the function that closes it. Move-only. The destructor takes the lock.
class MUSTER_INTERNAL_API Handle {
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
  /// Closes now, and throws an Error if that fails. A writer must call it, since the destructor ignores failures.
  void close(std::string_view doing);

 private:
  hid_t id_ = H5I_INVALID_HID;
  Close close_ = nullptr;
};

/// The remedy of an Error if the disk could not be read.
inline constexpr const char* retry_reading = "Check the disk or the file server, then try again";

/// Why a call of HDF5 has failed.
struct Reason {
  std::string text;  ///< HDF5's innermost message; if a system call failed, the system's message
  ExitCode code;     ///< for a call that reads: read_error_code(errno) if a system call failed, otherwise data
};

/// The reason from HDF5's error stack, or "HDF5 gives no reason". Clears the stack.
Reason last_reason();
/// The text of last_reason(), whose call also clears the stack.
MUSTER_INTERNAL_API std::string last_error();

/// Returns `status` (an herr_t, hid_t, htri_t, …). If it is negative, throws an Error with last_error() and with
/// `code`, or with ExitCode::retry if `code` is ExitCode::data and the disk could not be read.
MUSTER_INTERNAL_API std::int64_t check(std::int64_t status, std::string_view doing, ExitCode code = ExitCode::data);

/// The dataset's type, space or creation properties: `get` is H5Dget_type, H5Dget_space or H5Dget_create_plist.
MUSTER_INTERNAL_API Handle dataset_property(hid_t dataset, hid_t (*get)(hid_t), std::string_view doing,
                                            ExitCode code = ExitCode::data);
/// A new property list; `kind`: H5P_DATASET_CREATE and so on.
MUSTER_INTERNAL_API Handle make_properties(hid_t kind, std::string_view doing, ExitCode code = ExitCode::data);
/// The HDF5 space of values in the given shape; the space of a single value if `shape` is empty.
MUSTER_INTERNAL_API Handle make_space(const std::vector<std::int64_t>& shape, std::string_view doing,
                                      ExitCode code = ExitCode::data);

}  // namespace muster::detail::hdf5
