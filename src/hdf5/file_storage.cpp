#include "hdf5/file_storage.hpp"

#include "hdf5/handle.hpp"

#include <unistd.h>
#if H5_VERSION_GE(1, 13, 0)
#include <H5FDdevelop.h>
#endif

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <limits>
#include <new>
#include <utility>

namespace muster::detail::hdf5 {
namespace {

/// Calls part(offset in the range, size, page number, offset in the page) for each page that the range
/// [offset, offset + size) touches.
void each_page(std::uint64_t offset, std::size_t size, std::size_t page_bytes, auto&& part) {
  for (std::size_t done = 0; done < size;) {
    const auto at = offset + done, inside = at % page_bytes;
    const auto length = std::min<std::size_t>(size - done, page_bytes - inside);
    part(done, length, at / page_bytes, inside);
    done += length;
  }
}

/// The driver's record of an open file. HDF5 requires that it begins with an H5FD_t.
struct OpenFile {
  H5FD_t common{};
  std::shared_ptr<FileStorage> storage;
  haddr_t end_of_addresses = 0;
};

OpenFile& opened(H5FD_t* file) { return *reinterpret_cast<OpenFile*>(file); }
const OpenFile& opened(const H5FD_t* file) { return *reinterpret_cast<const OpenFile*>(file); }

/// Puts errno's message on HDF5's error stack, in the form that last_error() parses. Returns −1.
herr_t push_error() {
  H5Epush2(H5E_DEFAULT, __FILE__, __func__, __LINE__, H5E_ERR_CLS, H5E_VFL, H5E_WRITEERROR,
           "errno = %d, error message = '%s'", errno, std::strerror(errno));
  return -1;
}

H5FD_t* open(const char*, unsigned, hid_t access, haddr_t) {
  const auto* storage = static_cast<const std::shared_ptr<FileStorage>* const*>(H5Pget_driver_info(access));
  auto* file = storage == nullptr ? nullptr : new (std::nothrow) OpenFile;
  if (file == nullptr) return nullptr;
  file->storage = **storage;
  return &file->common;
}

herr_t close(H5FD_t* file) {
  delete &opened(file);
  return 0;
}

herr_t query(const H5FD_t*, unsigned long* flags) {
  if (flags != nullptr)
    *flags = H5FD_FEAT_AGGREGATE_METADATA | H5FD_FEAT_ACCUMULATE_METADATA | H5FD_FEAT_DATA_SIEVE |
             H5FD_FEAT_AGGREGATE_SMALLDATA | H5FD_FEAT_DEFAULT_VFD_COMPATIBLE;
  return 0;
}

haddr_t end_of_addresses(const H5FD_t* file, H5FD_mem_t) { return opened(file).end_of_addresses; }
herr_t set_end_of_addresses(H5FD_t* file, H5FD_mem_t, haddr_t address) {
  opened(file).end_of_addresses = address;
  return 0;
}
haddr_t end_of_file(const H5FD_t* file, H5FD_mem_t) { return opened(file).storage->size(); }

herr_t get_handle(H5FD_t* file, hid_t, void** handle) {
  *handle = &opened(file).storage;
  return 0;
}

herr_t read(H5FD_t* file, H5FD_mem_t, hid_t, haddr_t address, size_t size, void* into) {
  return opened(file).storage->read_at({static_cast<std::byte*>(into), size}, address) ? 0 : push_error();
}
herr_t write(H5FD_t* file, H5FD_mem_t, hid_t, haddr_t address, size_t size, const void* from) {
  return opened(file).storage->write_at({static_cast<const std::byte*>(from), size}, address) ? 0 : push_error();
}
herr_t truncate(H5FD_t* file, hid_t, hbool_t) {
  auto& open = opened(file);
  if (open.end_of_addresses == open.storage->size()) return 0;
  return open.storage->truncate(open.end_of_addresses) ? 0 : push_error();
}

hid_t driver() {
  static const hid_t id = [] {
    H5FD_class_t driver{};
#if H5_VERSION_GE(1, 13, 0)
    driver.version = H5FD_CLASS_VERSION;
    driver.value = static_cast<H5FD_class_value_t>(H5_VFD_MAX);
#endif
    driver.name = "muster";
    driver.maxaddr = static_cast<haddr_t>(std::numeric_limits<std::int64_t>::max());
    driver.fc_degree = H5F_CLOSE_STRONG;
    driver.fapl_size = sizeof(const std::shared_ptr<FileStorage>*);
    driver.open = open;
    driver.close = close;
    driver.query = query;
    driver.get_eoa = end_of_addresses;
    driver.set_eoa = set_end_of_addresses;
    driver.get_eof = end_of_file;
    driver.get_handle = get_handle;
    driver.read = read;
    driver.write = write;
    driver.truncate = truncate;
    constexpr H5FD_mem_t lists[] = H5FD_FLMAP_DICHOTOMY;
    std::copy(std::begin(lists), std::end(lists), driver.fl_map);
    return H5FDregister(&driver);
  }();
  return check(id, "registering with HDF5", ExitCode::retry);
}

}  // namespace

bool FileStorage::read_at(std::span<std::byte> into, std::uint64_t offset) const {
  std::size_t have = 0;
  while (file_ && have < into.size()) {
    const auto got =
        ::pread(file_->descriptor(), into.data() + have, into.size() - have, static_cast<off_t>(offset + have));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return false;
    if (got == 0) break;
    have += static_cast<std::size_t>(got);
  }
  std::fill(into.begin() + static_cast<std::ptrdiff_t>(have), into.end(), std::byte{});
  if (pages_.empty()) return true;
  each_page(offset, into.size(), page_bytes, [&](auto done, auto length, auto number, auto inside) {
    if (const auto page = pages_.find(number); page != pages_.end())
      std::memcpy(into.data() + done, page->second->data() + inside, length);
  });
  return true;
}

void FileStorage::remember(std::span<const std::byte> from, std::uint64_t offset) {
  each_page(offset, from.size(), page_bytes, [&](auto done, auto length, auto number, auto inside) {
    auto page = pages_.find(number);
    if (page == pages_.end()) {
      auto fresh = std::make_unique<Page>();
      read_at(*fresh, number * page_bytes);  // the file's bytes; if that fails, the content does not matter
      page = pages_.emplace(number, std::move(fresh)).first;
    }
    std::memcpy(page->second->data() + inside, from.data() + done, length);
  });
}

bool FileStorage::write_at(std::span<const std::byte> from, std::uint64_t offset) {
  size_ = std::max(size_, offset + from.size());
  std::size_t done = 0;
  while (in_file() && done < from.size()) {
    const auto wrote =
        ::pwrite(file_->descriptor(), from.data() + done, from.size() - done, static_cast<off_t>(offset + done));
    if (wrote < 0 && errno == EINTR) continue;
    if (wrote <= 0) {
      const int reason = wrote < 0 ? errno : ENOSPC;
      failed_ = true;
      write_at(from, offset);
      errno = reason;
      return false;
    }
    done += static_cast<std::size_t>(wrote);
  }
  if (in_file()) return true;
  try {
    remember(from, offset);
  } catch (const std::bad_alloc&) {
    // Running out of memory is also reported only once.
    if (std::exchange(failed_, true)) return true;
    errno = ENOMEM;
    return false;
  }
  return true;
}

bool FileStorage::truncate(std::uint64_t size) {
  size_ = size;
  while (in_file() && ::ftruncate(file_->descriptor(), static_cast<off_t>(size)) != 0)
    if (errno != EINTR) {
      failed_ = true;
      return false;
    }
  return true;
}

void set_storage(hid_t access, const std::shared_ptr<FileStorage>& storage) {
  const Lock lock;
  const auto* info = &storage;
  check(H5Pset_driver(access, driver(), &info), "choosing where HDF5 writes", ExitCode::retry);
}

std::shared_ptr<FileStorage> storage_of(hid_t object) {
  const Lock lock;
  const std::string doing = "finding the file of a dataset";
  const Handle file(check(H5Iget_file_id(object), doing), H5Fclose);
  const Handle access(check(H5Fget_access_plist(file.get()), doing), H5Pclose);
  if (H5Pget_driver(access.get()) != driver()) return {};
  void* storage = nullptr;
  check(H5Fget_vfd_handle(file.get(), H5P_DEFAULT, &storage), doing);
  return *static_cast<std::shared_ptr<FileStorage>*>(storage);
}

}  // namespace muster::detail::hdf5
