#include "soak/hostile_file.hpp"

#include "base/file.hpp"
#include "muster/convert.hpp"
#include "muster/dataset.hpp"
#include "muster/error.hpp"
#include "soak/dice.hpp"
#include "support/chunk_encoders.hpp"
#include "support/hdf5_fixture.hpp"

#include <algorithm>
#include <cstring>
#include <functional>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

namespace muster::soak {
namespace {

using detail::hdf5::Handle;
using Sizes = std::vector<hsize_t>;

constexpr hsize_t absurd = hsize_t{1} << 61;

/// A type of the file; values are never converted, so any bytes will do.
Handle random_type(Dice& dice) {
  static const hid_t plain[] = {H5T_STD_U8LE,   H5T_STD_I16BE,  H5T_STD_I32LE,  H5T_STD_U64LE,
                                H5T_IEEE_F32LE, H5T_IEEE_F64BE, H5T_IEEE_F32LE, H5T_IEEE_F64LE};
  Handle type(H5Tcopy(plain[dice.below(8)]), H5Tclose);
  switch (dice.below(12)) {
    case 0: {
      Handle pair(H5Tcreate(H5T_COMPOUND, 16), H5Tclose);
      H5Tinsert(pair.get(), "a", 0, H5T_IEEE_F32LE);
      H5Tinsert(pair.get(), "b", 8, type.get());
      return pair;
    }
    case 1: {
      Handle kinds(H5Tenum_create(H5T_STD_I8LE), H5Tclose);
      for (signed char i = 0; i < 2; ++i) H5Tenum_insert(kinds.get(), i == 0 ? "FALSE" : "TRUE", &i);
      return kinds;
    }
    case 2: {
      Handle text(H5Tcopy(H5T_C_S1), H5Tclose);
      H5Tset_size(text.get(), dice.chance(0.5) ? H5T_VARIABLE : 5);
      return text;
    }
    case 3: {
      const hsize_t three = 3;
      return {H5Tarray_create2(type.get(), 1, &three), H5Tclose};
    }
    case 4: {  // a number of unusual precision, which HDF5 must convert
      Handle odd(H5Tcopy(H5T_STD_I32LE), H5Tclose);
      H5Tset_precision(odd.get(), static_cast<std::size_t>(dice.between(1, 31)));
      return odd;
    }
    default:
      return type;
  }
}

/// Filters of muster and of HDF5 with parameters that are right, or random.
void add_filters(Dice& dice, hid_t creation, std::size_t value_bytes) {
  static const H5Z_filter_t unknown[] = {H5Z_FILTER_NBIT, H5Z_FILTER_SCALEOFFSET, 32013, 77};
  const auto known = test::known_filters(value_bytes);
  for (auto count = dice.below(4); count > 0; --count) {
    auto filter = known[static_cast<std::size_t>(dice.below(static_cast<int>(known.size())))];
    if (dice.chance(0.1)) filter.id = unknown[dice.below(4)];
    if (dice.chance(0.2)) filter.values.resize(static_cast<std::size_t>(dice.below(9)));
    if (dice.chance(0.3))
      for (auto& value : filter.values)
        if (dice.chance(0.5)) value = static_cast<unsigned>(dice.chance(0.5) ? dice.below(40) : dice.word());
    // Optional, so that HDF5 does not ask whether the filter can be applied.
    H5Pset_filter(creation, filter.id, H5Z_FLAG_OPTIONAL, filter.values.size(), filter.values.data());
  }
}

void add_attribute(Dice& dice, hid_t dataset) {
  static const char* const names[] = {
      "scale_factor",   "add_offset",  "_FillValue", "missing_value",       "CLASS",        "NAME",
      "DIMENSION_LIST", "valid_range", "_Unsigned",  "_Netcdf4Coordinates", "_Netcdf4Dimid"};
  const auto* const name = names[dice.below(static_cast<int>(std::size(names)))];
  const hsize_t size = static_cast<hsize_t>(dice.below(3));
  const Handle space(dice.chance(0.6) ? H5Screate(H5S_SCALAR) : H5Screate_simple(1, &size, nullptr), H5Sclose);
  if (dice.chance(0.3)) {
    const Handle text(H5Tcopy(H5T_C_S1), H5Tclose);
    H5Tset_size(text.get(), 16);
    const Handle attribute(H5Acreate2(dataset, name, text.get(), space.get(), H5P_DEFAULT, H5P_DEFAULT), H5Aclose);
    if (attribute) H5Awrite(attribute.get(), text.get(), "DIMENSION_SCALE\0DIMENSION_SCALE");
    return;
  }
  const auto type = dice.one_of({H5T_IEEE_F64LE, H5T_STD_I16LE, H5T_IEEE_F32BE});
  const double values[] = {dice.one_of({0.0, 1e-3, -1e300, std::numeric_limits<double>::quiet_NaN()}), 7};
  const Handle attribute(H5Acreate2(dataset, name, type, space.get(), H5P_DEFAULT, H5P_DEFAULT), H5Aclose);
  if (attribute) H5Awrite(attribute.get(), H5T_NATIVE_DOUBLE, values);
}

/// Stores chunks as they come: encoded, random, or of a wrong size, with random masks.
void write_chunks(Dice& dice, hid_t dataset, const Sizes& shape, const Sizes& chunk, std::size_t chunk_bytes) {
  std::mt19937_64 random(dice.word());
  for (int i = 0; i < 6; ++i) {
    Sizes at;
    for (std::size_t d = 0; d < shape.size(); ++d)
      at.push_back(dice.word() % ((shape[d] - 1) / chunk[d] + 1) * chunk[d]);
    auto bytes = test::smooth_values(random, chunk_bytes, 1);
    if (dice.chance(0.3)) {
      const auto known = test::known_filters(4);
      const auto& codec = known[static_cast<std::size_t>(dice.below(static_cast<int>(known.size())))];
      if (bytes.size() % 8 == 0) bytes = test::encoded(codec, bytes);
    }
    if (dice.chance(0.3)) bytes.resize(static_cast<std::size_t>(dice.between(1, static_cast<int>(2 * bytes.size()))));
    const auto mask = dice.chance(0.7) ? 0U : static_cast<unsigned>(dice.below(16));
    H5Dwrite_chunk(dataset, H5P_DEFAULT, mask, at.data(), bytes.size(), bytes.data());
  }
}

void add_dataset(Dice& dice, hid_t file, const std::string& name, hsize_t rows) {
  const auto type = random_type(dice);
  Sizes shape{rows}, chunk;
  for (auto more = dice.below(3); more > 0; --more) shape.push_back(static_cast<hsize_t>(dice.between(1, 6)));
  const bool chunked = dice.chance(0.7), is_absurd = dice.chance(0.05);
  if (is_absurd && chunked) shape[static_cast<std::size_t>(dice.below(static_cast<int>(shape.size())))] = absurd;
  const Handle creation(H5Pcreate(H5P_DATASET_CREATE), H5Pclose);
  auto most = shape;
  std::size_t chunk_bytes = H5Tget_size(type.get());
  if (chunked) {
    for (const auto size : shape) {
      chunk.push_back(1 + dice.word() % std::min<hsize_t>(size, 8));
      chunk_bytes *= chunk.back();
    }
    H5Pset_chunk(creation.get(), static_cast<int>(chunk.size()), chunk.data());
    add_filters(dice, creation.get(), H5Tget_size(type.get()));
    if (dice.chance(0.3)) most[0] = H5S_UNLIMITED;
  } else if (dice.chance(0.3)) {
    H5Pset_layout(creation.get(), H5D_COMPACT);
  }
  const Handle space(H5Screate_simple(static_cast<int>(shape.size()), shape.data(), most.data()), H5Sclose);
  const Handle dataset(
      H5Dcreate2(file, name.c_str(), type.get(), space.get(), H5P_DEFAULT, creation.get(), H5P_DEFAULT), H5Dclose);
  if (!dataset) return;
  while (dice.chance(0.4)) add_attribute(dice, dataset.get());
  if (H5Tis_variable_str(type.get()) > 0) return;
  if (chunked && is_absurd) return;  // HDF5 crashes when it writes chunks there
  if (chunked) return write_chunks(dice, dataset.get(), shape, chunk, chunk_bytes);
  std::vector<std::byte> values(static_cast<std::size_t>(H5Sget_simple_extent_npoints(space.get())) *
                                H5Tget_size(type.get()));
  for (auto& value : values) value = static_cast<std::byte>(dice.below(5));
  H5Dwrite(dataset.get(), type.get(), H5S_ALL, H5S_ALL, H5P_DEFAULT, values.data());
}

void add_offsets(Dice& dice, hid_t file, hsize_t rows) {
  std::vector<std::int64_t> offsets{0};
  while (offsets.back() < static_cast<std::int64_t>(rows))
    offsets.push_back(std::min<std::int64_t>(static_cast<std::int64_t>(rows), offsets.back() + dice.below(4)));
  if (dice.chance(0.3))
    offsets[static_cast<std::size_t>(dice.below(static_cast<int>(offsets.size())))] = dice.below(9) - 2;
  const hsize_t count = offsets.size();
  const Handle space(H5Screate_simple(1, &count, nullptr), H5Sclose);
  const Handle dataset(H5Dcreate2(file, "offsets", H5T_STD_I64LE, space.get(), H5P_DEFAULT, H5P_DEFAULT, H5P_DEFAULT),
                       H5Dclose);
  H5Dwrite(dataset.get(), H5T_NATIVE_INT64, H5S_ALL, H5S_ALL, H5P_DEFAULT, offsets.data());
}

void write_file(Dice& dice, const std::filesystem::path& path) {
  const detail::hdf5::Lock lock;
  const Handle creation(H5Pcreate(H5P_FILE_CREATE), H5Pclose), access(H5Pcreate(H5P_FILE_ACCESS), H5Pclose);
  if (dice.chance(0.2)) H5Pset_userblock(creation.get(), 512);
  // The newer format has checksums in its metadata, so that most damage is found early.
  if (dice.chance(0.3)) H5Pset_libver_bounds(access.get(), H5F_LIBVER_LATEST, H5F_LIBVER_LATEST);
  const Handle file(H5Fcreate(path.c_str(), H5F_ACC_TRUNC, creation.get(), access.get()), H5Fclose);
  if (!file) throw std::runtime_error("cannot write " + path.string());
  const auto rows = static_cast<hsize_t>(dice.between(1, 40));
  add_dataset(dice, file.get(), "x", rows);
  if (dice.chance(0.6)) add_dataset(dice, file.get(), "y", dice.chance(0.8) ? rows : rows + 1);
  if (dice.chance(0.4)) add_offsets(dice, file.get(), rows);
}

void damage(Dice& dice, std::string& bytes) {
  static constexpr char special[] = {0, 1, 2, 0x7f, static_cast<char>(0x80), static_cast<char>(0xff)};
  const auto place = [&](std::size_t length) { return dice.word() % (bytes.size() - length); };
  if (dice.chance(0.05)) bytes.resize(1 + place(1));
  for (auto changes = dice.between(1, 5); changes > 0 && bytes.size() > 64; --changes) {
    switch (dice.below(4)) {
      case 0:  // an address or a size from elsewhere in the file, which may make a cycle
        std::memmove(bytes.data() + place(8) / 8 * 8, bytes.data() + place(8) / 8 * 8, 8);
        break;
      case 1:
        std::memset(bytes.data() + place(16), dice.one_of({0, 0xff, 1}), static_cast<std::size_t>(dice.between(1, 16)));
        break;
      case 2:
        bytes[place(1)] = static_cast<char>(dice.word());
        break;
      default:
        bytes[place(1)] = special[dice.below(6)];
    }
  }
}

void read_some(Dice& dice, const Dataset& dataset) {
  const auto count = dataset.count();
  dataset.schema();
  std::vector<std::int64_t> samples{0, count - 1};
  for (int i = 0; i < 6; ++i)
    samples.push_back(static_cast<std::int64_t>(dice.word() % static_cast<std::uint64_t>(count)));
  dataset.read(samples);
  dataset.read(samples);
}

/// Returns whether `use` succeeds.
bool succeeds(const char* what, const std::function<void()>& use) {
  try {
    use();
    return true;
  } catch (const Error& error) {
    return false;
  } catch (const std::exception& error) {
    throw std::logic_error(std::string(what) + " throws something else than an Error: " + error.what());
  }
}

}  // namespace

void write_hostile_file(std::uint64_t seed, const std::filesystem::path& path) {
  Dice dice(seed);
  write_file(dice, path);
  if (dice.chance(0.3)) return;
  auto bytes = detail::read_file(path);
  damage(dice, bytes);
  std::filesystem::remove(path);
  detail::File(path, detail::File::Mode::create).write_at(std::as_bytes(std::span(bytes)), 0);
}

int use_file(std::uint64_t seed, const std::filesystem::path& path, const std::filesystem::path& folder) {
  Dice dice(seed + 1);
  const auto cache_bytes = dice.one_of<std::int64_t>({0, 100, 4096, 1 << 30});
  const auto sizes = [&] {
    return std::vector<std::int64_t>(static_cast<std::size_t>(dice.between(1, 3)), dice.between(0, 3));
  };
  int done = 0;
  done += succeeds("reading", [&] { read_some(dice, Dataset::from_hdf5({path}, {.cache_bytes = cache_bytes})); });
  for (const char* column : {"x", "y", "x.b"})
    done += succeeds("reading a column", [&] {
      read_some(dice, Dataset::from_hdf5({path, path}, {.columns = {column}, .cache_bytes = cache_bytes}));
    });
  done += succeeds("reading windows", [&] {
    const auto size = sizes();
    read_some(dice, Dataset::windows({path.string() + ":/x"},
                                     {.size = size,
                                      .margin = std::vector<std::int64_t>(size.size(), dice.below(2)),
                                      .cache_bytes = cache_bytes}));
  });
  done += succeeds("reading ragged samples",
                   [&] { read_some(dice, Dataset::ragged(path, {.values = {"x"}, .cache_bytes = cache_bytes})); });
  double bytes = 0;
  done += succeeds("describing", [&] {
    const auto described = describe_dataset(path);
    for (const auto& column : described["columns"]) bytes += column["bytes"].get<double>();
  });
  if (bytes > 1e8) return done;  // a copy would take too long
  done += succeeds("converting", [&] {
    const auto compress = dice.chance(0.5) ? std::optional(1) : std::nullopt;
    convert_h5({path}, folder / "converted.h5", {.compress = compress});
  });
  return done;
}

}  // namespace muster::soak
