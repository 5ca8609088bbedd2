// Weights in the formats of other programs: taken from Python, and given to it.
//
//   muster::load_state_dict(net, muster::load_safetensors("resnet18.safetensors"));
//
//   auto checkpoint = muster::Checkpoint::from_directory("runs/demo/checkpoint_000003");
//   muster::save_torch(checkpoint.to_dict(), "demo.pt");
//   # in Python                                        torch.load("demo.pt", weights_only=True)["model/fc.weight"]
//
// `muster checkpoint export` writes one entry of a checkpoint under the names that its Python twin has.
//
// Files are not trusted: nothing in them is run, and no memory is taken for what they only claim to hold. What cannot
// be is an Error (ExitCode::data) that names the file. Every function acts on the calling rank alone.
#pragma once

#include <muster/state.hpp>

#include <cstdint>
#include <filesystem>
#include <functional>

namespace muster {

struct ExportOptions {
  /// Replaces a file that is there, which is an Error (ExitCode::usage) otherwise.
  bool replace = false;
  /// Told of bytes written, of all. What it throws ends the writing.
  std::function<void(std::uint64_t done, std::uint64_t total)> progress = {};
};

/// Writes the tensors under their paths; `values` are left out. The file is there when it is whole and on the disk, or
/// not at all. Tensors that share memory are written each; complex128 is an Error (ExitCode::usage), as the format has
/// no such type.
void save_safetensors(const StateDict& state, const std::filesystem::path& file, const ExportOptions& options = {});
/// The same as a dict that Python's torch.load(file, weights_only=True) gives back. Tensors that share a storage share
/// it there too.
void save_torch(const StateDict& state, const std::filesystem::path& file, const ExportOptions& options = {});

/// The tensors of a .safetensors file by their names, on the CPU; `values` is its metadata, strings by key.
StateDict load_safetensors(const std::filesystem::path& file);
/// What torch.save() has written of tensors, numbers, strings, and dicts and lists of them; in place of anything else
/// that a pickle can hold stands an Error. Tensors of dicts inside a dict have paths: {"model": {"fc.weight": …}} is
/// "model/fc.weight"; `values` has the rest. Parameters become tensors, and all of them lie on the CPU.
StateDict load_torch(const std::filesystem::path& file);

/// Loads such a state into an object, a model above all. Names, shapes and types are compared first, as
/// Checkpoint::load() does; nothing is changed if they differ.
void load_state_dict(const StateEntry& entry, const StateDict& state);

}  // namespace muster
