// The base class of the preprocessors that learn from columns.
#pragma once

#include "muster/preprocessor.hpp"

#include <ATen/core/Tensor.h>

#include <map>
#include <string>
#include <vector>

namespace muster::detail::data {

/// A preprocessor that learns a tensor of numbers for each of its columns.
class ColumnPreprocessor : public Preprocessor {
 public:
  ColumnPreprocessor(std::string kind, std::vector<std::string> columns);

  void fit(const Dataset& dataset, const Communicator& communicator) final;
  bool fitted() const final { return !learned_.empty(); }
  using Preprocessor::transform;
  void transform(Batch& batch, at::Generator& generator) const final;
  /// {"kind": …, "columns": {name: to_json(learned), …}}
  Json state() const final;
  void load_state(const Json& state) final;

 protected:
  /// Says why the preprocessor cannot learn from a column of this type; empty if it can.
  virtual std::string objection(at::ScalarType dtype) const = 0;
  /// Summarises values as a table of two dimensions. `values`: [rows, features], where a feature is an index of the
  /// column's last dimension; one feature if a sample is a single value.
  virtual at::Tensor summary(const at::Tensor& values) const = 0;
  /// Joins two summaries into one, of the same type.
  virtual at::Tensor join(const at::Tensor& a, const at::Tensor& b) const = 0;
  /// Computes the learned numbers from the summary of all values.
  virtual at::Tensor learn(const at::Tensor& summary, const std::string& doing) const = 0;
  virtual at::Tensor apply(const at::Tensor& values, const at::Tensor& learned, const std::string& doing) const = 0;
  virtual Json to_json(const at::Tensor& learned) const = 0;
  virtual at::Tensor from_json(const Json& json) const = 0;

 private:
  std::string kind_;
  std::vector<std::string> columns_;
  std::map<std::string, at::Tensor> learned_;
};

}  // namespace muster::detail::data
