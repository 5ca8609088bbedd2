#include "operators/call_history.hpp"

#include <gtest/gtest.h>

#include <bit>
#include <string>
#include <utility>

namespace muster::detail::operators::call_history_test {
namespace {

void expect_equal(const CallHistory& one, const CallHistory& other) {
  ASSERT_EQ(one.size(), other.size());
  for (std::size_t i = 0; i < one.size(); ++i) {
    EXPECT_EQ(one[i].call, other[i].call);
    EXPECT_EQ(one[i].result, other[i].result);
    EXPECT_EQ(one[i].registers_data, other[i].registers_data);
    ASSERT_EQ(one[i].refusal.has_value(), other[i].refusal.has_value());
    if (!one[i].refusal) continue;
    EXPECT_EQ(one[i].refusal->code(), other[i].refusal->code());
    EXPECT_STREQ(one[i].refusal->what(), other[i].refusal->what());
  }
}

TEST(CallHistory, ComeBackFromTextAndFromBytes) {
  CallHistory calls;
  std::int64_t capacity = 0, grown = 0;
  for (int i = 0; i < 500; ++i) {
    if (i % 3 == 0) calls.add({.call = Call::train, .result = {{"loss", 0.1 * i}, {"text", "a\nb\\u00e9\0c"}}});
    if (i % 3 == 1) calls.add({.call = Call::apply_all_operators, .result = {1, nullptr}, .registers_data = true});
    if (i % 3 == 2) calls.add({.call = Call::load, .refusal = Error(ExitCode::data, "loading\nit: is not there")});
    const auto now = calls.bytes().numel();
    EXPECT_TRUE(std::has_single_bit(static_cast<std::uint64_t>(now)));
    grown += std::exchange(capacity, now) != now ? 1 : 0;
    if (i % 100 != 0) continue;
    CallHistory from_text, from_bytes;
    from_text.restore(calls.text());
    expect_equal(from_text, calls);
    from_bytes.restore(calls.bytes());
    expect_equal(from_bytes, calls);
    EXPECT_EQ(from_bytes.text(), calls.text());
  }
  EXPECT_LT(grown, 8) << "most calls leave the layout of a checkpoint as it was";
}

TEST(CallHistory, ThatAreNoneAreDamage) {
  CallHistory calls;
  EXPECT_TRUE(calls.empty());
  EXPECT_EQ(calls.text(), "");
  for (const char* const text : {"{}\n", "[1]\n", "train\n", R"({"name": 1, "result": 2})", R"({"name": "train"})",
                                 R"({"name": "a", "result": 2})"}) {
    try {
      calls.restore(std::string(text));
      ADD_FAILURE() << text;
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ExitCode::data) << text;
    }
  }
}

}  // namespace
}  // namespace muster::detail::operators::call_history_test
