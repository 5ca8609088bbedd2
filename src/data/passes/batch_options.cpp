#include "data/passes/batch_options.hpp"

#include "base/text.hpp"
#include "data/sources/source.hpp"
#include "muster/error.hpp"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <span>

namespace muster::detail::data {
namespace {

void check_order(const BatchOptions& options, const std::string& doing) {
  const auto refuse = [&](const char* fact, const char* remedy) { throw Error(ExitCode::usage, doing, fact, remedy); };
  const bool local = options.local_shuffle_buffer_size.has_value();
  if (options.local_shuffle_seed && !local)
    refuse("local_shuffle_seed is given and there is no local shuffle", "Give local_shuffle_buffer_size too");
  if (options.weights.defined() && (options.shuffle || local))
    refuse("weights are given together with a shuffle, and draws are in random order anyway",
           "Give weights without shuffle and local_shuffle_buffer_size");
  if (options.num_samples && !options.weights.defined())
    refuse("num_samples is given without weights, and then a pass takes each sample once", "Give weights too");
  if (options.bucket_samples && (!options.shuffle || local))
    refuse("bucket_samples is given, and buckets are made of the order that shuffle alone gives",
           "Give shuffle and no local_shuffle_buffer_size");
}

}  // namespace

void check_options(const BatchOptions& options, const std::string& doing) {
  const auto require = [&](bool holds, const std::string& option, const std::string& least) {
    if (!holds) throw Error(ExitCode::usage, doing, option + " is less than " + least, "Give at least " + least);
  };
  require(options.batch_size >= 1, "batch_size", "1");
  require(options.global_batch_size.value_or(1) >= 1, "global_batch_size", "1");
  require(options.local_shuffle_buffer_size.value_or(1) >= 1, "local_shuffle_buffer_size", "1");
  require(options.num_samples.value_or(1) >= 1, "num_samples", "1");
  require(options.bucket_samples.value_or(1) >= 1, "bucket_samples", "1");
  require(options.prefetch_batches >= 0, "prefetch_batches", "0");
  check_order(options, doing);
}

std::shared_ptr<const AliasTable> table_of(const at::Tensor& weights, std::int64_t count, const std::string& doing) {
  if (!weights.defined()) return nullptr;
  const auto refuse = [&](const std::string& fact, const std::string& remedy) {
    throw Error(ExitCode::usage, doing, fact, remedy);
  };
  if (!weights.is_cpu() || weights.layout() != at::kStrided || weights.is_complex() || weights.dim() != 1 ||
      weights.size(0) != count)
    refuse(str("its weights are not a tensor [", count, "] of real numbers on the CPU"),
           "Give one weight for each sample");
  const auto values = weights.detach().to(at::kDouble).contiguous();
  const std::span all(values.const_data_ptr<double>(), static_cast<std::size_t>(count));
  for (std::size_t i = 0; i < all.size(); ++i)
    if (!std::isfinite(all[i]) || all[i] < 0)
      refuse(str("the weight of sample ", i, " is ", all[i]), "Give finite weights of at least 0");
  if (std::ranges::none_of(all, [](double weight) { return weight > 0; }))
    refuse("all weights are 0", "Give a positive weight to at least one sample");
  return std::make_shared<const AliasTable>(all);
}

void require_lengths(Source& source, const std::string& doing) {
  if (!source.lengths())
    throw Error(ExitCode::usage, doing, "bucket_samples is given, and " + source.shown() + " has samples of one length",
                "Remove it, or make the dataset by Dataset::ragged");
}

}  // namespace muster::detail::data
