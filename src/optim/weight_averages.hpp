// The implementation of EMA: averages of a module's parameters, which can temporarily replace their values.
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

/// True if the tensor holds averages in place of its own values: it is inside a scope of EMA::apply().
bool is_average(const at::Tensor& parameter);

/// Returns the type of a parameter's average: 16 bits are too few for the small changes of a decay near 1.
inline at::ScalarType type_of_average(const at::Tensor& parameter) {
  return at::isReducedFloatingType(parameter.scalar_type()) ? at::kFloat : parameter.scalar_type();
}

class WeightAverages {
 public:
  WeightAverages(std::shared_ptr<torch::nn::Module> module, const EMAOptions& options);

  void update();
  std::int64_t updates() const noexcept { return updates_; }

  /// True if the module's parameters hold averages now, these or another EMA's.
  bool is_applied() const;
  void apply();
  /// Undoes apply().
  void restore() noexcept;

  /// Return tensors by name. A parameter with two names has one average.
  std::map<std::string, at::Tensor> averages();
  std::map<std::string, at::Tensor> buffers() const;
  /// Call it after the values of averages() have been set.
  void set_updates(std::int64_t updates) noexcept { updates_ = updates; }

 private:
  void require_not_applied(const char* doing) const;
  void copy_first();

  std::shared_ptr<torch::nn::Module> module_;
  EMAOptions options_;
  std::vector<at::Tensor> parameters_, averages_;
  std::map<std::string, std::size_t> names_;  ///< index of each name's parameter in parameters_ and averages_
  std::int64_t updates_ = 0;
  std::vector<at::Tensor> weights_ = {};  ///< the parameters' own values while these averages are applied
};

}  // namespace muster::detail::optim
