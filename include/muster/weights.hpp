// Weights in the formats of other programs: loads what Python has written, and writes files for Python.
//
//   muster::load_state_dict(net, muster::load_safetensors("resnet18.safetensors"));
//
//   auto checkpoint = muster::Checkpoint::from_directory("runs/demo/checkpoint_000003");
//   muster::save_torch(checkpoint.to_dict(), "demo.pt");
//   # in Python                                        torch.load("demo.pt", weights_only=True)["model/fc.weight"]
//
// `muster checkpoint export` writes one entry of a checkpoint under the names that its Python counterpart has.
//
// Files are not trusted: nothing in them is executed, and no memory is allocated for contents that a file only claims
// to have. Invalid contents are an Error (ExitCode::data) that names the file. Every function acts on the calling rank
// only.
#pragma once

#include <muster/detail/export.hpp>
#include <muster/state.hpp>

#include <cstdint>
#include <filesystem>
#include <functional>
#include <string>
#include <vector>

namespace muster {

struct ExportOptions {
  /// Replaces an existing file, which is otherwise an Error (ExitCode::usage).
  bool replace = false;
  /// Called with the bytes written so far and in total. What it throws ends the writing.
  std::function<void(std::uint64_t done, std::uint64_t total)> progress = {};
};

/// Writes the tensors under their paths; `values` are left out. The file appears only when it is complete and on the
/// disk. Tensors that share memory are written separately; complex32 and complex128 are an Error (ExitCode::usage),
/// because the format has no such types.
MUSTER_API void save_safetensors(const StateDict& state, const std::filesystem::path& file,
                                 const ExportOptions& options = {});
/// Returns the bytes of such a file.
MUSTER_API std::string safetensors(const StateDict& state);
/// Writes a dict for Python's torch.load(file, weights_only=True). Tensors on the CPU that share a storage share it in
/// the file too, except for expanded, conjugate and negative ones, and for those that view it as another type. A type
/// for which Python's torch has no storage class is an Error (ExitCode::usage): save_safetensors() can write float8,
/// uint16 and similar types; no format has complex32.
MUSTER_API void save_torch(const StateDict& state, const std::filesystem::path& file,
                           const ExportOptions& options = {});

/// Loads the tensors of a .safetensors file by their names, on the CPU; `values` has its metadata, strings by key.
MUSTER_API StateDict load_safetensors(const std::filesystem::path& file);
/// Loads what torch.save() has written, in the pickle protocols 2 to 5: tensors, numbers, strings, and dicts and lists
/// of them; anything else in the pickle is an Error. Tensors of nested dicts get paths: {"model": {"fc.weight": …}} is
/// "model/fc.weight"; `values` has the rest. Parameters become tensors, conjugate and negative views stay views, and
/// all tensors are on the CPU. Expanded tensors are an Error. Checksums are verified where there are any
/// (torch.serialization.set_crc32_options()).
MUSTER_API StateDict load_torch(const std::filesystem::path& file);

/// Returns the state of an object, usually a model, in the form that load_state_dict() takes: its tensors by name, and
/// its JSON values. The tensors share the object's memory.
MUSTER_API StateDict state_dict(const StateEntry& entry);

struct LoadOptions {
  /// Buffers that keep the model's own values if the state lacks them, such as those that are persistent=False in
  /// Python. An Error (ExitCode::usage) for any other name: parameters are never left out.
  std::vector<std::string> may_be_missing = {};
};

/// Loads a state, such as state_dict() and load_torch() return, into an object, usually a model. Compares names, shapes
/// and types first, like Checkpoint::load(); if they differ, nothing is changed.
///
/// A model also accepts these states, with a line in the log: only one of several tied parameters or buffers is there;
/// a batch-norm has no num_batches_tracked, which then begins at 0; all names have a prefix "module." or "model.",
/// which is removed. Any other buffer that is missing is an Error (ExitCode::data).
MUSTER_API void load_state_dict(const StateEntry& entry, const StateDict& state, const LoadOptions& options = {});

}  // namespace muster
