// Describes the content and layout of a dataset file, for `muster inspect`.
#include "base/number.hpp"
#include "data/sources/source.hpp"
#include "hdf5/file.hpp"
#include "hdf5/filters.hpp"
#include "hdf5/types.hpp"
#include "muster/convert.hpp"

#include <algorithm>
#include <bit>
#include <string>
#include <vector>

namespace muster {
namespace {

namespace hdf5 = detail::hdf5;
using detail::data::joined;

constexpr std::int64_t large_chunk_bytes = 4 << 20;

std::string number_name(hid_t type) {
  const auto kind = H5Tget_class(type);
  const auto bits = std::to_string(8 * H5Tget_size(type));
  if (kind == H5T_INTEGER) return (H5Tget_sign(type) == H5T_SGN_NONE ? "uint" : "int") + bits;
  if (kind == H5T_FLOAT) return (hdf5::scalar_type(type, "a column") == at::kBFloat16 ? "bfloat" : "float") + bits;
  if (kind == H5T_ENUM && hdf5::scalar_type(type, "a column") != at::kBool)
    return number_name(hdf5::Handle(H5Tget_super(type), H5Tclose).get());
  return kind == H5T_ENUM ? "bool" : "complex" + bits;
}

bool is_foreign(hid_t type) {
  const auto foreign = std::endian::native == std::endian::little ? H5T_ORDER_BE : H5T_ORDER_LE;
  return H5Tget_size(type) > 1 && H5Tget_order(type) == foreign;
}

/// Adds advice if the chunks of a column will make reading slow.
void advise_on_chunks(const std::string& name, const std::vector<std::int64_t>& shape,
                      const std::vector<std::int64_t>& chunk, std::int64_t value_bytes,
                      std::vector<std::string>& advice) {
  auto bytes = value_bytes;
  for (const auto size : chunk) bytes = detail::checked_product(bytes, size, "describing a column", "a chunk");
  if (bytes > large_chunk_bytes && chunk.front() > 1)
    advice.push_back(name + ": a chunk is " + std::to_string(bytes >> 20) +
                     " MiB and is read whole for one of its samples; convert with a smaller --chunk");
  for (std::size_t i = 1; i < shape.size(); ++i)
    if (chunk[i] < shape[i]) {
      advice.push_back(name +
                       ": a sample is spread over several chunks; convert it again, so that chunks hold whole samples");
      return;
    }
}

Json describe_column(hid_t dataset, const std::string& name, const std::string& shown,
                     std::vector<std::string>& advice) {
  const std::string doing = "reading the layout of " + shown;
  const auto type = hdf5::dataset_property(dataset, H5Dget_type, doing);
  const auto creation = hdf5::dataset_property(dataset, H5Dget_create_plist, doing);
  hdf5::scalar_type(type.get(), shown);
  const auto shape = hdf5::shape(dataset, shown);
  const auto value_bytes = detail::checked_cast<std::int64_t>(H5Tget_size(type.get()), doing, "the size of a value");
  const auto layout = H5Pget_layout(creation.get());
  const auto stored = detail::checked_cast<std::int64_t>(H5Dget_storage_size(dataset), doing, "its size in the file");

  Json column{{"name", name}, {"dtype", number_name(type.get())}, {"shape", shape}, {"chunk", nullptr}};
  column["layout"] = layout == H5D_CHUNKED ? "chunked" : layout == H5D_COMPACT ? "compact" : "contiguous";
  const auto filters = hdf5::filters(creation.get(), doing);
  column["compression"] = filters.empty() ? "none" : joined(filters, &hdf5::Filter::text);
  column["bytes"] = stored;
  if (layout == H5D_CHUNKED) {
    std::vector<hsize_t> sizes(shape.size());
    hdf5::check(H5Pget_chunk(creation.get(), static_cast<int>(sizes.size()), sizes.data()), doing);
    std::vector<std::int64_t> chunk;
    for (const auto size : sizes) chunk.push_back(detail::checked_cast<std::int64_t>(size, doing, "a chunk"));
    column["chunk"] = chunk;
    advise_on_chunks(name, shape, chunk, value_bytes, advice);
  }
  if (stored == 0) advice.push_back(name + ": nothing was ever written to it; all its values read as the fill value");
  if (is_foreign(type.get()))
    advice.push_back(name + ": its byte order is not this machine's, so every read converts; convert it again");
  if (column["dtype"] == "float64")
    advice.push_back(name + ": float64 is twice the bytes of float32, which is what most models compute with");
  return column;
}

/// True if `name` is a group; false for a link without a target.
bool is_group(hid_t parent, const std::string& name) {
  const hdf5::Handle object(H5Oopen(parent, name.c_str(), H5P_DEFAULT), H5Oclose);
  if (!object) hdf5::last_error();
  return object && H5Iget_type(object.get()) == H5I_GROUP;
}

/// The number of samples, null if the columns differ in it. Adds advice about the columns as a whole.
Json count_samples(const Json& columns, std::vector<std::string>& advice) {
  if (columns.empty()) return nullptr;
  const auto samples_of = [](const Json& column) { return column.at("shape").at(0); };
  const auto samples = samples_of(columns.front());
  std::vector<std::string> lengths, indirect;
  for (const auto& column : columns) {
    const std::string name = column.at("name");
    lengths.push_back(name + " " + samples_of(column).dump());
    if (column.at("layout") != "contiguous") indirect.push_back(name);
  }
  if (std::ranges::any_of(columns, [&](const Json& column) { return samples_of(column) != samples; })) {
    advice.push_back("columns differ in their number of samples (" + joined(lengths) +
                     "); choose columns of the same length");
    return nullptr;
  }
  if (samples == 0) advice.push_back("there is no sample in it");
  if (!indirect.empty())
    advice.push_back(joined(indirect) + ": not contiguous, so HDF5 unpacks it: fast if it fits into memory, slow if " +
                     "not; convert without --chunk and --compress");
  return samples;
}

}  // namespace

Json describe_dataset(const std::string& path) {
  const hdf5::Lock lock;
  const hdf5::GroupPath place(path);
  const auto file = hdf5::open_file(place.path);
  const auto group = hdf5::open_group(file.get(), place.group, path);
  Json columns = Json::array();
  std::vector<std::string> advice, groups;
  for (const auto& name : hdf5::list(group.get())) {
    if (is_group(group.get(), name)) {
      groups.push_back(name);
      continue;
    }
    const auto shown = place.shown(name);
    try {
      const auto dataset = hdf5::open_dataset(group.get(), name, shown);
      if (!hdf5::shape(dataset.get(), shown).empty())
        columns.push_back(describe_column(dataset.get(), name, shown, advice));
    } catch (const Error& error) {
      advice.push_back(error.what());
    }
  }
  const auto samples = count_samples(columns, advice);
  if (columns.empty() && advice.empty())
    advice.push_back("there is no column in " + place.group +
                     (groups.empty() ? "" : "; name a group, as in " + place.shown(groups.front())));
  return {{"path", path},       {"samples", samples}, {"bytes", std::filesystem::file_size(place.path)},
          {"columns", columns}, {"groups", groups},   {"advice", advice}};
}

}  // namespace muster
