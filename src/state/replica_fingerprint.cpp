#include "state/replica_fingerprint.hpp"

namespace muster::detail::state {

ReplicaFingerprint::ReplicaFingerprint(const std::vector<at::Tensor>& tensors) {
  for (const auto& tensor : tensors) (tensor.is_cpu() ? on_cpu_ : on_devices_).push_back(tensor);
}

bool ReplicaFingerprint::advance() {
  constexpr std::size_t block_bytes = 256 << 10;
  if (!current_) {
    if (next_ == on_cpu_.size()) return false;
    current_.emplace(on_cpu_[next_++]);
    done_ = 0;
    fingerprints_.push_back(0);
  }
  const auto part = current_->all().substr(done_, block_bytes);
  fingerprints_.back() = fingerprint(part, fingerprints_.back());
  done_ += part.size();
  if (done_ == current_->all().size()) current_.reset();
  return true;
}

std::uint64_t ReplicaFingerprint::value() {
  while (advance()) continue;
  auto fingerprints = fingerprints_on_devices(on_devices_);
  fingerprints.insert(fingerprints.end(), fingerprints_.begin(), fingerprints_.end());
  return fingerprint(
      {reinterpret_cast<const char*>(fingerprints.data()), fingerprints.size() * sizeof fingerprints[0]});
}

}  // namespace muster::detail::state
