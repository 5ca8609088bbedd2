#include "hdf5/handle.hpp"

#include "base/file.hpp"

namespace muster::detail::hdf5 {

Lock::Lock() {
  static std::recursive_mutex mutex;
  lock_ = std::unique_lock(mutex);
  static bool prepared = false;
  thread_local bool is_quiet = false;  // a thread-safe HDF5 has this setting for each thread
  if (!std::exchange(is_quiet, true)) H5Eset_auto2(H5E_DEFAULT, nullptr, nullptr);
  if (std::exchange(prepared, true)) return;
  H5Lunregister(H5L_TYPE_EXTERNAL);
  H5PLset_loading_state(0);
}

Handle::~Handle() {
  if (id_ < 0) return;
  const Lock lock;
  close_(id_);
}

void Handle::close(std::string_view doing) {
  const Lock lock;
  const hid_t id = std::exchange(id_, H5I_INVALID_HID);
  if (id >= 0) check(close_(id), doing, ExitCode::retry);
}

Reason last_reason() {
  std::string text;
  H5Ewalk2(
      H5E_DEFAULT, H5E_WALK_UPWARD,
      [](unsigned n, const H5E_error2_t* entry, void* out) -> herr_t {
        if (n == 0 && entry->desc != nullptr) *static_cast<std::string*>(out) = entry->desc;
        return 0;
      },
      &text);
  H5Eclear2(H5E_DEFAULT);
  // If a system call failed, its message is all that a user needs. HDF5 adds addresses and a time, over two lines.
  int error = 0;
  if (const auto number = text.find("errno = "); number != std::string::npos)
    std::sscanf(text.c_str() + number, "errno = %d", &error);
  constexpr std::string_view before = "error message = '";
  if (const auto begin = text.find(before); begin != std::string::npos) {
    const auto end = text.find('\'', begin + before.size());
    text = text.substr(begin + before.size(), end - begin - before.size());
  }
  return {.text = text.empty() ? "HDF5 gives no reason" : text,
          .code = error == 0 ? ExitCode::data : read_error_code(error)};
}

std::string last_error() { return last_reason().text; }

std::int64_t check(std::int64_t status, std::string_view doing, ExitCode code) {
  if (status >= 0) return status;
  const auto reason = last_reason();
  if (code == ExitCode::retry) throw Error(code, doing, reason.text, "Check the space and the permissions there");
  const bool disk_failed = code == ExitCode::data && reason.code == ExitCode::retry;
  throw Error(disk_failed ? reason.code : code, doing, reason.text, disk_failed ? retry_reading : "");
}

Handle dataset_property(hid_t dataset, hid_t (*get)(hid_t), std::string_view doing, ExitCode code) {
  return {check(get(dataset), doing, code), H5Idec_ref};
}

Handle make_properties(hid_t kind, std::string_view doing, ExitCode code) {
  return {check(H5Pcreate(kind), doing, code), H5Pclose};
}

Handle make_space(const std::vector<std::int64_t>& shape, std::string_view doing, ExitCode code) {
  const std::vector<hsize_t> sizes(shape.begin(), shape.end());
  return {check(sizes.empty() ? H5Screate(H5S_SCALAR)
                              : H5Screate_simple(static_cast<int>(sizes.size()), sizes.data(), nullptr),
                doing, code),
          H5Sclose};
}

}  // namespace muster::detail::hdf5
