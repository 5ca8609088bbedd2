// Common to all formats of weight files: writing them, and checking files from elsewhere before they are trusted.
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

namespace muster::detail::weights {

/// Throws an Error (ExitCode::usage) for a tensor that is not one of plain values in memory, such as a sparse one.
void check_exportable(const StateDict& state);

/// True if .safetensors files can hold tensors of the type.
bool is_safetensors_type(at::ScalarType type) noexcept;

/// Takes the next bytes of the file.
using ByteSink = std::function<void(std::string_view)>;

/// Creates the file with the bytes that `write` passes to the sink. `total`: about how many bytes, for the progress. If
/// `write` throws, no new file is left.
void write_weights(const std::filesystem::path& path, const ExportOptions& options, std::uint64_t total,
                   const std::function<void(const ByteSink&)>& write);

/// The sink that torch's archive writers take.
using ArchiveSink = std::function<std::size_t(const void* data, std::size_t bytes)>;
/// Runs `write`, which uses one of torch's archive writers, and passes its bytes to `sink`. Torch's writers end the
/// process if a write fails. So they are told that every write succeeded, and the first failure is thrown afterwards.
void write_archive(const ByteSink& sink, const std::function<void(const ArchiveSink&)>& write);

/// Throws an Error (ExitCode::data) for a file that is not a TorchScript archive, or whose values are damaged.
void check_script(const std::filesystem::path& path);

/// Throws the Error (ExitCode::data) for a file that cannot be read.
[[noreturn]] void throw_unreadable(const std::filesystem::path& path, const std::string& fact,
                                   const std::string& remedy = "Use another file, or make it anew");

/// Returns how many values a view of a storage has. Returns none if the view is invalid (a negative stride, for
/// example) or a value lies outside of the storage, which has `stored` values of that type.
std::optional<std::int64_t> values_of_view(at::ScalarType type, std::span<const std::int64_t> sizes,
                                           std::span<const std::int64_t> strides, std::int64_t offset,
                                           std::int64_t stored);

/// Reads a tensor from the file. Bytes of bool tensors other than 0 and 1 become 1.
at::Tensor read_values(const File& file, std::uint64_t offset, at::ScalarType type,
                       std::span<const std::int64_t> shape);

}  // namespace muster::detail::weights
