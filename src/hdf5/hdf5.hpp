// HDF5 for muster: handles that close themselves, calls that are checked, files that cannot reach outside themselves.
//
// HDF5 is not thread-safe here, so there is one lock for every call in the process: take hdf5::Lock around any use of
// what stands in this header, and never hold it while waiting for anything else. Errors are muster::Error with
// ExitCode::data when reading, ExitCode::retry when writing.
#pragma once

#include "hdf5/medium.hpp"
#include "muster/error.hpp"

#include <c10/core/ScalarType.h>
#include <hdf5.h>

#include <cstdint>
#include <filesystem>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
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
  Handle(Handle&& other) noexcept;
  Handle& operator=(Handle&& other) noexcept;
  Handle(const Handle&) = delete;
  Handle& operator=(const Handle&) = delete;
  ~Handle();

  hid_t get() const noexcept { return id_; }
  explicit operator bool() const noexcept { return id_ >= 0; }
  /// Closes now and says whether that worked: what a writer must know.
  void close(std::string_view doing);

 private:
  hid_t id_ = H5I_INVALID_HID;
  Close close_ = nullptr;
};

/// The innermost message of HDF5's error stack (the system's word where a system call failed), or "HDF5 gives no
/// reason"; clears the stack.
std::string last_error();

/// Throws Error(code, doing, last_error()) if `status` (an herr_t, hid_t, htri_t, …) is negative; returns it otherwise.
std::int64_t check(std::int64_t status, std::string_view doing, ExitCode code = ExitCode::data);

/// Opens for reading, with plain POSIX I/O and no file lock. Tells a missing file, one that is not HDF5 and a truncated
/// one apart.
Handle open_file(const std::filesystem::path& path);
/// Makes a new file in the latest format, early allocation and data aligned to `alignment` bytes; it must not exist.
Handle create_file(const std::filesystem::path& path, std::uint64_t alignment = 4096);
/// The same on a fresh medium, which the caller may read once the handle is closed.
Handle create_file(const std::shared_ptr<Medium>& medium, std::uint64_t alignment = 4096,
                   const std::string& shown = "an HDF5 file in memory");

/// Opens a group or a dataset by its path inside the file. Refuses soft links that lead nowhere and external ones.
Handle open_group(hid_t file, const std::string& name, const std::string& shown);
/// Refuses external storage, virtual datasets, and what is not a dataset. `shown` names it in errors.
Handle open_dataset(hid_t file, const std::string& name, const std::string& shown);

/// Names of the links of a group, in the order of names.
std::vector<std::string> list(hid_t group);
/// Dimensions of a dataset; empty for a scalar. An Error for one that no int64 holds. `shown` names it in errors.
std::vector<std::int64_t> shape(hid_t dataset, const std::string& shown = {});

/// The type in memory that stands for a torch type: bfloat16 as a 16-bit float of 8 exponent bits, half as IEEE, bool
/// as h5py's enumeration of FALSE and TRUE over int8, complex as h5py's compound of r and i.
Handle type_of(at::ScalarType type);
/// The torch type that holds values of a stored type whatever its byte order (uint16, uint32, uint64 become the next
/// larger signed type that torch computes with; uint64 becomes int64); an Error that names the kind for strings,
/// references, other compounds and so on.
at::ScalarType scalar_type(hid_t type, const std::string& shown);

}  // namespace muster::detail::hdf5
