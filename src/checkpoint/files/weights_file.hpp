// What files of weights have in common, whatever their format: how they are written, and what is checked of one that
// somebody else has written before it is believed.
#pragma once

#include "base/file.hpp"
#include "muster/weights.hpp"

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <string_view>

namespace muster::detail::checkpoint {

/// An Error (ExitCode::usage) for a tensor that has no dense values.
void check_exportable(const StateDict& state);

/// Takes the next bytes of the file.
using Sink = std::function<void(std::string_view)>;

/// Makes the file, of about `total` bytes, with what `write` gives the sink; an Error leaves nothing.
void write_weights(const std::filesystem::path& path, const ExportOptions& options, std::uint64_t total,
                   const std::function<void(const Sink&)>& write);

/// What torch's own writers of archives give their bytes to.
using ArchiveSink = std::function<std::size_t(const void* data, std::size_t bytes)>;
/// An archive of what `write` does. Those writers end the process where a write fails; so they are told that all went
/// well, and the first failure is thrown when they are done.
void write_archive(const Sink& sink, const std::function<void(const ArchiveSink&)>& write);

/// Refuses a file that is not a whole one of TorchScript.
void check_script(const std::filesystem::path& path);

/// Ends the reading of a file that cannot be.
[[noreturn]] void refuse_weights(const std::filesystem::path& path, const std::string& fact,
                                 const std::string& remedy = "Use another file, or make it anew");

/// Bytes of the values of a tensor that is said to have that shape; none if no tensor can.
std::optional<std::uint64_t> claimed_bytes(at::ScalarType type, std::span<const std::int64_t> shape);

/// A tensor of the bytes at that place. A bool is 0 or 1, whatever is stored.
at::Tensor read_values(const File& file, std::uint64_t offset, at::ScalarType type,
                       std::span<const std::int64_t> shape);

}  // namespace muster::detail::checkpoint
