// The part of Python's pickle protocol 2 that state dicts are made of, read without running anything: torch.save()'s
// data.pkl. Dicts, lists, tuples, strings, numbers; of what a pickle may call, the five functions that put tensors
// together; all else is refused by its name.
// The protocol: https://github.com/python/cpython/blob/3.11/Lib/pickletools.py; what torch makes of it:
// https://github.com/pytorch/pytorch/blob/v2.13.0/torch/serialization.py
#pragma once

#include "muster/state.hpp"

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <stdexcept>
#include <string>
#include <string_view>

namespace muster::detail::checkpoint {

/// What is wrong with a pickle; what() is a fact without its stop.
struct BadPickle : std::runtime_error {
  using std::runtime_error::runtime_error;
};

/// So many values, one after the other, that the pickle names by a key: the same tensor at each call for that key, or
/// BadPickle where there are not as many.
using Storages = std::function<at::Tensor(const std::string& key, at::ScalarType type, std::int64_t count)>;

/// The dict in the pickle: tensors by path, with the keys of dicts inside each other joined by "/", and the rest as
/// values. Takes memory in proportion to the pickle's own length.
StateDict unpickle_state_dict(std::string_view pickle, const Storages& storages);

}  // namespace muster::detail::checkpoint
