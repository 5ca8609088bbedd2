#include "data/passes/pass_order.hpp"

#include <algorithm>
#include <limits>
#include <sstream>

namespace muster::detail::data {
namespace {

std::int64_t product_of(std::int64_t a, std::int64_t b) {
  std::int64_t product = 0;
  return __builtin_mul_overflow(a, b, &product) ? std::numeric_limits<std::int64_t>::max() : product;
}

Json json_of(const Blocks& blocks) {
  if (blocks.rows == 0) return nullptr;
  return {{"rows", blocks.rows}, {"lanes", blocks.lanes}, {"files", blocks.files}};
}

Blocks blocks_from(const Json& json) {
  if (json.is_null()) return {};
  return {.rows = json.at("rows"), .files = json.at("files"), .lanes = json.at("lanes")};
}

/// False if these are not the blocks of a dataset with so many samples.
bool blocks_fit(const Blocks& blocks, std::int64_t samples) {
  if (blocks.rows == 0) return true;
  for (const auto rows : blocks.files) {
    if (rows < 1 || rows > samples) return false;
    samples -= rows;
  }
  return blocks.rows > 0 && blocks.lanes > 0 && samples == 0;
}

/// Null if the samples have one length.
std::shared_ptr<const Lengths> lengths_of(const PassData& data) { return data.lengths ? data.lengths() : nullptr; }

}  // namespace

PassOrder PassOrder::of(const BatchOptions& options, const PassData& data, const step::MicroBatchShare& share,
                        std::uint64_t seed) {
  PassOrder order{.samples = data.count,
                  .seed = seed,
                  .shuffle = options.shuffle,
                  .window_seed = options.local_shuffle_seed.value_or(seed),
                  .blocks = data.blocks};
  if (options.local_shuffle_buffer_size) order.window = product_of(*options.local_shuffle_buffer_size, share.total);
  if (data.weights) {
    order.samples = options.num_samples.value_or(data.count);
    order.draws = {.count = data.count, .weights = data.weights->hash()};
  }
  if (options.bucket_samples)
    if (const auto lengths = lengths_of(data))
      order.buckets = {.samples = *options.bucket_samples, .lengths = lengths->hash};
  return order;
}

PassOrder PassOrder::from_json(const Json& position) {
  PassOrder order{.samples = position.at("samples"),
                  .window = position.at("window"),
                  .blocks = blocks_from(position.value("blocks", Json())),
                  .uses_name = position.value("uses_name", false)};
  const auto known = [&](const char* key) { return position.contains(key) && !position.at(key).is_null(); };
  if (known("pass_seed")) order.seed = position.at("pass_seed").get<std::uint64_t>();
  if (known("shuffle")) order.shuffle = position.at("shuffle").get<bool>();
  if (known("window_seed")) order.window_seed = position.at("window_seed").get<std::uint64_t>();
  if (known("draws"))
    order.draws = {.count = position["draws"].at("count"), .weights = position["draws"].at("weights")};
  if (known("buckets"))
    order.buckets = {.samples = position["buckets"].at("samples"), .lengths = position["buckets"].at("lengths")};
  return order;
}

void PassOrder::add_to(Json& position) const {
  position["samples"] = samples;
  position["window"] = window;
  position["pass_seed"] = seed ? Json(*seed) : Json();
  position["shuffle"] = shuffle ? Json(*shuffle) : Json();
  position["window_seed"] = window_seed ? Json(*window_seed) : Json();
  position["blocks"] = json_of(blocks);
  position["uses_name"] = uses_name;
  if (draws) position["draws"] = {{"count", draws->count}, {"weights", draws->weights}};
  if (buckets) position["buckets"] = {{"samples", buckets->samples}, {"lengths", buckets->lengths}};
}

PassOrder PassOrder::completed_by(const PassOrder& now) const {
  auto order = *this;
  if (!order.seed) order.seed = now.seed;
  if (!order.shuffle) order.shuffle = now.shuffle;
  if (!order.window_seed) order.window_seed = now.window_seed;
  return order;
}

OrderOptions PassOrder::options_for(const PassData& data) const {
  OrderOptions options{
      .shuffle = shuffle.value_or(false), .blocks = blocks, .window = window, .window_seed = window_seed.value_or(0)};
  if (draws) options.weights = data.weights;
  if (buckets) options.lengths = lengths_of(data);
  if (options.lengths) options.bucket = buckets->samples;
  return options;
}

bool PassOrder::is_possible() const noexcept {
  return blocks_fit(blocks, dataset_samples()) && (!draws || draws->count >= 1) && (!buckets || buckets->samples >= 1);
}

bool PassOrder::needs_other_weights(const PassData& data) const noexcept {
  return draws && (!data.weights || data.weights->hash() != draws->weights);
}

bool PassOrder::needs_other_lengths(const PassData& data) const {
  if (!buckets) return false;
  const auto lengths = lengths_of(data);
  return !lengths || lengths->hash != buckets->lengths;
}

std::map<std::string, std::string> PassOrder::compared_options(const BatchOptions& options) const {
  const auto number = [](const auto& given) { return given ? std::to_string(*given) : "not given"; };
  const auto flag = [](bool value) { return value ? "true" : "false"; };
  std::ostringstream hash;
  if (draws) hash << "a tensor with the hash " << std::hex << draws->weights;
  return {{"batch_size", options.global_batch_size ? "not given" : std::to_string(options.batch_size)},
          {"global_batch_size", number(options.global_batch_size)},
          {"shuffle", flag(options.shuffle)},
          {"drop_last", flag(options.drop_last)},
          {"local_shuffle_buffer_size", number(options.local_shuffle_buffer_size)},
          {"local_shuffle_seed", number(options.local_shuffle_seed)},
          {"weights", draws ? hash.str() : "not given"},
          {"num_samples", number(options.num_samples)},
          {"bucket_samples", number(options.bucket_samples)}};
}

std::string PassOrder::changed_option(const PassOrder& now) const {
  const auto before = completed_by(now);
  if (before.seed != now.seed) return "--seed";
  if (before.draws.has_value() != now.draws.has_value()) return "weights";
  if (before.draws && before.samples != now.samples) return "num_samples";
  if (before.shuffle != now.shuffle) return "shuffle";
  const auto bucket = [](const PassOrder& order) { return order.buckets ? order.buckets->samples : 0; };
  if (bucket(before) != bucket(now)) return "bucket_samples";
  if ((before.window > 0) != (now.window > 0)) return "local_shuffle_buffer_size";
  if (before.window > 0 && before.window_seed != now.window_seed) return "local_shuffle_seed";
  return {};
}

}  // namespace muster::detail::data
