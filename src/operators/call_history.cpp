#include "operators/call_history.hpp"

#include "base/json.hpp"

#include <ATen/ops/zeros.h>

#include <algorithm>
#include <array>
#include <bit>
#include <sstream>
#include <string_view>
#include <utility>

namespace muster::detail::operators {
namespace {

constexpr std::int64_t least_bytes = 4096;
constexpr const char* restoring = "restoring the calls of an operator's trainer";

constexpr std::array names{"train", "validate", "apply_all_operators", "update_scheduler", "load_state_dict", "save",
                           "load",  "step"};

Call call_named(const std::string& name) {
  const auto found = std::ranges::find(names, name, [](const char* one) { return std::string_view(one); });
  if (found == names.end())
    throw Error(ExitCode::data, restoring, "there is no call \"" + name + "\"", "Resume from another checkpoint");
  return static_cast<Call>(found - names.begin());
}

std::string line_of(const CallRecord& call) {
  Json json{{"name", name_of(call.call)}, {"result", call.result}};
  if (call.registers_data) json["registers_data"] = true;
  if (call.refusal) json["refused"] = {static_cast<int>(call.refusal->code()), call.refusal->what()};
  return json_text_lossy(json) + "\n";
}

CallRecord call_in(const std::string& line) {
  const auto json = parse_json(line, restoring);
  try {
    CallRecord call{.call = call_named(json.at("name")),
                    .result = json.at("result"),
                    .registers_data = json.value("registers_data", false)};
    if (const auto refused = json.find("refused"); refused != json.end())
      call.refusal.emplace(static_cast<ExitCode>(refused->at(0).get<int>()), refused->at(1).get<std::string>());
    return call;
  } catch (const Json::exception& error) {
    throw Error(ExitCode::data, restoring, error.what(), "Resume from another checkpoint");
  }
}

}  // namespace

const char* name_of(Call call) noexcept { return names[static_cast<std::size_t>(call)]; }

bool changes_state(Call call) noexcept {
  return call != Call::train && call != Call::validate && call != Call::save && call != Call::step;
}

void CallHistory::add(CallRecord call) {
  if (position_ < calls_.size()) return;
  append(line_of(call));
  calls_.push_back(std::move(call));
}

std::string CallHistory::text() const {
  return {static_cast<const char*>(bytes_.const_data_ptr()), static_cast<std::size_t>(length_)};
}

void CallHistory::restore(const std::string& text) {
  calls_.clear();
  bytes_ = at::zeros({least_bytes}, at::kByte);
  length_ = 0;
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) calls_.push_back(call_in(line));
  append(text);
}

void CallHistory::restore(const at::Tensor& bytes) {
  const auto plain = bytes.to(at::kCPU).contiguous();
  const std::string_view all(static_cast<const char*>(plain.const_data_ptr()), plain.nbytes());
  restore(std::string(all.substr(0, all.find('\0'))));
}

void CallHistory::append(const std::string& text) {
  const auto needed = length_ + static_cast<std::int64_t>(text.size());
  if (needed > bytes_.numel()) {
    auto larger = at::zeros({static_cast<std::int64_t>(std::bit_ceil(static_cast<std::uint64_t>(needed)))}, at::kByte);
    larger.narrow(0, 0, length_).copy_(bytes_.narrow(0, 0, length_));
    bytes_ = std::move(larger);
  }
  std::ranges::copy(text, static_cast<char*>(bytes_.mutable_data_ptr()) + length_);
  length_ = needed;
}

}  // namespace muster::detail::operators
