// Tensors, JSON, numbers, strings, and the user's own functions.
#include "state/copy.hpp"
#include "state/stateful.hpp"

namespace muster {
namespace {

using namespace detail::state;

class StatefulTensor : public Stateful {
 public:
  explicit StatefulTensor(at::Tensor& tensor) : tensor_(&tensor) {}

  StateDict save(const ParameterPaths&) const override { return {.tensors = {{"", *tensor_}}}; }

  void compare(const StateDict& saved, const ParameterPaths&, Differences& differences) const override {
    if (!tensor_->defined())
      differences.push_back({"", "the tensor here is undefined"});
    else if (saved.tensors.size() != 1 || !saved.tensors.contains(""))
      differences.push_back({"", "a tensor here, something else in the checkpoint"});
    else
      compare_values("", saved.tensors.at(""), *tensor_, tensor_->scalar_type(), differences);
  }

  void load(const StateDict& saved, const ParameterPaths&) override { copy_values(*tensor_, saved.tensors.at("")); }

  std::map<std::string, at::Tensor> parameters() const override {
    if (!tensor_->defined()) return {};
    return {{"", *tensor_}};
  }

 private:
  at::Tensor* tensor_;
};

template <class T>
class StatefulValue : public Stateful {
 public:
  StatefulValue(T& value, const char* kind) : value_(&value), kind_(kind) {}

  StateDict save(const ParameterPaths&) const override { return {.values = quick_values()}; }
  Json quick_values() const override { return value_to_json(*value_); }

  void compare(const StateDict& saved, const ParameterPaths&, Differences& differences) const override {
    T unused{};
    if (!saved.tensors.empty() || !value_from_json(saved.values, unused))
      differences.push_back({"", std::string(kind_) + " here, something else in the checkpoint"});
  }

  void load(const StateDict& saved, const ParameterPaths&) override { value_from_json(saved.values, *value_); }

 private:
  T* value_;
  const char* kind_;
};

class StatefulFunctions : public Stateful {
 public:
  StatefulFunctions(std::function<StateDict()> save, std::function<void(const StateDict&)> load)
      : save_(std::move(save)), load_(std::move(load)) {}

  StateDict save(const ParameterPaths&) const override { return save_(); }
  void compare(const StateDict&, const ParameterPaths&, Differences&) const override {}
  void load(const StateDict& saved, const ParameterPaths&) override { load_(saved); }
  bool may_throw() const override { return true; }

 private:
  std::function<StateDict()> save_;
  std::function<void(const StateDict&)> load_;
};

}  // namespace

StateEntry::StateEntry(at::Tensor& tensor) : object_(std::make_shared<StatefulTensor>(tensor)) {}
StateEntry::StateEntry(Json& value) : object_(std::make_shared<StatefulValue<Json>>(value, "JSON")) {}
StateEntry::StateEntry(double& value) : object_(std::make_shared<StatefulValue<double>>(value, "a number")) {}
StateEntry::StateEntry(std::int64_t& value)
    : object_(std::make_shared<StatefulValue<std::int64_t>>(value, "an integer")) {}
StateEntry::StateEntry(std::string& value) : object_(std::make_shared<StatefulValue<std::string>>(value, "a string")) {}
StateEntry::StateEntry(std::function<StateDict()> save, std::function<void(const StateDict&)> load)
    : object_(std::make_shared<StatefulFunctions>(std::move(save), std::move(load))) {}

}  // namespace muster
