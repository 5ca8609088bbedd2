#include "weights/weights_file.hpp"

#include "muster/error.hpp"
#include "state/collect.hpp"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <algorithm>

namespace muster {

namespace detail::weights {

void check_exportable(const StateDict& state) {
  for (const auto& [name, tensor] : state.tensors)
    if (!tensor.defined() || tensor.layout() != at::kStrided || tensor.is_meta() || tensor.is_quantized())
      throw Error(ExitCode::usage, "writing " + name, "it is not a tensor of plain values in memory",
                  "Write it in another form");
}

void write_weights(const std::filesystem::path& path, const ExportOptions& options, std::uint64_t total,
                   const std::function<void(const ByteSink&)>& write) {
  require_output(path);
  if (!options.replace && std::filesystem::exists(status_of(path)))
    throw Error(ExitCode::usage, "writing " + path.string(), "it is there already",
                "Choose another name, or ask for it to be replaced");
  remove_unfinished(path, /*none_writes=*/false);
  constexpr std::size_t step = 16 << 20;  // bytes between two calls of options.progress
  write_file(
      path,
      [&](File& file) {
        std::uint64_t done = 0;
        write([&](std::string_view bytes) {
          while (!bytes.empty()) {
            const auto part = bytes.substr(0, step);
            file.append(part);
            bytes.remove_prefix(part.size());
            done += part.size();
            if (options.progress) options.progress(std::min(done, total), total);
          }
        });
      },
      options.replace);
}

void throw_unreadable(const std::filesystem::path& path, const std::string& fact, const std::string& remedy) {
  throw Error(ExitCode::data, "reading " + path.string(), fact, remedy);
}

at::Tensor read_values(const File& file, std::uint64_t offset, at::ScalarType type,
                       std::span<const std::int64_t> shape) {
  const auto stored = at::empty({shape.data(), shape.size()}, at::TensorOptions(type == at::kBool ? at::kByte : type));
  file.read_at({static_cast<std::byte*>(stored.mutable_data_ptr()), stored.nbytes()}, offset);
  return type == at::kBool ? stored.ne(0) : stored;
}

}  // namespace detail::weights

void load_state_dict(const StateEntry& entry, const StateDict& state) {
  const std::string name = "model";
  StateDict named{.values = {{name, state.values}}};
  for (const auto& [path, tensor] : state.tensors)
    named.tensors.emplace(path.empty() ? name : name + "/" + path, tensor);
  detail::state::restore({{name, entry}}, named);
}

}  // namespace muster
