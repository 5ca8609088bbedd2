#include "gradients/module_signature.hpp"

#include <gtest/gtest.h>
#include <torch/nn/modules/linear.h>

namespace muster::detail::gradients::module_signature_test {
namespace {

TEST(ModuleSignature, SaysKindNameTypeAndShape) {
  torch::nn::Linear linear(3, 2);
  linear->register_buffer("count", linear->weight.new_zeros({}, at::kLong));
  linear->register_parameter("tied", linear->weight);
  linear->bias.set_requires_grad(false);
  EXPECT_EQ(signature(*linear),
            "parameter weight\tFloat[2, 3]\nparameter bias\tFloat[2], frozen\n"
            "parameter tied\tthe tensor of weight\nbuffer count\tLong[]\n");
}

TEST(ModuleSignature, SaysStridesThatAreNotPlain) {
  torch::nn::Module module;
  module.register_buffer("turned", at::zeros({2, 3}).t());
  EXPECT_EQ(signature(module), "buffer turned\tFloat[3, 2] with strides [1, 3]\n");
}

TEST(FirstDifference, NoneWhereAllAgree) {
  EXPECT_FALSE(first_difference({""}));
  EXPECT_FALSE(first_difference({"parameter a\tFloat[1]\n", "parameter a\tFloat[1]\n"}));
}

TEST(FirstDifference, GroupsTheRanks) {
  const std::string same = "parameter a\tFloat[1]\nparameter b\tFloat[2]\n";
  EXPECT_EQ(first_difference({same, "parameter a\tFloat[1]\nparameter b\tLong[2]\n", same, "parameter a\tFloat[1]\n"}),
            "parameter b is Float[2] on ranks 0, 2, Long[2] on rank 1 and missing on rank 3");
}

TEST(FirstDifference, NamesWhatOnlyALaterRankHas) {
  EXPECT_EQ(first_difference({"", "buffer x\tFloat[1]\n"}), "buffer x is missing on rank 0 and Float[1] on rank 1");
}

TEST(FirstDifference, SeesAnotherOrder) {
  EXPECT_EQ(first_difference({"parameter a\tF\nparameter b\tF\n", "parameter b\tF\nparameter a\tF\n"}),
            "parameter a comes on rank 0 where rank 1 has parameter b");
}

TEST(FirstDifference, ShortensLongListsOfRanks) {
  std::vector<std::string> signatures(20, "parameter a\tFloat[1]\n");
  signatures[3] = "";
  EXPECT_EQ(first_difference(signatures),
            "parameter a is Float[1] on ranks 0, 1, 2, 4, 5, 6, 7, 8 and 11 more and missing on rank 3");
}

}  // namespace
}  // namespace muster::detail::gradients::module_signature_test
