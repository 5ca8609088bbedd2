// Optimizers. The JSON is {"kind": "Adam", "param_groups": [{"params": [path, …], "lr": …, …}, …],
// "state": {path: {"step": …, …}, …}}. Tensors of a parameter's state have the path PATH/FIELD. Tensors in a list have
// the paths PATH/FIELD.0, PATH/FIELD.1 …, and the JSON has the list's length. A parameter that was never stepped has no
// state.
#include "base/text.hpp"
#include "muster/error.hpp"
#include "muster/optimizer.hpp"
#include "optim/fields.hpp"
#include "state/copy.hpp"
#include "state/stateful.hpp"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty_like.h>

#include <algorithm>
#include <deque>
#include <functional>
#include <set>

namespace muster {
namespace {

using namespace detail::state;
using detail::optim::FieldShape, detail::optim::shape_of_field, detail::optim::sizes_of_field,
    detail::optim::visit_fields;

const Json& member(const Json& json, const char* key) {
  static const Json nothing;
  return json.is_object() && json.contains(key) ? json.at(key) : nothing;
}

std::string list_path(const std::string& path, std::size_t index) { return detail::str(path, ".", index); }

/// Writes the fields of a parameter's state to a StateDict.
struct FieldWriter {
  StateDict& out;
  const std::string& parameter;
  Json& json;

  void operator()(const char* name, const at::Tensor& tensor) { put(parameter + "/" + name, tensor); }
  void operator()(const char* name, const std::deque<at::Tensor>& tensors) { put_list(name, tensors); }
  void operator()(const char* name, const std::optional<std::vector<at::Tensor>>& tensors) {
    if (tensors) put_list(name, *tensors);
  }
  void operator()(const char* name, const auto& value) { json[name] = value_to_json(value); }

 private:
  void put(const std::string& path, const at::Tensor& tensor) {
    if (tensor.defined()) out.tensors.emplace(path, tensor);
  }
  void put_list(const char* name, const auto& tensors) {
    json[name] = tensors.size();
    std::size_t index = 0;
    for (const auto& tensor : tensors) put(list_path(parameter + "/" + name, index++), tensor);
  }
};

/// Reads the fields of a parameter's state from a StateDict. A missing tensor becomes undefined, and a missing optional
/// field becomes empty. Any other missing field is added to `differences`.
struct FieldReader {
  const StateDict& saved;
  const std::string& parameter;
  const Json& json;
  /// Returns the tensor to keep for a saved tensor. `now`: the field's present tensor, which may be undefined.
  std::function<at::Tensor(const char* name, const std::string& path, const at::Tensor& saved, const at::Tensor& now)>
      take;
  Differences& differences;
  std::set<std::string>& known;  ///< collects the paths of tensors that belong to a field

  void operator()(const char* name, at::Tensor& tensor) { get(name, parameter + "/" + name, tensor); }
  void operator()(const char* name, std::deque<at::Tensor>& tensors) { get_list(name, tensors); }
  void operator()(const char* name, std::optional<std::vector<at::Tensor>>& tensors) {
    tensors.reset();
    if (!member(json, name).is_null()) get_list(name, tensors.emplace());
  }
  void operator()(const char* name, auto& value) {
    if (!value_from_json(member(json, name), value)) add_missing(name);
  }

 private:
  /// More than the history of any LBFGS.
  static constexpr std::uint64_t max_list_size = 1'000'000;

  void add_missing(const char* name) {
    differences.push_back({parameter, detail::str(name, " is missing in the checkpoint")});
  }
  void get(const char* name, const std::string& path, at::Tensor& tensor) {
    const auto at = saved.tensors.find(path);
    tensor = at == saved.tensors.end() ? at::Tensor() : take(name, path, at->second, tensor);
    known.insert(path);
  }
  void get_list(const char* name, auto& tensors) {
    const auto& size = member(json, name);
    tensors.clear();
    if (!size.is_number_unsigned() || size.get<std::uint64_t>() > max_list_size) return add_missing(name);
    tensors.resize(size.get<std::size_t>());
    std::size_t index = 0;
    for (auto& tensor : tensors) get(name, list_path(parameter + "/" + name, index++), tensor);
  }
};

template <class Kind>
class StatefulOptimizer : public Stateful {
  using Options = typename Kind::Options;
  using ParamState = typename Kind::State;

 public:
  StatefulOptimizer(torch::optim::Optimizer& optimizer, const char* kind) : optimizer_(&optimizer), kind_(kind) {}

  StateDict save(const ParameterPaths& parameters) const override {
    StateDict out;
    auto groups = Json::array();
    auto states = Json::object();
    for (auto& group : optimizer_->param_groups()) {
      auto names = Json::array();
      for (const auto& parameter : group.params()) {
        const auto path = path_of(parameter, parameters);
        names.push_back(path);
        const auto state = optimizer_->state().find(parameter.unsafeGetTensorImpl());
        if (state == optimizer_->state().end()) continue;
        auto& json = states[path] = Json::object();
        visit_fields(static_cast<const ParamState&>(*state->second), FieldWriter{out, path, json});
      }
      Json json{{"params", names}};
      visit_fields(static_cast<const Options&>(group.options()),
                   [&](const char* name, const auto& value) { json[name] = value_to_json(value); });
      groups.push_back(std::move(json));
    }
    out.values = {{"kind", kind_}, {"param_groups", std::move(groups)}, {"state", std::move(states)}};
    return out;
  }

  void gather() override {
    if (auto* const prepared = dynamic_cast<detail::optim::Prepared*>(optimizer_)) prepared->gather_state();
  }

  void compare(const StateDict& saved, const ParameterPaths& parameters, Differences& differences) const override {
    const auto before = differences.size();
    const auto paths = matched_paths(saved, parameters, differences);
    if (differences.size() > before) return;
    std::set<std::string> known;
    each_parameter(paths, [&](const at::Tensor& parameter, const std::string& path) {
      const auto& json = member(member(saved.values, "state"), path.c_str());
      if (!json.is_object()) return;
      const auto take = [&](const char* field, const std::string& at, const at::Tensor& tensor, const at::Tensor&) {
        compare_tensor(at, tensor, sizes_of_field<ParamState>(field, parameter, *optimizer_), parameter.scalar_type(),
                       differences);
        return tensor;
      };
      ParamState scratch;
      visit_fields(scratch, FieldReader{saved, path, json, take, differences, known});
    });
    for (const auto& [path, tensor] : saved.tensors)
      if (!known.contains(path)) differences.push_back({path, "in the checkpoint, not here"});
  }

  void load(const StateDict& saved, const ParameterPaths& parameters) override {
    const at::NoGradGuard no_grad;
    Differences none;
    std::set<std::string> known;
    const auto paths = matched_paths(saved, parameters, none);
    for (std::size_t g = 0; g < paths.size(); ++g) {
      const auto& json = saved.values.at("param_groups").at(g);
      visit_fields(static_cast<Options&>(optimizer_->param_groups()[g].options()),
                   [&](const char* name, auto& value) { value_from_json(json.at(name), value); });
    }
    each_parameter(paths, [&](const at::Tensor& parameter, const std::string& path) {
      auto& states = optimizer_->state();
      void* const key = parameter.unsafeGetTensorImpl();
      const auto& json = member(member(saved.values, "state"), path.c_str());
      if (!json.is_object()) return void(states.erase(key));
      auto& state = states[key];
      if (!state) state = std::make_unique<ParamState>();
      const auto take = [&](const char* field, const std::string&, const at::Tensor& tensor, const at::Tensor& now) {
        if (shape_of_field<ParamState>(field) != FieldShape::parameter)
          return tensor.to(parameter.device(), tensor.scalar_type(), /*non_blocking=*/false, /*copy=*/true);
        const bool in_place = now.defined() && now.sizes() == tensor.sizes() &&
                              now.scalar_type() == tensor.scalar_type() && now.device() == parameter.device();
        auto mine = in_place ? now : at::empty_like(parameter);
        copy_values(mine, tensor);
        return mine;
      };
      visit_fields(static_cast<ParamState&>(*state), FieldReader{saved, path, json, take, none, known});
    });
  }

  std::function<void()> keep_schedule() override {
    std::vector<Options> before;
    for (const auto& group : optimizer_->param_groups()) before.push_back(static_cast<const Options&>(group.options()));
    return [optimizer = optimizer_, before] {
      auto& groups = optimizer->param_groups();
      for (std::size_t g = 0; g < std::min(groups.size(), before.size()); ++g)
        static_cast<Options&>(groups[g].options()) = before[g];
    };
  }

  Replication replication() const override { return Replication::averaged; }

 private:
  /// Paths by [group][parameter].
  using Paths = std::vector<std::vector<std::string>>;

  std::string path_of(const at::Tensor& parameter, const ParameterPaths& parameters) const {
    const auto at = parameters.find(parameter.unsafeGetTensorImpl());
    if (at == parameters.end())
      throw Error(ExitCode::usage, detail::str("saving the optimizer ", kind_),
                  "it has a parameter that no module or tensor of this state has",
                  "Add the model to the same state, as in {{\"model\", net}, {\"optimizer\", optimizer}}");
    return at->second;
  }

  /// Returns the path under which each parameter was saved. Adds to `differences` how the groups here and the saved
  /// groups differ.
  Paths matched_paths(const StateDict& saved, const ParameterPaths& parameters, Differences& differences) const {
    auto& groups = optimizer_->param_groups();
    const auto& saved_kind = member(saved.values, "kind");
    const auto& saved_groups = member(saved.values, "param_groups");
    const auto differ = [&](const std::string& here, const std::string& there) {
      differences.push_back({"", here + " here, " + there + " in the checkpoint"});
      return Paths();
    };
    if (saved_kind != kind_)
      return differ(detail::str("the optimizer ", kind_),
                    saved_kind.is_string() ? saved_kind.get<std::string>() : "something else");
    if (!saved_groups.is_array() || saved_groups.size() != groups.size())
      return differ(detail::str(groups.size(), " groups of parameters"), std::to_string(saved_groups.size()));
    Paths paths(groups.size());
    for (std::size_t g = 0; g < groups.size(); ++g) {
      const auto& json = saved_groups[g];
      const auto where = detail::str("param_groups.", g);
      std::vector<std::string> saved_paths;
      for (const auto& path : member(json, "params"))
        if (path.is_string()) saved_paths.push_back(path.get<std::string>());
      for (std::size_t p = 0; p < groups[g].params().size(); ++p)
        paths[g].push_back(path_here(groups[g].params()[p], parameters, saved_paths, p));
      if (std::set(paths[g].begin(), paths[g].end()) != std::set(saved_paths.begin(), saved_paths.end()))
        differences.push_back({where, describe(paths[g], saved_paths)});
      auto options = static_cast<const Options&>(groups[g].options());
      visit_fields(options, [&](const char* name, auto& value) {
        if (!value_from_json(member(json, name), value))
          differences.push_back({where, detail::str(name, " is missing in the checkpoint")});
      });
    }
    return paths;
  }

  /// Returns the path of a parameter. If the parameters have no paths here, returns the saved path at its position.
  static std::string path_here(const at::Tensor& parameter, const ParameterPaths& parameters,
                               const std::vector<std::string>& saved_paths, std::size_t position) {
    const auto at = parameters.find(parameter.unsafeGetTensorImpl());
    if (at != parameters.end()) return at->second;
    const bool nameless = parameters.empty() && position < saved_paths.size();
    return nameless ? saved_paths[position] : detail::str("parameter ", position, " (without a name)");
  }

  static std::string describe(const std::vector<std::string>& here, const std::vector<std::string>& saved) {
    std::string text = "other parameters:";
    for (const auto& path : here)
      if (std::ranges::find(saved, path) == saved.end()) text += " " + path + " only here,";
    for (const auto& path : saved)
      if (std::ranges::find(here, path) == here.end()) text += " " + path + " only in the checkpoint,";
    text.pop_back();
    return text;
  }

  void each_parameter(const Paths& paths, auto&& apply) const {
    for (std::size_t g = 0; g < paths.size(); ++g)
      for (std::size_t p = 0; p < paths[g].size(); ++p) apply(optimizer_->param_groups()[g].params()[p], paths[g][p]);
  }

  torch::optim::Optimizer* optimizer_;
  const char* kind_;
};

std::shared_ptr<Stateful> make_object(torch::optim::Optimizer& optimizer) {
  std::shared_ptr<Stateful> made;
  const auto make = [&]<class Kind>(const Kind& kind) {
    made = std::make_shared<StatefulOptimizer<Kind>>(optimizer, kind.name);
  };
  if (detail::optim::with_optimizer_kind(optimizer, make)) return made;
  std::string names;
  const auto name = [&](const auto& kind) { names += detail::str(names.empty() ? "" : ", ", kind.name); };
  std::apply([&](const auto&... each) { (name(each), ...); }, detail::optim::optimizer_kinds);
  throw Error(ExitCode::usage, "taking an optimizer into the state", "its type is none of " + names,
              "Give its state by two functions, save and load");
}

}  // namespace

StateEntry::StateEntry(torch::optim::Optimizer& optimizer) : object_(make_object(optimizer)) {}

}  // namespace muster
