#include "muster/augmentation.hpp"

#include "base/json.hpp"
#include "base/text.hpp"
#include "muster/error.hpp"
#include "muster/json.hpp"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/rand.h>
#include <ATen/ops/randint.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <utility>

namespace muster {
namespace {

std::string joined(at::IntArrayRef sizes) {
  std::string all;
  for (const auto size : sizes) all += detail::str(all.empty() ? "" : ", ", size);
  return "[" + all + "]";
}

/// The common base class: it has columns and options, which the checkpoint describes, and no fitted state.
class Augmentation : public Preprocessor {
 public:
  Augmentation(std::string kind, std::vector<std::string> columns, Json options)
      : kind_(std::move(kind)), columns_(std::move(columns)), options_(std::move(options)) {
    require(!columns_.empty(), "it has no columns", "Name at least one");
    for (auto name = columns_.begin(); name != columns_.end(); ++name)
      require(std::find(columns_.begin(), name, *name) == name, "column \"" + *name + "\" is named twice",
              "Name each column once");
  }

  void fit(const Dataset&, const Communicator&) final {}
  bool fitted() const final { return true; }
  Json state() const final { return {{"kind", kind_}, {"columns", columns_}, {"options", options_}}; }
  void load_state(const Json& saved) final {
    if (saved != state())
      throw Error(ExitCode::data, "restoring a preprocessor",
                  detail::json_text(state()) + " was asked for, but " + detail::json_text(saved) + " was saved",
                  "Build the same preprocessor as the run that was saved");
  }

 protected:
  /// Throws an Error (ExitCode::usage) if `holds` is false.
  void require(bool holds, const std::string& fact, const std::string& remedy) const {
    if (!holds) throw Error(ExitCode::usage, "making a " + kind_, fact, remedy);
  }
  [[noreturn]] void refuse(const std::string& column, const std::string& fact, const std::string& remedy) const {
    throw Error(ExitCode::data, "applying " + kind_ + " to column \"" + column + "\"", fact, remedy);
  }
  const std::vector<std::string>& columns() const noexcept { return columns_; }

 private:
  std::string kind_;
  std::vector<std::string> columns_;
  Json options_;
};

class RandomCrop final : public Augmentation {
 public:
  RandomCrop(std::vector<std::string> columns, std::vector<std::int64_t> sizes, std::int64_t padding)
      : Augmentation("random_crop", std::move(columns), {{"sizes", sizes}, {"padding", padding}}),
        sizes_(std::move(sizes)),
        padding_(padding) {
    require(!sizes_.empty(), "there are no sizes", "Give the size of each of the last dimensions");
    require(std::ranges::all_of(sizes_, [](auto size) { return size > 0; }), "a size is less than 1",
            "Give at least 1");
    require(padding_ >= 0, "padding is negative", "Give at least 0");
  }

  using Preprocessor::transform;
  void transform(Batch& batch, at::Generator& generator) const override {
    const auto padded = padded_sizes(batch);
    const auto rows = batch[columns().front()].size(0);
    auto places = at::zeros({rows, 1}, at::kLong);  // for each sample, the index of its box in the flattened dimensions
    for (std::size_t d = 0; d < sizes_.size(); ++d) {
      const auto first = at::randint(padded[d] - sizes_[d] + 1, {rows, 1}, generator, at::kLong);
      const auto place = first + at::arange(sizes_[d]);
      places = (places.unsqueeze(2) * padded[d] + place.unsqueeze(1)).flatten(1);
    }
    for (const auto& name : columns()) batch.set(name, cropped(batch[name], places));
  }

 private:
  /// Returns the sizes of the cropped dimensions with their padding. Throws an Error unless all columns have the same.
  std::vector<std::int64_t> padded_sizes(const Batch& batch) const {
    std::vector<std::int64_t> first;
    for (const auto& name : columns()) {
      const auto shape = batch[name].sizes().slice(1);
      if (shape.size() < sizes_.size())
        refuse(name, "its samples have the shape " + joined(shape) + ", and the crop " + joined(sizes_),
               "Give a size for each of the last dimensions of a sample");
      const auto sizes = shape.slice(shape.size() - sizes_.size()).vec();
      if (first.empty()) first = sizes;
      if (sizes != first)
        refuse(name,
               "it is cropped in dimensions of " + joined(sizes) + ", but \"" + columns().front() + "\" of " +
                   joined(first),
               "Name columns together that have the same sizes there");
      for (std::size_t d = 0; d < sizes.size(); ++d)
        if (sizes[d] + 2 * padding_ < sizes_[d])
          refuse(name,
                 detail::str("the crop ", joined(sizes_), " is larger than a sample, ", joined(sizes), " with padding ",
                             padding_),
                 "Give smaller sizes or more padding");
    }
    for (auto& size : first) size += 2 * padding_;
    return first;
  }

  at::Tensor cropped(at::Tensor values, const at::Tensor& places) const {
    if (padding_ > 0) values = at::constant_pad_nd(values, std::vector<std::int64_t>(2 * sizes_.size(), padding_));
    const auto kept = values.sizes().slice(0, static_cast<std::size_t>(values.dim()) - sizes_.size());
    auto shape = kept.vec();
    shape.insert(shape.end(), sizes_.begin(), sizes_.end());
    const auto planes = c10::multiply_integers(kept.slice(1));
    const auto flat = values.reshape({kept[0], planes, c10::multiply_integers(values.sizes().slice(kept.size()))});
    const auto index = places.to(values.device()).unsqueeze(1).expand({kept[0], planes, places.size(1)});
    return flat.gather(2, index).view(shape);
  }

  std::vector<std::int64_t> sizes_;
  std::int64_t padding_;
};

class RandomFlip final : public Augmentation {
 public:
  RandomFlip(std::vector<std::string> columns, std::int64_t dimension, double probability)
      : Augmentation("random_flip", std::move(columns), {{"dimension", dimension}, {"probability", probability}}),
        dimension_(dimension),
        probability_(probability) {
    require(probability_ >= 0 && probability_ <= 1, "the probability is not between 0 and 1",
            "Give a number from 0 to 1");
  }

  using Preprocessor::transform;
  void transform(Batch& batch, at::Generator& generator) const override {
    const auto flips = at::rand({batch[columns().front()].size(0)}, generator, at::kDouble).lt(probability_);
    for (const auto& name : columns()) {
      const auto& values = batch[name];
      const auto dimensions = values.dim() - 1;
      if (dimension_ < -dimensions || dimension_ >= dimensions)
        refuse(name,
               detail::str("its samples have the shape ", joined(values.sizes().slice(1)), ", without dimension ",
                           dimension_),
               "Name a dimension of a sample");
      std::vector<std::int64_t> shape(static_cast<std::size_t>(values.dim()), 1);
      shape.front() = values.size(0);
      const auto flipped = values.flip({dimension_ < 0 ? dimension_ : dimension_ + 1});
      batch.set(name, at::where(flips.to(values.device()).view(shape), flipped, values));
    }
  }

 private:
  std::int64_t dimension_;
  double probability_;
};

class RandomNoise final : public Augmentation {
 public:
  RandomNoise(std::vector<std::string> columns, double deviation)
      : Augmentation("random_noise", std::move(columns), {{"deviation", deviation}}), deviation_(deviation) {
    require(deviation_ >= 0 && std::isfinite(deviation_), "the deviation is negative or not finite",
            "Give a number of at least 0");
  }

  using Preprocessor::transform;
  void transform(Batch& batch, at::Generator& generator) const override {
    for (const auto& name : columns()) {
      const auto& values = batch[name];
      if (!values.is_floating_point())
        refuse(name, detail::str("it holds ", c10::toString(values.scalar_type()), " values"),
               "Convert it to floats before, or name other columns");
      const auto wide = values.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
      const auto noise = at::randn(values.sizes(), generator, wide).mul_(deviation_);
      batch.set(name, values + noise.to(values.options()));
    }
  }

 private:
  double deviation_;
};

}  // namespace

PreprocessorPtr random_crop(std::vector<std::string> columns, std::vector<std::int64_t> sizes, std::int64_t padding) {
  return std::make_shared<RandomCrop>(std::move(columns), std::move(sizes), padding);
}

PreprocessorPtr random_flip(std::vector<std::string> columns, std::int64_t dimension, double probability) {
  return std::make_shared<RandomFlip>(std::move(columns), dimension, probability);
}

PreprocessorPtr random_noise(std::vector<std::string> columns, double deviation) {
  return std::make_shared<RandomNoise>(std::move(columns), deviation);
}

}  // namespace muster
