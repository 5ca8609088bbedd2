#include "hdf5/read_driver.hpp"

#include "hdf5/handle.hpp"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>
#if H5_VERSION_GE(1, 13, 0)
#include <H5FDdevelop.h>
#endif

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <limits>
#include <new>

namespace muster::detail::hdf5 {
namespace {

/// The driver's record of an open file. HDF5 requires that it begins with an H5FD_t.
struct ReadFile {
  H5FD_t common{};
  int descriptor = -1;
  haddr_t end_of_addresses = 0;
  OpenForReading shared;
};

/// The functions that HDF5 calls. They have a namespace since the driver in file_storage.cpp uses the same names.
namespace reader {

ReadFile& opened(H5FD_t* file) { return *reinterpret_cast<ReadFile*>(file); }
const ReadFile& opened(const H5FD_t* file) { return *reinterpret_cast<const ReadFile*>(file); }

/// Puts errno on HDF5's error stack, in the form that last_reason() parses.
void push_error(hid_t kind) {
  H5Epush2(H5E_DEFAULT, __FILE__, __func__, __LINE__, H5E_ERR_CLS, H5E_VFL, kind, "errno = %d, error message = '%s'",
           errno, std::strerror(errno));
}

H5FD_t* open(const char* path, unsigned, hid_t, haddr_t) {
  const int descriptor = ::open(path, O_RDONLY | O_CLOEXEC);
  struct stat status {};
  if (descriptor < 0 || ::fstat(descriptor, &status) != 0) {
    push_error(H5E_CANTOPENFILE);
    if (descriptor >= 0) ::close(descriptor);
    return nullptr;
  }
  auto* file = new (std::nothrow) ReadFile;
  if (file == nullptr) {
    ::close(descriptor);
    return nullptr;
  }
  file->descriptor = descriptor;
  file->shared.bytes = static_cast<std::uint64_t>(status.st_size);
  return &file->common;
}

herr_t close(H5FD_t* file) {
  ::close(opened(file).descriptor);
  delete &opened(file);
  return 0;
}

herr_t query(const H5FD_t*, unsigned long* flags) {
  if (flags != nullptr)
    *flags = H5FD_FEAT_ACCUMULATE_METADATA_READ | H5FD_FEAT_DATA_SIEVE | H5FD_FEAT_DEFAULT_VFD_COMPATIBLE;
  return 0;
}

haddr_t end_of_addresses(const H5FD_t* file, H5FD_mem_t) { return opened(file).end_of_addresses; }
herr_t set_end_of_addresses(H5FD_t* file, H5FD_mem_t, haddr_t address) {
  opened(file).end_of_addresses = address;
  return 0;
}
haddr_t end_of_file(const H5FD_t* file, H5FD_mem_t) { return opened(file).shared.bytes; }

herr_t get_handle(H5FD_t* file, hid_t, void** handle) {
  *handle = &opened(file).shared;
  return 0;
}

/// Reads zeroes beyond the end of the file, as HDF5's own drivers do.
herr_t read(H5FD_t* file, H5FD_mem_t kind, hid_t, haddr_t address, size_t size, void* into) {
  if (auto* noted = opened(file).shared.noted; noted != nullptr && kind == H5FD_MEM_DRAW) {
    *noted = {noted->count + 1, address, size};
    return 0;
  }
  auto* next = static_cast<char*>(into);
  while (size > 0) {
    const auto got = ::pread(opened(file).descriptor, next, size, static_cast<off_t>(address));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) {
      push_error(H5E_READERROR);
      return -1;
    }
    if (got == 0) break;
    next += got;
    address += static_cast<haddr_t>(got);
    size -= static_cast<size_t>(got);
  }
  std::fill_n(next, size, '\0');
  return 0;
}

herr_t refuse_to_write(H5FD_t*, H5FD_mem_t, hid_t, haddr_t, size_t, const void*) { return -1; }

}  // namespace reader

hid_t read_driver() {
  static const hid_t id = [] {
    H5FD_class_t driver{};
#if H5_VERSION_GE(1, 13, 0)
    driver.version = H5FD_CLASS_VERSION;
    driver.value = static_cast<H5FD_class_value_t>(H5_VFD_MAX - 1);
#endif
    driver.name = "muster's reader";
    driver.maxaddr = static_cast<haddr_t>(std::numeric_limits<std::int64_t>::max());
    driver.fc_degree = H5F_CLOSE_STRONG;
    driver.open = reader::open;
    driver.close = reader::close;
    driver.query = reader::query;
    driver.get_eoa = reader::end_of_addresses;
    driver.set_eoa = reader::set_end_of_addresses;
    driver.get_eof = reader::end_of_file;
    driver.get_handle = reader::get_handle;
    driver.read = reader::read;
    driver.write = reader::refuse_to_write;
    constexpr H5FD_mem_t lists[] = H5FD_FLMAP_DICHOTOMY;
    std::copy(std::begin(lists), std::end(lists), driver.fl_map);
    return H5FDregister(&driver);
  }();
  return check(id, "registering with HDF5", ExitCode::retry);
}

}  // namespace

void set_read_driver(hid_t access) {
  const Lock lock;
  check(H5Pset_driver(access, read_driver(), nullptr), "choosing how HDF5 reads", ExitCode::retry);
}

OpenForReading* open_for_reading(hid_t object) {
  const Lock lock;
  const std::string doing = "finding the file of a dataset";
  const Handle file(check(H5Iget_file_id(object), doing), H5Fclose);
  const Handle access(check(H5Fget_access_plist(file.get()), doing), H5Pclose);
  if (H5Pget_driver(access.get()) != read_driver()) return nullptr;
  void* record = nullptr;
  check(H5Fget_vfd_handle(file.get(), H5P_DEFAULT, &record), doing);
  return static_cast<OpenForReading*>(record);
}

}  // namespace muster::detail::hdf5
