// What decides the order of a pass, as it is saved with the position in the middle of the pass.
#pragma once

#include "data/passes/samples.hpp"
#include "muster/dataset.hpp"
#include "muster/json.hpp"
#include "step/batch_weight.hpp"

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>

namespace muster::detail::data {

/// The samples that a pass goes over.
struct PassData {
  std::int64_t count = 0;                          ///< samples of the dataset; 0 if not known
  Blocks blocks = {};                              ///< in which the samples are stored; rows 0 if that does not matter
  std::shared_ptr<const AliasTable> weights = {};  ///< table of BatchOptions::weights; null: each sample comes once
  /// Returns the lengths of the samples. The function is null or returns null if all samples have the same length.
  /// Called only for an order in buckets of like length.
  std::function<std::shared_ptr<const Lengths>()> lengths = {};
};

/// The order of one pass, apart from the number of the pass.
struct PassOrder {
  struct Draws {
    std::int64_t count = 0;     ///< samples of the dataset
    std::uint64_t weights = 0;  ///< AliasTable::hash()
    bool operator==(const Draws&) const = default;
  };
  struct Buckets {
    std::int64_t samples = 0;   ///< samples of a bucket
    std::uint64_t lengths = 0;  ///< Lengths::hash
    bool operator==(const Buckets&) const = default;
  };

  std::int64_t samples = 0;                       ///< of the pass: all of the dataset, or the number of draws
  std::int64_t window = 0;                        ///< samples of a local shuffle's window when the pass began; 0: none
  std::optional<std::uint64_t> seed = {};         ///< the run's when the pass began; none if not known
  std::optional<bool> shuffle = {};               ///< none if not known
  std::optional<std::uint64_t> window_seed = {};  ///< seed of the local shuffle; none if not known
  Blocks blocks = {};
  bool uses_name = true;            ///< false if an early version of muster saved the pass: its orders ignored the name
  std::optional<Draws> draws = {};  ///< none if each sample comes once
  std::optional<Buckets> buckets = {};  ///< none if samples of like length do not come together

  /// The order of a new pass. `seed`: the run's; also the local shuffle's, unless the options have one.
  static PassOrder of(const BatchOptions& options, const PassData& data, const step::MicroBatchShare& share,
                      std::uint64_t seed);
  /// Reads what add_to() has written. Throws a Json::exception for missing keys and wrong types.
  static PassOrder from_json(const Json& position);
  void add_to(Json& position) const;

  /// This order, with what is not known taken from `now`.
  PassOrder completed_by(const PassOrder& now) const;
  /// An Order's options, without seed, epoch and pass. Only right if `data` has the weights and lengths that this order
  /// needs (needs_other_weights(), needs_other_lengths()).
  OrderOptions options_for(const PassData& data) const;
  /// The samples of the dataset.
  std::int64_t dataset_samples() const noexcept { return draws ? draws->count : samples; }
  /// False if the numbers contradict each other, which is possible since they come from a file.
  bool is_possible() const noexcept;
  /// True if this order needs weights or lengths, and `data` has other ones: then the pass cannot go on.
  bool needs_other_weights(const PassData& data) const noexcept;
  bool needs_other_lengths(const PassData& data) const;
  /// The options of a pass in this order that must be the same on all ranks, for step::OpenPass::options. `options`:
  /// the options from which of() made this order.
  std::map<std::string, std::string> compared_options(const BatchOptions& options) const;
  /// The name of the first option by which `now` is another order than this one; empty if there is none.
  std::string changed_option(const PassOrder& now) const;
};

}  // namespace muster::detail::data
