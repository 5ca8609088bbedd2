#include "data/sources/file_set.hpp"

#include "data/sources/source.hpp"
#include "muster/error.hpp"

#include <sys/resource.h>

#include <algorithm>
#include <cstddef>

namespace muster::detail::data {

void prepare_to_open(const std::vector<std::string>& paths) {
  if (paths.empty()) throw Error(ExitCode::data, "making a dataset", "there are no files", "Name at least one");
  constexpr std::size_t few = 100;    // files; each is open twice, for HDF5 and for reads beside it
  constexpr rlim_t enough = 1 << 16;  // a higher limit makes programs slow that close all possible files before exec()
  rlimit limit{};
  if (paths.size() <= few || ::getrlimit(RLIMIT_NOFILE, &limit) != 0) return;
  limit.rlim_cur = std::max(limit.rlim_cur, std::min(limit.rlim_max, enough));
  ::setrlimit(RLIMIT_NOFILE, &limit);  // if it is refused, opening tells
}

std::string shown_files(const std::string& first, std::size_t files) {
  return first + (files > 1 ? " and " + std::to_string(files - 1) + " more" : "");
}

void require_same_schema(const Schema& schema, const hdf5::GroupPath& file, const Schema& first,
                         const hdf5::GroupPath& first_file) {
  const auto doing = "opening " + file.path;
  if (!std::ranges::equal(schema, first, {}, &Column::name, &Column::name))
    throw Error(ExitCode::data, doing,
                "its columns are " + joined(schema, &Column::name) + ", those of " + first_file.path + " are " +
                    joined(first, &Column::name),
                "Choose columns that all files have");
  for (std::size_t i = 0; i < schema.size(); ++i)
    if (schema[i] != first[i])
      throw Error(ExitCode::data, doing,
                  "column \"" + schema[i].name + "\" is " + column_text(schema[i]) + " there and " +
                      column_text(first[i]) + " in " + first_file.path,
                  "Files of one dataset must agree; convert one of them");
}

void add_samples(std::int64_t& count, std::int64_t samples, const std::string& path) {
  if (__builtin_add_overflow(count, samples, &count))
    throw Error(ExitCode::data, "opening " + path, "its files have more samples than can be counted",
                "Make them again");
}

}  // namespace muster::detail::data
