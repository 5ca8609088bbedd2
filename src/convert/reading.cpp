#include "convert/reading.hpp"

#include "base/number.hpp"
#include "base/text.hpp"
#include "convert/convert.hpp"
#include "hdf5/chunk_index.hpp"
#include "hdf5/codecs.hpp"
#include "hdf5/conversion.hpp"
#include "hdf5/file.hpp"
#include "hdf5/filter_pipeline.hpp"

#include <algorithm>

namespace muster::detail::convert {
namespace {

constexpr std::int64_t large_chunk_bytes = 4 << 20;
constexpr std::int64_t good_chunk_bytes = 256 << 10;

bool has_filters_of_muster(const StoredColumn& column) { return hdf5::FilterPipeline(column.filters).decodes(); }

bool is_spread(const StoredColumn& column) {
  for (std::size_t i = 1; i < column.chunk.size(); ++i)
    if (column.chunk[i] < column.shape[i]) return true;
  return false;
}

std::int64_t chunk_bytes(const StoredColumn& column) {
  auto bytes = column.value_bytes;
  for (const auto size : column.chunk) bytes = checked_product(bytes, size, "describing a column", "a chunk");
  return bytes;
}

std::int64_t good_chunk(const StoredColumn& column) {
  return std::max<std::int64_t>(1, good_chunk_bytes / std::max<std::int64_t>(1, column.bytes / column.shape.front()));
}

/// Why muster does not decode the filters, and what to do about it.
Reading read_with_unknown_filters(const StoredColumn& column) {
  const bool can_hdf5 = hdf5::missing_filter(column.filters) == nullptr;
  const std::string effect = can_hdf5 ? ", so HDF5 does, under its lock" : ", nor does this HDF5: it cannot be read";
  for (const auto& filter : column.filters) {
    if (filter.id == H5Z_FILTER_SHUFFLE || filter.id == H5Z_FILTER_FLETCHER32 || hdf5::decoder_of(filter)) continue;
    if (const auto* const package = hdf5::package_of(filter))
      return {Reader::hdf5,
              "this muster does not decode " + filter.text() + effect + "; build it again where " + package +
                  " is installed",
              can_hdf5, can_hdf5};
    return {Reader::hdf5,
            "muster does not decode " + filter.text() + effect +
                (can_hdf5 ? "; convert it again" : "; store it with deflate, as h5repack does"),
            can_hdf5, can_hdf5};
  }
  return {Reader::hdf5, "its filters are more than muster undoes" + effect + (can_hdf5 ? "; convert it again" : ""),
          can_hdf5, can_hdf5};
}

}  // namespace

const char* name_of(Reader reader) noexcept {
  return reader == Reader::direct ? "direct" : reader == Reader::decoded ? "decoded" : "hdf5";
}

Reading reading_of(const StoredColumn& column, hid_t dataset, const std::string& shown) {
  const std::string doing = "reading the layout of " + shown;
  const auto type = hdf5::dataset_property(dataset, H5Dget_type, doing);
  const auto creation = hdf5::dataset_property(dataset, H5Dget_create_plist, doing);
  const auto layout = H5Pget_layout(creation.get());
  if (!has_filters_of_muster(column)) return read_with_unknown_filters(column);
  if (!hdf5::Conversion(type.get(), {}, shown).reads_file()) {
    const std::string why = "its values have an unusual form";
    if (const auto* const filter = hdf5::missing_filter(column.filters))
      return {Reader::hdf5,
              why + ", which is left to HDF5, but this one lacks the filter " + filter->text() +
                  ": it cannot be read; convert it again",
              true};
    return {Reader::hdf5, why + ", so HDF5 converts it, under its lock; convert it again", true};
  }
  if (column.is_foreign) return {Reader::decoded, "", true};
  if (layout == H5D_CONTIGUOUS) return {hdf5::contiguous_offset(dataset) ? Reader::direct : Reader::hdf5, "", false};
  if (layout == H5D_VIRTUAL)
    return {Reader::hdf5,
            "it is a virtual dataset, which HDF5 reads, under its lock; name its files as one dataset, or convert it",
            true};
  if (layout != H5D_CHUNKED || column.shape.front() == 0) return {Reader::hdf5, "", false};
  if (!hdf5::ChunkIndex(dataset, shown).locates())
    return {Reader::hdf5,
            "this HDF5 does not tell where chunks lie, so it reads them, under its lock; convert it again", true};
  return {column.filters.empty() ? Reader::direct : Reader::decoded, "", !column.filters.empty()};
}

Json offset_of(const StoredColumn& column, const Reading& reading, hid_t dataset) {
  if (reading.reader != Reader::direct || !column.chunk.empty()) return nullptr;
  const auto offset = hdf5::contiguous_offset(dataset);
  return offset ? Json(*offset) : Json();
}

std::vector<std::string> chunk_problems(const StoredColumn& column, const Reading& reading) {
  std::vector<std::string> problems;
  if (column.chunk.empty() || column.shape.front() == 0 || column.bytes == 0) return problems;
  const auto bytes = chunk_bytes(column);
  if (bytes > large_chunk_bytes && column.chunk.front() > 1 && reading.reader != Reader::direct)
    problems.push_back(str("a chunk is ", bytes >> 20,
                           " MiB and is decoded whole for one of its samples; convert it again with --chunk ",
                           good_chunk(column)));
  if (is_spread(column))
    problems.emplace_back(
        "a sample is spread over several chunks; convert it again, so that chunks hold whole samples");
  return problems;
}

std::optional<BetterLayout> better_layout(const std::vector<StoredColumn>& columns,
                                          const std::vector<Reading>& readings) {
  bool helps = false, has_bad_chunks = false;
  double bytes = 0, file_bytes = 0;
  BetterLayout layout;
  for (std::size_t i = 0; i < columns.size(); ++i) {
    const auto& column = columns[i];
    if (column.shape.front() == 0 || column.bytes == 0) return {};
    helps = helps || readings[i].can_improve || is_spread(column);
    has_bad_chunks = has_bad_chunks || !chunk_problems(column, readings[i]).empty() || !has_filters_of_muster(column);
    bytes += static_cast<double>(column.bytes);
    file_bytes += static_cast<double>(column.file_bytes);
    for (const auto& filter : column.filters)
      if (filter.id == H5Z_FILTER_DEFLATE) layout.compress = static_cast<int>(std::clamp(filter.value(0), 1U, 9U));
    const auto chunk = good_chunk(column);
    layout.chunk = std::min(layout.chunk.value_or(chunk), chunk);
  }
  if (!helps) return {};
  // Compression is kept if it saves much and the problem is the size or the filters of the chunks.
  const bool saves = bytes > 1.5 * file_bytes && std::ranges::any_of(columns, [](const auto& column) {
                       return !column.filters.empty() || column.is_foreign;
                     });
  if (!has_bad_chunks || !saves) return BetterLayout{};
  if (!layout.compress) layout.compress = 4;
  return layout;
}

}  // namespace muster::detail::convert
