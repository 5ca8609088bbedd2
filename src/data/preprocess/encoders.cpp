#include "base/text.hpp"
#include "data/preprocess/column_preprocessor.hpp"
#include "muster/error.hpp"

#include <ATen/TensorOperators.h>
#include <ATen/ops/_unique2.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/searchsorted.h>
#include <ATen/ops/tensor.h>

#include <sstream>

namespace muster {
namespace {

using detail::data::ColumnPreprocessor;

/// Learns the k distinct values of an integer column: a tensor [1, k], ascending.
class Encoder : public ColumnPreprocessor {
 public:
  using ColumnPreprocessor::ColumnPreprocessor;

 private:
  static at::Tensor distinct(const at::Tensor& values) {
    return std::get<0>(at::_unique2(values.flatten(), /*sorted=*/true)).unsqueeze(0);
  }

  std::string objection(at::ScalarType dtype) const override {
    return c10::isIntegralType(dtype, /*includeBool=*/true)
               ? ""
               : detail::str("it holds ", c10::toString(dtype), " values, but classes must be integers");
  }

  at::Tensor summary(const at::Tensor& values) const override { return distinct(values.cpu().to(at::kLong)); }

  at::Tensor join(const at::Tensor& a, const at::Tensor& b) const override { return distinct(at::cat({a, b}, 1)); }

  at::Tensor learn(const at::Tensor& classes, const std::string&) const override { return classes; }

  Json to_json(const at::Tensor& classes) const override {
    const auto* first = classes.const_data_ptr<std::int64_t>();
    return {{"classes", std::vector<std::int64_t>(first, first + classes.numel())}};
  }

  at::Tensor from_json(const Json& json) const override {
    return at::tensor(json.at("classes").get<std::vector<std::int64_t>>(), at::kLong).unsqueeze(0);
  }
};

/// The labels as integers. Throws an Error if one of them is not a whole number.
at::Tensor whole_numbers(const at::Tensor& labels, const std::string& doing) {
  if (c10::isIntegralType(labels.scalar_type(), /*includeBool=*/true)) return labels.to(at::kLong);
  const auto refuse = [&](const std::string& fact) {
    throw Error(ExitCode::data, doing, fact + ", but classes must be integers",
                "Apply it to labels like those that it was fitted on");
  };
  if (!labels.is_floating_point()) refuse(detail::str("it holds ", c10::toString(labels.scalar_type()), " values"));
  const auto values = labels.to(at::kDouble);
  const auto wrong = values.ne(values.floor()).logical_or(values.abs().ge(0x1p63));
  if (wrong.any().item<bool>()) {
    std::ostringstream value;
    value << values.masked_select(wrong)[0].item<double>();
    refuse("the value " + value.str() + " is no whole number of 64 bits");
  }
  return values.to(at::kLong);
}

class LabelEncoder final : public Encoder {
 public:
  explicit LabelEncoder(std::string column) : Encoder("label_encoder", {std::move(column)}) {}

 private:
  at::Tensor apply(const at::Tensor& labels, const at::Tensor& table, const std::string& doing) const override {
    const auto classes = table[0].to(labels.device()), values = whole_numbers(labels, doing).contiguous();
    const auto codes = at::searchsorted(classes, values).clamp_max(classes.numel() - 1);
    const auto unseen = classes.index_select(0, codes.flatten()).view_as(values) != values;
    if (unseen.any().item<bool>())
      throw Error(ExitCode::data, doing,
                  detail::str("the value ", values.masked_select(unseen)[0].item<std::int64_t>(),
                              " did not occur in the data that it was fitted on"),
                  "Fit it on data that holds every class");
    return codes;
  }
};

class OneHotEncoder final : public Encoder {
 public:
  explicit OneHotEncoder(std::vector<std::string> columns) : Encoder("one_hot_encoder", std::move(columns)) {}

 private:
  at::Tensor apply(const at::Tensor& labels, const at::Tensor& table, const std::string& doing) const override {
    return whole_numbers(labels, doing).unsqueeze(-1).eq(table[0].to(labels.device())).to(at::kFloat);
  }
};

}  // namespace

PreprocessorPtr label_encoder(std::string column) { return std::make_shared<LabelEncoder>(std::move(column)); }

PreprocessorPtr one_hot_encoder(std::vector<std::string> columns) {
  return std::make_shared<OneHotEncoder>(std::move(columns));
}

}  // namespace muster
