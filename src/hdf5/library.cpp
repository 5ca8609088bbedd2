#include "hdf5/library.hpp"

#include "base/text.hpp"
#include "hdf5/handle.hpp"

#include <hdf5.h>

namespace muster::detail::hdf5 {
namespace {

std::string version(unsigned major, unsigned minor, unsigned release) { return str(major, ".", minor, ".", release); }

}  // namespace

std::string loaded_version() {
  const Lock lock;
  unsigned major = 0, minor = 0, release = 0;
  ::H5get_libversion(&major, &minor, &release);
  return version(major, minor, release);
}

std::string compiled_version() { return version(H5_VERS_MAJOR, H5_VERS_MINOR, H5_VERS_RELEASE); }

bool is_parallel() {
#ifdef H5_HAVE_PARALLEL
  return true;
#else
  return false;
#endif
}

bool is_thread_safe() {
  const Lock lock;
  hbool_t safe = false;
  return ::H5is_library_threadsafe(&safe) >= 0 && safe;
}

}  // namespace muster::detail::hdf5
