// Turns values as a file stores them into the values of tensors, without HDF5 and its lock.
#pragma once

#include "base/export.hpp"
#include "hdf5/handle.hpp"
#include "hdf5/packing.hpp"

#include <c10/core/ScalarType.h>

#include <cstddef>
#include <optional>
#include <string>

namespace muster::detail::hdf5 {

/// Values keep their type, with these exceptions. uint16 and uint32 become the next larger signed type, uint64 becomes
/// int64, and enumerations become their integers, except h5py's booleans. If values are scaled (Packing::is_scaled),
/// integers of 1 or 2 bytes and 16-bit floats become float32, and wider integers become float64. Missing values become
/// NaN, except integers that are not scaled. 16-bit floats that can be missing become float32, too. NetCDF's attribute
/// _Unsigned decides whether integers are signed.
class MUSTER_INTERNAL_API Conversion {
 public:
  /// `type`: the type of a dataset's values. Throws an Error (ExitCode::data) that names the kind if it holds no
  /// numbers.
  Conversion(hid_t type, std::optional<Packing> packing, const std::string& shown);

  at::ScalarType dtype() const noexcept { return dtype_; }
  /// The size of a value in the file, in bytes; at most the size of dtype().
  std::size_t stored_bytes() const noexcept { return stored_bytes_; }
  /// True if the tensor has the same bytes as the file, so that nothing is converted.
  bool is_copy() const noexcept { return convert_ == nullptr; }
  /// False if only HDF5 can read values of this type, as native_type().
  bool reads_file() const noexcept { return reads_file_; }
  hid_t native_type() const noexcept { return native_.get(); }
  /// Called if HDF5 reads the values as native_type(): operator() then does only what HDF5 has not done.
  void after_hdf5();

  /// Converts in place: `values` has room for `count` values of dtype(), and the stored values lie at its end. Returns
  /// how many were converted: fewer than `count` if the next one is above 2^63 − 1, too large for a tensor.
  std::size_t operator()(std::byte* values, std::size_t count) const;

 private:
  using Convert = std::size_t (*)(const Conversion& conversion, const std::byte* from, std::byte* into,
                                  std::size_t count);
  template <class Stored, class Value>
  static std::size_t convert(const Conversion& conversion, const std::byte* from, std::byte* into, std::size_t count);
  void adapt_packing();
  void choose();
  template <class Stored, class Value = Stored>
  void choose_for(at::ScalarType packed = at::kDouble);

  Handle native_;
  at::ScalarType dtype_ = at::kFloat;
  std::size_t stored_bytes_ = 0;
  bool is_integer_ = false, is_signed_ = true, half_is_bfloat_ = false;
  bool reads_file_ = true, is_swapped_ = false;
  std::optional<Packing> packing_;
  Convert convert_ = nullptr;
};

}  // namespace muster::detail::hdf5
