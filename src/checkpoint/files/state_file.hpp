// state.h5: the tensors. One rank has HDF5 lay the file out in memory and writes what is not values; then every rank
// writes its share of the file's bytes where they belong, so no HDF5 call is collective and none touches a disk.
// Reading goes by the manifest's offsets: HDF5 never parses what somebody else has written.
#pragma once

#include "checkpoint/files/manifest.hpp"
#include "checkpoint/files/pieces.hpp"

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <filesystem>
#include <map>
#include <set>
#include <string>
#include <vector>

namespace muster::detail::checkpoint {

using Tensors = std::map<std::string, at::Tensor>;

/// Where everything lies in a file that has been laid out.
struct Layout {
  std::vector<TensorEntry> tensors;
  std::uint64_t bytes = 0;  ///< of the file
};

Json to_json(const Layout& layout);
Layout layout_from_json(const Json& json);

/// An Error (ExitCode::usage) for a tensor that has no dense values, or for names that cannot stand beside each other.
void check_storable(const Tensors& tensors);

/// Makes the file with a dataset for each tensor, the parts of its name being groups; nothing is in them yet. Tensors
/// that share their memory become one dataset with several names. Durable but for its folder.
Layout lay_out(const std::filesystem::path& path, const Tensors& tensors);

/// Which of so many ranks writes each piece of the file: rank 0 those that hold a byte of a tensor in `of_rank_0`, so
/// that no such tensor is a mixture of several ranks'; all of them an even share of the others.
std::vector<int> piece_writers(const Layout& layout, int ranks, const std::set<std::string>& of_rank_0 = {});

/// Writes the pieces whose writer is `rank`, durably; gives their checksums. An Error (ExitCode::usage) if the tensors
/// are not those that the file was laid out for.
std::vector<std::uint32_t> write_pieces(const std::filesystem::path& path, const Layout& layout, const Tensors& tensors,
                                        const std::vector<int>& writers, int rank);

/// Reads all tensors, onto the CPU, and verifies this rank's share of checksums. What shared memory shares it again.
Tensors read_tensors(const std::filesystem::path& directory, const Manifest& manifest, Rank here);

}  // namespace muster::detail::checkpoint
