// Reads data.pkl in files of torch.save(), without running any code: the part of Python's pickle protocols 2 to 5 that
// state dicts use. It knows dicts, lists, tuples, strings and numbers, and of all functions only those that build
// tensors and ordered dicts. Everything else is refused, and the error names it. The protocol:
// https://github.com/python/cpython/blob/3.11/Lib/pickletools.py How torch uses it:
// https://github.com/pytorch/pytorch/blob/v2.13.0/torch/serialization.py
#pragma once

#include "muster/state.hpp"

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>

namespace muster::detail::weights {

/// Says what is wrong with a pickle, and what to do. what() is a sentence without a full stop.
struct BadPickle : std::runtime_error {
  explicit BadPickle(const std::string& fact,
                     std::string what_to_do = "Save the state dict alone: torch.save(model.state_dict(), FILE)")
      : std::runtime_error(fact), remedy(std::move(what_to_do)) {}
  std::string remedy;
};

/// True if Python's torch has a storage class for the type. Python cannot load tensors of other types that libtorch has
/// pickled in C++.
bool has_storage_class(at::ScalarType type) noexcept;

/// Returns the storage that the pickle refers to by `key`, as a one-dimensional tensor of `count` values. Returns the
/// same tensor at each call for one key. Throws BadPickle if the storage does not have `count` values.
using StorageReader = std::function<at::Tensor(const std::string& key, at::ScalarType type, std::int64_t count)>;

/// Returns the dict in the pickle: tensors by path, where the keys of nested dicts are joined by "/", and all else as
/// values. The memory that it uses is proportional to the length of the pickle.
StateDict unpickle_state_dict(std::string_view pickle, const StorageReader& storages);

}  // namespace muster::detail::weights
