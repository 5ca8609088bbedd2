// Attributes of HDF5 datasets, such as units and scale_factor. Hold an hdf5::Lock around any use.
#pragma once

#include "hdf5/handle.hpp"

#include <cstdint>
#include <string>
#include <vector>

namespace muster::detail::convert {

/// The names of a dataset's attributes. `shown`: its name in errors.
std::vector<std::string> attribute_names(hid_t dataset, const std::string& shown);

class Attribute {
 public:
  Attribute(hid_t dataset, const std::string& name, const std::string& shown);

  /// True if the attribute holds numbers, booleans or strings, and not more than a megabyte or 1024 strings of variable
  /// length.
  bool is_simple() const noexcept { return is_simple_; }
  /// Copies the attribute to another dataset. An enumeration becomes its integers, except h5py's booleans. `writing`:
  /// what is being done, for errors.
  void write_to(hid_t dataset, const std::string& writing) const;

 private:
  std::string name_, doing_;
  hdf5::Handle attribute_, type_, space_;
  bool is_simple_ = false;
  bool has_pointers_ = false;  ///< true for strings of variable length
  std::size_t bytes_ = 0;
};

}  // namespace muster::detail::convert
