// A source of some samples of another source, in another order.
#include "base/text.hpp"
#include "data/sources/permutation.hpp"
#include "data/sources/source.hpp"
#include "muster/error.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <mutex>
#include <numeric>

namespace muster::detail::data {
namespace {

/// The samples of a list.
struct Listed {
  std::vector<std::int64_t> samples;

  std::int64_t count() const noexcept { return static_cast<std::int64_t>(samples.size()); }
  std::int64_t operator[](std::int64_t index) const noexcept { return samples[static_cast<std::size_t>(index)]; }
  FingerprintPart fingerprint() const {
    return {.name = "the list of samples",
            .bytes = samples.size() * sizeof(std::int64_t),
            .checksum = checksum_of(std::as_bytes(std::span(samples)))};
  }
};

/// `range` of a permutation of all samples.
struct Drawn {
  Permutation order;
  SampleRange range;
  std::uint64_t key;

  std::int64_t count() const noexcept { return range.count; }
  std::int64_t operator[](std::int64_t index) const noexcept { return order(range.first + index); }
  FingerprintPart fingerprint() const {
    const std::array<std::uint64_t, 2> values{key, static_cast<std::uint64_t>(range.first)};
    return {.name = "the random split",
            .bytes = static_cast<std::uint64_t>(range.count) * sizeof(std::int64_t),
            .checksum = checksum_of(std::as_bytes(std::span(values)))};
  }
};

template <class Chosen>
class SubsetSource final : public Source {
 public:
  SubsetSource(std::shared_ptr<Source> source, Chosen chosen)
      : source_(std::move(source)), chosen_(std::move(chosen)) {}

  std::int64_t count() override { return chosen_.count(); }
  const Schema& schema() override { return source_->schema(); }
  Batch read(std::span<const std::int64_t> samples) override { return source_->read(in_source(samples)); }
  ReadBatch read_ahead(std::span<const std::int64_t> samples, std::uint64_t seed) override {
    return source_->read_ahead(in_source(samples), seed);
  }
  int threads() const noexcept override { return source_->threads(); }
  std::string shown() const override { return "a subset of " + source_->shown(); }
  std::vector<std::string> files() const override { return source_->files(); }
  bool has_column_order() const noexcept override { return source_->has_column_order(); }
  NodeChunks* node_chunks() override { return source_->node_chunks(); }
  void end_threads() override { source_->end_threads(); }

  std::shared_ptr<const Lengths> lengths() override {
    std::call_once(lengths_made_, [this] {
      const auto all = source_->lengths();
      if (!all) return;
      std::vector<std::int64_t> chosen;
      for (std::int64_t i = 0; i < count(); ++i)
        chosen.push_back(all->of_samples[static_cast<std::size_t>(chosen_[i])]);
      lengths_ = std::make_shared<Lengths>(std::move(chosen));
    });
    return lengths_;
  }

  DatasetFingerprint fingerprint() override {
    auto print = source_->fingerprint();
    print.count = count();
    print.order.clear();  // a subset has no blocks
    print.parts.push_back(chosen_.fingerprint());
    return print;
  }

 private:
  std::vector<std::int64_t> in_source(std::span<const std::int64_t> samples) const {
    std::vector<std::int64_t> indices;
    indices.reserve(samples.size());
    for (const auto sample : samples) indices.push_back(chosen_[sample]);
    return indices;
  }

  std::shared_ptr<Source> source_;
  Chosen chosen_;
  std::once_flag lengths_made_;
  std::shared_ptr<const Lengths> lengths_;
};

/// The sizes of parts of `count` samples, by the largest remainder. `fractions` are positive.
std::vector<std::int64_t> sizes_of_parts(std::int64_t count, std::span<const double> fractions) {
  const auto sum = std::accumulate(fractions.begin(), fractions.end(), 0.0);
  std::vector<std::int64_t> sizes;
  std::vector<double> remainders;
  auto left = count;
  for (const auto fraction : fractions) {
    const auto quota = fraction / sum * static_cast<double>(count);
    sizes.push_back(std::min(left, static_cast<std::int64_t>(quota)));
    remainders.push_back(quota - std::floor(quota));
    left -= sizes.back();
  }
  std::vector<std::size_t> parts(sizes.size());
  std::iota(parts.begin(), parts.end(), std::size_t{0});
  std::ranges::stable_sort(parts, std::ranges::greater{}, [&](std::size_t part) { return remainders[part]; });
  for (std::size_t next = 0; left > 0; next = (next + 1) % parts.size(), --left) ++sizes[parts[next]];
  return sizes;
}

/// Throws an Error for a source whose samples have no indices of their own.
void require_indices(const Source& source, const std::string& doing) {
  if (source.draws())
    throw Error(ExitCode::usage, doing, "it draws its samples itself, and their indices mean nothing",
                "Choose samples where they are made, or hold some out for validation by the source's own options");
}

}  // namespace

std::shared_ptr<Source> subset_source(std::shared_ptr<Source> source, std::vector<std::int64_t> samples) {
  const auto doing = "taking a subset of " + source->shown();
  require_indices(*source, doing);
  const auto count = source->count();
  if (samples.empty()) throw Error(ExitCode::usage, doing, "the list of samples is empty", "Name at least one sample");
  for (const auto sample : samples)
    if (sample < 0 || sample >= count)
      throw Error(ExitCode::usage, doing, str("the list names sample ", sample, ", it has ", count),
                  str("Name samples from 0 to ", count - 1));
  return std::make_shared<SubsetSource<Listed>>(std::move(source), Listed{std::move(samples)});
}

std::vector<std::shared_ptr<Source>> split_source(const std::shared_ptr<Source>& source,
                                                  std::span<const double> fractions, std::uint64_t seed) {
  const auto doing = "splitting " + source->shown();
  require_indices(*source, doing);
  const auto count = source->count();
  const auto is_fraction = [](double fraction) { return fraction > 0 && fraction <= 1; };
  const auto sum = std::accumulate(fractions.begin(), fractions.end(), 0.0);
  if (!std::ranges::all_of(fractions, is_fraction) || !(std::abs(sum - 1) < 1e-6))
    throw Error(ExitCode::usage, doing, "the fractions are not positive numbers whose sum is 1",
                "Give fractions such as {0.8, 0.2}");
  constexpr std::uint64_t splitting = 0x73706c6974;
  const auto key = mix(seed, splitting);
  const Permutation order(count, key);
  std::vector<std::shared_ptr<Source>> parts;
  SampleRange range;
  for (const auto size : sizes_of_parts(count, fractions)) {
    range = {range.first + range.count, size};
    if (size == 0)
      throw Error(ExitCode::usage, doing, str("part ", parts.size(), " gets none of the ", count, " samples"),
                  "Give it a larger fraction");
    parts.push_back(std::make_shared<SubsetSource<Drawn>>(source, Drawn{order, range, key}));
  }
  return parts;
}

}  // namespace muster::detail::data
