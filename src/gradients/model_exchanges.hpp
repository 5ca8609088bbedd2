// The exchanges of a model: one for its dense gradients, one for its sparse gradients. It gives each gradient to its
// exchange, and begins and finishes both together.
#pragma once

#include "gradients/exchange.hpp"
#include "gradients/model_parameters.hpp"

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

namespace muster::detail::gradients {

/// Throws the Error about another rank that has abandoned the round.
[[noreturn]] void throw_abandoned();

class ModelExchanges {
 public:
  /// Makes the exchange for these parameters. Collective.
  using Make = std::function<std::unique_ptr<Exchange>(const std::vector<at::Tensor>& parameters)>;

  /// Makes the exchanges for the parameters that require a gradient. Collective.
  ModelExchanges(const ModelParameters& parameters, Make make_dense, Make make_sparse);

  /// Returns the parameters without an exchange that require a gradient.
  std::vector<std::size_t> unfrozen() const;
  /// Makes new exchanges if any of `unfrozen` has none: the result of unfrozen() when the round began, since the
  /// program may freeze or unfreeze parameters before this rank finishes the round. Collective.
  void extend(const std::vector<std::size_t>& unfrozen);

  bool has(std::size_t parameter) const noexcept { return places_[parameter].index != Place::none; }
  bool has_dense(std::size_t parameter) const noexcept { return has(parameter) && !parameters_[parameter].sparse; }
  Exchange& dense() const noexcept { return *dense_; }
  /// See Reducer::fusable().
  std::shared_ptr<SharedExchange> fusable() const { return {dense_, dense_->fusable()}; }
  /// Returns the parameters of the dense exchange, in the exchange's order.
  std::vector<at::Tensor> dense_parameters() const;
  /// See Exchange::holds().
  bool holds(std::size_t parameter) const noexcept {
    return has_dense(parameter) && dense_->holds(places_[parameter].index);
  }

  // A round. With a fused optimizer, dense gradients are left to its step if they have no weights.
  /// Begins a round; the dense exchange only if backward() averages dense gradients. `fused`: true if there is a fused
  /// optimizer. `weighted`: true if the program gives weights. `weight`: see Exchange::begin().
  void begin(Arrival arrival, bool fused, bool weighted, Flags flags, double weight);
  bool dense_in_backward() const noexcept { return dense_in_backward_; }
  /// True if the parameter's gradient is averaged in this backward(); false if it is left to a fused optimizer's step.
  bool averages_in_backward(std::size_t parameter) const noexcept;
  /// True if the exchange gets the parameter's gradient in this backward().
  bool given_in_backward(std::size_t parameter) const noexcept;
  bool was_added(std::size_t parameter) const noexcept { return places_[parameter].added; }
  /// Adds .grad, with `use` if backward() averages it, else with `use_in_step`.
  void add(std::size_t parameter, ParameterUse use, ParameterUse use_in_step);
  /// Adds an undefined gradient in place of every gradient that the exchanges have not been given.
  void add_missing(ParameterUse use);
  /// Finishes what begin() has begun. Collective.
  void finish();
  // The following are for the time after finish(): of the exchanges that begin() had begun.
  Flags flags() const;
  double mean_weight() const;
  /// Returns how many ranks have used the parameter in this round. Throws an Error if a rank has abandoned the round.
  int user_count(std::size_t parameter) const;
  void fetch(std::size_t parameter, at::Tensor& gradient) { of(parameter).fetch(places_[parameter].index, gradient); }
  double mean_weight(std::size_t parameter) const { return of(parameter).mean_weight(); }

  // Dense gradients that are left to a fused optimizer. Over several nodes, the exchange begins to average them in
  // backward() nevertheless.
  /// Begins that for the round, if it is the first one since the last step and the exchange gains anything by it.
  void begin_early(bool is_first);
  /// Call it when a round begins: it adds to gradients that were begun early, so they are averaged anew.
  void spoil_early() noexcept;
  bool has_early() const noexcept { return early_ != Early::no; }
  bool gives_early() const noexcept { return early_ == Early::begun; }
  /// Gives the exchange all gradients; a fused optimizer or finish() of the dense exchange follows. `use_in_step`: of
  /// each parameter. `unchanged`: true if all gradients are as add() has given them. `word`: see
  /// SharedExchange::set_check_word(). Collective.
  void give_left(const std::function<ParameterUse(std::size_t)>& use_in_step, bool unchanged, Flags flags,
                 std::uint32_t word);
  /// The use that add() has given with the gradient.
  ParameterUse given_use(std::size_t parameter) const noexcept { return places_[parameter].given; }
  /// Ends the round of dense gradients that ranks may have begun, without averages. `begun`: true if begin() has begun
  /// it on this rank. Collective.
  void drop_dense(bool begun);

 private:
  /// Of a parameter.
  struct Place {
    static constexpr std::size_t none = ~std::size_t{0};
    std::size_t index = none;  ///< position in its exchange; `none` until a round trains the parameter
    bool added = false;        ///< true if its gradient was added since begin()
    ParameterUse given = ParameterUse::unused;
  };
  Exchange& of(std::size_t parameter) const noexcept { return parameters_[parameter].sparse ? *sparse_ : *dense_; }
  bool end_early(bool valid, Flags flags = 0, std::uint32_t word = 0);
  void abandon_dense(std::size_t first);

  const ModelParameters& parameters_;
  Make make_dense_, make_sparse_;
  std::shared_ptr<Exchange> dense_;
  std::unique_ptr<Exchange> sparse_;  ///< null if there is no sparse parameter
  std::vector<Place> places_;         ///< [parameters]
  bool dense_in_backward_ = false;    ///< false if the dense exchange begins in the optimizer's step instead
  /// Whether the exchange has begun to average the gradients that the next give_left() will give.
  enum class Early {
    no,
    begun,    ///< by the only round since the last give_left()
    useless,  ///< a later round has added to the gradients
  } early_ = Early::no;
};

}  // namespace muster::detail::gradients
