// The parameters of a prepared model, as prepare_model() has found them.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace torch::nn {
class Module;
}

namespace muster::detail::gradients {

class Reducer;

struct ModelParameter {
  std::string name;
  at::Tensor tensor;
  // When prepare_model() was called.
  std::vector<std::int64_t> sizes;
  at::ScalarType type;
  c10::Device device;
  bool sparse = false;         ///< true if its gradient is sparse
  const void* hook = nullptr;  ///< address of the hook that calls Reducer::after_accumulation()

  /// Throws an Error if the layout, type or shape of .grad differs from the parameter's in prepare_model.
  void check_gradient() const;
};

class ModelParameters {
 public:
  explicit ModelParameters(std::shared_ptr<torch::nn::Module> module);
  /// Installs the hooks that call the reducer.
  void install_hooks(const std::weak_ptr<Reducer>& reducer);

  // Floating-point and complex parameters; a tensor that has two names is listed once.
  std::size_t size() const noexcept { return all_.size(); }
  const ModelParameter& operator[](std::size_t i) const { return all_[i]; }
  auto begin() const noexcept { return all_.begin(); }
  auto end() const noexcept { return all_.end(); }

  // See the Reducer's functions of these names.
  void check_parameters() const;
  void check_shapes() const;
  std::string name_of(const at::Tensor& parameter) const;
  bool averages(const at::Tensor& parameter) const;

 private:
  std::shared_ptr<torch::nn::Module> module_;
  std::vector<std::pair<std::string, const void*>> names_;  ///< each name and its tensor
  std::vector<ModelParameter> all_;
};

}  // namespace muster::detail::gradients
