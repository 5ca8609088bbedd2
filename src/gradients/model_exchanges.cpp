#include "gradients/model_exchanges.hpp"

#include "comm/progress.hpp"
#include "gradients/shared_exchange.hpp"
#include "muster/error.hpp"

#include <algorithm>
#include <utility>

namespace muster::detail::gradients {

ModelExchanges::ModelExchanges(const ModelParameters& parameters, Make make_dense, Make make_sparse)
    : parameters_(parameters),
      make_dense_(std::move(make_dense)),
      make_sparse_(std::move(make_sparse)),
      places_(parameters.size()) {
  extend(unfrozen());
}

std::vector<std::size_t> ModelExchanges::unfrozen() const {
  std::vector<std::size_t> found;
  for (std::size_t i = 0; i < places_.size(); ++i)
    if (!has(i) && parameters_[i].tensor.requires_grad()) found.push_back(i);
  return found;
}

void throw_abandoned() {
  throw Error(ExitCode::user_error, averaging,
              "another rank has left this backward() by an exception and has continued training",
              "Let the exception end the training function");
}

void ModelExchanges::extend(const std::vector<std::size_t>& unfrozen) {
  if (dense_ && std::ranges::all_of(unfrozen, [&](std::size_t i) { return has(i); })) return;
  end_early(/*valid=*/false);
  auto places = places_;
  for (const auto i : unfrozen) places[i].index = 0;
  std::vector<at::Tensor> dense, sparse;
  for (std::size_t i = 0; i < places.size(); ++i) {
    if (places[i].index == Place::none) continue;
    auto& tensors = parameters_[i].sparse ? sparse : dense;
    places[i].index = tensors.size();
    tensors.push_back(parameters_[i].tensor);
  }
  std::shared_ptr<Exchange> of_dense = make_dense_(dense);
  if (!sparse.empty()) sparse_ = make_sparse_(sparse);
  dense_ = std::move(of_dense);
  places_ = std::move(places);
}

std::vector<at::Tensor> ModelExchanges::dense_parameters() const {
  std::vector<at::Tensor> tensors;
  for (std::size_t i = 0; i < places_.size(); ++i)
    if (has_dense(i)) tensors.push_back(parameters_[i].tensor);
  return tensors;
}

void ModelExchanges::begin(Arrival arrival, bool fused, bool weighted, Flags flags, double weight) {
  dense_in_backward_ = !fused || weighted;
  if (dense_in_backward_) {
    end_early(/*valid=*/false);
    // Another rank may have no weight and leave its gradients to the fused optimizer: both must send the same messages.
    const auto left = arrival == Arrival::in_backward ? Arrival::left_in_backward : Arrival::left;
    dense_->begin(fused && dense_->fusable()->averages_early() ? left : arrival, flags, weight);
  }
  if (sparse_) sparse_->begin(arrival, flags, weight);
  for (auto& place : places_) place.added = false;
}

bool ModelExchanges::averages_in_backward(std::size_t parameter) const noexcept {
  return has(parameter) && (parameters_[parameter].sparse || dense_in_backward_);
}

bool ModelExchanges::given_in_backward(std::size_t parameter) const noexcept {
  return averages_in_backward(parameter) || (has_dense(parameter) && gives_early());
}

void ModelExchanges::add(std::size_t parameter, ParameterUse use, ParameterUse use_in_step) {
  auto& place = places_[parameter];
  place.given = averages_in_backward(parameter) ? use : use_in_step;
  of(parameter).add(place.index, parameters_[parameter].tensor.grad(), place.given);
  place.added = true;  // not if the exchange has thrown
}

void ModelExchanges::add_missing(ParameterUse use) {
  for (std::size_t i = 0; i < places_.size(); ++i)
    if (given_in_backward(i) && !places_[i].added) of(i).add(places_[i].index, {}, use);
}

void ModelExchanges::finish() {
  if (dense_in_backward_) dense_->finish();
  if (sparse_) sparse_->finish();
}

Flags ModelExchanges::flags() const {
  return (dense_in_backward_ ? dense_->flags() : 0) | (sparse_ ? sparse_->flags() : 0);
}

double ModelExchanges::mean_weight() const {
  return std::max(dense_->mean_weight(), sparse_ ? sparse_->mean_weight() : 0);
}

int ModelExchanges::user_count(std::size_t parameter) const {
  const int users = of(parameter).user_count(places_[parameter].index);
  if (users < 0) throw_abandoned();
  return users;
}

void ModelExchanges::begin_early(bool is_first) {
  if (!is_first || has_early() || !dense_->fusable()->averages_early()) return;
  dense_->begin(Arrival::left_in_backward, 0, 0);
  early_ = Early::begun;
}

void ModelExchanges::spoil_early() noexcept {
  if (early_ == Early::begun) early_ = Early::useless;
}

/// Ends what begin_early() has begun, if it has; true if the exchange goes on with it. `valid`: true if this rank's
/// gradients are as they were given. Collective.
bool ModelExchanges::end_early(bool valid, Flags flags, std::uint32_t word) {
  if (!has_early()) return false;
  comm::require_progress(averaging, "");  // a child of fork() must not wait for its parent's thread
  return dense_->fusable()->go_on(std::exchange(early_, Early::no) == Early::begun && valid, flags, word);
}

void ModelExchanges::give_left(const std::function<ParameterUse(std::size_t)>& use_in_step, bool unchanged, Flags flags,
                               std::uint32_t word) {
  if (end_early(unchanged, flags, word)) return;
  auto* const fusable = dense_->fusable();
  do {
    dense_->begin(Arrival::left, flags, 0);
    if (fusable != nullptr) fusable->set_check_word(word);
    std::size_t next = 0;
    try {
      for (; next < places_.size(); ++next)
        if (has_dense(next)) dense_->add(places_[next].index, parameters_[next].tensor.grad(), use_in_step(next));
    } catch (...) {
      abandon_dense(next);  // the other ranks wait for this one
      throw;
    }
    // A rank that has not given gradients early must begin again with those that have, and found theirs stale.
  } while (fusable != nullptr && fusable->averages_early() && !fusable->go_on(true, flags, word));
}

/// Ends a round of dense gradients in which those from `first` on are missing. Collective.
void ModelExchanges::abandon_dense(std::size_t first) {
  for (std::size_t i = first; i < places_.size(); ++i)
    if (has_dense(i)) dense_->add(places_[i].index, {}, ParameterUse::abandoned);
  dense_->finish();
}

void ModelExchanges::drop_dense(bool begun) {
  if (begun && dense_in_backward_) return dense_->finish();
  end_early(/*valid=*/false);
  dense_->begin(Arrival::left, 0, 0);
  abandon_dense(0);
}

}  // namespace muster::detail::gradients
