#include "gradients/exchange.hpp"

namespace muster::detail::gradients {

std::vector<std::int64_t> Exchange::find_order(const std::function<void(std::vector<std::int64_t>& order)>& broadcast) {
  const auto gradients = notes_.numbers().size() - Notes::tail;
  if (order_known_ || gradients == 0) return {};
  std::vector<std::int64_t> order(gradients, -1);
  if (arrival_ == Arrival::in_backward && arrived_.size() == gradients) order = arrived_;
  broadcast(order);
  if (order.front() < 0) return {};
  order_known_ = true;
  arrived_ = {};
  return order;
}

}  // namespace muster::detail::gradients
