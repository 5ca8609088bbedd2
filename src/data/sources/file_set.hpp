// Checks and names for datasets of several files.
#pragma once

#include "hdf5/file.hpp"
#include "muster/dataset.hpp"

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace muster::detail::data {

/// Throws an Error if there is no file. Raises this process's limit of open files if there are many.
void prepare_to_open(const std::vector<std::string>& paths);
/// "a.h5 and 2 more", for errors. `files`: at least one.
std::string shown_files(const std::string& first, std::size_t files);
/// Throws an Error (ExitCode::data) that names the first difference if two files of one dataset have different columns.
void require_same_schema(const Schema& schema, const hdf5::GroupPath& file, const Schema& first,
                         const hdf5::GroupPath& first_file);
/// Adds the samples of a file to `count`. Throws an Error (ExitCode::data) if there are too many to be counted.
void add_samples(std::int64_t& count, std::int64_t samples, const std::string& path);

}  // namespace muster::detail::data
