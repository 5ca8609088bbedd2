// An entry of which each rank has its own.
#include "checkpoint/object.hpp"

namespace muster {
namespace {

using detail::checkpoint::Differences;
using detail::checkpoint::ParameterPaths;

/// The entry itself: who collects and restores gives it this rank's part.
class PerRankObject : public StateEntry::Object {
 public:
  explicit PerRankObject(std::shared_ptr<Object> object) : object_(std::move(object)) {}

  StateDict save(const ParameterPaths& parameters) const override { return object_->save(parameters); }
  void compare(const StateDict& saved, const ParameterPaths& parameters, Differences& differences) const override {
    object_->compare(saved, parameters, differences);
  }
  void load(const StateDict& saved, const ParameterPaths& parameters) override { object_->load(saved, parameters); }
  std::map<std::string, at::Tensor> parameters() const override { return object_->parameters(); }
  detail::checkpoint::Copies copies() const override { return detail::checkpoint::Copies::own; }
  std::optional<StateDict> regroup(const StateDict& all, detail::checkpoint::Part here) const override {
    return object_->regroup(all, here);
  }
  bool may_refuse() const override { return object_->may_refuse(); }

 private:
  std::shared_ptr<Object> object_;
};

}  // namespace

StateEntry per_rank(const StateEntry& entry) { return StateEntry(std::make_shared<PerRankObject>(entry.object())); }

}  // namespace muster
