#include "hdf5/filters.hpp"

#include "base/text.hpp"
#include "hdf5/codecs.hpp"
#include "hdf5/filter_pipeline.hpp"
#include "muster/error.hpp"

#include <algorithm>
#include <utility>

namespace muster::detail::hdf5 {
namespace {

constexpr std::size_t most_values = 64;  ///< parameters of a filter; the known filters have fewer

bool is_available(const Filter& filter) {
  if (H5Zfilter_avail(filter.id) > 0) return true;
  last_error();
  return false;
}

}  // namespace

std::string Filter::text() const {
  if (id == H5Z_FILTER_DEFLATE) return values.empty() ? "deflate" : str("deflate ", values.front());
  if (id == H5Z_FILTER_SHUFFLE) return "shuffle";
  if (id == H5Z_FILTER_FLETCHER32) return "checksum";
  return name.empty() ? str("filter ", id) : name;
}

std::vector<Filter> filters(hid_t creation, std::string_view doing) {
  std::vector<Filter> all;
  for (int i = 0, count = static_cast<int>(check(H5Pget_nfilters(creation), doing)); i < count; ++i) {
    unsigned flags = 0;
    std::vector<unsigned> values(most_values);
    std::size_t used = values.size();
    char name[64] = "";
    const auto id =
        H5Pget_filter2(creation, static_cast<unsigned>(i), &flags, &used, values.data(), sizeof name, name, nullptr);
    check(id, doing);
    values.resize(std::min(used, values.size()));
    all.push_back({id, name, std::move(values)});
  }
  return all;
}

const Filter* missing_filter(const std::vector<Filter>& filters) {
  const auto missing = std::ranges::find_if_not(filters, is_available);
  return missing == filters.end() ? nullptr : &*missing;
}

void require_filters(const std::vector<Filter>& filters, std::string_view doing) {
  const auto* missing = missing_filter(filters);
  if (missing == nullptr) return;
  for (const auto& filter : filters)
    if (!is_available(filter) && !decoder_of(filter)) missing = &filter;  // neither HDF5 nor muster decodes that one
  const auto name = missing->name.empty() ? std::to_string(missing->id) : missing->name;
  constexpr const char* store = "Store it uncompressed or with deflate; h5repack does that";
  if (decoder_of(*missing))
    throw Error(ExitCode::data, std::string(doing),
                "only HDF5 can read it in this form, and this HDF5 was not built with its filter (" + name +
                    "); muster loads no filter plugins",
                FilterPipeline(filters).decodes() ? "`muster convert h5` makes a copy that muster can read" : store);
  const auto* const package = package_of(*missing);
  throw Error(ExitCode::data, std::string(doing),
              "it is compressed by a filter that neither muster nor HDF5 was built with here (" + name + ")",
              package == nullptr ? store
                                 : str("Build muster again where ", package,
                                       " is installed, or store it with deflate; h5repack does that"));
}

void compress(hid_t creation, hid_t type, int level, std::string_view doing) {
  if (H5Tget_size(type) > 1) check(H5Pset_shuffle(creation), doing, ExitCode::retry);
  check(H5Pset_deflate(creation, static_cast<unsigned>(level)), doing, ExitCode::retry);
}

}  // namespace muster::detail::hdf5
