// Tensors, JSON, numbers, strings, and the user's own functions.
#include "checkpoint/object.hpp"

#include <ATen/core/grad_mode.h>

namespace muster {
namespace {

using detail::checkpoint::Differences;
using detail::checkpoint::ParameterPaths;

class TensorObject : public StateEntry::Object {
 public:
  explicit TensorObject(at::Tensor& tensor) : tensor_(&tensor) {}

  StateDict save(const ParameterPaths&) const override { return {.tensors = {{"", *tensor_}}}; }

  void compare(const StateDict& saved, const ParameterPaths&, Differences& differences) const override {
    if (!tensor_->defined()) {
      differences.push_back({"", "the tensor here is undefined"});
    } else if (saved.tensors.size() != 1 || !saved.tensors.contains("")) {
      differences.push_back({"", "a tensor here, something else in the checkpoint"});
    } else {
      compare_tensor("", saved.tensors.at(""), {tensor_->sizes().data(), tensor_->sizes().size()},
                     tensor_->scalar_type(), differences);
    }
  }

  void load(const StateDict& saved, const ParameterPaths&) override {
    const at::NoGradGuard no_grad;
    tensor_->copy_(saved.tensors.at(""));
  }

  std::map<std::string, at::Tensor> parameters() const override {
    return tensor_->defined() ? std::map<std::string, at::Tensor>{{"", *tensor_}} : std::map<std::string, at::Tensor>{};
  }

 private:
  at::Tensor* tensor_;
};

/// Reads a value of one kind; nothing if the JSON is of another.
std::optional<Json> read(const Json& json, const Json*) { return json; }
std::optional<double> read(const Json& json, const double*) { return detail::checkpoint::number_from_json(json); }
std::optional<std::int64_t> read(const Json& json, const std::int64_t*) {
  return json.is_number_integer() ? std::optional(json.get<std::int64_t>()) : std::nullopt;
}
std::optional<std::string> read(const Json& json, const std::string*) {
  return json.is_string() ? std::optional(json.get<std::string>()) : std::nullopt;
}

template <class T>
class ValueObject : public StateEntry::Object {
 public:
  ValueObject(T& value, const char* kind) : value_(&value), kind_(kind) {}

  StateDict save(const ParameterPaths&) const override {
    if constexpr (std::is_same_v<T, double>)
      return {.values = detail::checkpoint::number_to_json(*value_)};
    else
      return {.values = Json(*value_)};
  }

  void compare(const StateDict& saved, const ParameterPaths&, Differences& differences) const override {
    if (!saved.tensors.empty() || !read(saved.values, value_))
      differences.push_back({"", std::string(kind_) + " here, something else in the checkpoint"});
  }

  void load(const StateDict& saved, const ParameterPaths&) override { *value_ = *read(saved.values, value_); }

 private:
  T* value_;
  const char* kind_;
};

class FunctionObject : public StateEntry::Object {
 public:
  FunctionObject(std::function<StateDict()> save, std::function<void(const StateDict&)> load)
      : save_(std::move(save)), load_(std::move(load)) {}

  StateDict save(const ParameterPaths&) const override { return save_(); }
  void compare(const StateDict&, const ParameterPaths&, Differences&) const override {}
  void load(const StateDict& saved, const ParameterPaths&) override { load_(saved); }
  bool may_refuse() const override { return true; }

 private:
  std::function<StateDict()> save_;
  std::function<void(const StateDict&)> load_;
};

}  // namespace

StateEntry::StateEntry(at::Tensor& tensor) : object_(std::make_shared<TensorObject>(tensor)) {}
StateEntry::StateEntry(Json& value) : object_(std::make_shared<ValueObject<Json>>(value, "JSON")) {}
StateEntry::StateEntry(double& value) : object_(std::make_shared<ValueObject<double>>(value, "a number")) {}
StateEntry::StateEntry(std::int64_t& value)
    : object_(std::make_shared<ValueObject<std::int64_t>>(value, "an integer")) {}
StateEntry::StateEntry(std::string& value) : object_(std::make_shared<ValueObject<std::string>>(value, "a string")) {}
StateEntry::StateEntry(std::function<StateDict()> save, std::function<void(const StateDict&)> load)
    : object_(std::make_shared<FunctionObject>(std::move(save), std::move(load))) {}

}  // namespace muster
