#include "weights/weights_file.hpp"

#include "base/log.hpp"
#include "base/text.hpp"
#include "launch/settings.hpp"
#include "muster/error.hpp"
#include "state/collect.hpp"
#include "state/tensor_bytes.hpp"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros_like.h>

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

std::optional<std::int64_t> values_of_view(at::ScalarType type, std::span<const std::int64_t> sizes,
                                           std::span<const std::int64_t> strides, std::int64_t offset,
                                           std::int64_t stored) {
  const auto bytes = state::tensor_bytes(type, sizes);
  if (!bytes || offset < 0 || strides.size() != sizes.size()) return std::nullopt;
  std::int64_t last = offset;  // index of the last value in the storage
  for (std::size_t i = 0; i < sizes.size(); ++i) {
    std::int64_t span = 0;
    if (strides[i] < 0 || __builtin_mul_overflow(std::max<std::int64_t>(sizes[i] - 1, 0), strides[i], &span) ||
        __builtin_add_overflow(last, span, &last))
      return std::nullopt;
  }
  if (*bytes > 0 && last >= stored) return std::nullopt;
  return static_cast<std::int64_t>(*bytes) / static_cast<std::int64_t>(c10::elementSize(type));
}

at::Tensor read_values(const File& file, std::uint64_t offset, at::ScalarType type,
                       std::span<const std::int64_t> shape) {
  const auto stored = at::empty({shape.data(), shape.size()}, at::TensorOptions(type == at::kBool ? at::kByte : type));
  file.read_at({static_cast<std::byte*>(stored.mutable_data_ptr()), stored.nbytes()}, offset);
  return type == at::kBool ? stored.ne(0) : stored;
}

}  // namespace detail::weights

namespace {

using Tensors = std::map<std::string, at::Tensor>;

std::string in_quotes(const std::string& name) { return "\"" + name + "\""; }

/// Removes `prefix` from the names of the file if all of them begin with it and no name of the model does.
void strip(const std::string& prefix, Tensors& tensors, const Tensors& here) {
  const auto has_prefix = [&](const auto& item) { return item.first.starts_with(prefix); };
  if (tensors.empty() || !std::ranges::all_of(tensors, has_prefix) || std::ranges::any_of(here, has_prefix)) return;
  Tensors stripped;
  for (auto& [name, tensor] : tensors) stripped.emplace(name.substr(prefix.size()), std::move(tensor));
  tensors = std::move(stripped);
  detail::log::info("loading weights: all names begin with " + in_quotes(prefix) + ", which is left out");
}

[[noreturn]] void refuse_without(const std::vector<std::string>& buffers, const Tensors& tensors) {
  std::vector<std::string> keys;
  for (const auto& [name, tensor] : tensors) keys.push_back(name);
  const auto with_nearest = [&](const std::string& name) {
    const auto nearest = detail::launch::nearest_match(name, keys);
    return in_quotes(name) + (nearest.empty() ? "" : " (the nearest is " + in_quotes(nearest) + ")");
  };
  throw Error(ExitCode::data, "loading weights",
              "the buffers " + detail::listed(buffers, 5, with_nearest) + " are not among them",
              "To keep the model's own: load_state_dict(net, state, {.may_be_missing = {" +
                  detail::listed(buffers, 5, in_quotes) + "}})");
}

/// Gives the tensors of a file the names that the module's tensors have. Adds the tensors that a file may lack: tied
/// ones, counts of batches, and buffers in LoadOptions::may_be_missing.
void fit_to_module(Tensors& tensors, const detail::state::Stateful& object, const LoadOptions& options) {
  const auto parameters = object.parameters(), buffers = object.buffers();
  auto here = parameters;
  here.insert(buffers.begin(), buffers.end());
  for (const auto& name : options.may_be_missing)
    if (!buffers.contains(name))
      throw Error(ExitCode::usage, "loading weights",
                  "may_be_missing has " + in_quotes(name) + ", which is no buffer of the model",
                  "Name its buffers; parameters are never left out");
  if (here.empty()) return;  // the user's own functions name the tensors
  strip("module.", tensors, here);
  strip("model.", tensors, here);

  std::vector<std::string> tied, counts, missing;
  const auto given = tensors;
  for (const auto& [name, tensor] : here) {
    if (given.contains(name)) continue;
    const auto other = std::ranges::find_if(
        here, [&, &own = tensor](const auto& item) { return item.second.is_same(own) && given.contains(item.first); });
    if (other != here.end()) {
      tensors[name] = given.at(other->first);
      tied.push_back(name);
    } else if (!buffers.contains(name)) {
      return;  // load_state_dict() then throws: restore() says what does not fit
    } else if (std::ranges::find(options.may_be_missing, name) != options.may_be_missing.end()) {
      tensors[name] = tensor.clone();
    } else if (name.ends_with("num_batches_tracked")) {
      tensors[name] = at::zeros_like(tensor);
      counts.push_back(name);
    } else {
      missing.push_back(name);
    }
  }
  if (!missing.empty()) refuse_without(missing, given);
  if (!tied.empty())
    detail::log::info("loading weights: " + detail::listed(tied, 5, in_quotes) +
                      " is under the name of a tensor that it is tied to");
  if (!counts.empty())
    detail::log::info("loading weights: without num_batches_tracked, which begins with 0 in " +
                      detail::counted(counts.size(), "batch-norm"));
}

}  // namespace

StateDict state_dict(const StateEntry& entry) {
  const std::string name = "model";
  auto named = detail::state::collect({{name, entry}});
  StateDict state;
  if (named.values.contains(name) && !named.values[name].is_null()) state.values = named.values[name];
  for (auto& [path, tensor] : named.tensors)
    state.tensors.emplace(path == name ? "" : path.substr(name.size() + 1), std::move(tensor));
  return state;
}

void load_state_dict(const StateEntry& entry, const StateDict& given, const LoadOptions& options) {
  const std::string name = "model";
  auto state = given;
  fit_to_module(state.tensors, *entry.object(), options);
  StateDict named{.values = {{name, state.values}}};
  for (const auto& [path, tensor] : state.tensors)
    named.tensors.emplace(path.empty() ? name : name + "/" + path, tensor);
  detail::state::restore({{name, entry}}, named);
}

}  // namespace muster
