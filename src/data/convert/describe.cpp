// What a dataset file holds and how it is laid out, for `muster inspect`.
#include "base/number.hpp"
#include "hdf5/file.hpp"
#include "hdf5/types.hpp"
#include "muster/convert.hpp"

#include <bit>
#include <string>
#include <vector>

namespace muster {
namespace {

constexpr std::int64_t large_chunk_bytes = 4 << 20;

std::string number_name(hid_t type) {
  const auto bits = std::to_string(8 * H5Tget_size(type));
  switch (H5Tget_class(type)) {
    case H5T_INTEGER:
      return (H5Tget_sign(type) == H5T_SGN_NONE ? "uint" : "int") + bits;
    case H5T_FLOAT: {
      const bool brain = H5Tget_size(type) == 2 && detail::hdf5::scalar_type(type, "a column") == at::kBFloat16;
      return (brain ? "bfloat" : "float") + bits;
    }
    case H5T_ENUM:
      return "bool";
    default:
      return "complex" + bits;
  }
}

/// "deflate 9", "shuffle, deflate 9" …; "none".
std::string compression_name(hid_t creation) {
  std::string names;
  for (int i = 0, count = H5Pget_nfilters(creation); i < count; ++i) {
    unsigned flags = 0, level = 0;
    std::size_t values = 1;
    char name[64] = "";
    const auto filter =
        H5Pget_filter2(creation, static_cast<unsigned>(i), &flags, &values, &level, sizeof name, name, nullptr);
    if (!names.empty()) names += ", ";
    switch (filter) {
      case H5Z_FILTER_DEFLATE:
        names += "deflate " + std::to_string(level);
        break;
      case H5Z_FILTER_SHUFFLE:
        names += "shuffle";
        break;
      case H5Z_FILTER_FLETCHER32:
        names += "checksum";
        break;
      default:
        names += name[0] ? name : "filter " + std::to_string(filter);
    }
  }
  return names.empty() ? "none" : names;
}

std::int64_t product(const std::vector<std::int64_t>& sizes) {
  std::int64_t all = 1;
  for (const auto size : sizes) all = detail::checked_product(all, size, "describing a column", "its shape");
  return all;
}

bool is_foreign(hid_t type) {
  const auto foreign = std::endian::native == std::endian::little ? H5T_ORDER_BE : H5T_ORDER_LE;
  return H5Tget_size(type) > 1 && H5Tget_order(type) == foreign;
}

/// What will make a column of that layout slow.
void advise_on_chunks(const std::string& name, const std::vector<std::int64_t>& shape,
                      const std::vector<std::int64_t>& chunk, std::int64_t value_bytes,
                      std::vector<std::string>& advice) {
  const auto bytes = detail::checked_product(product(chunk), value_bytes, "describing a column", "a chunk");
  if (bytes > large_chunk_bytes && chunk.front() > 1)
    advice.push_back(name + ": a chunk is " + std::to_string(bytes >> 20) +
                     " MiB and is read whole for one of its samples; convert with a smaller --chunk");
  for (std::size_t i = 1; i < shape.size(); ++i)
    if (chunk[i] < shape[i]) {
      advice.push_back(name + ": a sample is spread over several chunks; convert anew, chunks then hold whole samples");
      return;
    }
}

Json describe_column(hid_t dataset, const std::string& name, const std::string& shown,
                     std::vector<std::string>& advice) {
  const std::string doing = "reading the layout of " + shown;
  const detail::hdf5::Handle type(detail::hdf5::check(H5Dget_type(dataset), doing), H5Tclose);
  const detail::hdf5::Handle creation(detail::hdf5::check(H5Dget_create_plist(dataset), doing), H5Pclose);
  detail::hdf5::scalar_type(type.get(), shown);
  const auto shape = detail::hdf5::shape(dataset, shown);
  const auto value_bytes = detail::checked<std::int64_t>(H5Tget_size(type.get()), doing, "the size of a value");
  const auto layout = H5Pget_layout(creation.get());
  const auto stored = detail::checked<std::int64_t>(H5Dget_storage_size(dataset), doing, "its size in the file");

  Json column{{"name", name}, {"dtype", number_name(type.get())}, {"shape", shape}, {"chunk", nullptr}};
  column["layout"] = layout == H5D_CHUNKED ? "chunked" : layout == H5D_COMPACT ? "compact" : "contiguous";
  column["compression"] = compression_name(creation.get());
  column["bytes"] = stored;
  if (layout == H5D_CHUNKED) {
    std::vector<hsize_t> sizes(shape.size());
    detail::hdf5::check(H5Pget_chunk(creation.get(), static_cast<int>(sizes.size()), sizes.data()), doing);
    column["chunk"] = sizes;
    std::vector<std::int64_t> chunk;
    for (const auto size : sizes) chunk.push_back(detail::checked<std::int64_t>(size, doing, "a chunk"));
    advise_on_chunks(name, shape, chunk, value_bytes, advice);
  }
  if (stored == 0) advice.push_back(name + ": nothing was ever written to it; it reads as one fill value");
  if (is_foreign(type.get()))
    advice.push_back(name + ": its byte order is not this machine's, so every read converts; convert it anew");
  if (column["dtype"] == "float64")
    advice.push_back(name + ": float64 is twice the bytes of float32, which is what most models compute with");
  return column;
}

struct Place {
  std::string path, group;
};

Place place_of(const std::string& path) {
  const auto colon = path.rfind(":/");
  if (colon == std::string::npos) return {path, "/"};
  return {path.substr(0, colon), path.substr(colon + 1)};
}

/// Whether the link leads to an object of that kind; one that leads nowhere is none.
bool is(hid_t group, const std::string& name, H5I_type_t kind) {
  const detail::hdf5::Handle object(H5Oopen(group, name.c_str(), H5P_DEFAULT), H5Oclose);
  if (!object) detail::hdf5::last_error();
  return object && H5Iget_type(object.get()) == kind;
}

std::string joined(const std::vector<std::string>& names) {
  std::string text;
  for (const auto& name : names) text += (text.empty() ? "" : ", ") + name;
  return text;
}

/// The samples, null where columns disagree; and what to say of the columns together.
Json count_samples(const Json& columns, std::vector<std::string>& advice) {
  if (columns.empty()) return nullptr;
  std::vector<std::string> lengths, indirect;
  const auto samples = columns.front().at("shape").at(0);
  bool even = true;
  for (const auto& column : columns) {
    even = even && column.at("shape").at(0) == samples;
    lengths.push_back(column.at("name").get<std::string>() + " " + column.at("shape").at(0).dump());
    if (column.at("layout") != "contiguous") indirect.push_back(column.at("name").get<std::string>());
  }
  if (!even) {
    advice.push_back("columns differ in their samples (" + joined(lengths) + "); choose those of one length");
    return nullptr;
  }
  if (samples == 0) advice.push_back("there is no sample in it");
  if (!indirect.empty())
    advice.push_back(joined(indirect) + ": not contiguous, so HDF5 unpacks it: fast where it fits into memory, slow " +
                     "where not; convert without --chunk and --compress");
  return samples;
}

}  // namespace

Json describe_dataset(const std::string& path) {
  const detail::hdf5::Lock lock;
  const auto place = place_of(path);
  const auto &file_path = place.path, &group_name = place.group;
  const auto file = detail::hdf5::open_file(file_path);
  const auto group = detail::hdf5::open_group(file.get(), group_name, path);
  const auto inside = [&](const std::string& name) {
    return group_name + (group_name.ends_with('/') ? "" : "/") + name;
  };
  Json columns = Json::array();
  std::vector<std::string> advice, groups;
  for (const auto& name : detail::hdf5::list(group.get())) {
    const auto shown = file_path + ":" + inside(name);
    if (is(group.get(), name, H5I_GROUP)) {
      groups.push_back(name);
      continue;
    }
    try {
      const auto dataset = detail::hdf5::open_dataset(group.get(), name, shown);
      if (!detail::hdf5::shape(dataset.get(), shown).empty())
        columns.push_back(describe_column(dataset.get(), name, shown, advice));
    } catch (const Error& error) {
      advice.push_back(error.what());
    }
  }
  const auto samples = count_samples(columns, advice);
  if (columns.empty() && advice.empty())
    advice.push_back("there is no column in " + group_name +
                     (groups.empty() ? "" : "; name a group, as in " + file_path + ":" + inside(groups.front())));
  return {{"path", path},       {"samples", samples}, {"bytes", std::filesystem::file_size(file_path)},
          {"columns", columns}, {"groups", groups},   {"advice", advice}};
}

}  // namespace muster
