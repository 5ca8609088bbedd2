// Describes the content and layout of a dataset file, for `muster inspect`.
#include "base/json.hpp"
#include "base/number.hpp"
#include "base/text.hpp"
#include "convert/hdf5_rows.hpp"
#include "convert/ragged.hpp"
#include "convert/reading.hpp"
#include "data/sources/source.hpp"
#include "hdf5/conversion.hpp"
#include "hdf5/dimensions.hpp"
#include "hdf5/file.hpp"
#include "hdf5/filters.hpp"
#include "hdf5/foreign_chunks.hpp"
#include "hdf5/packing.hpp"
#include "hdf5/types.hpp"
#include "muster/convert.hpp"
#include "muster/dataset.hpp"
#include "zarr/open_file.hpp"

#include <algorithm>
#include <cctype>
#include <cmath>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

namespace muster {
namespace {

namespace convert = detail::convert;
namespace hdf5 = detail::hdf5;
using detail::data::joined;

constexpr std::int64_t most_chunks_counted = 1 << 17;  ///< of a Zarr array, whose metadata may announce any number

/// The columns of a dataset and how they are read, in the same order.
struct Description {
  Json columns = Json::array();
  std::vector<convert::StoredColumn> stored;
  std::vector<convert::Reading> readings;
  bool has_refused = false;         ///< something in the group cannot be read as a column
  std::vector<std::string> groups;  ///< names of the HDF5 groups inside the described one
  std::vector<std::string> advice;
  std::vector<std::string> arrays;  ///< columns of several dimensions that have names, as NetCDF writes them
  Json ragged = nullptr;            ///< the result of find_ragged()
};

std::string number_name(hid_t type) {
  const auto kind = H5Tget_class(type);
  const auto bits = std::to_string(8 * H5Tget_size(type));
  if (kind == H5T_INTEGER) return (H5Tget_sign(type) == H5T_SGN_NONE ? "uint" : "int") + bits;
  if (kind == H5T_FLOAT) return (hdf5::scalar_type(type, "a column") == at::kBFloat16 ? "bfloat" : "float") + bits;
  if (kind == H5T_ENUM && hdf5::scalar_type(type, "a column") != at::kBool)
    return number_name(hdf5::Handle(H5Tget_super(type), H5Tclose).get());
  return kind == H5T_ENUM ? "bool" : "complex" + bits;
}

std::string megabytes(std::int64_t bytes) {
  return bytes < 1'000'000 ? "less than 1 MB" : detail::str(bytes / 1'000'000, " MB");
}

/// A word of a command line, in quotes if it needs them.
std::string in_shell(const std::string& word) {
  const auto is_plain = [](unsigned char c) { return std::isalnum(c) != 0 || std::strchr("/._-:+=@%,", c) != nullptr; };
  if (std::ranges::all_of(word, is_plain)) return word;
  std::string quoted = "'";
  for (const char c : word) quoted += c == '\'' ? "'\\''" : std::string(1, c);
  return quoted + "'";
}

/// A path on a command line, so that no program takes it for a flag.
std::string path_in_shell(const std::string& path) { return in_shell(path.starts_with('-') ? "./" + path : path); }

const char* layout_name(H5D_layout_t layout) {
  return layout == H5D_CHUNKED   ? "chunked"
         : layout == H5D_COMPACT ? "compact"
         : layout == H5D_VIRTUAL ? "virtual"
                                 : "contiguous";
}

convert::StoredColumn stored_column(hid_t dataset, const std::string& name, const std::string& doing) {
  const auto type = hdf5::dataset_property(dataset, H5Dget_type, doing);
  const auto creation = hdf5::dataset_property(dataset, H5Dget_create_plist, doing);
  convert::StoredColumn column;
  column.name = name;
  column.shape = hdf5::shape(dataset, name);
  column.filters = hdf5::filters(creation.get(), doing);
  column.value_bytes = detail::checked_cast<std::int64_t>(H5Tget_size(type.get()), doing, "the size of a value");
  column.bytes = column.value_bytes;
  for (const auto size : column.shape) column.bytes = detail::checked_product(column.bytes, size, doing, "its shape");
  const auto chunks = hdf5::foreign_chunks(dataset);
  column.is_foreign = chunks != nullptr;
  const auto stored =
      chunks ? chunks->stored(most_chunks_counted) : hdf5::ForeignChunks::Stored{.bytes = H5Dget_storage_size(dataset)};
  column.is_whole = stored.is_whole;
  column.file_bytes = detail::checked_cast<std::int64_t>(stored.bytes, doing, "its size in the file");
  if (H5Pget_layout(creation.get()) == H5D_CHUNKED)
    column.chunk = hdf5::chunk_shape(creation.get(), column.shape.size(), doing);
  return column;
}

/// The advice about values that were never written. Null if there are none, and for a virtual dataset. Also null if
/// some chunks are written and HDF5 is older than 1.10.5, which cannot count them.
const char* unwritten_values(const convert::StoredColumn& column, hid_t dataset) {
  const auto creation = hdf5::dataset_property(dataset, H5Dget_create_plist, "reading the layout of " + column.name);
  if (H5Pget_layout(creation.get()) == H5D_VIRTUAL || column.bytes == 0) return nullptr;
  if (column.file_bytes == 0) return "nothing was ever written to it; all its values read as the fill value";
  if (column.is_foreign)
    return column.is_whole ? nullptr : "some of its chunks are missing; their values read as the fill value";
#if H5_VERSION_GE(1, 10, 5)
  double chunks = 1;
  for (std::size_t d = 0; d < column.chunk.size(); ++d)
    chunks *= std::ceil(static_cast<double>(column.shape[d]) / static_cast<double>(column.chunk[d]));
  hsize_t written = 0;
  if (column.chunk.empty()) return nullptr;
  const auto space = hdf5::dataset_property(dataset, H5Dget_space, "reading the layout of " + column.name);
  hdf5::check(H5Dget_num_chunks(dataset, space.get(), &written), "counting the chunks of " + column.name);
  if (static_cast<double>(written) < chunks)
    return "some of its chunks were never written; their values read as the fill value";
#endif
  return nullptr;
}

void describe_column(hid_t dataset, const std::string& name, const std::string& shown, Description& all) {
  const std::string doing = "reading the layout of " + shown;
  const auto type = hdf5::dataset_property(dataset, H5Dget_type, doing);
  const auto creation = hdf5::dataset_property(dataset, H5Dget_create_plist, doing);
  const auto packing = hdf5::packing_of(dataset, type.get(), shown);
  const bool is_floating = at::isFloatingType(hdf5::Conversion(type.get(), packing, shown).dtype());
  const auto stored = stored_column(dataset, name, doing);
  const auto reading = convert::reading_of(stored, dataset, shown);

  const auto chunks = hdf5::foreign_chunks(dataset);
  const auto compression = chunks ? chunks->codecs() : joined(stored.filters, &hdf5::Filter::text);
  all.columns.push_back({{"name", name},
                         {"dtype", number_name(type.get())},
                         {"shape", stored.shape},
                         {"layout", layout_name(H5Pget_layout(creation.get()))},
                         {"chunk", stored.chunk.empty() ? Json() : Json(stored.chunk)},
                         {"compression", compression.empty() ? "none" : compression},
                         {"bytes", stored.file_bytes},
                         {"reader", convert::name_of(reading.reader)},
                         {"offset", convert::offset_of(stored, reading, dataset)}});
  const auto advise = [&](const std::string& line) { all.advice.push_back(name + ": " + line); };
  const bool has_fill_value = hdf5::check(H5Aexists(dataset, "_FillValue"), doing) > 0;
  if (packing && packing->has_missing() && !is_floating)
    advise("its missing values stay the numbers that they are, since integers without a scale_factor have no NaN");
  if (const auto unwritten = unwritten_values(stored, dataset); unwritten != nullptr)
    advise(detail::str(unwritten, is_floating && !has_fill_value ? ", which is no NaN: it has no _FillValue" : ""));
  if (!reading.problem.empty()) advise(reading.problem);
  for (const auto& problem : convert::chunk_problems(stored, reading)) advise(problem);
  if (all.columns.back().at("dtype") == "float64")
    advise("float64 is twice the bytes of float32, which is what most models compute with");
  if (stored.shape.size() > 1 && (hdf5::check(H5Aexists(dataset, "DIMENSION_LIST"), doing) > 0 ||
                                  hdf5::check(H5Aexists(dataset, hdf5::array_dimensions), doing) > 0))
    all.arrays.push_back(name);
  all.stored.push_back(stored);
  all.readings.push_back(reading);
}

/// The number of samples; null if there are no columns, or if they differ in it. Adds advice about that.
Json count_samples(const std::string& path, Description& all) {
  if (all.columns.empty()) return nullptr;
  const auto samples = all.stored.front().shape.front();
  if (std::ranges::any_of(all.stored, [&](const auto& column) { return column.shape.front() != samples; })) {
    all.ragged = convert::find_ragged(path, all.stored, all.advice);
    if (!all.ragged.is_null()) {
      all.advice.push_back("it looks like " + detail::json_text(all.ragged.at("samples")) +
                           " samples of different length, which " + convert::ragged_call(path, all.ragged) + " reads");
      return nullptr;
    }
    all.advice.push_back(
        "columns differ in their number of samples (" +
        joined(all.stored, [](const auto& column) { return detail::str(column.name, " ", column.shape.front()); }) +
        "); choose columns of the same length");
    return nullptr;
  }
  if (samples == 0) all.advice.emplace_back("there is no sample in it");
  return samples;
}

/// The conversion that makes reading faster, as options and as a command; null if there is none, or if the command
/// cannot name a column. Adds advice about the memory that decoded values take.
Json advise_conversion(const std::string& path, Description& all) {
  std::vector<convert::StoredColumn> columns;
  std::vector<convert::Reading> readings;
  std::string names;
  for (std::size_t i = 0; i < all.stored.size(); ++i) {
    if (!all.readings[i].can_convert) continue;
    columns.push_back(all.stored[i]);
    readings.push_back(all.readings[i]);
    names += (names.empty() ? "" : ",") + columns.back().name;
  }
  const auto layout = convert::better_layout(columns, readings);
  if (!layout) return nullptr;
  const bool is_store = detail::zarr::is_store(hdf5::GroupPath(path).path);
  std::string command = detail::str("muster convert ", is_store ? "zarr " : "h5 ", path_in_shell(path), " OUT.h5");
  if (all.has_refused || columns.size() < all.stored.size()) {
    if (std::ranges::any_of(columns, [](const auto& column) { return column.name.find(',') != std::string::npos; }))
      return nullptr;
    command += (names.starts_with('-') ? " --columns=" : " --columns ") + in_shell(names);
  }
  if (layout->chunk) command += detail::str(" --chunk ", *layout->chunk);
  if (layout->compress) command += detail::str(" --compress ", *layout->compress);

  std::vector<std::string> kept;
  double bytes = 0;
  for (std::size_t i = 0; i < columns.size(); ++i) {
    if (readings[i].reader == convert::Reader::direct) continue;
    kept.push_back(columns[i].name);
    bytes += static_cast<double>(columns[i].bytes);
  }
  const auto cache_bytes = DatasetOptions{}.cache_bytes;
  const bool fits = bytes <= static_cast<double>(cache_bytes);
  std::string fact;
  if (!kept.empty())
    fact = joined(kept) +
           (fits ? ": the first pass decodes or converts them, and keeps " +
                       megabytes(static_cast<std::int64_t>(bytes)) + " in memory on each node or rank"
                 : ": larger than DatasetOptions::cache_bytes (" + megabytes(cache_bytes) +
                       " unless set), so every pass decodes or converts them again") +
           "; ";
  all.advice.push_back(fact + "faster: `" + command + "`");
  return {{"chunk", layout->chunk ? Json(*layout->chunk) : Json()},
          {"compress", layout->compress ? Json(*layout->compress) : Json()},
          {"command", command}};
}

/// Describes all columns of the group.
Description describe_columns(const hdf5::GroupPath& place, const std::string& path) {
  const hdf5::Lock lock;
  const auto file = detail::zarr::open_file(place.path);
  const auto group = hdf5::open_group(file.get(), place.group, path);
  Description all;
  for (const auto& name : hdf5::list(group.get())) {
    if (convert::is_group(group.get(), name)) {
      all.groups.push_back(name);
      continue;
    }
    const auto shown = place.shown(name);
    try {
      if (!hdf5::is_column(group.get(), name, shown)) continue;
      describe_column(hdf5::open_dataset(group.get(), name, shown).get(), name, shown, all);
    } catch (const Error& error) {
      all.has_refused = true;
      all.advice.emplace_back(error.what());
    }
  }
  return all;
}

}  // namespace

Json describe_dataset(const std::string& path) {
  const hdf5::GroupPath place(path);
  auto all = describe_columns(place, path);
  const auto samples = count_samples(path, all);
  const auto conversion = samples.is_null() ? Json() : advise_conversion(path, all);
  if (!all.arrays.empty())
    all.advice.push_back("its dimensions have names: muster::Dataset::windows({\"" + place.shown(all.arrays.front()) +
                         "\", …}, {.size = …}) reads windows of " + detail::listed(all.arrays, 4, std::identity()) +
                         " as samples");
  if (all.columns.empty() && all.advice.empty())
    all.advice.push_back("there is no column in " + place.group +
                         (all.groups.empty() ? "" : "; name a group, as in " + place.shown(all.groups.front())));
  std::uint64_t bytes = 0;
  for (const auto& column : all.stored) bytes += static_cast<std::uint64_t>(column.file_bytes);
  if (!detail::zarr::is_store(place.path)) bytes = std::filesystem::file_size(place.path);
  return {{"path", path},         {"samples", samples},   {"bytes", bytes},        {"columns", all.columns},
          {"groups", all.groups}, {"advice", all.advice}, {"convert", conversion}, {"ragged", all.ragged}};
}

}  // namespace muster
