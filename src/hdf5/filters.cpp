#include "hdf5/filters.hpp"

#include "muster/error.hpp"

namespace muster::detail::hdf5 {

std::string Filter::text() const {
  switch (id) {
    case H5Z_FILTER_DEFLATE:
      return "deflate " + std::to_string(level);
    case H5Z_FILTER_SHUFFLE:
      return "shuffle";
    case H5Z_FILTER_FLETCHER32:
      return "checksum";
    default:
      return name.empty() ? "filter " + std::to_string(id) : name;
  }
}

std::vector<Filter> filters(hid_t creation, std::string_view doing) {
  std::vector<Filter> all;
  for (int i = 0, count = static_cast<int>(check(H5Pget_nfilters(creation), doing)); i < count; ++i) {
    unsigned flags = 0, level = 0;
    std::size_t values = 1;
    char name[64] = "";
    const auto id =
        H5Pget_filter2(creation, static_cast<unsigned>(i), &flags, &values, &level, sizeof name, name, nullptr);
    all.push_back({id, name, level});
  }
  return all;
}

void require_filters(hid_t creation, std::string_view doing) {
  for (const auto& filter : filters(creation, doing)) {
    if (H5Zfilter_avail(filter.id) > 0) continue;
    last_error();
    throw Error(ExitCode::data, std::string(doing),
                "it is compressed by a filter that is not built into HDF5 here (" +
                    (filter.name.empty() ? std::to_string(filter.id) : filter.name) + ")",
                "Store it uncompressed or with deflate, h5repack does that");
  }
}

void compress(hid_t creation, hid_t type, int level, std::string_view doing) {
  if (H5Tget_size(type) > 1) check(H5Pset_shuffle(creation), doing, ExitCode::retry);
  check(H5Pset_deflate(creation, static_cast<unsigned>(level)), doing, ExitCode::retry);
}

}  // namespace muster::detail::hdf5
