// The implementation of EMA: averages of a module's parameters, which can replace the parameters' values for a while.
#pragma once

#include "muster/ema.hpp"

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

namespace muster::detail::optim {

/// True if the tensor holds averages instead of its own values, inside a scope of EMA::apply().
bool is_average(const at::Tensor& parameter);

/// Returns the type of a parameter's average. Averages of 16-bit parameters are floats, since a decay near 1 makes
/// small changes.
inline at::ScalarType type_of_average(const at::Tensor& parameter) {
  return at::isReducedFloatingType(parameter.scalar_type()) ? at::kFloat : parameter.scalar_type();
}

class WeightAverages {
 public:
  WeightAverages(std::shared_ptr<torch::nn::Module> module, const EMAOptions& options);

  void update();
  std::int64_t updates() const noexcept { return updates_; }

  /// True if the module's parameters hold averages now, of this EMA or of another one.
  bool is_applied() const;
  void apply();
  /// Undoes apply().
  void restore() noexcept;

  /// Return tensors by name. A parameter that has two names has one average.
  std::map<std::string, at::Tensor> averages();
  std::map<std::string, at::Tensor> buffers() const;
  /// Sets the number of updates, after the values of averages() were restored.
  void set_updates(std::int64_t updates) noexcept { updates_ = updates; }

 private:
  void require_not_applied(const char* doing) const;
  void copy_first();

  std::shared_ptr<torch::nn::Module> module_;
  EMAOptions options_;
  std::vector<at::Tensor> parameters_, averages_;
  /// For each name, the index of its parameter in parameters_ and averages_.
  std::map<std::string, std::size_t> names_;
  std::int64_t updates_ = 0;
  std::vector<at::Tensor> weights_ = {};  ///< the parameters' own values while these averages are applied
};

}  // namespace muster::detail::optim
