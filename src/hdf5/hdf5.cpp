#include "hdf5/hdf5.hpp"

#include "base/number.hpp"

#include <sys/stat.h>

#include <array>
#include <cerrno>
#include <complex>
#include <cstring>
#include <utility>

namespace muster::detail::hdf5 {
namespace {

std::recursive_mutex& mutex() {
  static std::recursive_mutex instance;
  return instance;
}

void prepare_library() {
  H5open();
  H5Eset_auto2(H5E_DEFAULT, nullptr, nullptr);
  H5Lunregister(H5L_TYPE_EXTERNAL);
  H5PLset_loading_state(0);
}

/// A 16-bit float with 8 bits of exponent and 7 of mantissa: the upper half of a float.
hid_t make_bfloat16() {
  const hid_t type = H5Tcopy(H5T_NATIVE_FLOAT);
  check(H5Tset_fields(type, 15, 7, 8, 0, 7), "making the type bfloat16");
  check(H5Tset_precision(type, 16), "making the type bfloat16");
  check(H5Tset_size(type, 2), "making the type bfloat16");
  check(H5Tset_ebias(type, 127), "making the type bfloat16");
  return type;
}

hid_t make_half() {
  const hid_t type = H5Tcopy(H5T_NATIVE_FLOAT);
  check(H5Tset_fields(type, 15, 10, 5, 0, 10), "making the type half");
  check(H5Tset_precision(type, 16), "making the type half");
  check(H5Tset_size(type, 2), "making the type half");
  check(H5Tset_ebias(type, 15), "making the type half");
  return type;
}

hid_t make_bool() {
  const hid_t type = H5Tenum_create(H5T_NATIVE_INT8);
  const std::int8_t no = 0, yes = 1;
  check(H5Tenum_insert(type, "FALSE", &no), "making the type bool");
  check(H5Tenum_insert(type, "TRUE", &yes), "making the type bool");
  return type;
}

hid_t make_complex(hid_t part, std::size_t size) {
  const hid_t type = H5Tcreate(H5T_COMPOUND, 2 * size);
  check(H5Tinsert(type, "r", 0, part), "making a complex type");
  check(H5Tinsert(type, "i", size, part), "making a complex type");
  return type;
}

const char* class_name(H5T_class_t type) {
  switch (type) {
    case H5T_STRING:
      return "strings";
    case H5T_COMPOUND:
      return "compound values";
    case H5T_REFERENCE:
      return "references";
    case H5T_VLEN:
      return "values of variable length";
    case H5T_OPAQUE:
      return "opaque bytes";
    case H5T_ENUM:
      return "enumerated names";
    case H5T_ARRAY:
      return "arrays in one element";
    case H5T_TIME:
      return "times";
    case H5T_BITFIELD:
      return "bit fields";
    default:
      return "values of an unknown kind";
  }
}

[[noreturn]] void refuse_type(const char* kind, const std::string& shown) {
  throw Error(ExitCode::data, "reading " + shown, std::string("it holds ") + kind + ", and tensors hold numbers",
              "Convert it, or choose other columns");
}

at::ScalarType integer_type(std::size_t size, bool is_signed, const std::string& shown) {
  switch (size) {
    case 1:
      return is_signed ? at::kChar : at::kByte;
    case 2:
      return is_signed ? at::kShort : at::kInt;
    case 4:
      return is_signed ? at::kInt : at::kLong;
    case 8:
      return at::kLong;
    default:
      refuse_type("integers of an unusual size", shown);
  }
}

at::ScalarType float_type(hid_t type, const std::string& shown) {
  std::size_t sign, exponent, exponent_size, mantissa, mantissa_size;
  check(H5Tget_fields(type, &sign, &exponent, &exponent_size, &mantissa, &mantissa_size),
        "reading the type of " + shown);
  switch (H5Tget_size(type)) {
    case 2:
      return exponent_size == 8 ? at::kBFloat16 : at::kHalf;
    case 4:
      return at::kFloat;
    case 8:
      return at::kDouble;
    default:
      refuse_type("floating-point numbers of an unusual size", shown);
  }
}

at::ScalarType compound_type(hid_t type, const std::string& shown) {
  if (H5Tget_nmembers(type) == 2 && H5Tget_member_class(type, 0) == H5T_FLOAT &&
      H5Tget_member_class(type, 1) == H5T_FLOAT) {
    const std::array<char*, 2> names{H5Tget_member_name(type, 0), H5Tget_member_name(type, 1)};
    const bool complex = std::strcmp(names[0], "r") == 0 && std::strcmp(names[1], "i") == 0;
    for (char* name : names) H5free_memory(name);
    if (complex && H5Tget_size(type) == 8) return at::kComplexFloat;
    if (complex && H5Tget_size(type) == 16) return at::kComplexDouble;
  }
  refuse_type(class_name(H5T_COMPOUND), shown);
}

Handle creation_access(std::uint64_t alignment, const std::string& doing) {
  Handle access(check(H5Pcreate(H5P_FILE_ACCESS), doing, ExitCode::retry), H5Pclose);
#if H5_VERSION_GE(1, 10, 7)
  check(H5Pset_file_locking(access.get(), false, true), doing, ExitCode::retry);
#endif
  check(H5Pset_libver_bounds(access.get(), H5F_LIBVER_V110, H5F_LIBVER_LATEST), doing, ExitCode::retry);
  check(H5Pset_fclose_degree(access.get(), H5F_CLOSE_STRONG), doing, ExitCode::retry);
  if (alignment > 1) check(H5Pset_alignment(access.get(), alignment, alignment), doing, ExitCode::retry);
  return access;
}

/// H5Fclose for a file that was written. The medium fails once at the most: where that is here, what is left in the
/// cache goes to memory with the second try, and that the file is not whole is still said.
herr_t close_written(hid_t file) {
  if (H5Fflush(file, H5F_SCOPE_GLOBAL) >= 0) return H5Fclose(file);
  const hid_t reasons = H5Eget_current_stack();
  H5Fclose(file);
  H5Eset_current_stack(reasons);  // which also closes `reasons`
  return -1;
}

}  // namespace

Lock::Lock() : lock_(mutex()) {
  static const bool prepared = (prepare_library(), true);
  static_cast<void>(prepared);
}

Handle::Handle(Handle&& other) noexcept
    : id_(std::exchange(other.id_, H5I_INVALID_HID)), close_(std::exchange(other.close_, nullptr)) {}

Handle& Handle::operator=(Handle&& other) noexcept {
  if (this != &other) {
    Handle old(std::move(*this));
    id_ = std::exchange(other.id_, H5I_INVALID_HID);
    close_ = std::exchange(other.close_, nullptr);
  }
  return *this;
}

Handle::~Handle() {
  if (id_ < 0 || close_ == nullptr) return;
  const Lock lock;
  close_(id_);
}

void Handle::close(std::string_view doing) {
  const Lock lock;
  const hid_t id = std::exchange(id_, H5I_INVALID_HID);
  if (id >= 0 && close_ != nullptr) check(close_(id), doing, ExitCode::retry);
}

std::string last_error() {
  std::string text;
  H5Ewalk2(
      H5E_DEFAULT, H5E_WALK_UPWARD,
      [](unsigned n, const H5E_error2_t* entry, void* out) -> herr_t {
        if (n == 0 && entry->desc != nullptr) *static_cast<std::string*>(out) = entry->desc;
        return 0;
      },
      &text);
  H5Eclear2(H5E_DEFAULT);
  // Where the system refused, its word is what a reader needs; HDF5 wraps it in addresses and a time of two lines.
  constexpr std::string_view before = "error message = '";
  if (const auto begin = text.find(before); begin != std::string::npos) {
    const auto end = text.find('\'', begin + before.size());
    text = text.substr(begin + before.size(), end - begin - before.size());
  }
  return text.empty() ? "HDF5 gives no reason" : text;
}

std::int64_t check(std::int64_t status, std::string_view doing, ExitCode code) {
  if (status < 0)
    throw Error(code, doing, last_error(), code == ExitCode::retry ? "Check the space and the permissions there" : "");
  return status;
}

Handle open_file(const std::filesystem::path& path) {
  const Lock lock;
  const std::string doing = "opening " + path.string();
  struct stat status {};
  if (::stat(path.c_str(), &status) != 0)
    throw Error(ExitCode::data, doing, std::strerror(errno),
                errno == ENOENT ? "Check the path; `muster convert` makes datasets" : "Check the permissions");
  if (S_ISDIR(status.st_mode)) throw Error(ExitCode::data, doing, "it is a folder", "Name an HDF5 file");
  const htri_t is_hdf5 = H5Fis_hdf5(path.c_str());
  if (is_hdf5 <= 0) {
    H5Eclear2(H5E_DEFAULT);
    throw Error(ExitCode::data, doing, is_hdf5 == 0 ? "it is not an HDF5 file" : "it cannot be read",
                "`muster convert` makes one from idx, npy or csv");
  }
  const Handle access(check(H5Pcreate(H5P_FILE_ACCESS), doing), H5Pclose);
  check(H5Pset_fapl_sec2(access.get()), doing);
#if H5_VERSION_GE(1, 10, 7)
  check(H5Pset_file_locking(access.get(), false, true), doing);
#endif
  check(H5Pset_fclose_degree(access.get(), H5F_CLOSE_STRONG), doing);
  const hid_t file = H5Fopen(path.c_str(), H5F_ACC_RDONLY, access.get());
  if (file < 0) {
    const auto reason = last_error();
    const bool truncated = reason.find("truncated") != std::string::npos;
    throw Error(ExitCode::data, doing, truncated ? "the file is truncated" : reason, "Make or copy it anew");
  }
  return {file, H5Fclose};
}

Handle create_file(const std::filesystem::path& path, std::uint64_t alignment) {
  return create_file(std::make_shared<Medium>(path), alignment, path.string());
}

Handle create_file(const std::shared_ptr<Medium>& medium, std::uint64_t alignment, const std::string& shown) {
  const Lock lock;
  const std::string doing = "creating " + shown;
  const auto access = creation_access(alignment, doing);
  set_medium(access.get(), medium);
  return {check(H5Fcreate(shown.c_str(), H5F_ACC_TRUNC, H5P_DEFAULT, access.get()), doing, ExitCode::retry),
          close_written};
}

Handle open_group(hid_t file, const std::string& name, const std::string& shown) {
  const Lock lock;
  const hid_t group = H5Gopen2(file, name.c_str(), H5P_DEFAULT);
  if (group < 0) {
    last_error();
    throw Error(ExitCode::data, "opening " + shown, "the file has no group \"" + name + "\"",
                "`muster inspect` lists what it holds");
  }
  return {group, H5Gclose};
}

Handle open_dataset(hid_t file, const std::string& name, const std::string& shown) {
  const Lock lock;
  const std::string doing = "opening " + shown;
  const hid_t id = H5Oopen(file, name.c_str(), H5P_DEFAULT);
  if (id < 0) {
    last_error();
    throw Error(ExitCode::data, doing, "the file has no dataset \"" + name + "\", or it links to another file",
                "`muster inspect` lists what it holds; links to other files are not followed");
  }
  Handle dataset(id, H5Oclose);
  if (H5Iget_type(id) != H5I_DATASET)
    throw Error(ExitCode::data, doing, "\"" + name + "\" is not a dataset",
                "`muster inspect` lists what the file holds");
  const Handle creation(check(H5Dget_create_plist(id), doing), H5Pclose);
  if (H5Pget_external_count(creation.get()) > 0)
    throw Error(ExitCode::data, doing, "its values lie in other files (external storage)", "Copy them into the file");
  if (H5Pget_layout(creation.get()) == H5D_VIRTUAL)
    throw Error(ExitCode::data, doing, "it is a virtual dataset over other files",
                "Name those files as one dataset instead");
  return dataset;
}

std::vector<std::string> list(hid_t group) {
  const Lock lock;
  std::vector<std::string> names;
  check(H5Literate(
            group, H5_INDEX_NAME, H5_ITER_INC, nullptr,
            [](hid_t, const char* name, const H5L_info_t*, void* out) -> herr_t {
              static_cast<std::vector<std::string>*>(out)->emplace_back(name);
              return 0;
            },
            &names),
        "listing a group");
  return names;
}

std::vector<std::int64_t> shape(hid_t dataset, const std::string& shown) {
  const Lock lock;
  const std::string doing = "reading the shape of " + (shown.empty() ? "a dataset" : shown);
  const Handle space(check(H5Dget_space(dataset), doing), H5Sclose);
  const auto rank = check(H5Sget_simple_extent_ndims(space.get()), doing);
  std::vector<hsize_t> sizes(static_cast<std::size_t>(rank));
  check(H5Sget_simple_extent_dims(space.get(), sizes.data(), nullptr), doing);
  std::vector<std::int64_t> shape;
  for (const auto size : sizes) shape.push_back(checked<std::int64_t>(size, doing, "a dimension"));
  return shape;
}

Handle type_of(at::ScalarType type) {
  const Lock lock;
  const auto copy = [](hid_t id) { return Handle(check(H5Tcopy(id), "making a type"), H5Tclose); };
  switch (type) {
    case at::kByte:
      return copy(H5T_NATIVE_UINT8);
    case at::kChar:
      return copy(H5T_NATIVE_INT8);
    case at::kShort:
      return copy(H5T_NATIVE_INT16);
    case at::kInt:
      return copy(H5T_NATIVE_INT32);
    case at::kLong:
      return copy(H5T_NATIVE_INT64);
    case at::kFloat:
      return copy(H5T_NATIVE_FLOAT);
    case at::kDouble:
      return copy(H5T_NATIVE_DOUBLE);
    case at::kHalf:
      return {make_half(), H5Tclose};
    case at::kBFloat16:
      return {make_bfloat16(), H5Tclose};
    case at::kBool:
      return {make_bool(), H5Tclose};
    case at::kComplexFloat:
      return {make_complex(H5T_NATIVE_FLOAT, sizeof(float)), H5Tclose};
    case at::kComplexDouble:
      return {make_complex(H5T_NATIVE_DOUBLE, sizeof(double)), H5Tclose};
    default:
      throw Error(ExitCode::data, "storing a tensor", std::string("HDF5 has no type for ") + c10::toString(type),
                  "Convert it to another type first");
  }
}

at::ScalarType scalar_type(hid_t type, const std::string& shown) {
  const Lock lock;
  switch (const H5T_class_t kind = H5Tget_class(type)) {
    case H5T_INTEGER:
      return integer_type(H5Tget_size(type), H5Tget_sign(type) != H5T_SGN_NONE, shown);
    case H5T_FLOAT:
      return float_type(type, shown);
    case H5T_COMPOUND:
      return compound_type(type, shown);
    case H5T_ENUM: {
      const Handle boolean = type_of(at::kBool);
      if (H5Tequal(type, boolean.get()) > 0) return at::kBool;
      refuse_type(class_name(kind), shown);
    }
    default:
      refuse_type(class_name(kind), shown);
  }
}

}  // namespace muster::detail::hdf5
